# SPDX-License-Identifier: Apache-2.0
"""Plans for Winograd's algorithm: what every plan keeps to, and what the model must know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.winograd_knobs import MAX_GROUP, WinogradShape, best_plan
from schedules.workload.conv2d import ConvLayer
from schedules.workload.winograd_matrices import TILE_SIZES

CPU = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}))


def shape(channels: int, extent: int, size: int, batch: int = 1) -> WinogradShape:
    layer = ConvLayer(channels, channels, (3, 3), padding=(1, 1, 1, 1))
    return WinogradShape.of(layer, batch, (extent, extent), size, 8, "float32")


def test_extents_of_a_layer():
    layer = ConvLayer(20, 33, (3, 3))
    found = WinogradShape.of(layer, 3, (9, 4), 4, 8, "float32")
    assert found == WinogradShape(4, tiles=9, in_blocks=3, out_blocks=5, lanes=8, item_bytes=4)
    assert found.points == 36


def test_pairs_of_bfloat16_halve_products_and_weights_and_cost_a_rounding():
    layer, cpu = ConvLayer(64, 64, (3, 3), padding=(1, 1, 1, 1)), replace(CPU, family="znver5")
    floats, halves = (
        WinogradShape.of(layer, 4, (56, 56), 2, 16, dtype) for dtype in ("float32", "bfloat16")
    )
    assert halves == replace(floats, item_bytes=2, word=2)
    slow, fast = (best_plan(each, cpu).cycles for each in (floats, halves))
    assert 1.2 < slow / fast < 2


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(TILE_SIZES),
    st.integers(1, 400),
    st.integers(1, 64),
    st.integers(1, 64),
    st.sampled_from([1, 2, 3, 16, 64]),
    st.sampled_from(["x86-64-v3", "x86-64-v4"]),
)
def test_every_plan_fits(size, tiles, in_blocks, out_blocks, cores, mcpu):
    cpu = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": mcpu, "num-cores": cores}))
    plan = best_plan(WinogradShape(size, tiles, in_blocks, out_blocks, 8, 4), cpu)
    knobs = plan.knobs
    assert 1 <= knobs.group <= min(tiles, MAX_GROUP)
    assert out_blocks % knobs.block_chunks == 0
    assert knobs.pixels * knobs.blocks + knobs.blocks + 1 <= cpu.num_vector_registers
    assert plan.cycles > 0


@pytest.mark.parametrize("size", TILE_SIZES)
def test_twice_the_images_take_about_twice_as_long(size):
    one, two = (best_plan(shape(64, 56, size, batch), CPU).cycles for batch in (4, 8))
    assert 1.9 < two / one < 2.1


def test_many_tiles_are_shared_out_and_few_tiles_share_the_channels():
    assert best_plan(shape(64, 56, 4), CPU).knobs.block_chunks == 1
    assert best_plan(shape(512, 7, 4), CPU).knobs.block_chunks == 2


def test_weights_that_few_tiles_read_make_small_tiles_the_faster():
    small, large = (best_plan(shape(512, 7, size), CPU).cycles for size in TILE_SIZES)
    assert small < large
    small, large = (best_plan(shape(128, 56, size), CPU).cycles for size in TILE_SIZES)
    assert large < small


def test_more_cores_are_not_slower():
    cycles = [best_plan(shape(128, 28, 4), replace(CPU, num_cores=n)).cycles for n in (1, 2, 4)]
    assert cycles == sorted(cycles, reverse=True)
