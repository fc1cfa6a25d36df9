# SPDX-License-Identifier: Apache-2.0
"""Cutting rows into register tiles: nothing twice, nothing left out, and the right taps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx
from tvm.sym import Analyzer

from schedules.cpu.core.tiles import row_runs, split_evenly, tile_of, tile_start
from schedules.workload.conv2d import ConvLayer

EXTENT, TILE = st.integers(1, 60), st.integers(1, 20)


@given(EXTENT, TILE)
def test_split_evenly_uses_the_fewest_tiles_and_equal_sizes(extent, tile):
    sizes = split_evenly(extent, tile)
    assert sum(sizes) == extent
    assert max(sizes) <= tile
    assert len(sizes) == -(-extent // tile)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(EXTENT, TILE)
def test_tile_start_and_tile_of_agree_with_the_sizes(extent, tile):
    simplify = Analyzer().simplify
    start = 0
    for index, size in enumerate(split_evenly(extent, tile)):
        constant = tirx.IntImm("int32", index)
        assert int(simplify(tile_start(extent, tile, constant))) == start
        for element in range(start, start + size):
            found = tile_of(extent, tile, tirx.IntImm("int32", element))
            assert int(simplify(found)) == index
        start += size
    end = tirx.IntImm("int32", len(split_evenly(extent, tile)))
    assert int(simplify(tile_start(extent, tile, end))) == extent


@given(
    in_width=st.integers(1, 40),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 4),
    padding=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    tile=TILE,
)
def test_runs_cover_a_row_once_and_know_their_taps(
    in_width, kernel, stride, dilation, padding, tile
):
    left, right = padding
    reach = (kernel - 1) * dilation + 1
    in_width = max(in_width, reach - left - right)
    layer = ConvLayer(8, 8, (1, kernel), (1, stride), (0, left, 0, right), dilation=(1, dilation))
    out_width = layer.output_size(1, in_width)[1]
    runs = row_runs(layer, in_width, out_width, tile)

    tiles = [(run, run.start + i * run.size) for run in runs for i in range(run.count)]
    assert [run.first for run in runs] == [
        sum(earlier.count for earlier in runs[:i]) for i in range(len(runs))
    ]
    pixels = [start + p for run, start in tiles for p in range(run.size)]
    assert pixels == list(range(out_width))
    for run, start in tiles:
        assert 1 <= run.size <= tile
        seen = [
            [0 <= (start + p) * stride + tap * dilation - left < in_width for p in range(run.size)]
            for tap in range(kernel)
        ]
        claimed = [[low <= p < high for p in range(run.size)] for low, high in run.taps]
        assert claimed == seen
        assert all(0 <= low <= high <= run.size for low, high in run.taps)


def test_neighbouring_runs_differ():
    layer = ConvLayer(8, 8, (1, 3), padding=(0, 1, 0, 1))
    runs = row_runs(layer, 56, 56, 7)
    assert [(run.first, run.count, run.size) for run in runs] == [(0, 1, 7), (1, 6, 7), (7, 1, 7)]
    assert [run.taps[0] for run in runs] == [(1, 7), (0, 7), (0, 7)]
    assert [run.taps[2] for run in runs] == [(0, 7), (0, 7), (0, 6)]
