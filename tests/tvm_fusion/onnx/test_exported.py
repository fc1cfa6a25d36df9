# SPDX-License-Identifier: Apache-2.0
"""Models that jax2onnx and tf2onnx wrote, from JAX, TensorFlow and Keras, run as in ONNX Runtime.

``exported/export.py`` made them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_reference import run_onnx

import tvm_fusion
from tvm_fusion.runtime.host_arrays import random_inputs

FOLDER = Path(__file__).parent / "exported"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax2onnx", "tf2onnx", "keras"])
def test_exported_model(name: str) -> None:
    path = FOLDER / f"{name}.onnx"
    graph = onnx.load(path).graph
    dims = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    shapes = dict.fromkeys(filter(None, dims), 3)
    compiled = tvm_fusion.compile(path, shapes=shapes, threads=1)
    feeds = random_inputs(compiled.inputs, 0, normal=True)
    found = compiled(feeds)
    (wanted,) = run_onnx(onnx.load(path), feeds)
    assert found.shape == wanted.shape and wanted.std() > 1e-2
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
