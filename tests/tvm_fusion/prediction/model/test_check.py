# SPDX-License-Identifier: Apache-2.0
"""Predicted beside measured."""

from dataclasses import replace

import pytest
from small_onnx import small_model

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.model.check import (
    check_model,
    check_table,
    geometric_error,
    mean_error,
    pair,
)


@pytest.mark.slow
def test_a_model_runs_the_kernels_that_were_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tvm_fusion.bench.profiler.time.sleep", lambda seconds: None)
    checked = check_model(small_model(), threads=2, runs=3, rounds=2)
    assert len(checked.measured) == len(checked.prediction.kernels) > 0
    data = checked.to_json()
    assert data["error"] == pytest.approx(checked.prediction.seconds / checked.seconds - 1)
    assert 0 <= data["inside_interval"] <= 1
    assert check_table(checked, "small").row_count == len(checked.measured)


def test_other_kernels_than_predicted_are_an_error(tmp_path, monkeypatch):
    from tvm_fusion.bench.profiler import Profile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from tvm_fusion import predict

    found = predict(small_model(), threads=2)
    empty = Profile((), 1e-3, None, {})
    with pytest.raises(PredictionError, match=f"predicted {len(found.kernels)} kernels, and 0 ran"):
        pair(found, empty)
    renamed = replace(found, kernels=())
    assert pair(renamed, empty).error == pytest.approx(found.seconds / 1e-3 - 1)


def test_means_of_errors():
    assert mean_error([0.1, -0.3]) == pytest.approx(0.2)
    assert geometric_error([0.1, -0.1]) == pytest.approx(0.1004)
    assert geometric_error([0.0]) == pytest.approx(4e-4)
