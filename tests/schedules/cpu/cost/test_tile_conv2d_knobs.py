# SPDX-License-Identifier: Apache-2.0
"""Cost model of convolutions in tile registers: measured layers, and the block that it chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost import tile_conv2d_knobs
from schedules.cpu.cost.tile_conv2d_knobs import (
    TileConv2DKnobs,
    TileGeometry,
    default_tile_knobs,
    fastest_blocks,
    fits_tiles,
    takes_tiles,
    tile_cycles,
    tile_groups,
)
from schedules.cpu.cost.tile_pair_knobs import (
    default_pair_knobs,
    separate_cycles,
    takes_pair,
    tile_pair_cycles,
)
from schedules.workload.conv2d import WORDS, ChannelBlocks, Conv2DKernel, ConvLayer

TYPES = frozenset({"uint8", "bfloat16"})
CPU = CPUInfo(512, 32, True, 2, 48 << 10, 2 << 20, 260 << 20, "emeraldrapids", tiles=TYPES)
CYCLES_PER_US = 2860
MEASURED = {
    (512, 512, 1, 14): (55, 26),
    (512, 2048, 1, 7): (83, 36),
    (2048, 512, 1, 7): (83, 36),
    (64, 64, 1, 56): (15, 18),
    (256, 256, 1, 28): (46, 27),
    (64, 64, 3, 56): (74, 47),
    (128, 128, 3, 28): (78, 41),
    (256, 256, 3, 14): (91, 47),
    (512, 512, 3, 7): (190, 86),
}
"""Microseconds of bfloat16 and of bytes on two cores; channels, kernel, and size of the output."""


def kernel_of(layer: ConvLayer, size: int, dtype: str, lanes: int = 0) -> Conv2DKernel:
    layout = f"NCHW{lanes}c" if lanes else "NCHW"
    sums = None if dtype == "uint8" else "float32"
    word = {"word": WORDS[dtype], "sums": sums, "out_dtype": dtype}
    return Conv2DKernel((layer,), 1, size, size, False, dtype, layout, layout, **word)


@pytest.mark.parametrize("shape", MEASURED, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_measured_layers_are_predicted_to_a_quarter(shape, dtype):
    inputs, outputs, kernel, size = shape
    layer = ConvLayer(inputs, outputs, (kernel, kernel))  # the zeros around it were stored
    workload = kernel_of(layer, size + kernel - 1, dtype, 64 // (4 // WORDS[dtype]))
    cycles = tile_cycles(workload, default_tile_knobs(workload, CPU), CPU)
    measured = MEASURED[shape][dtype == "uint8"] * CYCLES_PER_US
    assert 0.75 < cycles / measured < 1.25


@pytest.mark.parametrize(
    ("dtype", "measured", "tiles"), [("bfloat16", 247, (2, 2)), ("uint8", 186, (1, 4))]
)
def test_the_measured_stem_is_predicted_to_a_quarter(dtype, measured, tiles):
    """Pixels of four channels, of which each row of the kernel is one row of a tile."""
    layer = ConvLayer(3, 64, (7, 7), (2, 2))
    workload = replace(kernel_of(layer, 230, dtype, 16 * WORDS[dtype]), data_layout="NCHW4c")
    knobs = TileConv2DKnobs(16, *tiles, 2, 1, 4, interleaved=False)
    cycles = tile_cycles(workload, knobs, CPU)
    assert 0.75 < cycles / (measured * CYCLES_PER_US) < 1.25


@pytest.mark.parametrize(
    ("lanes", "dtype", "layer", "share"),
    [
        (32, "bfloat16", ConvLayer(64, 64, (1, 1)), 0),
        (16, "bfloat16", ConvLayer(64, 64, (3, 3)), 0),
        (48, "uint8", ConvLayer(96, 64, (1, 1)), 1 / 2),
        (4, "bfloat16", ConvLayer(3, 64, (7, 7), (2, 2)), 3 / 4),
        (4, "uint8", ConvLayer(3, 64, (7, 7), (2, 2)), 3 / 8),
    ],
)
def test_rows_of_tiles_that_lie_in_two_cache_lines(lanes, dtype, layer, share):
    kernel = replace(kernel_of(layer, 30, dtype, 64), data_layout=f"NCHW{lanes}c")
    assert TileGeometry.of(kernel).crossing == share


def test_blocks_fill_rows_of_tiles_where_there_are_channels():
    many = [ConvLayer(64, 256, (1, 1)), ConvLayer(256, 64, (1, 1)), ConvLayer(64, 64, (3, 3))]
    few = [ConvLayer(16, 16, (3, 3)), ConvLayer(16, 16, (1, 1))]
    for dtype, row in (("uint8", 64), ("bfloat16", 32)):
        for layers, block in ((many, row), (few, 16)):
            kernels = [kernel_of(layer, 28, dtype) for layer in layers]
            found = fastest_blocks(kernels, CPU, are_equal=True)
            assert found == ChannelBlocks(block, block)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_tensors_of_few_channels_have_narrower_blocks(dtype):
    shapes = ((16, 96), (96, 24), (24, 144), (144, 24), (192, 64), (64, 384))
    kernels = [kernel_of(ConvLayer(*shape, (1, 1)), 28, dtype) for shape in shapes]
    depthwise = Conv2DKernel((ConvLayer(96, 96, (3, 3), groups=96),), 1, 28, 28)
    found = fastest_blocks([*kernels, depthwise], CPU)
    assert found == ChannelBlocks(16, 16 * WORDS[dtype])
    assert found.of(16) == 16 and found.of(24) == 32
    assert found.of(144) == (48 if dtype == "uint8" else 32)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
@pytest.mark.parametrize(("channels", "size"), [(256, 28), (512, 14)])
def test_groups_are_computed_in_tiles_where_these_are_faster(dtype, channels, size):
    """Layers of ResNeXt-50: of 8 and 16 channels a group."""
    layer = ConvLayer(channels, channels, (3, 3), padding=(1,) * 4, groups=32)
    dense = [kernel_of(ConvLayer(2 * channels, channels, (1, 1)), size, dtype)] * 2
    kernel = kernel_of(layer, size, dtype)
    blocks = fastest_blocks([*dense, kernel], CPU)
    assert blocks is not None and tile_groups(kernel, blocks, CPU) == channels // 16
    assert tile_groups(kernel, ChannelBlocks(16, 16), CPU) == channels // 16
    wide = replace(layer, in_channels=24 * 32, out_channels=24 * 32)
    assert tile_groups(replace(kernel, layers=(wide,)), ChannelBlocks(16, 16), CPU) == 0
    large = replace(layer, kernel=(65, 65), in_channels=128, out_channels=128)
    assert tile_groups(replace(kernel, layers=(large,)), ChannelBlocks(16, 16), CPU) == 0


def test_groups_of_bytes_in_wide_blocks_leave_no_choice():
    layer = ConvLayer(1024, 1024, (3, 3), padding=(1,) * 4, groups=32)
    kernel = kernel_of(layer, 1, "uint8", 16)
    assert not takes_tiles(kernel, CPU) and fits_tiles(kernel, CPU)
    assert takes_tiles(kernel_of(layer, 1, "uint8", 32), CPU)
    assert tile_groups(kernel_of(layer, 1, "uint8"), ChannelBlocks(32, 32), CPU) == 32
    narrow = replace(layer, in_channels=256, out_channels=256)
    for dtype in ("uint8", "bfloat16"):
        assert tile_groups(kernel_of(narrow, 1, dtype), ChannelBlocks(16, 16), CPU) == 0


def test_networks_that_tiles_compute_in_part_keep_their_blocks():
    dense, grouped = ConvLayer(96, 96, (1, 1)), ConvLayer(96, 96, (3, 3), groups=8)
    bytes_, floats = kernel_of(dense, 28, "uint8"), kernel_of(dense, 28, "bfloat16")
    other = replace(kernel_of(grouped, 28, "bfloat16"), word=1)
    assert fastest_blocks([bytes_, floats], CPU) is None
    assert fastest_blocks([floats, other], CPU) == ChannelBlocks(16, 16)
    twelves = kernel_of(grouped, 28, "uint8")
    assert fastest_blocks([bytes_, twelves], CPU) == ChannelBlocks(16, 16)
    assert fastest_blocks([replace(bytes_, dtype="float32")], CPU) is None
    assert fastest_blocks([bytes_], replace(CPU, tiles=frozenset({"bfloat16"}))) is None
    assert fastest_blocks([], CPU) is None


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
@pytest.mark.parametrize(
    ("channels", "columns", "size", "gains"), [(144, 24, 56, True), (960, 160, 7, False)]
)
def test_pairs_gain_where_cores_share_rows(channels, columns, size, gains, dtype):
    """Depthwise layers of MobileNet-V2 and the 1x1 ones behind them."""
    lanes = 16 * WORDS[dtype]
    first = ConvLayer(channels, channels, (3, 3), padding=(1,) * 4, groups=channels)
    kernel = kernel_of(ConvLayer(channels, columns, (1, 1)), size, dtype, lanes)
    layers = (first, *kernel.layers)
    pair = replace(kernel, layers=layers, mid_layout=f"NCHW{lanes}c")
    assert takes_pair(pair, CPU)
    fused = tile_pair_cycles(pair, default_pair_knobs(pair, CPU), CPU)
    assert (sum(separate_cycles(pair, CPU)) > fused) == gains


def test_narrow_groups_of_floats_are_left_to_vectors_that_are_nearly_as_fast(monkeypatch):
    """Tiles would spread infinities from a group to its neighbours."""
    kernel = kernel_of(ConvLayer(64, 64, (3, 3), padding=(1,) * 4, groups=8), 7, "bfloat16")
    assert tile_groups(kernel, ChannelBlocks(32, 32), CPU) == 0
    monkeypatch.setattr(tile_conv2d_knobs, "_NEAR", 1.0)
    assert tile_groups(kernel, ChannelBlocks(32, 32), CPU) == 4
