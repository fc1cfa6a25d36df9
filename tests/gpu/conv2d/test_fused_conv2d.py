# SPDX-License-Identifier: Apache-2.0
"""Fused pairs of the GPU rule, executed in OpenCL against NumPy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu.conv_cases import Case, build
from gpu_conv_cases import CUDA, OPENCL, case_of, check, dense, depthwise, rule_of, scheduled
from tvm import tirx
from tvm.target import Target

from schedules.gpu import FusedConv2D
from schedules.gpu.conv2d.fused_conv2d import fused_template, pair_of, unsupported
from schedules.gpu.conv2d.fused_tiles import FusedTile, choose_fused_tile
from schedules.gpu.core.machine import GPUInfo
from schedules.workload.conv2d import ConvLayer, to_json
from tests.selection import in_turns

STRIDED = {"strides": (2, 1), "padding": (1, 2, 1, 0)}

CASES = [
    case_of(depthwise(13), dense(13, 22, activation="relu"), batch=2, height=9, residual=True),
    case_of(depthwise(8, 5, "hardswish", **STRIDED), dense(8, 5), height=11),
    case_of(depthwise(20, 3), dense(20, 12, 3, "relu"), height=6, width=7),
    case_of(dense(13, 37, 3, "silu"), dense(37, 22, activation="relu"), height=7, residual=True),
    case_of(dense(9, 13, 1, "relu6"), dense(13, 22, 3, **STRIDED), batch=2, residual=True),
    case_of(dense(6, 10, 3, **STRIDED), dense(10, 6, 3, "silu", dilation=(2, 1)), height=8),
    case_of(dense(3, 13, 3, "relu6", strides=(2, 2)), dense(13, 9, 3), height=15, nchw=True),
]

TILES = [
    FusedTile(2, 8, 4, 1, 1, 2, 4),
    FusedTile(4, 4, 4, 1, 1, 4, 4, first_blocks=2, rows=4),
    FusedTile(4, 8, 8, 2, 2, 4, 8, first_quads=4, rows=1),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " - ".join(map(str, case.layers)))
def test_pair(case: Case, rng: np.random.Generator) -> None:
    assert rule_of(build(case)) == "FusedConv2D"
    check(case, scheduled(case, FusedConv2D()), rng)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "tile"), in_turns([CASES[2], CASES[5]], TILES, every=3))
def test_any_tile(case: Case, tile: FusedTile, rng: np.random.Generator) -> None:
    check(case, fused_template(build(case), case.kernel, tile), rng)


@pytest.mark.slow
@pytest.mark.parametrize("layer", [depthwise(24), dense(4, 24)], ids=["depthwise", "dense"])
def test_a_last_chunk_that_is_not_full(layer: ConvLayer, rng: np.random.Generator) -> None:
    """Six blocks in chunks of four: what lies behind the last weights is poison."""
    case = case_of(layer, dense(24, 4), height=3, width=5)
    tile = FusedTile(2, 8, 4, 1, 1, 2, 4)
    assert pair_of(case.kernel, 1).chunks(tile) * tile.chunk == 8
    check(case, fused_template(build(case), case.kernel, tile), rng)


@pytest.mark.slow
def test_symbolic_batch(rng: np.random.Generator) -> None:
    case = case_of(depthwise(6), dense(6, 9), batch=3, height=5, width=7)
    func = build(case, tirx.Var("n", "int64"))
    func = func.with_attr("tvm_fusion.workload", to_json(replace(case.kernel, batch=None)))
    check(case, FusedConv2D().apply(func, OPENCL, False).mod["main"], rng)


@pytest.mark.slow
def test_padding_of_the_second_layer_is_zero(rng: np.random.Generator) -> None:
    """And not what the first layer would have there, its activated bias."""
    case = case_of(dense(4, 4, activation="sigmoid"), dense(4, 4, 3), height=3, width=3)
    check(case, scheduled(case, FusedConv2D()), rng)


def test_refuses_what_it_cannot_compute() -> None:
    grouped = ConvLayer(8, 8, (3, 3), groups=2)
    assert "second layer has groups" in str(unsupported(dense(8, 8), depthwise(8)))
    assert "first layer has groups" in str(unsupported(grouped, dense(8, 8)))
    assert "more than 49 taps" in str(unsupported(depthwise(8, 9), dense(8, 8)))
    case = case_of(dense(8, 8), depthwise(8))
    assert FusedConv2D().apply(build(case), CUDA, False) is None
    fine = build(case_of(depthwise(8), dense(8, 8)))
    assert FusedConv2D().apply(fine, Target("llvm"), False) is None
    assert FusedConv2D().apply(build(case_of(dense(8, 8))), CUDA, False) is None


def test_tiles_fit_the_device() -> None:
    gpus = [GPUInfo.from_target(target) for target in (CUDA, OPENCL)]
    for case in (CASES[0], CASES[5], case_of(dense(64, 64, 3), dense(64, 64, 3), height=56)):
        for gpu in gpus:
            pair = pair_of(case.kernel, case.batch)
            tile = choose_fused_tile(pair, gpu)
            assert tile is not None
            assert pair.shared_bytes(tile) <= gpu.shared_bytes
            assert tile.threads <= gpu.max_threads
    huge = case_of(dense(8, 8), dense(8, 8, 49), height=64, width=64)
    assert choose_fused_tile(pair_of(huge.kernel, 1), gpus[0]) is None
    assert FusedConv2D().apply(build(huge), CUDA, False) is None
