# SPDX-License-Identifier: Apache-2.0
"""Loops in place of tile registers: the arithmetic of the instructions, in their order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.conv_cases import compile_function
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.cpu.core.tile_unit import TILE_ELEMENTS, TILE_WORDS, TileLoops, TileShape

SIZE = st.integers(1, 16)


def product(rows: int, depth: int, dtype: str, strides: tuple[int, int]) -> tirx.PrimFunc:
    """Twice the product of two tiles, from zero."""
    whole, left = TileShape(rows, TILE_WORDS), TileShape(rows, depth)
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            first = T.arg("first", T.buffer((rows * strides[0],), "int32"))
            second = T.arg("second", T.buffer((depth * strides[1],), "int32"))
            output = T.arg("output", T.buffer((TILE_ELEMENTS,), "int32"))
            with T.sblock("root"):
                T.reads()
                T.writes()
                unit = TileLoops([whole, left, TileShape(depth, TILE_WORDS)], dtype)
                unit.open()
                unit.zero(0)
                unit.load(1, first, 0, strides[0])
                unit.load(2, second, 0, strides[1])
                unit.multiply(0, 1, 2)
                unit.multiply(0, 1, 2)
                unit.store(0, output, 0)
                unit.close()
    return builder.get()


def run(
    first: np.ndarray, second: np.ndarray, dtype: str, depth: int, strides: tuple[int, int]
) -> np.ndarray:
    rows = len(first)
    stored = np.zeros((rows, strides[0] * 4), "uint8"), np.zeros((depth, strides[1] * 4), "uint8")
    for place, array in zip(stored, (first, second), strict=True):
        place[:, : array.shape[1] * array.itemsize] = array.view("uint8")
    tensors = [tvm.runtime.tensor(array.view("int32").reshape(-1)) for array in stored]
    output = tvm.runtime.tensor(np.full(TILE_ELEMENTS, 99, "int32"))
    compile_function(product(rows, depth, dtype, strides))["main"](*tensors, output)
    return output.numpy()[: rows * TILE_WORDS].reshape(rows, TILE_WORDS)


@pytest.mark.slow
@given(SIZE, SIZE, st.integers(0, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=settings.default.max_examples // 4)
def test_products_of_bytes(rows, depth, gap, seed):
    random = np.random.default_rng(seed)
    first = random.integers(0, 256, (rows, 4 * depth)).astype("uint8")
    second = random.integers(-128, 128, (depth, 4 * TILE_WORDS)).astype("int8")
    first[0], second[:, :4] = 255, -128
    found = run(first, second, "uint8", depth, (depth + gap, TILE_WORDS + gap))
    channels = second.reshape(depth, TILE_WORDS, 4).transpose(0, 2, 1).reshape(-1, TILE_WORDS)
    np.testing.assert_array_equal(found, 2 * first.astype("int32") @ channels.astype("int32"))


@given(SIZE, SIZE, st.integers(0, 2**32 - 1))
@settings(max_examples=settings.default.max_examples // 4)
def test_products_of_bfloat16_are_added_in_the_order_of_the_instruction(rows, depth, seed):
    random = np.random.default_rng(seed)
    first, second = (
        random.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((rows, 2 * depth), (depth, 2 * TILE_WORDS))
    )
    found = run(first, second, "bfloat16", depth, (depth, TILE_WORDS)).view("float32")
    parts = np.zeros((2, rows, TILE_WORDS), "float32")
    for word in range(depth):
        for part in range(2):
            left = first[:, 2 * word + part].astype("float64")[:, None]
            parts[part] = parts[part] + left * second[word, part::2].astype("float64")
    once = parts[0] + parts[1]
    np.testing.assert_array_equal(found, once + once)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_stays_in_its_row_and_column(value):
    first = np.ones((3, 4), ml_dtypes.bfloat16)
    second = np.ones((2, 2 * TILE_WORDS), ml_dtypes.bfloat16)
    first[1, 2] = value
    found = run(first, second, "bfloat16", 2, (2, TILE_WORDS)).view("float32")
    np.testing.assert_array_equal(found[[0, 2]], 8)
    np.testing.assert_array_equal(found[1], value)
