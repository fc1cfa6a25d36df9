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
from math import prod

import pytest
from tensor_core_emulation import EmulatedTensorCore
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.attention import warpgroup_attention
from schedules.gpu.core import warpgroup
from schedules.gpu.core.intrinsics import sync
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.tensor_core import MatrixType
from schedules.gpu.core.vector_loads import flat_view
from schedules.gpu.core.warpgroup import BulkSource, ChunkLayout, FactorLayout, Fetch, Layout
from schedules.gpu.gemm.matmul import warpgroup_conv2d, warpgroup_matmul, warpgroup_tile
from schedules.tir.extents import unravel


class EmulatedWarpgroupCore:
    """Takes the place of :class:`schedules.gpu.core.warpgroup.WarpgroupCore`."""

    shared_bytes = staticmethod(warpgroup.WarpgroupCore.shared_bytes)

    def __init__(
        self,
        kind: MatrixType,
        stages: int,
        stage_bytes: int,
        warpgroups: int,
        thread: tirx.Expr,
        cluster: int,
        rank: tirx.Expr,
        kept_bytes: int = 0,
        moves_registers: bool = False,
    ):
        assert stages >= 2
        self.type, self.kept = kind, tirx.const(stage_bytes, "uint32")
        self.threads, self.thread = warpgroups * warpgroup.WARPGROUP, thread
        size = (stage_bytes + kept_bytes) // kind.itemsize
        self.shared = T.alloc_buffer((size,), kind.dtype, scope="shared")
        self.words = [T.alloc_buffer((self.threads,), kind.sums, scope="shared") for _ in range(2)]

    @staticmethod
    def producers(moves_registers: bool = False) -> int:
        return 0

    @staticmethod
    def encode(source: BulkSource) -> None:
        assert len(source.extents) == len(source.box) == len(source.strides) + 1

    @staticmethod
    def launch_cluster(size: int) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def shares(self, layout: Layout) -> range:
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

    def run_chained(
        self,
        steps: tirx.Expr,
        keep: Callable[[tirx.Expr, tirx.Expr], None],
        fetch: Fetch,
        multiply: tuple[Callable[[tirx.Expr], None], Callable[[tirx.Expr], None]],
        results: tuple[tirx.Buffer, tirx.Buffer],
        left: tirx.Buffer,
        between: Callable[[tirx.Expr, Callable[[], None]], None],
        finish: Callable[[], None],
    ) -> None:
        stage = tirx.const(0, "uint32")
        keep(self.kept, stage)
        with T.serial(tirx.const(0, "int64"), steps) as step:
            fetch(step, stage, stage)
            sync()
            multiply[0](stage)
            between(step, lambda: None)
            multiply[1](stage)
            sync()
        finish()

    def copy(
        self,
        handle: None,
        source: BulkSource,
        coordinates: Sequence[tirx.Expr],
        place: tirx.Expr,
        filled: tirx.Expr,
        to_all: bool,
    ) -> None:
        rank, steps = len(source.box), source.steps or (1,) * len(source.box)
        assert rank <= 5 and all(
            n * s <= 256 and s <= 8 for n, s in zip(source.box, steps, strict=True)
        )
        itemsize = self.type.itemsize
        assert steps[0] == 1 and source.words in (1, 8 // itemsize)
        counts = [source.box[0] * source.words, *source.box[1:]]
        if source.is_swizzled:
            assert counts[0] * itemsize == warpgroup.LINE and set(counts[2:]) <= {1}
        assert counts[0] * itemsize % 16 == 0
        flat, total = flat_view(source.buffer), prod(counts)
        with T.serial(0, -(-total // self.threads)) as turn:
            number = T.bind(turn * self.threads + self.thread.astype("int32"))
            with T.If(number < total), T.Then():
                at = [each.astype("int64") for each in coordinates]
                at[0] = at[0] * source.words
                for k, inner in enumerate(reversed(unravel(number, counts[::-1]))):
                    at[k] = T.bind(at[k] + inner * steps[k])
                extents = [source.extents[0] * source.words, *source.extents[1:]]
                exists = [tirx.all(c >= 0, c < e) for c, e in zip(at, extents, strict=True)]
                position = at[0]
                for c, stride in zip(at[1:], source.strides, strict=True):
                    position = position + c * stride
                zero = tirx.const(0, flat.dtype)
                value = tirx.if_then_else(tirx.all(*exists), flat[position], zero)
                where = self._element(place + number * itemsize, source.is_swizzled)
                T.buffer_store(self.shared, value.astype(self.shared.dtype), [where])

    def multiply(
        self,
        sums: tirx.Buffer,
        left: tuple[Layout, tirx.Expr] | Sequence[tirx.Expr],
        right: tuple[Layout, tirx.Expr],
        sets: bool = False,
    ) -> None:
        lane, warp = self.thread % 32, self.thread % warpgroup.WARPGROUP // 32
        in_shared = isinstance(left[0], FactorLayout | ChunkLayout)
        if sets:
            warpgroup.clear(sums)
        if not in_shared:
            words = T.alloc_buffer((self.threads * 16,), "uint32", scope="shared")
            for r, word in enumerate(left):
                T.buffer_store(words, word, [self.thread * 16 + r])
            sync()
        depth, of_sums = warpgroup.LINE // self.type.itemsize, self.type.sums
        with T.serial(0, right[0].rows // 8) as product, T.serial(0, depth) as k:
            for e in range(4):
                row = lane // 4 + e // 2 * 8
                column = product * 8 + lane % 4 * 2 + e % 2
                if in_shared:
                    factor = self._read(*left, warp * 16 + row, k, half=0x1000).astype(of_sums)
                else:
                    factor = self._of_registers(words, row, k)
                other = self._read(*right, column, k).astype(self.type.right).astype(of_sums)
                total = sums[product * 4 + e] + (factor * other).astype(sums.dtype)
                T.buffer_store(sums, total, [product * 4 + e])
        if not in_shared:
            sync()

    def _of_registers(self, words: tirx.Buffer, row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """An element of the warp's rows by the layout of a left factor in registers."""
        thread = self.thread // 32 * 32 + row % 8 * 4 + k % 8 // 2
        word = words[thread * 16 + k // 16 * 4 + k % 16 // 8 * 2 + row // 8]
        bits = (word >> (k % 2 * 16).astype("uint32")) & tirx.const(0xFFFF, "uint32")
        if self.type.name == "bf16":
            return T.reinterpret("float32", bits << tirx.const(16, "uint32"))
        return T.reinterpret(self.type.dtype, bits.astype("uint16")).astype("float32")

    def _read(
        self, layout: Layout, begin: tirx.Expr, row: tirx.Expr, k: tirx.Expr, half: int = 0
    ) -> tirx.Expr:
        """An element by the canonical layout that the descriptor of its product names.

        Bits that TF32 lacks are dropped, after ``half`` of their last one was added.
        """
        descriptor = layout.descriptor
        swizzle = descriptor >> 62
        assert swizzle in (0, 1) and descriptor >> 49 & 7 == 0  # 128 bytes, from their begin
        assert self.type.transposes or not layout.rows_first
        leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
        size, chunk = self.type.itemsize, self.type.chunk
        step, inner = k // self.type.step, k % self.type.step
        of_step = int(layout.place(0, 1))
        if not swizzle:
            lane, other = inner % chunk, row % 8
            if layout.rows_first:
                lane, other = row % 8, inner % 8
            place = lane * size + other * 16 + row // 8 * stride + inner // chunk * leading
        elif layout.rows_first:
            place = row % 64 * 2 + row // 64 * leading + inner % 8 * 128 + inner // 8 * stride
        else:
            place = row % 8 * 128 + row // 8 * stride + inner * size
        value = self.shared[self._element(begin + step * of_step + place, swizzle == 1)]
        if self.type.is_rounded:
            bits = (T.reinterpret("uint32", value) + half) >> 13 << 13
            value = T.reinterpret("float32", bits)
        return value

    pack, exp2 = EmulatedTensorCore.pack, EmulatedTensorCore.exp2

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        self.words.reverse()
        T.buffer_store(self.words[0], value, [self.thread])
        sync()
        return self.words[0][self.thread ^ mask]

    def _element(self, byte: tirx.Expr, is_swizzled: bool) -> tirx.Expr:
        """Place of an element that is at a byte, before a swizzle."""
        byte = byte ^ ((byte // 128 % 8) * 16) if is_swizzled else byte
        return byte // self.type.itemsize


def emulate_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have products of warpgroups, emulate them, and prefer them always."""
    monkeypatch.setattr(GPUInfo, "has_tensor_cores", True)
    monkeypatch.setattr(GPUInfo, "has_warpgroup_products", True)
    for module in (warpgroup_matmul, warpgroup_conv2d, warpgroup_attention):
        monkeypatch.setattr(module, "WarpgroupCore", EmulatedWarpgroupCore)
    for module in (warpgroup_tile, warpgroup_conv2d, warpgroup_attention):
        monkeypatch.setattr(module, "single_cycles", lambda *_: float("inf"))


def check_protocol(kernel: str, cluster: int) -> None:
    """Check the waits and arrivals of both sides in the text of a kernel of clusters of a size.

    Raises
    ------
    AssertionError
        If a copy begins without its stage being free, or bytes being expected; if products begin
        before the stage is filled, or its stage is freed, or sums are used, before they are done;
        if blocks of a cluster do not wait for each other at both ends.
    """
    copies = ["wait", "expect", "copy"]
    main = ["wait", "fence", "multiply", "commit", "done", "free"]
    ends = ["meet"] * (cluster > 1)
    expected = [*ends, *copies, *main, "done", "free", "settle", "store", *ends]
    assert _protocol(kernel) == expected


def check_chained_protocol(kernel: str) -> None:
    """Check the same of products of products.

    Raises
    ------
    AssertionError
        As :func:`check_protocol`, and if the second products begin while registers of theirs may
        still be written, or these are written before the second products are done.
    """
    multiply = ["fence", "multiply", "commit"]
    copies = ["expect", "copy", "wait", "expect", "copy"]
    first = ["wait", *multiply, "done", "settle", "store", "settle"]
    loop = ["wait", *multiply, *multiply, "done", "settle", "store"]
    loop += ["done", "settle", "free", "settle"]
    assert _protocol(kernel) == [*copies, *first, *loop, *multiply, "done", "settle", "store"]


def _protocol(kernel: str) -> list[str]:
    """Protocol of both sides in the text of a kernel, repetitions as one."""
    words = {
        "wait": r"mbarrier_wait\w*\(",
        "expect": r"mbarrier_arrive_expect_tx\w*\(",
        "copy": r"cp_async_bulk_tensor\w*\(",
        "fence": r"wgmma_fence\w*\(",
        "multiply": r"wgmma_\w+_mma_async\w*\(",
        "commit": r"wgmma_commit_group\w*\(",
        "done": r"wgmma_wait_group\w*\(",
        "free": r"(mbarrier_arrive_nocount\w*|tvm_fusion_arrive)\(",
        "settle": r"tvm_fusion_settle_\w+\(",
        "store": r"shfl_xor",
        "meet": r"tvm_fusion_cluster_wait\(",
    }
    found: list[str] = []
    for line in kernel.splitlines():
        found += [word for word, pattern in words.items() if re.search(pattern, line)]
    return [word for k, word in enumerate(found) if k == 0 or found[k - 1] != word]
