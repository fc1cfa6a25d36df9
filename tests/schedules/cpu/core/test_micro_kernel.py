# SPDX-License-Identifier: Apache-2.0
"""Weights that the tiles of a layer prefetch while they compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from schedules.cpu.core.micro_kernel import ReducedBlocks, RegisterTile, next_weights
from schedules.cpu.core.prefetch import CACHE_LINE_BYTES
from schedules.cpu.core.tiles import Run
from schedules.workload.conv2d import ConvLayer

LINE = CACHE_LINE_BYTES // 4


def asked_for(
    ops: Any, blocks: int, reduction: ReducedBlocks, tiles: int, following: int | None = None
) -> set[int]:
    """Cache lines of the weights that so many tiles ask for, one at each of their steps."""
    taps = ops.layer.kernel[0] * ops.layer.kernel[1]
    first = int(reduction.start) * taps
    steps = range(first, first + reduction.count * taps)
    tile = RegisterTile(2, blocks, 0, Run(0, 1, 0, tiles, ()), 0, reduction, following)
    starts = [int(next_weights(ops, tile, turn)) for turn in range(tiles)]
    assert all(start % LINE == 0 for start in starts)
    return {start // LINE + step for start in starts for step in steps}


def lines_of(ops: Any, block: int, blocks: int, start: int, count: int) -> set[int]:
    """Cache lines of a part of the reduction of some output blocks."""
    taps = ops.layer.kernel[0] * ops.layer.kernel[1]
    square = ops.source.lanes * ops.lanes * taps
    return {
        ((piece * ops.weight_blocks + start) * square + element) // LINE
        for piece in range(block, block + blocks)
        for element in range(count * square)
    }


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_enough_tiles_ask_for_all_weights_that_come_next(lanes, kernel, blocks):
    layer = ConvLayer(4 * lanes, 8 * lanes, kernel)
    source = SimpleNamespace(lanes=lanes)
    weight = SimpleNamespace(dtype="float32")
    ops = SimpleNamespace(layer=layer, source=source, weight=weight, lanes=lanes, weight_blocks=4)
    ops.step, ops.dtype = lanes, "float32"
    tiles = blocks * lanes * lanes // LINE
    following = lines_of(ops, 2 + blocks, blocks, 0, 4)
    assert asked_for(ops, blocks, ReducedBlocks(0, 4), tiles) == following
    assert asked_for(ops, blocks, ReducedBlocks(0, 4), tiles - 1) < following
    inner = asked_for(ops, blocks, ReducedBlocks(0, 2, True, False), tiles)
    assert inner == lines_of(ops, 2, blocks, 2, 2)
    last = asked_for(ops, blocks, ReducedBlocks(2, 2, False, True), tiles)
    assert last == lines_of(ops, 2 + blocks, blocks, 0, 2)
    elsewhere = asked_for(ops, blocks, ReducedBlocks(0, 4), tiles, following=7)
    assert elsewhere == lines_of(ops, 7, blocks, 0, 4)
