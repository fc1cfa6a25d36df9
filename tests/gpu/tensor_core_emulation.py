# SPDX-License-Identifier: Apache-2.0
"""Tensor core instructions by loops and barriers, as the PTX manual defines them, for OpenCL."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.attention import tensor_core_attention
from schedules.gpu.conv2d import tensor_core_pair
from schedules.gpu.core.intrinsics import sync
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.tensor_core import MatrixType, TensorCore
from schedules.gpu.gemm.matmul import tensor_core_matmul


class EmulatedTensorCore:
    """Takes the place of :class:`schedules.gpu.core.tensor_core.TensorCore`."""

    thread: tirx.Var
    threads: int

    def __init__(self, kind: MatrixType, shared_bytes: int):
        self.type = kind
        size = shared_bytes // self.type.itemsize
        self.shared = T.alloc_buffer((size,), kind.dtype, scope="shared")
        self.words = [T.alloc_buffer((self.threads,), "int32", scope="shared") for _ in range(2)]
        values = self.threads // 32 * self.values
        self.factors = [T.alloc_buffer((values,), self.type.sums, scope="shared") for _ in range(2)]
        self.lane, self.first = self.thread % 32, self.thread // 32 * 32

    of_type = TensorCore.of_type

    @property
    def values(self) -> int:
        """Elements of both factors of a product."""
        return 24 * self.type.step

    def copy(
        self, place: tirx.Expr, source: tirx.Buffer, index: tirx.Expr, exists: tirx.Expr | None
    ) -> None:
        for k in range(self.type.chunk):
            value = source[index + tirx.const(k, "int64")]
            if exists is not None:
                value = tirx.if_then_else(exists, value, tirx.const(0, value.ty.dtype))
            self._put(value, [place // self.type.itemsize + k])

    def store(self, place: tirx.Expr, registers: tirx.Buffer, first: int) -> None:
        for k in range(min(self.type.chunk, int(registers.shape[0]))):
            value = registers[first + k]
            self._put(value, [place // self.type.itemsize + k])

    def _put(self, value: tirx.Expr, place: list[tirx.Expr]) -> None:
        T.buffer_store(self.shared, value.astype(self.shared.dtype), place)

    def commit(self) -> None:
        pass

    def wait(self, groups: int) -> None:
        assert groups >= 0

    def load(
        self,
        fragment: tirx.Buffer,
        first: int,
        place: tirx.Expr,
        is_transposed: bool,
        shifts: Sequence[tirx.Expr] | None = None,
    ) -> None:
        words, of_word = _next(self.words), 4 // self.type.itemsize
        T.buffer_store(words, place, [self.thread])
        sync()
        for matrix in range(4):
            word: tirx.Expr | None = None
            for e in range(of_word):
                row, column = self.lane // 4, self.lane % 4 * of_word + e
                if is_transposed:
                    assert self.type.transposes
                    row, column = column, row
                at = words[self.first + 8 * matrix + row] // self.type.itemsize + column
                value = self.shared[at]
                if shifts is not None:
                    value = value - shifts[matrix % 2]
                bits = self._bits(value) << (32 // of_word * e)
                word = bits if word is None else word | bits
            T.buffer_store(fragment, word, [first + matrix])

    def multiply(
        self, sums: tirx.Buffer, first: int, left: list[tirx.Expr], right: list[tirx.Expr]
    ) -> None:
        step, chunk, of_word = self.type.step, self.type.chunk, 4 // self.type.itemsize
        group, member, begin = self.lane // 4, self.lane % 4, self.first // 32 * self.values
        factors = _next(self.factors)
        for r, word in enumerate(left):
            for e in range(of_word):
                at = (group + r % 2 * 8) * step + member * of_word + e + r // 2 * chunk
                T.buffer_store(factors, self._element(word, e, self.type.dtype), [begin + at])
        for r, word in enumerate(right):
            for e in range(of_word):
                at = 16 * step + (member * of_word + e + r * chunk) * 8 + group
                T.buffer_store(factors, self._element(word, e, self.type.right), [begin + at])
        sync()
        with T.serial(0, step) as k:
            for r in range(4):
                row, column = group + r // 2 * 8, member * 2 + r % 2
                both = begin + row * step + k, begin + 16 * step + k * 8 + column
                product = factors[both[0]] * factors[both[1]]
                total = sums[first + r] + product.astype(sums.dtype)
                T.buffer_store(sums, total, [first + r])

    def pack(self, low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        bits = []
        for value in (low, high):
            if self.type.name == "bf16":  # It is rounded to the nearest, ties to even.
                word = T.reinterpret("uint32", value)
                bits.append((word + 0x7FFF + ((word >> 16) & 1)) >> 16)
            else:
                word = T.reinterpret("uint16", value.astype(self.type.dtype))
                bits.append(word.astype("uint32"))
        return bits[0] | (bits[1] << 16)

    def exp2(self, value: tirx.Expr) -> tirx.Expr:
        return tirx.exp2(value)

    def exchange(self, value: tirx.Expr, mask: int) -> tirx.Expr:
        factors = _next(self.factors)
        T.buffer_store(factors, value, [self.thread])
        sync()
        return factors[self.thread ^ mask]

    def _bits(self, value: tirx.Expr) -> tirx.Expr:
        if self.type.name == "tf32":  # It is rounded to the nearest, ties away from zero.
            return ((T.reinterpret("uint32", value) + 0x1000) >> 13) << 13
        if self.type.name == "bf16":  # TVM reinterprets none on OpenCL
            return T.reinterpret("uint32", value.astype("float32")) >> 16
        return T.reinterpret(f"uint{8 * self.type.itemsize}", value).astype("uint32")

    def _element(self, word: tirx.Expr, e: int, dtype: str) -> tirx.Expr:
        size = 8 * self.type.itemsize
        bits = word if size == 32 else ((word >> (size * e)) & ((1 << size) - 1))
        if self.type.name == "bf16":
            return T.reinterpret("float32", bits << 16)
        value = T.reinterpret(dtype, bits.astype(f"uint{size}"))
        return value.astype(self.type.sums)


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
    for module, name in (
        (tensor_core_matmul, "ThreadPart"),
        (tensor_core_attention, "_ThreadPart"),
        (tensor_core_pair, "_ThreadPart"),
    ):
        monkeypatch.setattr(module, "TensorCore", EmulatedTensorCore)
        monkeypatch.setattr(module, name, _emulated(getattr(module, name)))
