# SPDX-License-Identifier: Apache-2.0
"""Pooling on the GPU: numbers in OpenCL, wide loads of NCHW4c in CUDA's machine code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from gpu_conv_cases import convolve_groups
from graph_cases import CUDA, fused, run, scheduled
from tvm import relax, te, tirx
from tvm.relax import op

from schedules import attributes
from schedules.gpu import Pooling
from tests.selection import in_turns

F32 = "float32"

CASES: list[dict[str, Any]] = [
    {"pool": [2, 2], "strides": [2, 2], "padding": [0, 0, 0, 0], "ceil_mode": False},
    {"pool": [3, 3], "strides": [2, 2], "padding": [1, 1, 1, 1], "ceil_mode": False},
    {"pool": [3, 2], "strides": [2, 1], "padding": [0, 1, 1, 0], "ceil_mode": True},
    {"pool": [3, 3], "strides": [1, 1], "padding": [1, 1, 1, 1], "ceil_mode": False},
]
SHAPES = {"NCHW": (2, 5, 9, 12), "NCHW4c": (1, 3, 9, 11, 4)}


def _windows(x: np.ndarray, case: dict[str, Any], fill: float) -> np.ndarray:
    """All windows of ``[N, C, H, W, ...]``: two axes more at the front."""
    (kh, kw), (sh, sw), (top, left, bottom, right) = case["pool"], case["strides"], case["padding"]
    more = max(sh, sw) if case["ceil_mode"] else 0
    pads = [(0, 0), (0, 0), (top, bottom + more), (left, right + more)] + [(0, 0)] * (x.ndim - 4)
    padded = np.pad(x.astype("float64"), pads, constant_values=fill)
    rounding = np.ceil if case["ceil_mode"] else np.floor
    rows = int(rounding((x.shape[2] + top + bottom - kh) / sh)) + 1
    columns = int(rounding((x.shape[3] + left + right - kw) / sw)) + 1
    return np.stack(
        [
            np.stack(
                [
                    padded[:, :, i : i + rows * sh : sh, j : j + columns * sw : sw][
                        :, :, :rows, :columns
                    ]
                    for j in range(kw)
                ]
            )
            for i in range(kh)
        ]
    )


def _pool(name: str, case: dict[str, Any], layout: str, **options: bool) -> Any:
    def build(x: relax.Expr) -> relax.Expr:
        return getattr(op.nn, name)(
            x,
            case["pool"],
            case["strides"],
            case["padding"],
            ceil_mode=case["ceil_mode"],
            layout=layout,
            out_layout=layout,
            **options,
        )

    return build


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_maxima(case: dict[str, Any], layout: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal(SHAPES[layout]).astype(F32)
    [got] = run(_pool("max_pool2d", case, layout), [x])
    np.testing.assert_array_equal(got, _windows(x, case, -np.inf).max((0, 1)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("layout", "case", "padded"), in_turns(SHAPES, CASES[:2] + CASES[3:], [False, True])
)
def test_averages(
    case: dict[str, Any], layout: str, padded: bool, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(SHAPES[layout]).astype(F32)
    [got] = run(_pool("avg_pool2d", case, layout, count_include_pad=padded), [x])
    windows = _windows(x, case, np.nan)
    size = case["pool"][0] * case["pool"][1]
    counted = size if padded else np.isfinite(windows).sum((0, 1))
    np.testing.assert_allclose(got, np.nansum(windows, (0, 1)) / counted, 1e-5, 1e-6)


@pytest.mark.slow
def test_neighbours_join_the_kernel(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((1, 2, 8, 8, 4)).astype(F32) for _ in range(2))
    pool = _pool("max_pool2d", CASES[1], "NCHW4c")
    built = scheduled(lambda x, y: op.nn.relu(pool(op.add(x, y))), (x.shape, F32), (y.shape, F32))
    [got] = run(lambda x, y: op.nn.relu(pool(op.add(x, y))), [x, y])
    wanted = np.maximum(_windows(x + y, CASES[1], -np.inf).max((0, 1)), 0)
    np.testing.assert_array_equal(got, wanted.astype(F32))
    assert len(built) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
def test_pixels_of_four_channels_are_loaded_at_once(name: str) -> None:
    build = _pool(name, CASES[1], "NCHW4c")
    [func] = scheduled(build, ((1, 16, 112, 112, 4), F32), target=CUDA).values()
    source = cuda_source(func)
    [used], [code] = ptxas(source).values(), sass(source).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "LDG.E.128") == count(names, "LDG") == 9
    assert count(names, "STG.E.128") == count(names, "STG") == 1


# Strides, padding, dilation, channels a group, filters a group, and their size.
DEPTHWISE: dict[str, tuple[tuple[int, int], tuple[int, int, int, int], int, int, int, int]] = {
    "plain": ((1, 1), (1, 1, 1, 1), 1, 1, 1, 3),
    "strided, two filters a channel": ((2, 1), (0, 2, 1, 1), 1, 1, 2, 5),
    "dilated": ((1, 1), (2, 2, 2, 2), 2, 1, 1, 3),
    "two channels a group": ((1, 2), (1, 1, 1, 1), 1, 2, 3, 3),
    "eight channels a group": ((1, 1), (1, 1, 1, 1), 1, 8, 8, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_convolutions_of_float16(name: str, rng: np.random.Generator) -> None:
    strides, padding, dilation, channels, filters, size = DEPTHWISE[name]
    groups = max(2, 6 // channels)
    x = rng.standard_normal((2, groups * channels, 9, 12)).astype("float16")
    w = rng.standard_normal((groups * filters, channels, size, size)).astype("float16")

    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        conv = op.nn.conv2d(x, w, strides, padding, dilation, groups, out_dtype=F32)
        return op.nn.relu(conv)

    [func] = scheduled(build, (x.shape, "float16"), (w.shape, "float16")).values()
    assert func.attrs[attributes.RULE] == "Pooling"
    [got] = run(build, [x, w])
    wanted = np.maximum(convolve_groups(x, w, groups, strides, padding, dilation), 0)
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-5)


@pytest.mark.slow
def test_machine_code_of_a_depthwise_convolution() -> None:
    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        conv = op.nn.conv2d(x, w, padding=1, groups=960, out_dtype=F32)
        return op.astype(op.clip(conv, 0, 6), "float16")

    shapes = ((8, 960, 14, 14), "float16"), ((960, 1, 3, 3), "float16")
    [func] = scheduled(build, *shapes, target=CUDA).values()
    [used], [code] = ptxas(cuda_source(func)).values(), sass(cuda_source(func)).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert used.registers <= 64 and not count(names, "BAR") and not count(names, "SHFL")
    assert count(names, "STG.E") == count(names, "STG") == 1, "two pixels at once"


def test_a_dense_convolution_of_few_channels_is_left_alone() -> None:
    shapes = ((1, 3, 9, 9), F32), ((8, 3, 3, 3), F32)
    mod = fused(op.nn.conv2d, *shapes)
    [func] = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert Pooling().apply(func, CUDA, False) is None


def test_sums_of_rows_are_left_alone() -> None:
    x = te.placeholder((8, 8), F32, name="x")
    k = te.reduce_axis((0, 8))
    func = te.create_prim_func([x, te.compute((8,), lambda i: te.sum(x[i, k], k))])
    assert Pooling().apply(func, CUDA, False) is None
    wide = te.reduce_axis((0, 80))
    long = te.placeholder((200,), F32, name="long")
    func = te.create_prim_func([long, te.compute((100,), lambda i: te.sum(long[i + wide], wide))])
    assert Pooling().apply(func, CUDA, False) is None
