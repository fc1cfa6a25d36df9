# SPDX-License-Identifier: Apache-2.0
"""The register tiles worth a try fit the registers, and no cheaper one is left out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.machine_costs import FAMILIES
from schedules.cpu.cost.register_tile import (
    MOST_CYCLES,
    dense_tiles,
    most_pixels,
    register_tiles,
    row_cycles,
)
from schedules.workload.conv2d import ConvLayer

ROW, BLOCKS = st.integers(1, 200), st.integers(1, 40)
CPUS = st.builds(
    CPUInfo,
    vector_bits=st.sampled_from([128, 256, 512]),
    num_vector_registers=st.sampled_from([16, 32]),
    has_fma=st.just(True),
    num_cores=st.just(2),
    l1d_bytes=st.just(32 << 10),
    l2_bytes=st.just(1 << 20),
    l3_bytes=st.just(32 << 20),
    family=st.sampled_from(["", *FAMILIES]),
)
AVX2 = CPUInfo(256, 16, True, 2, 32 << 10, 512 << 10, 32 << 20)


@given(ROW, BLOCKS, CPUS)
def test_tiles_fit_the_registers_and_the_layer(row, blocks, cpu):
    for pixels, vectors in dense_tiles(row, blocks, cpu):
        assert 1 <= pixels <= row
        assert 1 <= vectors <= min(4, blocks)
        assert pixels * vectors + vectors + 1 <= cpu.num_vector_registers


@given(ROW, BLOCKS, CPUS)
def test_no_tile_that_fits_is_cheaper_than_the_first(row, blocks, cpu):
    tiles = dense_tiles(row, blocks, cpu)
    cycles = [row_cycles(row, blocks, *tile, cpu) for tile in tiles]
    others = [
        row_cycles(row, blocks, pixels, vectors, cpu)
        for pixels, vectors in itertools.product(range(1, row + 1), range(1, min(4, blocks) + 1))
        if pixels <= most_pixels(cpu, vectors)
    ]
    assert cycles == sorted(cycles)
    assert cycles[0] == min(others)
    assert cycles[-1] <= MOST_CYCLES * min(others)


def test_tiles_that_cut_a_row_alike_count_once():
    tiles = dense_tiles(7, 4, AVX2)
    assert len(tiles) == len(set(tiles))
    assert not {(5, 2), (6, 2)} & set(tiles)  # 7 pixels are 4 + 3 with all of these
    assert (4, 2) in tiles


@pytest.mark.parametrize(("cpu", "registers"), [("x86-64-v3", 16), ("x86-64-v4", 32)])
@pytest.mark.parametrize("channels", [8, 13, 64, 320])
def test_a_layer_uses_the_registers_of_its_target(cpu, registers, channels):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    info = CPUInfo.from_target(target)
    assert info.num_vector_registers == registers
    lanes = info.lanes("float32")
    dense = ConvLayer(channels, channels, (3, 3))
    blocks = -(-channels // lanes)
    assert register_tiles(dense, 56, lanes, info) == dense_tiles(56, blocks, info)

    grouped = ConvLayer(lanes * 4, lanes * 4, (3, 3), groups=4)
    assert {vectors for _, vectors in register_tiles(grouped, 56, lanes, info)} == {1}

    depthwise = ConvLayer(channels, channels, (3, 3), groups=channels)
    tiles = register_tiles(depthwise, 56, lanes, info)
    assert all(vectors == 1 and pixels < registers // 2 for pixels, vectors in tiles)
    assert tiles[0][0] > registers // 4
    assert register_tiles(depthwise, 3, lanes, info)[0] == (3, 1)
