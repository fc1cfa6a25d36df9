# SPDX-License-Identifier: Apache-2.0
"""The register tile is the cheapest of those that fit the registers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.target import Target

from schedules.conv2d_workload import ConvLayer
from schedules.cpu.machine import CPUInfo
from schedules.cpu.register_tile import best_tile, register_tile

ROW, BLOCKS, REGISTERS = st.integers(1, 200), st.integers(1, 40), st.sampled_from([16, 32])


def cost(row: int, blocks: int, pixels: int, vectors: int) -> float:
    """Cycles of the module's docstring, summed over tiles that are as equal as can be."""

    def sizes(extent: int, tile: int) -> list[int]:
        count = math.ceil(extent / tile)
        return [extent // count + (i < extent % count) for i in range(count)]

    return sum(
        max(p * v / 2, (p + v) / 2, 4)
        for p, v in itertools.product(sizes(row, pixels), sizes(blocks, vectors))
    )


@given(ROW, BLOCKS, REGISTERS)
def test_fits_the_registers_and_the_layer(row, blocks, registers):
    pixels, vectors = best_tile(row, blocks, registers)
    assert 1 <= pixels <= row
    assert 1 <= vectors <= min(4, blocks)
    assert pixels * vectors + vectors + 1 <= registers


@given(ROW, BLOCKS, REGISTERS)
def test_no_tile_that_fits_is_cheaper(row, blocks, registers):
    chosen = best_tile(row, blocks, registers)
    others = [
        (pixels, vectors)
        for pixels, vectors in itertools.product(range(1, row + 1), range(1, min(4, blocks) + 1))
        if pixels * vectors + vectors + 1 <= registers
    ]
    cheapest = min(cost(row, blocks, *tile) for tile in others)
    assert cost(row, blocks, *chosen) == cheapest
    ties = [tile for tile in others if cost(row, blocks, *tile) == cheapest]

    def preference(tile: tuple[int, int]) -> tuple[bool, float, int]:
        takes_all = math.prod(tile) + tile[1] + 1 == registers
        return takes_all, sum(tile) / math.prod(tile), -math.prod(tile)

    assert preference(chosen) == min(map(preference, ties))


@pytest.mark.parametrize(("cpu", "registers"), [("x86-64-v3", 16), ("x86-64-v4", 32)])
@pytest.mark.parametrize("channels", [8, 13, 64, 320])
def test_a_layer_uses_the_registers_of_its_target(cpu, registers, channels):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    info = CPUInfo.from_target(target)
    lanes = info.lanes("float32")
    dense = ConvLayer(channels, channels, (3, 3))
    blocks = -(-channels // lanes)
    assert register_tile(dense, 56, lanes, info) == best_tile(56, blocks, registers)

    grouped = ConvLayer(lanes * 4, lanes * 4, (3, 3), groups=4)
    assert register_tile(grouped, 56, lanes, info)[1] == 1

    depthwise = ConvLayer(channels, channels, (3, 3), groups=channels)
    pixels, vectors = register_tile(depthwise, 56, lanes, info)
    assert vectors == 1
    assert registers // 4 < pixels < registers // 2
    assert register_tile(depthwise, 3, lanes, info) == (3, 1)
