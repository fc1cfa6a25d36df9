# SPDX-License-Identifier: Apache-2.0
"""The example that serves a model over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from small_onnx import small_model

import tvm_fusion


@pytest.mark.slow
def test_requests_at_once_and_wrong_ones(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="it is not installed")
    pytest.importorskip("httpx", reason="it is not installed")
    from fastapi.testclient import TestClient

    from examples.http_server import create_app

    model = tvm_fusion.compile(small_model(), threads=1)
    model.save(tmp_path / "model.so")
    (spec,), (result,) = model.inputs, model.outputs
    client = TestClient(create_app(tmp_path / "model.so", streams=2))
    described = client.get("/").json()
    assert described["inputs"] == [
        {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}
    ]
    images = np.random.default_rng(0).random((4, *spec.shape), dtype=np.float32)

    def answer(image: np.ndarray) -> np.ndarray:
        response = client.post("/predict", json={spec.name: image.tolist()})
        assert response.status_code == 200
        return np.array(response.json()[result.name], np.float32)

    with ThreadPoolExecutor(4) as pool:
        for image, found in zip(images, pool.map(answer, images), strict=True):
            np.testing.assert_allclose(found, model(image), rtol=1e-5, atol=1e-6)
    for wrong, text in (
        ({spec.name: [1, 2]}, "shape"),
        ({"picture": [1]}, "picture"),
        ({spec.name: [[1], [2, 3]]}, "inhomogeneous"),
    ):
        refused = client.post("/predict", json=wrong)
        assert refused.status_code == 422 and text in refused.json()["detail"]
