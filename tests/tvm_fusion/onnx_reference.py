# SPDX-License-Identifier: Apache-2.0
"""The numbers of ONNX Runtime, and how far others are from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime


def run_onnx(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in ONNX Runtime, on the CPU with two threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(feed))


def random_feed(model: onnx.ModelProto, seed: int, **sizes: int) -> dict[str, np.ndarray]:
    """Random arrays for the inputs of a model; ``sizes`` gives those of named dimensions."""
    generator = np.random.default_rng([seed, 20])
    weights = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: generator.standard_normal(
            [sizes[d.dim_param] if d.dim_param else d.dim_value for d in dims], dtype=np.float32
        )
        for value in model.graph.input
        if value.name not in weights
        for dims in [value.type.tensor_type.shape.dim]
    }


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number that is expected."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def assert_same(
    actual: np.ndarray | Sequence[np.ndarray], expected: Sequence[np.ndarray], limit: float = 1e-4
) -> None:
    """Check every output against ONNX Runtime's."""
    outputs = [actual] if isinstance(actual, np.ndarray) else list(actual)
    assert len(outputs) == len(expected)
    for output, reference in zip(outputs, expected, strict=True):
        assert np.isfinite(reference).all()
        assert np.abs(reference).max() > 0
        assert relative_error(output, reference) <= limit
