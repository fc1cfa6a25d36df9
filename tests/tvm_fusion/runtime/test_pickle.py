# SPDX-License-Identifier: Apache-2.0
"""Pickled and copied models, also in other processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from small_onnx import small_model

import tvm_fusion
from tvm_fusion.runtime.compiled_model import CompiledModel

IMAGE = np.random.default_rng(3).standard_normal((1, 3, 12, 12), dtype=np.float32)


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return tvm_fusion.compile(small_model(), threads=1)


@pytest.mark.slow
def test_copies_compute_the_same(model: CompiledModel) -> None:
    first = copy.deepcopy(model)
    second = pickle.loads(pickle.dumps(first))
    del first
    gc.collect()
    np.testing.assert_array_equal(second(IMAGE), model(IMAGE))
    assert (second.inputs, second.threads, second.fused) == (model.inputs, 1, model.fused)


def test_the_file_of_a_copy_lives_as_long_as_the_copy(model: CompiledModel, tmp_path: Path) -> None:
    copied = copy.deepcopy(model)
    assert copied._folder is not None
    folder = Path(copied._folder.name)
    copied.save(tmp_path / "model.so")
    assert folder.exists()
    del copied
    gc.collect()
    assert not folder.exists()
    np.testing.assert_array_equal(tvm_fusion.load(tmp_path / "model.so")(IMAGE), model(IMAGE))


@pytest.mark.slow
def test_another_process(model: CompiledModel) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        np.testing.assert_array_equal(pool.apply(model, (IMAGE,)), model(IMAGE))
