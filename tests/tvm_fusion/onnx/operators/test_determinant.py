# SPDX-License-Identifier: Apache-2.0
"""Determinants are those of numpy in float64, whatever rows have to be exchanged."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tvm_fusion
from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx


def det_model(shape: tuple[int | str, ...], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="op")],
        "determinants",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 22)])


def check(model: onnx.ModelProto, x: np.ndarray, tolerance: float = 1e-4) -> None:
    found = tvm_fusion.compile(model, threads=2)(x)
    wanted = np.linalg.det(x.astype(np.float64))
    # An entry's error weighs as much as the product of the rows' norms.
    scale = np.prod(np.linalg.norm(x.astype(np.float64), axis=-1), axis=-1)
    assert (found.shape, found.dtype) == (wanted.shape, x.dtype)
    assert (np.abs(found - wanted) <= tolerance * scale).all()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 3, 3), (2, 3, 7, 7), (33, 33)])
def test_determinants(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    check(det_model(shape), x, 1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "tolerance"), [("DOUBLE", 1e-14), ("FLOAT16", 1e-3)])
def test_other_types(kind: str, tolerance: float) -> None:
    number = getattr(TensorProto, kind)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    x = np.random.default_rng(3).standard_normal((4, 6, 6)).astype(dtype)
    check(det_model((4, 6, 6), number), x, tolerance)


def test_pivots_of_zero_and_matrices_without_an_inverse() -> None:
    shifted = np.roll(np.eye(4), 1, axis=0)  # an odd permutation, only zeros on the diagonal
    twice = np.ones((4, 4))
    tiny = np.diag([1e-20, 1, 1, 1]) + np.roll(np.eye(4), 1, axis=1)
    x = np.stack([shifted, twice, np.zeros((4, 4)), tiny]).astype(np.float32)
    found = tvm_fusion.compile(det_model((4, 4, 4)), threads=1)(x)
    np.testing.assert_allclose(found, np.linalg.det(x.astype(np.float64)), atol=1e-6)
    x[0, 2, 1] = np.nan
    assert np.isnan(tvm_fusion.compile(det_model((4, 4, 4)), threads=1)(x)[0])


def test_open_batch() -> None:
    model = tvm_fusion.compile(det_model(("n", 2, 3, 3)), shapes={"n": "n"}, threads=1)
    x = np.random.default_rng(4).standard_normal((5, 2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(model(x), np.linalg.det(x.astype(np.float64)), 1e-4, 1e-5)


def test_other_matrices_are_refused() -> None:
    with pytest.raises(InvalidModelError, match="Det, node name: op.* between 3 and 2"):
        import_onnx(det_model((2, 3)))
    with pytest.raises(UnsupportedOperatorError, match="node 'op': Det.*only known at run time"):
        import_onnx(det_model((2, "n", "n")), {"n": "n"})
    with pytest.raises(UnsupportedOperatorError, match="Det.*its matrices are empty"):
        import_onnx(det_model((0, 0)))
