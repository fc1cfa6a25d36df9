# SPDX-License-Identifier: Apache-2.0
"""Weights as bytes: what is written is read, aligned, and what does not fit is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.runtime.host_arrays import TensorSpec
from tvm_fusion.runtime.weights import (
    map_weights,
    places_from,
    stored_bytes,
    weight_specs,
    write_weights,
)

DTYPES = ["float16", "float32", "float64", "int8", "uint16", "int64"]
SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def tensor(shape: tuple[int, ...], dtype: str, seed: int) -> tuple[np.ndarray, tvm_ffi.Tensor]:
    array = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    array = np.array(array, dtype)
    return array, tvm_ffi.from_dlpack(array)


def stored(path: Path, weights: list[tvm_ffi.Tensor], before: int = 0) -> tuple[int, ...]:
    """Write weights behind some bytes, and return where they begin."""
    with path.open("wb") as file:
        file.write(bytes(before))
        return write_weights(file, weights, {})


def mapped(path: Path, weights: list[tvm_ffi.Tensor], places: tuple) -> list[tvm_ffi.Tensor]:
    with path.open("rb") as file:
        return map_weights(file, weight_specs(weights), places)


@given(
    st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5),
    st.integers(0, 1000),
    st.sampled_from([0, 1, 60, 64, 4096]),
)
def test_what_is_written_is_read(
    kinds: list[tuple[tuple[int, ...], str]], seed: int, before: int
) -> None:
    """Wherever it begins in the file, as in early formats, kernels see it aligned."""
    made = [tensor(*kind, seed + index) for index, kind in enumerate(kinds)]
    weights = [weight for _, weight in made]
    specs = weight_specs(weights)
    assert [(spec.shape, spec.dtype) for spec in specs] == kinds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        places = stored(path, [tensor((1,), "int8", 0)[1], *weights], before)[1:]
        assert path.stat().st_size <= before + 64 + stored_bytes(specs)
        again = mapped(path, weights, places)
        assert (path.stat().st_size < before + 64 + stored_bytes(specs)) == (
            places != places_from(before + 64, specs)
        )
    for (array, _), weight in zip(made, again, strict=True):
        found = np.from_dlpack(weight)
        assert found.dtype == array.dtype and weight.data_ptr() % 64 == 0
        np.testing.assert_array_equal(found, array)


def test_equal_tensors_lie_in_a_file_once(tmp_path: Path) -> None:
    weight, other = tensor((300, 50), "float32", 3)[1], tensor((300, 50), "float32", 4)[1]
    same_bytes = tvm_ffi.from_dlpack(np.from_dlpack(weight).reshape(50, 300))
    first, second, copy, reshaped = stored(tmp_path / "w", [weight, other, weight, same_bytes])
    assert first == copy and len({first, second, reshaped}) == 3


def test_all_that_map_a_file_share_its_pages(tmp_path: Path) -> None:
    """They outlive the file and its name; another file has pages of its own."""
    array, weight = tensor((300, 50), "float32", 3)
    path = tmp_path / "w"
    places = stored(path, [weight])
    one, two = mapped(path, [weight], places)[0], mapped(path, [weight], places)[0]
    assert one.data_ptr() == two.data_ptr()
    pages = Path("/proc/self/maps").read_text().splitlines()
    [line] = [line for line in pages if line.endswith(str(path))]
    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
    assert begin <= one.data_ptr() < end
    path.unlink()
    changed, other = tensor((300, 50), "float32", 4)
    three = mapped(path, [other], stored(path, [other]))[0]
    np.full(20_000, np.nan)
    np.testing.assert_array_equal(np.from_dlpack(two), array)
    np.testing.assert_array_equal(np.from_dlpack(three), changed)


def test_a_write_does_not_reach_the_file(tmp_path: Path) -> None:
    array, weight = tensor((300, 50), "float32", 3)
    places = stored(tmp_path / "w", [weight])
    before = (tmp_path / "w").read_bytes()
    np.from_dlpack(mapped(tmp_path / "w", [weight], places)[0])[...] = 7
    assert (tmp_path / "w").read_bytes() == before


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    weight = tensor((16,), "float32", 1)[1]
    (tmp_path / "w").write_bytes(bytes(63))
    with pytest.raises(OSError, match="it ends within the weights"):
        mapped(tmp_path / "w", [weight], (0,))


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
