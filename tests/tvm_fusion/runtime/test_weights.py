# SPDX-License-Identifier: Apache-2.0
"""Weights as bytes: what is written is read, aligned, and what does not fit is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.runtime.tensor_spec import TensorSpec
from tvm_fusion.runtime.weights import read_weights, stored_bytes, weight_specs, write_weights

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int64"]
SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def tensor(shape: tuple[int, ...], dtype: str, seed: int) -> tuple[np.ndarray, tvm_ffi.Tensor]:
    array = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    array = np.array(array, dtype)
    return array, tvm_ffi.from_dlpack(array)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5), st.integers(0, 1000))
def test_what_is_written_is_read(kinds: list[tuple[tuple[int, ...], str]], seed: int) -> None:
    made = [tensor(*kind, seed + index) for index, kind in enumerate(kinds)]
    file = io.BytesIO()
    write_weights(file, [weight for _, weight in made])
    specs = weight_specs([weight for _, weight in made])
    assert [(spec.shape, spec.dtype) for spec in specs] == kinds
    assert len(file.getvalue()) == stored_bytes(specs)
    file.seek(0)
    again = read_weights(file, specs)
    for (array, _), weight in zip(made, again, strict=True):
        found = np.from_dlpack(weight)
        assert found.dtype == array.dtype and weight.data_ptr() % 64 == 0
        np.testing.assert_array_equal(found, array)


def test_tensors_keep_their_memory() -> None:
    array, weight = tensor((300, 50), "float32", 3)
    file = io.BytesIO()
    write_weights(file, [weight, weight])
    file.seek(0)
    second = np.from_dlpack(read_weights(file, weight_specs([weight, weight]))[1])
    np.full(20_000, np.nan)
    np.testing.assert_array_equal(second, array)


def test_a_file_that_ends_too_early_is_an_error() -> None:
    with pytest.raises(OSError, match="it ends within the weights"):
        read_weights(io.BytesIO(bytes(63)), [TensorSpec("w", (16,), "float32")])


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (("n",), "float32", r"'w' has the shape \('n',\)"),
        ((2, -1), "float32", r"'w' has the shape \(2, -1\)"),
        ((2,), "bool", "'w' has the element type .bool."),
        ((2,), ">f4", "'w' has the element type '>f4'"),
    ],
)
def test_what_can_be_no_weight_is_refused(shape: tuple, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stored_bytes([TensorSpec("w", shape, dtype)])
