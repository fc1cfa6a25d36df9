# SPDX-License-Identifier: Apache-2.0
"""Choice of pairs that are computed on planes, and their knobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cpu.conv_cases import Case
from cpu.plain_cases import build, check, depthwise, kernel_of
from tvm.target import Target

from schedules.cpu.conv2d.fused_conv2d import FusedConv2D
from schedules.cpu.conv2d.planar.planar_knobs import default_planar_knobs, prefers_planar
from schedules.cpu.conv2d.planar.planar_nest import planar_template
from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import ConvLayer

AVX2 = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
AVX512 = Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2})
CPU = CPUInfo.from_target(AVX2)
LARGE = replace(CPUInfo.from_target(AVX512), l2_bytes=1024 * 1024)
WIDE = Case((depthwise(16, 3, 2), ConvLayer(16, 24, (1, 1))), height=12, width=56)


NARROW = replace(WIDE, height=28, width=28, lanes=16)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("case", "target"), [(WIDE, AVX2), (NARROW, AVX512)])
def test_wide_rows_are_computed_on_planes(case, target):
    kernel, cpu = kernel_of(case, True, True), CPUInfo.from_target(target)
    assert prefers_planar(kernel, cpu)
    schedule = FusedConv2D().apply(build(case, True, True), target, False)
    knobs = default_planar_knobs(kernel, cpu)
    expected = planar_template(build(case, True, True), kernel, knobs)
    assert schedule.mod["main"].script() == expected.mod["main"].script()
    check(case, True, True, [schedule.mod["main"]], seed=7)


@pytest.mark.parametrize(
    "changed",
    [
        {"width": 55},
        {"plain_out": False},
        {"layers": (WIDE.layers[0], ConvLayer(16, 8192, (1, 1)))},
    ],
    ids=["narrow", "packed output", "weights beyond the L2"],
)
def test_what_stays_packed(changed):
    assert not prefers_planar(replace(kernel_of(WIDE, True, True), **changed), CPU)


@pytest.mark.parametrize(
    ("changed", "cores"),
    [
        ({"width": 27}, 2),
        ({"height": 14}, 2),
        ({}, 8),
        ({"layers": (NARROW.layers[0], ConvLayer(16, 8193, (1, 1)))}, 2),
    ],
    ids=["narrow", "few rows", "many cores", "weights beyond the L2"],
)
def test_what_stays_packed_with_long_vectors(changed, cores):
    kernel = replace(kernel_of(NARROW, True, True), **changed)
    assert not prefers_planar(kernel, replace(LARGE, num_cores=cores))


@pytest.mark.parametrize("changed", [{"vector_bits": 128}, {"has_fma": False}])
def test_other_vector_units_stay_packed(changed):
    cpu = replace(CPU, **changed)
    kernel = kernel_of(replace(WIDE, lanes=cpu.lanes("float32")), True, True)
    assert not prefers_planar(kernel, cpu)


def test_weights_packed_for_another_unit_stay_packed():
    assert not prefers_planar(kernel_of(WIDE, True, True), LARGE)


@pytest.mark.parametrize(
    ("size", "stride", "h", "lanes1"),
    [(28, 2, 7, 8), (56, 2, 14, 16), (56, 1, 4, 16), (112, 2, 4, 16), (112, 1, 7, 16)],
)
def test_steps_of_long_vectors_leave_least_of_the_last(size, stride, h, lanes1):
    layers = (depthwise(16, 3, stride), WIDE.layers[1])
    case = replace(NARROW, layers=layers, height=size, width=size)
    knobs = default_planar_knobs(kernel_of(case, True, True), LARGE)
    assert (knobs.h, knobs.lanes1, knobs.lanes2) == (h, lanes1, 16)


@pytest.mark.slow
def test_vectors_of_layer_two_fit_a_step_of_one_row():
    case = replace(NARROW, height=2)
    knobs = default_planar_knobs(kernel_of(case, True, True), LARGE)
    assert (knobs.h, knobs.lanes2) == (1, 8)
    check(
        case,
        True,
        True,
        [planar_template(build(case, True, True), kernel_of(case, True, True), knobs).mod["main"]],
        seed=3,
    )


@pytest.mark.parametrize(
    ("batch", "height", "cores", "h_t", "h"),
    [(1, 112, 2, 2, 4), (1, 112, 8, 8, 4), (2, 112, 2, 1, 4), (4, 24, 6, 3, 4), (1, 6, 8, 3, 1)],
)
def test_every_core_gets_a_piece(batch, height, cores, h_t, h):
    case = replace(WIDE, batch=batch, height=height)
    knobs = default_planar_knobs(kernel_of(case, True, True), replace(CPU, num_cores=cores))
    assert (knobs.h_t, knobs.h) == (h_t, h)


def test_steps_of_a_dense_grid_have_more_rows():
    """Theirs is the smaller part of what streams through the cache."""
    layers = (depthwise(16, 3, 1), WIDE.layers[1])
    for height, h in ((56, 7), (112, 7), (8, 4), (26, 7)):
        kernel = kernel_of(replace(WIDE, layers=layers, height=height), True, True)
        assert default_planar_knobs(kernel, CPU).h == h


def test_steps_leave_the_cache_to_the_weights():
    kernel = kernel_of(replace(WIDE, height=112), True, True)
    small = replace(CPU, l2_bytes=16 * 1024)
    assert default_planar_knobs(kernel, small).h == 4
