# SPDX-License-Identifier: Apache-2.0
"""The rule for layer norm over channels in blocks: numbers, refusals, what cores share."""

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

from schedules.compute.norms import channel_norm
from schedules.cpu.conv2d.channel_norm import ChannelNorm
from tests.targets import compile_unchecked

EPSILON = 1e-5


@dataclass(frozen=True)
class Image:
    """Images in NCHW, the lanes of their packed form, and the cores to normalise them."""

    batch: int | tirx.Var
    channels: int
    height: int | tirx.Var
    width: int
    lanes: int
    cores: int = 2

    @property
    def blocks(self) -> int:
        return up(self.channels, self.lanes)

    @property
    def target(self) -> Target:
        return Target({**HOST, "num-cores": self.cores})


def build(image: Image, dtype: str = "float32") -> tirx.PrimFunc:
    """The function as legalization makes it."""
    shape = (image.batch, image.blocks, image.height, image.width, image.lanes)
    data = te.placeholder(shape, dtype, name="data")
    gamma, beta = (te.placeholder((image.blocks, image.lanes), dtype, name=n) for n in "gb")
    out = channel_norm(data, gamma, beta, image.channels, EPSILON)
    attrs = {"op": "channel_norm", "channels": image.channels, "epsilon": EPSILON}
    func = te.create_prim_func([data, gamma, beta, out])
    return func.with_attrs({f"tvm_fusion.{name}": value for name, value in attrs.items()})


def schedule(image: Image) -> tirx.PrimFunc:
    found = ChannelNorm().apply(build(image), image.target, False)
    assert found is not None, image
    return found.mod["main"]


def reference(data: Array, gamma: Array, beta: Array) -> tuple[Array, Array]:
    """The results, and how far each moves with a mean that is off by the mean of the data."""
    data = data.astype("float64")
    centred = data - data.mean(1, keepdims=True)
    scale = gamma[:, None, None] / np.sqrt((centred**2).mean(1, keepdims=True) + EPSILON)
    moved = np.abs(data).mean(1, keepdims=True) * np.abs(scale)
    return centred * scale + beta[:, None, None], moved


def check(
    function: tvm.runtime.PackedFunc, image: Image, batch: int, seed: int, spread: float = 1.0
) -> None:
    rng = np.random.default_rng(seed)
    shape = batch, image.channels, int(image.height), image.width
    data = (spread * rng.standard_normal(shape) + 3).astype("float32")
    vectors = rng.standard_normal((2, image.channels)).astype("float32")
    # What lies in the lanes that do not exist is finite, and takes no part.
    packed = conv_cases.pack(data, image.lanes, fill=1e4)
    gamma, beta = (conv_cases.pack(vector, image.lanes, axis=0) for vector in vectors)
    out = tvm.runtime.tensor(np.full(packed.shape, np.nan, "float32"))
    function(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in (packed, gamma, beta)), out)
    expected, moved = (conv_cases.pack(a, image.lanes) for a in reference(data, *vectors))
    # Channels that are nearly equal show the roundings of their mean, one for each of its steps.
    roundings = (image.blocks + image.lanes.bit_length()) * np.finfo("float32").eps / 2
    off = np.abs(out.numpy() - expected) - roundings * moved
    assert (off <= 2e-5 * (1 + np.abs(expected))).all(), f"{image} is {off.max()} off"


@st.composite
def images(draw: st.DrawFn) -> Image:
    lanes = draw(st.sampled_from([2, 4, 8, 16]))
    return Image(
        batch=draw(st.integers(1, 3)),
        channels=draw(st.one_of(st.sampled_from([lanes, 3 * lanes]), st.integers(2, 40))),
        height=draw(st.integers(1, 7)),
        width=draw(st.integers(1, 19)),
        lanes=lanes,
        cores=draw(st.integers(1, 3)),
    )


@given(
    st.lists(images(), min_size=3, max_size=3, unique=True),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1e-3]),
)
@settings(max_examples=5)
def test_numbers_of_any_image(drawn: list[Image], seed: int, spread: float) -> None:
    functions = {
        f"norm{number}": schedule(image).with_attr("global_symbol", f"norm{number}")
        for number, image in enumerate(drawn)
    }
    library = compile_unchecked(tvm.IRModule(functions), target=Target(HOST))
    for number, image in enumerate(drawn):
        check(library[f"norm{number}"], image, image.batch, seed, spread)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_numbers_of_two_channels_show_the_roundings_of_their_mean(spread: float) -> None:
    image = Image(2, 2, 4, 19, 2)
    function = conv_cases.compile_function(schedule(image), image.target)["main"]
    for seed in range(100):
        check(function, image, image.batch, seed, spread)


def test_numbers_where_cores_share_an_image_of_any_batch() -> None:
    image = Image(tirx.Var("n", "int64"), 45, 23, 19, 8, cores=3)
    executable = conv_cases.compile_function(schedule(image), image.target)
    for batch in (1, 3):
        check(executable["main"], image, batch, seed=batch)


@pytest.mark.parametrize(("size", "pieces"), [(29, 3), (5, 1)])
def test_cores_share_large_images_only(size: int, pieces: int) -> None:
    (loop,) = outer_loops(schedule(Image(2, 24, size, size, 8, 3)).body)
    assert loop.kind == tirx.ForKind.PARALLEL
    assert int(loop.extent) == 2 * pieces


IMAGE = Image(1, 13, 5, 7, 8)


@pytest.mark.parametrize(
    ("func", "target"),
    [
        (build(IMAGE).without_attr("tvm_fusion.op"), IMAGE.target),
        (build(IMAGE).with_attr("tvm_fusion.op", "pack"), IMAGE.target),
        (build(Image(1, 13, tirx.Var("h", "int64"), 7, 8)), IMAGE.target),
        (build(Image(1, 13, 5, 7, 6)), IMAGE.target),
        (build(Image(1, 13, 5, 7, 1)), IMAGE.target),
        (build(IMAGE, "float64"), IMAGE.target),
        (build(IMAGE), Target("c")),
    ],
    ids=["unmarked", "other", "symbolic", "six lanes", "one lane", "float64", "other target"],
)
def test_leaves_other_functions_alone(func: tirx.PrimFunc, target: Target) -> None:
    assert ChannelNorm().apply(func, target, False) is None
    assert ChannelNorm().apply(build(IMAGE), IMAGE.target, False) is not None
