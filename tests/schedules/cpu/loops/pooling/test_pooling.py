# SPDX-License-Identifier: Apache-2.0
"""The rule for pooling: numbers in three layouts, registers, no conditions inside, refusals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
import tvm_ffi
from cpu.rule_cases import (
    AVX2,
    AVX512,
    FOREIGN,
    HOST,
    NEON,
    Array,
    assembly,
    close,
    compiled,
    draw,
    extents,
    function,
    guards,
    loops,
    lowered,
    parallel,
    run,
    schedule,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import ir, te, tirx, topi

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.pooling import Pooling, tile_cuts
from schedules.tir.expression_walk import uses


@dataclass(frozen=True)
class Pool:
    """A pooling of an image with three channels blocks or channels."""

    kind: str
    layout: str
    size: tuple[int, int]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int, int, int]
    include: bool = False
    channels: int = 3

    @property
    def shape(self) -> tuple[int, ...]:
        height, width = self.size
        return {
            "NCHW": (2, self.channels, height, width),
            "NHWC": (2, height, width, self.channels),
        }.get(self.layout, (2, self.channels, height, width, 8))

    def build(self, shape: tuple | None = None) -> tirx.PrimFunc:
        x = te.placeholder(shape or self.shape, name="x")
        out = topi.nn.pool2d(
            x,
            self.kernel,
            self.strides,
            (1, 1),
            self.padding,
            self.kind,
            layout=self.layout,
            count_include_pad=self.include,
        )
        return function([x], out)

    def reference(self, x: Array) -> Array:
        """Windows of the padded image, reduced in float64."""
        order = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2)}.get(self.layout, (0, 1, 4, 2, 3))
        image = x.astype("float64").transpose(order)
        top, left, bottom, right = self.padding
        lead = [(0, 0)] * (image.ndim - 2)
        border = [*lead, (top, bottom), (left, right)]
        filler = -np.finfo("float32").max if self.kind == "max" else 0.0
        counted = np.pad(np.ones_like(image), border, constant_values=float(self.include))
        windows = self._windows(np.pad(image, border, constant_values=filler))
        if self.kind == "max":
            reduced = windows.max((-1, -2))
        else:
            counts = self._windows(counted).sum((-1, -2))
            reduced = windows.sum((-1, -2)) / np.maximum(counts, 1)
        return reduced.transpose(np.argsort(order))

    def _windows(self, image: Array) -> Array:
        windows = np.lib.stride_tricks.sliding_window_view(image, self.kernel, axis=(-2, -1))
        return windows[..., :: self.strides[0], :: self.strides[1], :, :]


RESNET = Pool("max", "NCHW8c", (112, 112), (3, 3), (2, 2), (1, 1, 1, 1))


def test_packed_channels_are_the_lanes_and_planes_run_in_parallel():
    func = schedule(Pooling(), RESNET.build(), AVX2)
    assert parallel(func) == [2] and vectors(func) == {8} and guards(func) == 0


def test_sums_stay_in_registers():
    text = assembly(schedule(Pooling(), RESNET.build(), AVX2), AVX2)
    assert "vmaxps" in text and "TVMBackendAllocWorkspace" not in text


@st.composite
def pools(draw_one: st.DrawFn, layouts: list[str]) -> Pool:
    kernel = draw_one(st.tuples(*[st.integers(1, 4)] * 2))
    sizes = st.sampled_from([4, 5, 7, 8, 13, 17, 29])
    return Pool(
        kind=draw_one(st.sampled_from(["max", "avg"])),
        layout=draw_one(st.sampled_from(layouts)),
        size=draw_one(st.tuples(sizes, sizes)),
        kernel=kernel,
        strides=draw_one(st.tuples(*[st.integers(1, 3)] * 2)),
        padding=draw_one(st.tuples(*[st.integers(0, kernel[k % 2] - 1) for k in range(4)])),
        include=draw_one(st.booleans()),
        channels=draw_one(st.sampled_from([1, 3, 13])),
    )


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 5)
@given(pools(["NCHW8c", "NHWC", "NCHW"]))
def test_numbers_of_float64(pool):
    func = pool.build()
    found = Pooling().apply(func, HOST, False)
    if found is None:  # a window of one element, or an image without several windows
        assert 1 in pool.kernel or pool.channels == 1 or 1 in pool.reference(draw(pool.shape)).shape
        return
    x = draw(pool.shape)
    close(run(found.mod["main"], x)[0], pool.reference(x))


def test_the_epilogue_is_computed_with_the_tile():
    x = tensor("x", 1, 4, 57, 57, 8)
    pooled = topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max", layout="NCHW8c")
    func = schedule(Pooling(), function([x], topi.nn.relu(pooled)))
    data = draw([1, 4, 57, 57, 8])
    pool = Pool("max", "NCHW8c", (57, 57), (3, 3), (2, 2), (1, 1, 1, 1), channels=4)
    close(run(func, data)[0], np.maximum(pool.reference(data), 0))


def test_symbolic_batch():
    n = tirx.Var("n", "int64")
    pool = Pool("avg", "NCHW8c", (9, 9), (3, 3), (1, 1), (1, 1, 1, 1))
    sizes = [tirx.IntImm("int64", extent) for extent in pool.shape[1:]]
    executable = compiled(schedule(Pooling(), pool.build((n, *sizes))))
    x = draw(pool.shape)
    out = tvm.runtime.tensor(np.full(pool.shape, np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(x), out)
    close(out.numpy(), pool.reference(x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [AVX512, NEON], ids=["avx512", "neon"])
@pytest.mark.parametrize("layout", ["NCHW8c", "NCHW"])
def test_compiles_for_other_vector_units(target, layout):
    pool = Pool("max", layout, (29, 29), (3, 3), (2, 2), (1, 1, 1, 1))
    func = schedule(Pooling(), pool.build(), target)
    assert max(vectors(func)) <= CPUInfo.from_target(target).lanes("float32")
    assert assembly(func, target)


@pytest.mark.parametrize(
    ("points", "extent", "tile", "ends"),
    [
        ([], 56, 8, [7]),
        ([1], 56, 8, [1, 7]),
        ([1, 55], 56, 8, [1, 6, 7]),
        ([8], 56, 8, [1, 7]),
        ([1, 12], 13, 7, [1, 2]),
        ([3], 5, 5, [1]),
    ],
)
def test_tiles_with_a_condition_are_cut_off(points, extent, tile, ends):
    assert tile_cuts(points, extent, tile) == ends


def conditions_on(loop: tirx.For) -> bool:
    """Return whether a condition inside depends on the loop, or on the pixels of a tile."""
    inner: list[tirx.For] = []
    tests: list[ir.Expr] = []
    tvm_ffi.structural_walk(loop, (tirx.For, inner.append))
    tvm_ffi.structural_walk(
        loop,
        (ir.Call, lambda c: tests.append(c.args[0]) if c.op.name == "prim.if_then_else" else None),
    )
    pixels = [one for one in inner if int(one.extent) == 8]
    return any(uses(test, *(one.loop_var for one in (loop, *pixels))) for test in tests)


@pytest.mark.parametrize(("layout", "kernel"), [("NCHW8c", 5), ("NCHW", 5), ("NHWC", 13)])
def test_only_a_row_of_a_large_window_is_unrolled(layout: str, kernel: int) -> None:
    half = kernel // 2
    pool = Pool("max", layout, (20, 20), (kernel, kernel), (1, 1), (half,) * 4, channels=8)
    func = schedule(Pooling(), pool.build(), AVX2)
    assert kernel in extents(func, tirx.ForKind.SERIAL)
    assert kernel in extents(func, tirx.ForKind.UNROLLED)


def test_only_the_tiles_at_the_border_keep_conditions():
    func = lowered(schedule(Pooling(), RESNET.build(), AVX2))
    assert [conditions_on(loop) for loop in loops(func) if int(loop.extent) == 6] == [False]
    assert conditions_on(next(loop for loop in loops(func) if int(loop.extent) == 56))


def test_convolutions_reductions_and_other_targets_are_left_alone():
    x, w = tensor("x", 1, 4, 9, 9), tensor("w", 5, 4, 3, 3)
    refused = [
        function([x, w], topi.nn.conv2d_nchw(x, w, 1, 0, 1)),
        function([x], topi.sum(x, [2, 3])),
        function([x], topi.nn.relu(x)),
        function([x], topi.nn.softmax(x, 1)),
    ]
    for func in refused:
        assert Pooling().apply(func, HOST, False) is None
    assert Pooling().apply(RESNET.build(), FOREIGN, False) is None
