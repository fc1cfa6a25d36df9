# SPDX-License-Identifier: Apache-2.0
"""Products of warpgroups and bulk copies by loops, as the PTX manual defines them, for OpenCL.

One thread waits for another only at barriers of the work-group, so the sides take turns: all
threads copy a step to the one stage, then all multiply. What this cannot show, whether each side
waits for the other, is told by :func:`check_protocol` from the CUDA text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core import warpgroup
from schedules.gpu.core.intrinsics import sync
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.tensor_core import MatrixType
from schedules.gpu.core.vector_loads import flat_view
from schedules.gpu.core.warpgroup import BulkSource, FactorLayout, Fetch
from schedules.gpu.gemm.matmul import warpgroup_matmul, warpgroup_tile


class EmulatedWarpgroupCore:
    """Takes the place of :class:`schedules.gpu.core.warpgroup.WarpgroupCore`."""

    producers = 0

    def __init__(
        self,
        kind: MatrixType,
        stages: int,
        stage_bytes: int,
        warpgroups: int,
        thread: tirx.Expr,
        cluster: int,
        rank: tirx.Expr,
    ):
        assert stages >= 2
        self.threads, self.thread = warpgroups * warpgroup.WARPGROUP, thread
        self.shared = T.alloc_buffer((stage_bytes // 2,), kind.dtype, scope="shared")
        self.words = [T.alloc_buffer((self.threads,), "float32", scope="shared") for _ in range(2)]

    @staticmethod
    def encode(source: BulkSource) -> None:
        assert len(source.extents) == len(source.box) == len(source.strides) + 1

    @staticmethod
    def launch_cluster(size: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def shares(self, layout: FactorLayout) -> range:
        """All of them: what other blocks would copy is copied here, too."""
        return range(layout.parts)

    def run(
        self,
        tiles: Callable[[], AbstractContextManager[tirx.Expr]],
        steps: int,
        fetch: Callable[[tirx.Expr], Fetch],
        multiply: Callable[[tirx.Expr], None],
        sums: tirx.Buffer,
        finish: Callable[[tirx.Expr], None],
    ) -> None:
        stage = tirx.const(0, "int32")
        with tiles() as tile:
            warpgroup.clear(sums)
            fetch_step = fetch(tile)
            with T.serial(0, steps) as step:
                fetch_step(step, stage, stage)
                sync()
                multiply(stage)
                sync()
            finish(tile)

    def copy(
        self,
        handle: None,
        source: BulkSource,
        coordinates: Sequence[tirx.Expr],
        place: tirx.Expr,
        filled: tirx.Expr,
        to_all: bool,
    ) -> None:
        width, lines = source.box[:2]
        assert width * 2 == warpgroup.LINE and lines <= 256 and set(source.box[2:]) <= {1}
        flat = flat_view(source.buffer)
        with T.serial(0, width * lines // self.threads) as turn:
            number = T.bind(turn * self.threads + self.thread.astype("int32"))
            inner, line = number % width, number // width
            at = [each.astype("int64") for each in coordinates]
            at[0], at[1] = at[0] + inner, at[1] + line
            exists = tirx.all(*(c < e for c, e in zip(at, source.extents, strict=True)))
            position = at[0]
            for c, stride in zip(at[1:], source.strides, strict=True):
                position = position + c * stride
            value = tirx.if_then_else(exists, flat[position], tirx.const(0, flat.dtype))
            T.buffer_store(self.shared, value, [_element(place + line * width * 2 + inner * 2)])

    def multiply(
        self,
        sums: tirx.Buffer,
        left: tuple[FactorLayout, tirx.Expr],
        right: tuple[FactorLayout, tirx.Expr],
    ) -> None:
        lane, warp = self.thread % 32, self.thread % warpgroup.WARPGROUP // 32
        with T.serial(0, right[0].rows // 8) as product, T.serial(0, warpgroup.DEPTH) as k:
            for e in range(4):
                row = warp * 16 + lane // 4 + e // 2 * 8
                column = product * 8 + lane % 4 * 2 + e % 2
                factors = [self._read(*left, row, k), self._read(*right, column, k)]
                total = sums[product * 4 + e] + factors[0] * factors[1]
                T.buffer_store(sums, total, [product * 4 + e])

    def _read(
        self, layout: FactorLayout, begin: tirx.Expr, row: tirx.Expr, k: tirx.Expr
    ) -> tirx.Expr:
        """An element by the canonical layout that the descriptor of its product names."""
        descriptor = layout.descriptor
        assert descriptor >> 62 == 1 and descriptor >> 49 & 7 == 0  # 128 bytes, from their begin
        leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
        step, inner = k // 16, k % 16
        of_step = int(layout.place(0, 16))
        if layout.rows_first:
            place = row % 64 * 2 + row // 64 * leading + inner % 8 * 128 + inner // 8 * stride
        else:
            place = row % 8 * 128 + row // 8 * stride + inner * 2
        return self.shared[_element(begin + step * of_step + place)].astype("float32")

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        self.words.reverse()
        T.buffer_store(self.words[0], value, [self.thread])
        sync()
        return self.words[0][self.thread ^ mask]


def _element(byte: tirx.Expr) -> tirx.Expr:
    """Place of an element that is at a byte before the swizzle."""
    return (byte ^ ((byte // 128 % 8) * 16)) // 2


def emulate_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have products of warpgroups, emulate them, and prefer them always."""
    monkeypatch.setattr(GPUInfo, "has_tensor_cores", True)
    monkeypatch.setattr(GPUInfo, "has_warpgroup_products", True)
    monkeypatch.setattr(warpgroup_matmul, "WarpgroupCore", EmulatedWarpgroupCore)
    monkeypatch.setattr(warpgroup_tile, "single_cycles", lambda *_: float("inf"))


def check_protocol(kernel: str, cluster: int) -> None:
    """Check the waits and arrivals of both sides in the text of a kernel of clusters of a size.

    Raises
    ------
    AssertionError
        If a copy begins without its stage being free, or bytes being expected; if products begin
        before the stage is filled, or its stage is freed, or sums are used, before they are done;
        if blocks of a cluster do not wait for each other at both ends.
    """
    words = {
        "wait": r"mbarrier_wait\w*\(",
        "expect": r"mbarrier_arrive_expect_tx\w*\(",
        "copy": r"cp_async_bulk_tensor\w*\(",
        "fence": r"wgmma_fence\w*\(",
        "multiply": r"wgmma_\w+_mma_async\w*\(",
        "commit": r"wgmma_commit_group\w*\(",
        "done": r"wgmma_wait_group\w*\(",
        "free": r"(mbarrier_arrive_nocount\w*|tvm_fusion_arrive)\(",
        "settle": r"tvm_fusion_settle\(",
        "store": r"shfl_xor",
        "meet": r"tvm_fusion_cluster_wait\(",
    }
    found: list[str] = []
    for line in kernel.splitlines():
        found += [word for word, pattern in words.items() if re.search(pattern, line)]
    unique = [word for k, word in enumerate(found) if k == 0 or found[k - 1] != word]
    copies = ["wait", "expect", "copy"]
    main = ["wait", "fence", "multiply", "commit", "done", "free"]
    ends = ["meet"] * (cluster > 1)
    expected = [*ends, *copies, *main, "done", "free", "settle", "store", *ends]
    assert unique == expected, unique
