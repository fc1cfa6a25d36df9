# SPDX-License-Identifier: Apache-2.0
"""The rule for Winograd's algorithm: its numbers, its machine code, and what it leaves alone."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi
from cpu.conv_cases import (
    CONTINUOUS,
    TARGET,
    Case,
    arguments,
    assembly,
    build,
    compile_function,
    loop_bodies,
    outer_loops,
    run,
    up,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir, te, tirx
from tvm.runtime import Executable
from tvm.target import Target

from schedules.compute.winograd_conv2d import winograd_conv2d
from schedules.cpu.conv2d.conv2d import Conv2D
from schedules.cpu.conv2d.winograd import winograd_nest
from schedules.cpu.conv2d.winograd.winograd_conv2d import (
    WinogradConv2D,
    WinogradKnobs,
    winograd_template,
)
from schedules.cpu.core.kernel_builder import STACK_BYTES, KernelBuilder
from schedules.cpu.core.micro_kernel import UNROLLED_STEPS
from schedules.tir.index_math import simplified
from schedules.workload.conv2d import ACTIVATIONS, Activation, Conv2DKernel, ConvLayer, to_json
from schedules.workload.winograd_matrices import TILE_SIZES, transform_weight
from tests.selection import in_turns

SEED = st.integers(0, 2**32 - 1)
SAME = (1, 1, 1, 1)


def workload(case: Case, size: int) -> Conv2DKernel:
    return replace(case.kernel, winograd=size)


def function(case: Case, size: int, batch: tirx.Var | None = None) -> tirx.PrimFunc:
    """The function of a case as legalization makes it, with a symbolic ``batch`` if given."""
    (layer,), lanes = case.layers, case.lanes
    images = case.batch if batch is None else batch
    blocks = up(layer.in_channels, lanes), up(layer.out_channels, lanes)

    def image(name: str, count: int, height: int, width: int) -> te.Tensor:
        return te.placeholder((images, count, height, width, lanes), name=name)

    points = ((size + 2) ** 2, blocks[1], blocks[0], lanes, lanes)
    inputs = [
        image("data", blocks[0], case.height, case.width),
        te.placeholder(points, name="weight"),
        te.placeholder((blocks[1], lanes), name="bias"),
    ]
    residual = [image("residual", blocks[1], *case.out_shape[2:])] if case.residual else []
    output = winograd_conv2d(*inputs, residual[0] if residual else None, layer, size)
    func = te.create_prim_func([*inputs, *residual, output])
    kernel = workload(case, size)
    kernel = kernel if batch is None else replace(kernel, batch=None)
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def schedule(case: Case, size: int, target: Target = TARGET) -> tirx.PrimFunc:
    found = WinogradConv2D().apply(function(case, size), target, False)
    assert found is not None
    return found.mod["main"]


def packed_arguments(case: Case, size: int, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    packed, expected = arguments(case, seed)
    return [packed[0], transform_weight(packed[1], size), *packed[2:]], expected


def check(case: Case, size: int, executable: Executable, seed: int, bound: float = 1e-5) -> None:
    """Compare with float64; ``bound`` is relative to the largest output."""
    packed, expected = packed_arguments(case, size, seed)
    found = run(case, executable, packed)
    assert np.isfinite(found).all(), case
    channels = np.moveaxis(found, -1, 2).reshape(case.batch, -1, *found.shape[2:4])
    channels = channels[:, : expected.shape[1]]
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(channels, expected, rtol=0, atol=bound * scale, err_msg=str(case))


@st.composite
def cases(draw) -> Case:
    """Any 3x3 layer with an image that it fits on."""
    channels = st.sampled_from([1, 3, 8, 13, 16, 24, 40])
    layer = ConvLayer(
        draw(channels),
        draw(channels),
        (3, 3),
        padding=draw(st.tuples(*[st.integers(0, 4)] * 4)),
        activation=Activation(draw(st.sampled_from(CONTINUOUS)), -0.4, 0.7),
    )
    least = [max(1, 3 - layer.padding[axis] - layer.padding[axis + 2]) for axis in (0, 1)]
    height, width = (draw(st.integers(extent, 18)) for extent in least)
    lanes, residual = draw(st.sampled_from([4, 8])), draw(st.booleans())
    return Case((layer,), draw(st.sampled_from([1, 1, 3])), height, width, lanes, residual)


@pytest.mark.slow
@given(cases(), st.sampled_from(TILE_SIZES), SEED)
@settings(max_examples=settings.default.max_examples // 3)
def test_numbers_with_default_knobs(case, size, seed):
    check(case, size, compile_function(schedule(case, size)), seed)


@given(cases(), st.sampled_from(TILE_SIZES), st.data(), SEED)
@settings(max_examples=settings.default.max_examples // 3)
def test_numbers_with_any_knobs(case, size, data, seed):
    out_blocks = up(case.layers[0].out_channels, case.lanes)
    knobs = WinogradKnobs(
        group=data.draw(st.integers(1, 9)),
        block_chunks=data.draw(
            st.sampled_from([n for n in range(1, out_blocks + 1) if out_blocks % n == 0])
        ),
        pixels=data.draw(st.integers(1, 6)),
        blocks=data.draw(st.integers(1, 3)),
    )
    func = winograd_template(function(case, size), workload(case, size), knobs).mod["main"]
    check(case, size, compile_function(func), seed)


IMAGES = [(7, 7), (13, 13), (17, 17), (30, 41), (4, 4), (1, 1), (1, 9), (8, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("image", "size"), in_turns(IMAGES, TILE_SIZES, every=3))
def test_numbers_of_image_sizes(image, size):
    layer = ConvLayer(24, 40, (3, 3), padding=SAME, activation=Activation("relu"))
    case = Case((layer,), 3, *image, residual=True)
    check(case, size, compile_function(schedule(case, size)), seed=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padding", "size"),
    in_turns([(0, 0, 0, 0), (0, 1, 2, 0), (3, 0, 0, 4), (5, 6, 5, 6)], TILE_SIZES),
)
def test_numbers_of_paddings(padding, size):
    case = Case((ConvLayer(13, 7, (3, 3), padding=padding),), 2, 9, 6)
    check(case, size, compile_function(schedule(case, size)), seed=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_numbers_of_every_activation(kind):
    layer = ConvLayer(13, 24, (3, 3), padding=SAME, activation=Activation(kind, -0.4, 0.7))
    case = Case((layer,), height=7, width=10, residual=True)
    check(case, 4, compile_function(schedule(case, 4)), seed=1)


# Above what the op's docstring has by as much as random data may differ.
BOUNDS = {2: 2e-6, 4: 7e-6}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", TILE_SIZES)
@pytest.mark.parametrize(("channels", "extent"), [(16, 28), (128, 28), (512, 14)])
def test_error_is_as_stated(channels, extent, size):
    case = Case((ConvLayer(channels, 32, (3, 3), padding=SAME),), height=extent, width=extent)
    executable = compile_function(schedule(case, size))
    for seed in range(3):
        check(case, size, executable, seed, BOUNDS[size])


@pytest.mark.slow
def test_small_tiles_are_the_more_exact():
    case = Case((ConvLayer(64, 64, (3, 3), padding=SAME),), height=28, width=28)
    errors = []
    for size in TILE_SIZES:
        packed, expected = packed_arguments(case, size, seed=1)
        found = run(case, compile_function(schedule(case, size)), packed)
        errors.append(np.std(np.moveaxis(found, -1, 2).reshape(expected.shape) - expected))
    assert 0 < errors[0] < errors[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "value"), in_turns(["none", "relu", "clip"], [np.nan, np.inf]))
def test_what_is_not_finite_makes_nan_of_the_tiles_that_read_it(value, kind):
    layer = ConvLayer(8, 16, (3, 3), padding=SAME, activation=Activation(kind, -0.4, 0.7))
    case = Case((layer,), height=16, width=16)
    packed, _ = packed_arguments(case, 4, seed=1)
    packed[0][0, 0, 6, 5, 3] = value
    found = run(case, compile_function(schedule(case, 4)), packed)
    lost = np.isnan(found).all(axis=(1, 4))[0]
    assert lost[5:8, 4:7].all()  # whatever reads the pixel
    expected = np.zeros((16, 16), bool)
    expected[4:8, 4:8] = True  # one tile of 4x4, whose neighbours read no further than row 3
    np.testing.assert_array_equal(np.isnan(found).any(axis=(1, 4))[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", TILE_SIZES)
def test_one_function_serves_every_batch(size):
    case = Case((ConvLayer(13, 24, (3, 3), padding=SAME),), residual=True)
    func = function(case, size, tirx.Var("n", "int64"))
    executable = compile_function(WinogradConv2D().apply(func, TARGET, False).mod["main"])
    for batch in (1, 3):
        check(replace(case, batch=batch), size, executable, seed=batch)


@pytest.mark.slow
@pytest.mark.parametrize("size", TILE_SIZES)
def test_the_compute_is_the_same_function(size):
    layer = ConvLayer(5, 8, (3, 3), padding=(1, 0, 2, 1), activation=Activation("relu6"))
    case = Case((layer,), 2, 6, 7, residual=True)
    check(case, size, compile_function(function(case, size)), seed=4)


def test_one_parallel_loop_feeds_all_cores():
    case = Case((ConvLayer(64, 64, (3, 3), padding=SAME),), height=56, width=56)
    target = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 4})
    (loop,) = outer_loops(schedule(case, 4, target).body)
    assert loop.kind == tirx.ForKind.PARALLEL
    assert int(loop.extent) % 4 == 0


@pytest.mark.parametrize("size", TILE_SIZES)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_only_points_are_taken_from_the_heap(lanes, size):
    layer = ConvLayer(64, 64, (3, 3), padding=SAME)
    case = Case((layer,), height=28, width=28, lanes=lanes)
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(schedule(case, size).body, (s_tir.SBlock, blocks.append))
    sizes = [4 * int(buffer.shape[0]) for block in blocks for buffer in block.alloc_buffers]
    assert len([extent for extent in sizes if extent > STACK_BYTES]) == 2  # data and products


# Triple, lanes, multiply-add, register, and how an access of the stack looks.
MACHINES = {
    "x86-64-v3": ("x86_64-linux-gnu", 8, r"vfmadd\d+ps\t", "%ymm", "(%rsp"),
    "x86-64-v4": ("x86_64-linux-gnu", 16, r"vfmadd\d+ps\t", "%zmm", "(%rsp"),
    "neoverse-n1": ("aarch64-linux-gnu", 4, r"fmla\t", ".4s", "[sp"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", MACHINES)
def test_products_are_multiply_adds_in_registers(cpu):
    triple, lanes, instruction, register, stack = MACHINES[cpu]
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 2})
    layer = ConvLayer(64, 64, (3, 3), padding=SAME, activation=Activation("relu"))
    case = Case((layer,), height=48, width=48, lanes=lanes)
    knobs = WinogradKnobs(group=24, block_chunks=1, pixels=6, blocks=2)
    text = assembly(
        winograd_template(function(case, 4), workload(case, 4), knobs).mod["main"], target
    )
    found = []
    for body in loop_bodies(text):
        multiply_adds = [line for line in body if re.search(instruction, line)]
        if len(multiply_adds) == knobs.pixels * knobs.blocks * min(lanes, UNROLLED_STEPS):
            found.append(body)
            assert all(register in line for line in multiply_adds)
            spilled = [line for line in body if stack in line and register[:2] in line]
            assert len(spilled) <= 2  # There are 96 multiply-adds and more.
    assert found
    assert re.search(r"prefetcht1|prfm\tpldl2keep", text)


@pytest.mark.parametrize("first_block", [0, 3])
def test_tiles_prefetch_the_next_weights_of_their_task(first_block, monkeypatch):
    case = Case((ConvLayer(16, 48, (3, 3), padding=SAME),), height=8, width=8)
    knobs = WinogradKnobs(group=4, block_chunks=2, pixels=4, blocks=2)
    tiles = []

    def note(ops, block, blocks, *place, following, **options):
        tiles.append((simplified(block), simplified(following)))

    monkeypatch.setattr(winograd_nest, "compute_tile", note)
    builder = KernelBuilder(function(case, 4))
    with builder.body():
        nest = winograd_nest._TaskNest(builder, workload(case, 4), knobs)
        data = winograd_nest._Points.allocate(36, 2, 4, nest.lanes, nest.sums)
        products = winograd_nest._Points.allocate(36, 3, 4, nest.lanes, nest.sums)
        for point in range(36):
            nest._multiply(point, first_block, 3, data, products)
    blocks = [int(block) for block, _ in tiles]
    assert blocks[:4] == [first_block, first_block + 2, first_block + 6, first_block + 8]
    assert [int(following) for _, following in tiles[:-1]] == blocks[1:]


CASE = Case((ConvLayer(16, 16, (3, 3), padding=SAME),))


def marked(**changes) -> tirx.PrimFunc:
    kernel = replace(workload(CASE, 4), **changes)
    return function(CASE, 4).with_attr("tvm_fusion.workload", to_json(kernel))


@pytest.mark.parametrize(
    ("func", "target"),
    [
        (build(CASE), TARGET),
        (build(CASE, marked=False), TARGET),
        (marked(), Target("c")),
        (marked(width=None), TARGET),
        (marked(layers=CASE.layers * 2), TARGET),
    ],
    ids=["direct", "unmarked", "other target", "symbolic width", "pair"],
)
def test_leaves_other_functions_alone(func, target):
    assert WinogradConv2D().apply(func, target, False) is None
    assert WinogradConv2D().apply(marked(), TARGET, False) is not None


def test_the_direct_rule_leaves_it_alone():
    assert Conv2D().apply(marked(), TARGET, False) is None
