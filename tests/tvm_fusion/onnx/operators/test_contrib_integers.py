# SPDX-License-Identifier: Apache-2.0
"""Quantised operators of ``com.microsoft`` have the numbers of ONNX Runtime, their author."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import normal

import tvm_fusion
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

DOMAIN = "com.microsoft"


def bits(*shape: int, dtype: str = "uint8", seed: int = 1) -> np.ndarray:
    limits = np.iinfo(dtype)
    generator = np.random.default_rng(seed)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def weights(*shape: int) -> np.ndarray:
    """Weights of 7 bits: those of 8 overflow ONNX Runtime's sums of two products without VNNI."""
    return bits(*shape, dtype="int8", seed=2) // 2


def number(value: float, dtype: str = "float32") -> np.ndarray:
    return np.array(value, dtype)


def model_of(
    op_type: str,
    given: list[np.ndarray | None],
    feeds: int = 1,
    result: int = TensorProto.UINT8,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One node; the first ``feeds`` arrays are fed, a None is left out, others are constants."""
    names = [f"t{i}" if value is not None else "" for i, value in enumerate(given)]
    arrays = {name: value for name, value in zip(names, given, strict=True) if value is not None}
    fed = {name: arrays.pop(name) for name in list(arrays)[:feeds]}
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], "op", domain=DOMAIN, **attributes)],
        "integers",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in fed.items()
        ],
        [helper.make_tensor_value_info("y", result, None)],
        [numpy_helper.from_array(value, name) for name, value in arrays.items()],
    )
    opsets = [helper.make_operatorsetid("", 17), helper.make_operatorsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), fed


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], most: float = 0) -> None:
    """Compare with ONNX Runtime; whole numbers may differ by ``most``."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (wanted,) = session.run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if found.dtype == np.float32:
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    else:
        assert np.abs(found.astype("int32") - wanted.astype("int32")).max() <= most


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_sums_and_products(op_type: str) -> None:
    left = [bits(2, 3, 5), number(0.02), number(117, "uint8")]
    right = [bits(3, 5, seed=2), number(0.03), number(9, "uint8")]
    model, feeds = model_of(op_type, [*left, *right, number(0.05), number(100, "uint8")])
    check(model, feeds, 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("QLinearSigmoid", {}),
        ("QLinearLeakyRelu", {"alpha": 0.2}),
        ("QLinearSoftmax", {"axis": -1, "opset": 13}),
        ("QLinearAveragePool", {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
        ("QLinearGlobalAveragePool", {}),
    ],
)
def test_activations_and_pools(op_type: str, attributes: dict[str, Any]) -> None:
    x = [bits(1, 4, 7, 6, dtype="int8"), number(0.03), number(-5, "int8")]
    given = [*x, number(0.008), number(-100, "int8")]
    check(*model_of(op_type, given, result=TensorProto.INT8, **attributes), 1)


def test_tensors_of_several_scales_in_one() -> None:
    parts = [bits(2, 3), number(0.1), number(3, "uint8"), bits(2, 4, seed=2), number(0.2)]
    given = [number(0.15), number(7, "uint8"), *parts, number(8, "uint8")]
    names = [f"t{i}" for i in range(len(given))]
    model, _ = model_of("QLinearConcat", given, 0, axis=1)
    feeds = {names[2]: given[2]}
    tensor = next(t for t in model.graph.initializer if t.name == names[2])
    model.graph.initializer.remove(tensor)
    info = helper.make_tensor_value_info(names[2], TensorProto.UINT8, given[2].shape)
    model.graph.input.append(info)
    check(model, feeds, 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("each_column", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
def test_dense_layers(is_float: bool, each_column: bool) -> None:
    left = [bits(3, 6), number(0.02), number(100, "uint8")]
    right = [weights(5, 6), number(0.01), number(0, "int8")]
    if each_column:
        right[1:] = [np.linspace(0.01, 0.02, 5, dtype="float32"), np.zeros(5, "int8")]
    bias = bits(5, dtype="int16").astype("int32")
    ends = [None, None] if is_float else [number(0.1), number(128, "uint8")]
    result = TensorProto.FLOAT if is_float else TensorProto.UINT8
    model, feeds = model_of("QGemm", [*left, *right, bias, *ends], result=result, transB=1)
    if is_float:
        del model.graph.node[0].input[7:]
    check(model, feeds, 1)


@pytest.mark.slow
def test_products_that_are_floats() -> None:
    scales, bias = normal(4, seed=3) ** 2, normal(4, seed=4)
    right = [weights(6, 4), scales, np.zeros(4, "int8"), bias]
    kind = TensorProto.FLOAT
    check(*model_of("DynamicQuantizeMatMul", [normal(3, 6), *right], result=kind))
    given = [bits(3, 6), right[0], number(0.1), scales, number(7, "uint8"), right[2], bias]
    check(*model_of("MatMulIntegerToFloat", given, result=kind))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("left", ["int16", "uint16"])
@pytest.mark.parametrize("right", ["int16", "uint16"])
def test_products_of_16_bits(left: str, right: str) -> None:
    """ONNX Runtime has no kernel but for two factors with signs; sums wrap around."""
    a, b = bits(2, 3, 5, dtype=left), bits(5, 4, dtype=right, seed=2)
    dtype = "uint32" if left == right == "uint16" else "int32"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model, feeds = model_of("MatMulInteger16", [a, b], result=kind)
    if dtype == "int32" and left == right:
        check(model, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, (a.astype("int64") @ b.astype("int64")).astype(dtype))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("width", "rows"), [(4, 64), (4, 80), (8, 64)])
def test_products_with_weights_of_few_bits(width: int, rows: int, has_zeros: bool) -> None:
    columns, size = 6, 32
    blocks = -(-rows // size)
    scales = normal(columns * blocks, seed=3) ** 2
    zeros = bits(columns * -(-blocks * width // 8), seed=5) if has_zeros else None
    given = [normal(3, rows), bits(columns, blocks, size * width // 8), scales, zeros]
    attributes = {"K": rows, "N": columns, "bits": width, "block_size": size}
    given = given if has_zeros else given[:3]
    check(*model_of("MatMulNBits", given, result=TensorProto.FLOAT, **attributes))


def test_names_of_onnx() -> None:
    """A tensor quantised and back, row by row, by the operators of this domain."""
    scales, zeros = np.array([0.1, 0.2], np.float32), np.array([3, -4], np.int8)
    model, feeds = model_of(
        "QuantizeLinear", [normal(2, 9), scales, zeros], result=TensorProto.INT8, axis=0
    )
    check(model, feeds, 1)
    given = [bits(2, 9, dtype="int8"), scales, zeros]
    check(*model_of("DequantizeLinear", given, result=TensorProto.FLOAT, axis=0))


@pytest.mark.parametrize(
    ("op_type", "attributes", "reason"),
    [
        ("QLinearGlobalAveragePool", {"channels_last": 1}, "its channels come last"),
        ("QLinearSoftmax", {"opset": 11}, "it is the Softmax of opset 12"),
    ],
)
def test_refusals(op_type: str, attributes: dict[str, Any], reason: str) -> None:
    given = [bits(1, 2, 3, 4), number(0.1), None, number(0.1), number(0, "uint8")]
    model, _ = model_of(op_type, given, **attributes)
    with pytest.raises(UnsupportedOperatorError, match=f"{op_type} .*{reason}"):
        import_onnx(model)
