# SPDX-License-Identifier: Apache-2.0
"""The rule for layout changes: exact numbers in poisoned outputs, refusals, the parallel loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from cpu import conv_cases
from cpu.conv_cases import HOST, Array, outer_loops, up
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.pack import pack, unpack
from schedules.cpu.conv2d.pack import Pack
from tests.targets import compile_unchecked


@dataclass(frozen=True)
class Image:
    """Images in NCHW, the lanes of their packed form, and the cores to pack them."""

    batch: int | tirx.Var
    channels: int
    height: int | tirx.Var
    width: int
    lanes: int
    cores: int = 2

    @property
    def shape(self) -> tuple:
        return (self.batch, self.channels, self.height, self.width)

    @property
    def packed_shape(self) -> tuple:
        blocks = up(self.channels, self.lanes)
        return (self.batch, blocks, self.height, self.width, self.lanes)

    @property
    def target(self) -> Target:
        return Target({**HOST, "num-cores": self.cores})


def build(kind: str, image: Image, marked: bool = True) -> tirx.PrimFunc:
    """The function as legalization makes it."""
    shape = image.shape if kind == "pack" else image.packed_shape
    data = te.placeholder(shape, "float32", name="data")
    out = pack(data, image.lanes) if kind == "pack" else unpack(data, image.channels)
    func = te.create_prim_func([data, out])
    return func.with_attr("tvm_fusion.op", kind) if marked else func


def schedule(kind: str, image: Image) -> tirx.PrimFunc:
    found = Pack().apply(build(kind, image), image.target, False)
    assert found is not None, image
    return found.mod["main"]


def numbers(image: Image, batch: int, seed: int) -> tuple[Array, Array]:
    """Images whose elements all differ, and their packed form."""
    elements = batch * image.channels * int(image.height) * image.width
    plain = np.random.default_rng(seed).permutation(elements).astype("float32") + 1
    plain = plain.reshape(batch, *image.shape[1:])
    return plain, conv_cases.pack(plain, image.lanes)


def run(function: tvm.runtime.PackedFunc, source: Array, shape: tuple) -> Array:
    """The output, which was NaN before."""
    out = tvm.runtime.tensor(np.full(shape, np.nan, "float32"))
    function(tvm.runtime.tensor(np.ascontiguousarray(source)), out)
    return out.numpy()


def check(images: list[Image], seed: int = 0) -> None:
    """Pack and unpack every image, by functions of one module; cores differ per function."""
    functions = {
        f"{kind}{number}": schedule(kind, image).with_attr("global_symbol", f"{kind}{number}")
        for number, image in enumerate(images)
        for kind in ("pack", "unpack")
    }
    library = compile_unchecked(tvm.IRModule(functions), target=Target(HOST))
    for number, image in enumerate(images):
        plain, packed = numbers(image, image.batch, seed)
        found = run(library[f"pack{number}"], plain, packed.shape)
        np.testing.assert_array_equal(found, packed, err_msg=str(image))
        # What lies in the lanes that do not exist must not come out again.
        garbage = conv_cases.pack(plain, image.lanes, fill=np.nan)
        found = run(library[f"unpack{number}"], garbage, plain.shape)
        np.testing.assert_array_equal(found, plain, err_msg=str(image))


@st.composite
def images(draw: st.DrawFn) -> Image:
    lanes = draw(st.sampled_from([2, 4, 8, 16]))
    height = draw(st.integers(1, 11))
    return Image(
        batch=draw(st.integers(1, 3)),
        channels=draw(st.one_of(st.sampled_from([lanes, 2 * lanes]), st.integers(1, 40))),
        height=height,
        width=draw(st.integers(up(lanes, height), 19)),
        lanes=lanes,
        cores=draw(st.integers(1, 3)),
    )


@given(st.lists(images(), min_size=3, max_size=3, unique=True), st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_numbers_of_any_image(drawn, seed):
    check(drawn, seed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_numbers_of_lanes(lanes):
    fewest = Image(1, 1, 1, lanes, lanes, cores=3)
    overlapping = Image(2, 2 * lanes + 1, 3, 7, lanes)
    exact = Image(3, lanes, 2 * lanes, 3, lanes, cores=1)
    check([fewest, overlapping, exact])


@pytest.mark.slow
def test_numbers_of_images_that_cores_share():
    check([Image(2, 13, 37, 41, 8, cores) for cores in (1, 2, 3)])


def test_numbers_of_blocks_that_cores_share():
    check([Image(2, 69, 16, 16, 8), Image(1, 48, 19, 19, 8, 3), Image(1, 45, 20, 20, 8, 3)])


def test_one_function_serves_every_batch():
    image = Image(tirx.Var("n", "int64"), 13, 5, 7, 8)
    executable = conv_cases.compile_function(schedule("pack", image), image.target)
    for batch in (1, 3):
        plain, packed = numbers(image, batch, seed=batch)
        np.testing.assert_array_equal(run(executable["main"], plain, packed.shape), packed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["pack", "unpack"])
def test_cores_share_the_images_of_every_batch(kind):
    image = Image(tirx.Var("n", "int64"), 13, 37, 41, 8, cores=3)
    func = schedule(kind, image)
    (loop,) = outer_loops(func.body)
    assert str(loop.extent.script()).endswith("* T.int64(3)")
    executable = conv_cases.compile_function(func, image.target)
    for batch in (1, 2):
        plain, packed = numbers(image, batch, seed=batch)
        given, wanted = (plain, packed) if kind == "pack" else (packed, plain)
        np.testing.assert_array_equal(run(executable["main"], given, wanted.shape), wanted)


@pytest.mark.parametrize("kind", ["pack", "unpack"])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_cores_share_a_large_image(kind, cores):
    (loop,) = outer_loops(schedule(kind, Image(2, 24, 56, 56, 8, cores)).body)
    assert loop.kind == tirx.ForKind.PARALLEL
    assert int(loop.extent) == 2 * cores


@pytest.mark.parametrize("kind", ["pack", "unpack"])
def test_one_core_takes_a_small_image(kind):
    (loop,) = outer_loops(schedule(kind, Image(2, 24, 5, 5, 8, 3)).body)
    assert int(loop.extent) == 2


def symbolic(image: Image) -> Image:
    return Image(image.batch, image.channels, tirx.Var("h", "int64"), image.width, image.lanes)


IMAGE = Image(1, 13, 5, 7, 8)


@pytest.mark.parametrize("kind", ["pack", "unpack"])
@pytest.mark.parametrize(
    ("image", "marked", "target"),
    [
        (IMAGE, False, IMAGE.target),
        (Image(1, 13, 1, 7, 8), True, IMAGE.target),
        (symbolic(IMAGE), True, IMAGE.target),
        (Image(1, 13, 5, 7, 6), True, IMAGE.target),
        (Image(1, 13, 5, 7, 1), True, IMAGE.target),
        (IMAGE, True, Target("c")),
    ],
    ids=["unmarked", "few pixels", "symbolic", "six lanes", "one lane", "other target"],
)
def test_leaves_other_functions_alone(kind, image, marked, target):
    assert Pack().apply(build(kind, image, marked), target, False) is None
    assert Pack().apply(build(kind, IMAGE), IMAGE.target, False) is not None


def test_leaves_functions_with_another_mark_alone():
    func = build("pack", IMAGE).with_attr("tvm_fusion.op", "hardswish")
    assert Pack().apply(func, IMAGE.target, False) is None
