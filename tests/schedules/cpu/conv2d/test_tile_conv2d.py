# SPDX-License-Identifier: Apache-2.0
"""Convolutions in tile registers: their numbers by loops, to the bit, and their machine code."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from cpu.conv2d.test_conv2d import SEED
from cpu.conv2d.test_conv2d_bfloat16 import TYPES, operands, run
from cpu.conv2d.test_conv2d_bfloat16 import build as build_floats
from cpu.conv2d.test_conv2d_bfloat16 import check as check_floats
from cpu.conv2d.test_conv2d_bfloat16 import kernel_of as kernel_of_floats
from cpu.conv_cases import TARGET, Case, assembly, compile_function
from cpu.conv_cases import cases as cases_of_floats
from cpu.quantized_cases import ADDITIONS, ROUNDINGS, QuantizedCase, quantized_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.target import Target

from examples.benchmarks.assembly import Instruction, loops
from schedules.cpu.conv2d.tile_conv2d import TILE_CONV2D, TileConv2D
from schedules.cpu.core.machine import CPUInfo, described
from schedules.cpu.cost.tile_conv2d_knobs import (
    TileConv2DKnobs,
    TileGeometry,
    default_tile_knobs,
    packed_tiles,
    tile_conv2d_space,
)
from schedules.workload.conv2d import Activation, ConvLayer

TILES = {"tiles": ("bfloat16", "uint8"), "emulates_tiles": True, "word_channels": 4}
CPU = replace(CPUInfo.from_target(TARGET), **TILES)
BYTES = Activation("round_clip", 0, 255)
FEW = settings(max_examples=settings.default.max_examples // 4)
BLOCKS = st.sampled_from([16, 32, 48, 64])


def fits(own: int, lanes: int) -> bool:
    return max(own, lanes) % min(own, lanes) == 0


@st.composite
def cases(draw) -> QuantizedCase:
    """A layer in any blocks; groups are of whole blocks, or blocks of whole groups."""
    case, lanes = draw(quantized_cases((4, False))), draw(BLOCKS)
    if case.layer.groups == 1:
        return replace(case, lanes=lanes, inner=draw(BLOCKS))
    own = draw(st.sampled_from([own for own in (16, 32, 48, 64, 128) if fits(own, lanes)]))
    channels = own * case.layer.groups
    layer = replace(case.layer, in_channels=channels, out_channels=channels)
    return replace(case, layer=layer, lanes=lanes)


def schedule(case: QuantizedCase, knobs: TileConv2DKnobs | None = None) -> tirx.PrimFunc:
    with described(TARGET, CPU):
        if knobs is None and case.layer.groups > 1:  # vectors might be faster
            knobs = TILE_CONV2D.default(case.kernel, CPU)
        if knobs is not None:
            return TILE_CONV2D.write(case.build(), case.kernel, knobs, TARGET).mod["main"]
        found = TileConv2D().apply(case.build(), TARGET, False)
    assert found is not None
    return found.mod["main"]


@pytest.mark.slow
@given(cases(), SEED)
@FEW
def test_numbers_with_default_knobs(case, seed):
    case.check(compile_function(schedule(case)), seed)


@given(cases(), st.integers(1, 6), st.data())
@FEW
def test_numbers_with_any_knobs(case, cores, data):
    space = list(tile_conv2d_space(case.kernel, replace(CPU, num_cores=cores)))
    case.check(compile_function(schedule(case, data.draw(st.sampled_from(space)))), 1)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "interleaved"), [((1, 4), True), ((2, 2), False)])
def test_tiles_that_reach_back(shape, interleaved):
    """29 pixels in tiles of 10, 80 channels in fours of 16; two pieces of each."""
    layer = ConvLayer(70, 80, (1, 1), activation=Activation("round_clip", -100, 155))
    case = QuantizedCase(layer, 2, 1, 29, 16, False, "uint8", addition=ADDITIONS[0])
    knobs = TileConv2DKnobs(10, *shape, 2, 2, 4, interleaved)
    case.check(compile_function(schedule(case, knobs)), 5)


@pytest.mark.slow
def test_three_channel_tiles_are_packed_side_by_side():
    layer = ConvLayer(96, 144, (1, 1), activation=Activation("round_clip", -100, 155))
    case = QuantizedCase(layer, 1, 5, 7, 48, False, "uint8", addition=ADDITIONS[0], inner=64)
    for interleaved in (True, False):
        knobs = TileConv2DKnobs(12, 1, 3, 1, 2, 1, interleaved)
        assert packed_tiles(case.kernel, knobs) == 3
        case.check(compile_function(schedule(case, knobs)), 5)


def test_padding_that_is_wider_than_what_is_read():
    layer = ConvLayer(20, 20, (1, 1), (5, 5), (4, 4, 0, 0), activation=BYTES)
    case = QuantizedCase(layer, 2, 1, 1, 16, False, "uint8")
    case.check(compile_function(schedule(case)), 3)


@pytest.mark.slow
def test_images_of_one_pixel_are_rows_of_a_matrix():
    layer = ConvLayer(70, 130, (1, 1), activation=Activation("round_clip", -100, 155))
    case = QuantizedCase(layer, 19, 1, 1, 64, False, "uint8", addition=ADDITIONS[1])
    assert case.kernel.is_matrix
    case.check(compile_function(schedule(case)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [None, ROUNDINGS[0]], ids=["bytes", "floats"])
def test_a_first_layer_reads_the_pixels_of_a_row_at_once(rounding):
    layer = ConvLayer(3, 40, (7, 7), (2, 2), (3, 3, 3, 3), activation=BYTES)
    case = QuantizedCase(layer, 1, 30, 33, 64, True, "uint8", rounding=rounding)
    case.check(compile_function(schedule(case)), 2)


def test_a_batch_that_is_known_only_at_run_time():
    case = QuantizedCase(ConvLayer(20, 20, (3, 3), padding=(1, 1, 1, 1)), batch=3)
    with described(TARGET, CPU):
        func = TileConv2D().apply(case.build(batch=tirx.Var("n", "int64")), TARGET, False)
    case.check(compile_function(func.mod["main"]), 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [3, 1])
def test_bits_are_the_same_for_any_number_of_threads(size):
    layer = ConvLayer(72, 40, (size, size), padding=(size // 2,) * 4)
    case = Case((layer,), height=12, width=10, lanes=32, residual=True)
    kernel, (packed, _) = kernel_of_floats(case, "float32"), operands(case, 8)
    results = []
    for pieces in ((1, 1), (2, 1), (1, 3)):  # Pieces of pixels and of channels.
        space = tile_conv2d_space(kernel, replace(CPU, num_cores=prod(pieces)))
        knobs = next(k for k in space if (k.unit_chunks, k.block_chunks) == pieces)
        with described(TARGET, CPU):
            func = TILE_CONV2D.write(build_floats(case, "float32"), kernel, knobs, TARGET)
        results.append(run(case, func.mod["main"], packed, "float32"))
    assert np.isfinite(results[0]).all() and results[0].std() > 0.1
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.slow
@given(cases_of_floats(pair=False), st.sampled_from([16, 32]), TYPES, SEED)
@FEW
def test_numbers_of_bfloat16(case, lanes, out_dtype, seed):
    layer, groups = case.layers[0], case.layers[0].groups
    if groups > 1:  # A group has another number of outputs than of inputs.
        own = seed % 3 + 1
        layer = replace(layer, in_channels=32 * groups, out_channels=16 * own * groups)
    case = replace(case, layers=(layer,), lanes=lanes)
    with described(TARGET, CPU):
        func = TileConv2D().apply(build_floats(case, out_dtype), TARGET, False)
    check_floats(case, func.mod["main"], out_dtype, seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "lanes", "shape", "interleaved"),
    [
        (16, 16, (1, 4), True),
        (32, 64, (2, 2), True),
        (64, 32, (1, 3), False),
        (48, 48, (1, 2), True),
    ],
)
def test_groups(own, lanes, shape, interleaved):
    """Five groups, whose tiles do not divide those that are summed at a time."""
    padding, end = (1, 0, 2, 1), Activation("round_clip", -100, 155)
    layer = ConvLayer(5 * own, 5 * own, (3, 3), (1, 2), padding, groups=5, activation=end)
    case = QuantizedCase(layer, 2, 6, 19, lanes, False, "uint8", addition=ADDITIONS[0])
    case.check(
        compile_function(schedule(case, TileConv2DKnobs(9, *shape, 2, 2, 4, interleaved))), 4
    )


SHAPES = {
    "pointwise": QuantizedCase(ConvLayer(512, 512, (1, 1)), 1, 14, 14, 64),
    "window": QuantizedCase(ConvLayer(256, 256, (3, 3), padding=(1,) * 4), 1, 14, 14, 64),
    "strided": QuantizedCase(ConvLayer(256, 512, (1, 1), (2, 2)), 1, 28, 28, 64),
    "stem": QuantizedCase(ConvLayer(3, 64, (7, 7), (2, 2), (3,) * 4), 1, 224, 224, 64, True),
    "image": QuantizedCase(
        ConvLayer(3, 64, (7, 7), (2, 2), (3,) * 4), 1, 224, 224, 64, True, rounding=ROUNDINGS[0]
    ),
    "halves": QuantizedCase(ConvLayer(96, 96, (3, 3), padding=(1,) * 4), 1, 28, 28, 32),
    "narrow": QuantizedCase(ConvLayer(128, 144, (1, 1)), 1, 28, 28, 48, inner=64),
    "groups": QuantizedCase(
        ConvLayer(512, 512, (3, 3), padding=(1,) * 4, groups=32), 1, 28, 28, 64
    ),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize(
    ("name", "shape"), [*product(SHAPES, [(1, 4), (2, 2)]), ("narrow", (1, 3))], ids=str
)
def test_machine_code(cpu, shape, name):
    """Each product takes the loads that its group promises, and nothing is called or spilled."""
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    case = SHAPES[name]
    layer, types = replace(case.layer, activation=BYTES), {"out_dtype": "uint8"}
    case = replace(case, layer=layer, addition=ADDITIONS[1], **types)
    info = CPUInfo.from_target(target)
    knobs = replace(default_tile_knobs(case.kernel, info), interleaved=True)
    knobs = replace(knobs, pixel_tiles=shape[0], channel_tiles=shape[1])
    text = assembly(TILE_CONV2D.write(case.build(), case.kernel, knobs, target).mod["main"], target)
    found = [loop for loop in loops(text) if _count(loop.instructions, "tdpbusd")]
    assert found
    most = 0
    for loop in found:
        products = _count(loop.instructions, "tdpbusd")
        assert products % prod(shape) == 0
        loads = shape[0] * TileGeometry.of(case.kernel).loads(knobs) + shape[1]
        assert _count(loop.instructions, "tileload") * prod(shape) == products * loads
        assert not _count(loop.instructions, "tilestored") or not loop.innermost
        assert not _count(loop.instructions, "call")
        assert loop.stack_stores == loop.stack_loads == 0
        most = max(most, _count(loop.instructions, "vpack"))
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
    # A row of output after the products of a step; several may be a loop of their own.
    is_row = shape[0] * knobs.rows <= TileGeometry.of(case.kernel).steps
    if is_row and case.lanes == 16 * shape[1]:
        assert most >= 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_machine_code_of_bfloat16(cpu, kernel):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    pad = kernel // 2
    layer = ConvLayer(128, 128, (kernel,) * 2, padding=(pad,) * 4, activation=Activation("relu"))
    case = Case((layer,), 1, 28, 28, 32, residual=True)
    workload = kernel_of_floats(case, "bfloat16")
    knobs = default_tile_knobs(workload, CPUInfo.from_target(target))
    knobs = replace(knobs, pixel_tiles=2, channel_tiles=2, interleaved=True)
    func = TILE_CONV2D.write(build_floats(case, "bfloat16"), workload, knobs, target).mod["main"]
    found = [loop for loop in loops(assembly(func, target)) if _count(loop.instructions, "tdpbf16")]
    assert found
    for loop in found:
        products, loads = (_count(loop.instructions, name) for name in ("tdpbf16", "tileload"))
        assert products == loads and products % 4 == 0
        assert not _count(loop.instructions, "call")
        assert loop.stack_stores == loop.stack_loads == 0
    assert any(_count(loop.instructions, "vcvtne2ps2bf16") for loop in found)


def _count(instructions: list[Instruction], name: str) -> int:
    return sum(each.name.startswith(name) for each in instructions)


def test_cpus_without_tiles_leave_them_alone():
    case = SHAPES["pointwise"]
    for cpu, features in (("sapphirerapids", ["-amx-int8"]), ("znver5", [])):
        options = {"mtriple": "x86_64-linux-gnu", "mcpu": cpu, "mattr": features}
        assert TileConv2D().apply(case.build(), Target({"kind": "llvm", **options}), False) is None


def test_blocks_that_fit_no_tiles_are_left_to_others():
    plain = QuantizedCase(ConvLayer(16, 16, (1, 1)))
    with described(TARGET, CPU):
        groups = replace(plain, layer=ConvLayer(96, 96, (1, 1), groups=2), lanes=32)
        fours = replace(plain, layer=ConvLayer(16, 16, (1, 1), groups=4))
        wide = [replace(plain, lanes=lanes) for lanes in (8, 128)]
        for case in (*wide, replace(plain, word=2), groups, fours):
            assert TileConv2D().apply(case.build(), TARGET, False) is None
