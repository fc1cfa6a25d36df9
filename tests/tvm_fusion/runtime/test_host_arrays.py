# SPDX-License-Identifier: Apache-2.0
"""Arrays on the host: where they lie, what random ones hold, and what importing them loads."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.runtime.host_arrays import ALIGNMENT, TensorSpec, aligned_empty, random_inputs

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(SHAPES, st.sampled_from(["float32", "float16", "int64", "bool"]))
def test_empty_arrays_are_aligned_and_contiguous(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned_empty(shape, dtype)
    assert array.shape == shape and array.dtype == dtype
    assert array.flags.c_contiguous and array.flags.writeable
    assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0


@given(st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"]), st.integers(0))
def test_random_inputs_have_the_asked_shape_and_type(dtype: str, seed: int) -> None:
    specs = [TensorSpec("a", (2, 3), dtype), TensorSpec("b", (), dtype)]
    first, second = random_inputs(specs, seed), random_inputs(specs, seed, aligned=True)
    for spec in specs:
        assert first[spec.name].shape == spec.shape and first[spec.name].dtype == dtype
        assert np.array_equal(first[spec.name], second[spec.name])
        assert second[spec.name].ctypes.data % ALIGNMENT == 0
        assert np.abs(first[spec.name].astype(float)).max() <= 1


def test_random_inputs_differ_by_seed_and_distribution() -> None:
    specs = [TensorSpec("a", (1000,), "float32")]
    first, second = random_inputs(specs, 0)["a"], random_inputs(specs, [0, 1])["a"]
    assert not np.array_equal(first, second)
    assert first.min() < -0.9 and first.max() < 1
    assert random_inputs(specs, 0, normal=True)["a"].max() > 2


def test_a_peer_loads_nothing_of_tvm() -> None:
    code = "import sys, tvm_fusion.bench.engines; print([m for m in sys.modules if 'tvm' in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "tvm_fusion.bench.engines" in loaded.stdout
    assert "'tvm'" not in loaded.stdout and "'tvm_ffi'" not in loaded.stdout
