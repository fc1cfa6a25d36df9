# SPDX-License-Identifier: Apache-2.0
"""The size of the machine code of convolutions and pairs: what an L1 instruction cache holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import tvm_ffi
from cpu.conv_cases import Case
from cpu.conv_cases import build as build_packed
from cpu.machine_cases import code_bytes, info_of, lanes_of, target_of
from cpu.plain_cases import build, depthwise, kernel_of
from tvm import tirx

from schedules.cpu.conv2d.conv2d import CONV2D
from schedules.cpu.conv2d.fused_conv2d import FUSED, PLANAR, FusedConv2D
from schedules.cpu.conv2d.planar.planar_knobs import (
    MOST_CODE_BYTES,
    can_be_planar,
    has_little_code,
    prefers_planar,
)
from schedules.workload.conv2d import ConvLayer

CPUS = ("x86-64-v3", "znver4")
SIZES = ((72, 56, 40), (64, 112, 64), (240, 28, 96), (96, 112, 24))
"""Channels, pixels of a row, and output channels."""
WORST = [(72, 56, 40, 5, 2), (96, 112, 24, 3, 2)]


def dense(inputs: int, outputs: int, kernel: int, stride: int = 1) -> ConvLayer:
    square, strides = (kernel, kernel), (stride, stride)
    return ConvLayer(inputs, outputs, square, strides, padding=(kernel // 2,) * 4)


def on_planes(cpu: str, channels: int, size: int, outputs: int, kernel: int, stride: int) -> Case:
    layers = (depthwise(channels, kernel, stride), ConvLayer(channels, outputs, (1, 1)))
    return Case(layers, height=size, width=size, lanes=lanes_of(cpu))


FORMS = [
    pytest.param(cpu, *size, *window, marks=() if (*size, *window) in WORST else pytest.mark.slow)
    for cpu, size, window in product(CPUS, SIZES, product((3, 5, 7), (1, 2)))
]


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "channels", "size", "outputs", "kernel", "stride"), FORMS)
def test_the_code_of_pairs_from_nchw_to_nchw_fits_the_instruction_cache(
    cpu, channels, size, outputs, kernel, stride
):
    case = on_planes(cpu, channels, size, outputs, kernel, stride)
    schedule = FusedConv2D().apply(build(case, True, True), target_of(cpu), False)
    assert schedule is not None
    assert 2048 < code_bytes(schedule.mod["main"], cpu) <= MOST_CODE_BYTES


DENSE = {
    f"{kernel}x{kernel} s{stride}, {last}x{last}": (dense(64, 64, kernel, stride), last)
    for kernel, stride, last in [*product((3, 5, 7), (1, 2), (1,)), (3, 1, 3), (3, 2, 3)]
}


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("form", DENSE)
def test_the_code_of_dense_pairs_fits_the_instruction_cache(cpu, form):
    first, last = DENSE[form]
    case = Case((first, dense(64, 64, last)), height=56, width=56, lanes=lanes_of(cpu))
    knobs = FUSED.default(case.kernel, info_of(cpu))
    func = FUSED.write(build_packed(case), case.kernel, knobs, target_of(cpu)).mod["main"]
    assert 2048 < code_bytes(func, cpu) <= MOST_CODE_BYTES


def grouped(channels: int, groups: int, kernel: int, stride: int) -> ConvLayer:
    return replace(dense(channels, channels, kernel, stride), groups=groups)


def code_of_single(layer: ConvLayer, size: int, cpu: str) -> int:
    case = Case((layer,), height=size, width=size, lanes=lanes_of(cpu))
    knobs = CONV2D.default(case.kernel, info_of(cpu))
    func = CONV2D.write(build_packed(case), case.kernel, knobs, target_of(cpu)).mod["main"]
    return code_bytes(func, cpu)


WORST_SINGLE = {("znver4", 7, 1, "dense 48"), ("cortex-a76", 5, 1, "60 in 3 groups")}
LAYERS = {
    "dense 48": (48, 1, 112),
    "dense 512": (512, 1, 7),
    "depthwise": (240, 240, 28),
    "60 in 3 groups": (60, 3, 28),
    "120 in 5 groups": (120, 5, 14),
    "440 in 55 groups": (440, 55, 7),
}
"""Channels, groups and pixels of a row."""
SINGLE = [
    pytest.param(*form, marks=() if form in WORST_SINGLE else pytest.mark.slow)
    for form in product((*CPUS, "sapphirerapids", "cortex-a76"), (3, 5, 7), (1, 2), LAYERS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "kernel", "stride", "name"), SINGLE)
def test_the_code_of_one_convolution_fits_the_instruction_cache(cpu, kernel, stride, name):
    channels, groups, size = LAYERS[name]
    layer = grouped(channels, groups, kernel, stride)
    assert 512 < code_of_single(layer, size, cpu) <= MOST_CODE_BYTES


@pytest.mark.slow
def test_the_code_does_not_grow_with_the_number_of_groups():
    """The blocks of a group are tiles of three and of two."""
    few, many = (
        code_of_single(grouped(20 * groups, groups, 3, 1), 28, "cortex-a76") for groups in (3, 12)
    )
    assert many < 1.1 * few


def test_blocks_of_a_tile_are_unpacked_by_a_loop():
    """Full blocks and the last one have a place each, for two sizes of tiles and of steps."""
    lanes = lanes_of("znver4")
    layers = (dense(120, 120, 3, 2), dense(120, 120, 1))
    case = Case(layers, height=14, width=14, lanes=lanes)
    kernel = kernel_of(case, False, True)
    knobs = FUSED.default(kernel, info_of("znver4"))
    assert (knobs.h_t, knobs.h, knobs.blocks2) == (2, 4, 3)  # 3 and 4 rows; 3, 3 and 2 blocks
    func = FUSED.write(build(case, False, True), kernel, knobs, target_of("znver4")).mod["main"]
    found: list[tirx.Shuffle] = []
    tvm_ffi.structural_walk(func.body, (tirx.Shuffle, found.append))
    assert len(found) == 2 * 2 * 2 * lanes * (lanes.bit_length() - 1)


@pytest.mark.parametrize("cpu", CPUS)
def test_settings_of_much_code_are_no_choice(cpu):
    """No window, size of the image or number of channels leads to such a choice."""
    sizes = product((24, 72, 144), (28, 56, 112), (24, 40, 64))
    for size, window in product(sizes, product((3, 5, 7), (1, 2))):
        kernel, info = kernel_of(on_planes(cpu, *size, *window), True, True), info_of(cpu)
        if prefers_planar(kernel, info):
            assert has_little_code(kernel, PLANAR.default(kernel, info), info)


def test_the_space_leaves_out_settings_of_much_code():
    kernel, info = kernel_of(on_planes("znver4", *WORST[0]), True, True), info_of("znver4")
    assert can_be_planar(kernel, info)
    default = PLANAR.default(kernel, info)
    found = list(PLANAR.settings(kernel, info))
    assert all(has_little_code(kernel, knobs, info) for knobs in found)
    assert (default.h, default.rows) == (7, 3)
    assert replace(default, h=14, rows=7) not in found
    assert replace(default, ahead=False) in found
