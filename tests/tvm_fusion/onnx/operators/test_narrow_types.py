# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits and fewer are those of ``ml_dtypes``."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tvm_fusion
from tests.selection import in_turns
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

FLOATS = (
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    *("FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2"),
)
INTEGERS = ("INT4", "UINT4", "INT2", "UINT2")


def kind_of(name: str) -> int:
    return getattr(TensorProto, name)


def model_of(
    nodes: list[onnx.NodeProto],
    x: np.ndarray,
    result: int = TensorProto.FLOAT,
    constants: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_tensor_value_info("y", result, None)],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_operatorsetid("", 28)])


def there_and_back(kind: int, x: np.ndarray, **attributes: int | str) -> np.ndarray:
    nodes = [
        helper.make_node("Cast", ["x"], ["n"], to=kind, **attributes),
        helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT),
    ]
    return tvm_fusion.compile(model_of(nodes, x), threads=1)(x)


def numbers() -> np.ndarray:
    """Numbers of every size, those halfway between two that are next to each other, and edges."""
    random = np.random.default_rng(1)
    spread = random.standard_normal(4000) * 2.0 ** random.integers(-22, 20, 4000)
    halves = []
    for name in FLOATS:
        dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
        count = 1 << (ml_dtypes.finfo(dtype).bits - 1)
        grid = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)
        grid = np.sort(grid[np.isfinite(grid)])
        halves += [(grid[1:] + grid[:-1]) / 2, grid]
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38]
    return np.concatenate([spread, *halves, *(-half for half in halves), edges]).astype(np.float32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("saturate", "name"), in_turns([1, 0], FLOATS))
def test_floats_are_rounded_to_even(name: str, saturate: int) -> None:
    x = numbers()
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
    limits = ml_dtypes.finfo(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        kept = np.clip(x, float(limits.min), float(limits.max)) if saturate else x
        wanted = kept.astype(dtype).astype(np.float32)
    found = there_and_back(kind_of(name), x, saturate=saturate)
    np.testing.assert_array_equal(found, wanted)
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[is_number]), np.signbit(wanted[is_number]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two(mode: str) -> None:
    x = np.abs(numbers())
    kind = TensorProto.FLOAT8E8M0
    wanted = numpy_helper.to_float8e8m0(x, True, mode).astype(np.float32)
    is_normal = ~(x < 1e-37)
    found = there_and_back(kind, x, saturate=1, round_mode=mode)
    np.testing.assert_array_equal(found[is_normal], wanted[is_normal])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers_are_taken_modulo(name: str) -> None:
    x = np.arange(-40, 41, dtype=np.int32)
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
    wanted = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(kind_of(name), x), wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", FLOATS[:4])
def test_inputs_and_outputs_of_8_bits(name: str) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
    codes = np.arange(256, dtype=np.uint8).view(dtype).reshape(2, 128)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Cast", ["t"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["f"], ["y"], to=kind_of(name), saturate=0),
    ]
    found = tvm_fusion.compile(model_of(nodes, codes, kind_of(name)), threads=1)(codes)
    assert (found.dtype, found.shape) == (dtype, (128, 2))
    np.testing.assert_array_equal(found.astype("float32"), codes.T.astype("float32"))


def test_inputs_of_4_bits_are_refused() -> None:
    x = np.zeros(3, ml_dtypes.int4)
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    with pytest.raises(
        UnsupportedOperatorError, match="input 'x' holds elements of INT4; expected one"
    ):
        import_onnx(model_of([node], x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name",), in_turns([FLOATS[0], "UINT4", *FLOATS[1:4], "UINT2", "INT4", *FLOATS[5:]], every=5)
)
def test_quantised_and_back(name: str) -> None:
    """One scale for each row; numbers beyond the range are its ends."""
    x = np.random.default_rng(3).standard_normal((3, 50)).astype("float32") * 20
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
    is_whole = name in INTEGERS
    zeros = np.array([1, 2, 3] if is_whole else [0, 0, 0]).astype(dtype)
    constants = {"s": np.array([0.1, 2, 3], np.float32), "z": zeros}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=0),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=0),
    ]
    model = model_of(nodes, x, constants=constants)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(tvm_fusion.compile(model, threads=1)(x), wanted, rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["INT4", "FLOAT8E4M3FN"])
def test_weights_in_blocks(name: str) -> None:
    """A product with weights of few bits, more than stay in the graph."""
    x = np.random.default_rng(5).standard_normal((4, 64)).astype("float32")
    dtype = helper.tensor_dtype_to_np_dtype(kind_of(name))
    bits = np.random.default_rng(6).integers(-7, 7, (64, 24)).astype("float32").astype(dtype)
    scales = np.random.default_rng(7).uniform(0.1, 1, (2, 24)).astype("float32")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    found = tvm_fusion.compile(model_of(nodes, x, constants={"w": bits, "s": scales}), threads=1)(x)
    wanted = x @ (bits.astype("float32") * np.repeat(scales, 32, axis=0))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
