# SPDX-License-Identifier: Apache-2.0
"""Tensor core instructions by loops and barriers, as the PTX manual defines them, for OpenCL."""

from __future__ import annotations

import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.attention import tensor_core_attention
from schedules.gpu.core.intrinsics import sync
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm import tensor_core_matmul


class EmulatedTensorCore:
    """Takes the place of :class:`schedules.gpu.core.tensor_core.TensorCore`."""

    thread: tirx.Var
    threads: int

    def __init__(self, dtype: str, shared_bytes: int):
        self.dtype = dtype
        self.shared = T.alloc_buffer((shared_bytes // 2,), dtype, scope="shared")
        floats = self.threads // 32 * 16 * 24
        self.words = [T.alloc_buffer((self.threads,), "int32", scope="shared") for _ in range(2)]
        self.floats = [T.alloc_buffer((floats,), "float32", scope="shared") for _ in range(2)]
        self.lane, self.first = self.thread % 32, self.thread // 32 * 32

    def copy(
        self, place: tirx.Expr, source: tirx.Buffer, index: tirx.Expr, exists: tirx.Expr | None
    ) -> None:
        for k in range(8):
            value = source[index + tirx.const(k, "int64")]
            if exists is not None:
                value = tirx.if_then_else(exists, value, tirx.const(0, self.dtype))
            T.buffer_store(self.shared, value, [place // 2 + k])

    def store(self, place: tirx.Expr, registers: tirx.Buffer, first: int) -> None:
        for k in range(8):
            T.buffer_store(self.shared, registers[first + k], [place // 2 + k])

    def commit(self) -> None:
        pass

    def wait(self, groups: int) -> None:
        assert groups >= 0

    def load(
        self, fragment: tirx.Buffer, first: int, place: tirx.Expr, is_transposed: bool
    ) -> None:
        words = _next(self.words)
        T.buffer_store(words, place, [self.thread])
        sync()
        for matrix in range(4):
            bits = []
            for e in range(2):
                row, column = self.lane // 4, self.lane % 4 * 2 + e
                if is_transposed:
                    row, column = column, row
                at = words[self.first + 8 * matrix + row] // 2 + column
                bits.append(T.reinterpret("uint16", self.shared[at]).astype("uint32"))
            T.buffer_store(fragment, bits[0] | (bits[1] << 16), [first + matrix])

    def multiply(
        self, sums: tirx.Buffer, first: int, left: list[tirx.Expr], right: list[tirx.Expr]
    ) -> None:
        group, member, begin = self.lane // 4, self.lane % 4, self.first // 32 * 16 * 24
        floats = _next(self.floats)
        for r, word in enumerate(left):
            for e in range(2):
                at = (group + r % 2 * 8) * 16 + member * 2 + e + r // 2 * 8
                T.buffer_store(floats, self._half(word, e), [begin + at])
        for r, word in enumerate(right):
            for e in range(2):
                at = 256 + (member * 2 + e + r * 8) * 8 + group
                T.buffer_store(floats, self._half(word, e), [begin + at])
        sync()
        with T.serial(0, 16) as k:
            for r in range(4):
                row, column = group + r // 2 * 8, member * 2 + r % 2
                factors = begin + row * 16 + k, begin + 256 + k * 8 + column
                product = floats[factors[0]] * floats[factors[1]]
                T.buffer_store(sums, sums[first + r] + product, [first + r])

    def pack(self, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        bits = [
            T.reinterpret("uint16", value.astype(self.dtype)).astype("uint32")
            for value in (low, high)
        ]
        return bits[0] | (bits[1] << 16)

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        floats = _next(self.floats)
        T.buffer_store(floats, value, [self.thread])
        sync()
        return floats[self.thread ^ mask]

    def _half(self, word: tirx.Expr, e: int) -> tirx.Expr:
        bits = ((word >> (16 * e)) & 0xFFFF).astype("uint16")
        return T.reinterpret(self.dtype, bits).astype("float32")


def _next(buffers: list[tirx.Buffer]) -> tirx.Buffer:
    """The other one of two: while some threads still read one, others may write the next."""
    buffers.reverse()
    return buffers[0]


def _emulated(part: type) -> type:
    """A thread's part of a kernel that tells the emulation which thread of how many it is."""

    class Part(part):
        def __init__(self, *arguments: object):
            EmulatedTensorCore.thread = arguments[-1]
            EmulatedTensorCore.threads = arguments[1].threads
            super().__init__(*arguments)

    return Part


def emulate_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have tensor cores, and emulate them."""
    monkeypatch.setattr(GPUInfo, "has_tensor_cores", True)
    for module in (tensor_core_matmul, tensor_core_attention):
        monkeypatch.setattr(module, "TensorCore", EmulatedTensorCore)
        monkeypatch.setattr(module, "_ThreadPart", _emulated(module._ThreadPart))
