# SPDX-License-Identifier: Apache-2.0
"""Copies past the caches: their bytes, and their instructions alone and in kernels of exchanges."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import IRModule, relax
from tvm.target import Target

from schedules.distribute.rows.exchange_kernel import exchange_kernel
from schedules.distribute.rows.exchange_table import table_width
from schedules.distribute.streamed_copy import UNIT, streamed_copy, streamed_copy_kernel

X86_64 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"})
AARCH64 = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"})


@given(st.integers(0, 10), st.integers(0, 5), st.integers(0, 3), st.integers(0, 17))
def test_bytes(units: int, count: int, place: int, gap: int) -> None:
    size = units * UNIT
    source = np.random.default_rng().integers(0, 256, (count, size + gap), np.uint8)
    memory = np.full(2048, 7, np.uint8)
    begin = -int(memory.ctypes.data) % UNIT + place * UNIT
    ends = int(memory.ctypes.data) + begin, int(source.ctypes.data)
    streamed_copy()(*ends, size, count, size + gap)
    expected = np.full(2048, 7, np.uint8)
    expected[begin : begin + count * size] = source[:, :size].ravel()
    np.testing.assert_array_equal(memory, expected)


def test_stores_are_streamed_before_the_fence() -> None:
    module = tvm.compile(IRModule({"main": streamed_copy_kernel()}), X86_64)
    text = module.mod.inspect_source("asm")
    assert 0 < text.index("movntps") < text.index("sfence")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("target", "streams"), [(X86_64, True), (AARCH64, False)])
def test_kernels_stream_what_they_send(target: Target, streams: bool) -> None:
    tensor, byte = relax.TensorType([1, 16, 8, 8, 16], "float32"), relax.TensorType([1], "uint8")
    kernel = exchange_kernel(0, [tensor], byte, (1, table_width(2)), is_x86=streams)
    module = IRModule({"main": kernel.with_attr("global_symbol", "main")})
    text = tvm.compile(module, target).mod.inspect_source("asm")
    assert (text.count("movntps"), text.count("sfence")) == ((1, 1) if streams else (0, 0))
