# SPDX-License-Identifier: Apache-2.0
"""Quantised operators and transforms have the numbers of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvm_fusion
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx


def integers(*shape: int, dtype: str = "uint8", seed: int = 1) -> np.ndarray:
    limits = np.iinfo(dtype)
    generator = np.random.default_rng(seed)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def weights(*shape: int) -> np.ndarray:
    """Weights of 7 bits: those of 8 overflow ONNX Runtime's sums of two products without VNNI."""
    return integers(*shape, dtype="int8") // 2


def model_of(
    op_type: str, feeds: dict[str, Any], constants: dict[str, Any], result: str, **attributes: Any
) -> onnx.ModelProto:
    """One node that reads all arrays in order; a None is a missing input."""
    given = {**feeds, **constants}
    names = [name if value is not None else "" for name, value in given.items()]
    kinds = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [helper.make_node(op_type, names, ["y"], "op", **attributes)],
        "quantised",
        [helper.make_tensor_value_info(n, kinds(v.dtype), v.shape) for n, v in feeds.items()],
        [helper.make_tensor_value_info("y", kinds(np.dtype(result)), None)],
        [numpy_helper.from_array(v, n) for n, v in constants.items() if v is not None],
    )
    opset = [helper.make_operatorsetid("", 21)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10)


def check(model: onnx.ModelProto, feeds: dict[str, Any], most: float) -> None:
    """Compare with ONNX Runtime; a number may differ by ``most``."""
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(feeds)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert np.abs(found.astype("float64") - wanted.astype("float64")).max() <= most


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("columns", [False, True])
def test_products(columns: bool) -> None:
    feeds = {"a": integers(3, 7)}
    scale = np.linspace(0.01, 0.03, 5, dtype="float32") if columns else np.array(0.02, "float32")
    zero = np.zeros(5, "int8") if columns else np.array(-3, "int8")
    constants = {
        "as": np.array(0.02, "float32"),
        "az": np.array(117, "uint8"),
        "b": weights(7, 5),
        "bs": scale,
        "bz": zero,
        "ys": np.array(0.1, "float32"),
        "yz": np.array(100, "uint8"),
    }
    check(model_of("QLinearMatMul", feeds, constants, "uint8"), feeds, 0)


def test_convolutions() -> None:
    feeds = {"x": integers(1, 4, 7, 7)}
    constants = {
        "xs": np.array(0.02, "float32"),
        "xz": np.array(110, "uint8"),
        "w": weights(6, 2, 3, 3),
        "ws": np.linspace(0.01, 0.03, 6, dtype="float32"),
        "wz": np.zeros(6, "int8"),
        "ys": np.array(0.5, "float32"),
        "yz": np.array(128, "uint8"),
        "b": integers(6, dtype="int16").astype("int32"),
    }
    model = model_of("QLinearConv", feeds, constants, "uint8", pads=[1, 1, 1, 1], group=2)
    check(model, feeds, 1)  # a half may be rounded up or down


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("depth", [7, 3001])
def test_exact_products(depth: int) -> None:
    feeds = {"a": np.full((2, depth), 255, "uint8"), "b": integers(depth, 3)}
    zeros = {"az": np.array(3, "uint8"), "bz": np.array(7, "uint8")}
    check(model_of("MatMulInteger", feeds, zeros, "int32"), feeds, 0)


def test_exact_convolutions() -> None:
    feeds = {"x": integers(1, 3, 6, 5), "w": integers(4, 3, 3, 3)}
    zeros = {"xz": np.array(9, "uint8")}
    check(model_of("ConvInteger", feeds, zeros, "int32", pads=[1, 0, 1, 2]), feeds, 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("op_type", ["MatMulInteger", "ConvInteger"])
def test_products_that_are_read_as_floats_are_computed_as_such(op_type: str) -> None:
    attributes = {"pads": [1, 1, 1, 1]} if op_type == "ConvInteger" else {}
    data = integers(2, 65, 6, 5) if attributes else integers(2, 9, 300)
    constants = {
        "w": weights(4, 65, 3, 3) if attributes else weights(300, 7),
        "xz": np.array(9, "uint8"),
    }
    model = model_of(op_type, {"x": data}, constants, "float32", **attributes)
    model.graph.node[0].output[0] = "whole"
    model.graph.node.append(helper.make_node("Cast", ["whole"], ["y"], to=TensorProto.FLOAT))
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": data})
    np.testing.assert_allclose(tvm_fusion.compile(model, threads=1)(data), wanted, rtol=1e-4)
    assert "float64" not in str(import_onnx(model).mod)


@pytest.mark.slow
def test_products_that_are_read_as_both_stay_exact() -> None:
    data = integers(2, 300)
    model = model_of("MatMulInteger", {"x": data}, {"w": weights(300, 7)}, "float32")
    model.graph.node[0].output[0] = "whole"
    model.graph.node.append(helper.make_node("Cast", ["whole"], ["y"], to=TensorProto.FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("whole", TensorProto.INT32, None))
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": data})
    for found, expected in zip(tvm_fusion.compile(model, threads=1)(data), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("types", [("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8")])
def test_products_of_two_activations(types: tuple[str, str]) -> None:
    """Bytes by bytes in all forms of attention: the bits of ONNX Runtime."""
    shapes = (2, 3, 40, 24), (2, 3, 40, 24), (2, 3, 40, 20)
    feeds = {
        name: integers(*shape, dtype=types[name != "q"], seed=seed) // 2
        for seed, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
    }
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    signed, plain = np.iinfo(types[1]), np.iinfo(types[0])
    constants = {
        "s": np.array(0.02, "float32"),
        "zq": np.array((plain.min + plain.max) // 2, types[0]),
        "zk": np.array((signed.min + signed.max) // 3, types[1]),
        "sy": np.array(0.31, "float32"),
        "zy": np.array(plain.max // 3, types[0]),
        "sp": np.array(1 / 255, "float32"),
        "zp": np.array(0, "uint8"),
    }
    make = helper.make_node
    nodes = [
        make("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
        make("QLinearMatMul", ["q", "s", "zq", "t", "s", "zk", "sy", "zy"], ["a"]),
        make("DequantizeLinear", ["a", "sy", "zy"], ["b"]),
        make("Add", ["b", "mask"], ["c"]),
        make("Softmax", ["c"], ["d"], axis=-1),
        make("QuantizeLinear", ["d", "sp", "zp"], ["e"]),
        make("DequantizeLinear", ["e", "sp", "zp"], ["f"]),
        make("DequantizeLinear", ["v", "s", "zk"], ["g"]),
        make("MatMul", ["f", "g"], ["h"]),
        make("QuantizeLinear", ["h", "s", "zk"], ["i"]),
        make("Transpose", ["i"], ["values"], perm=[0, 2, 1, 3]),
        make("MatMulInteger", ["q", "t", "zq", "zk"], ["whole"]),
        make("Cast", ["whole"], ["floats"], to=TensorProto.FLOAT),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(n, kinds[n], feeds[n].shape) for n in feeds]
        + [helper.make_tensor_value_info("mask", TensorProto.FLOAT, [2, 1, 1, 40])],
        [
            helper.make_tensor_value_info("values", kinds["v"], None),
            helper.make_tensor_value_info("floats", TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_operatorsetid("", 21)], ir_version=10
    )
    feeds["mask"] = np.linspace(-1, 1, 80, dtype="float32").reshape(2, 1, 1, 40)
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    # Weights of probabilities are below 1/2: ONNX Runtime's sums of two products do not saturate.
    for found, expected in zip(tvm_fusion.compile(model, threads=2)(feeds), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 70, 65)])
def test_tensors_that_are_quantised_by_their_range(shape: tuple[int, ...]) -> None:
    """The bits of ONNX Runtime, of two tensors whose product is scaled."""
    random = np.random.default_rng()
    feeds = {
        "a": random.standard_normal(shape).astype("float32") + np.float32(0.3),
        "b": random.uniform(-1, 4, (*shape[:-2], shape[-1], 7)).astype("float32"),
    }
    nodes = [
        helper.make_node("DynamicQuantizeLinear", [name], [f"q{name}", f"s{name}", f"z{name}"])
        for name in feeds
    ]
    nodes += [
        helper.make_node("MatMulInteger", ["qa", "qb", "za", "zb"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["sa", "sb"], ["scale"]),
        helper.make_node("Mul", ["floats", "scale"], ["y"]),
    ]
    kinds = {"q": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": TensorProto.UINT8}
    results = {f"{part}{name}": kind for part, kind in kinds.items() for name in feeds}
    graph = helper.make_graph(
        nodes,
        "dynamic",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in feeds.items()
        ],
        [
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in {**results, "y": TensorProto.FLOAT}.items()
        ],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_operatorsetid("", 21)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = session.run(None, feeds)
    for found, one in zip(tvm_fusion.compile(model, threads=2)(**feeds), wanted, strict=True):
        np.testing.assert_array_equal(found, one)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_constants_are_computed_without_a_kernel(opset: int) -> None:
    """ONNX's reference has no DequantizeLinear before opset 19."""
    x = np.ones((2, 3), "float32")
    constants = {"w": weights(4, 3), "s": np.linspace(1, 2, 4, dtype="float32")}
    model = model_of("DequantizeLinear", {}, {**constants}, "float32", axis=0)
    model.opset_import[0].version = opset
    model.ir_version = 8
    model.graph.node[0].output[0] = "f"
    model.graph.node.append(helper.make_node("Gemm", ["x", "f"], ["y"], transB=1))
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3]))
    assert "dequantize" not in str(import_onnx(model).mod)
    wanted = (constants["w"] * constants["s"][:, None]).sum(axis=1)
    np.testing.assert_allclose(tvm_fusion.compile(model, threads=1)(x)[0], wanted, rtol=1e-6)


def test_blocks() -> None:
    x = np.random.default_rng(2).standard_normal((3, 10)).astype("float32")
    scales = np.random.default_rng(3).uniform(0.01, 0.1, (3, 4)).astype("float32")
    zeros = integers(3, 4, dtype="int8")
    constants = {"s": scales, "z": zeros}
    wide = [np.repeat(each, 3, axis=1)[:, :10].astype("float64") for each in (scales, zeros)]
    model = model_of("QuantizeLinear", {"x": x}, constants, "int8", axis=1, block_size=3)
    found = tvm_fusion.compile(model, threads=1)(x)
    wanted = np.clip(np.round(x / wide[0]) + wide[1], -128, 127)
    np.testing.assert_array_equal(found, wanted)
    model = model_of("DequantizeLinear", {"x": found}, constants, "float32", axis=1, block_size=3)
    again = tvm_fusion.compile(model, threads=1)(found)
    np.testing.assert_allclose(again, (found - wide[1]) * wide[0], rtol=1e-5)


@pytest.mark.parametrize("op_type", ["QuantizeLinear", "DequantizeLinear"])
def test_blocks_of_other_dimensions_are_refused(op_type: str) -> None:
    data = np.zeros(4, "int8" if op_type[0] == "D" else "float32")
    scales = {"s": np.ones((3, 2), np.float32)}
    kind = "float32" if op_type[0] == "D" else "uint8"
    model = model_of(op_type, {"x": data}, scales, kind, axis=1, block_size=2)
    with pytest.raises(UnsupportedOperatorError, match=f"{op_type}.*as many dimensions as each"):
        tvm_fusion.compile(model, threads=1)


@pytest.mark.parametrize(
    ("op_type", "scale", "attributes", "message"),
    [
        ("QuantizeLinear", np.array(0), {}, "'s' is 0 or NaN; expected numbers to divide by"),
        ("QuantizeLinear", np.array([1, np.nan, 1, 1]), {"axis": 1}, "'s' is 0 or NaN"),
        (
            "DequantizeLinear",
            np.ones(3),
            {"axis": 1},
            r"shape \(3,\); expected \(4,\), one for each",
        ),
        (
            "DequantizeLinear",
            np.ones(4),
            {"axis": 2},
            "its axis is 2; expected one of 2 dimensions",
        ),
        (
            "DequantizeLinear",
            np.ones((6, 1)),
            {"axis": 1, "block_size": 3},
            r"shape \(6, 1\); expected \(6, 2\), one for each block of 3 numbers along axis 1",
        ),
    ],
)
@pytest.mark.parametrize("is_constant", [False, True])
def test_scales_that_do_not_fit(op_type, scale, attributes, message, is_constant) -> None:
    data = np.ones((6, 4), "int8" if op_type[0] == "D" else "float32")
    constants = {"s": scale.astype("float32")}
    feeds = {} if is_constant else {"x": data}
    constants = {"x": data, **constants} if is_constant else constants
    kind = "float32" if op_type[0] == "D" else "uint8"
    with pytest.raises(UnsupportedOperatorError, match=f"{op_type}.*{message}"):
        tvm_fusion.compile(model_of(op_type, feeds, constants, kind, **attributes), threads=1)


@pytest.mark.parametrize("scale", [0.0, np.nan])
def test_floats_of_such_scales_are_theirs(scale: float) -> None:
    data, scales = integers(6, 4, dtype="int8"), np.array([1, scale, 2, 3], "float32")
    model = model_of("DequantizeLinear", {"x": data}, {"s": scales}, "float32", axis=1)
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(data), data * scales)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("axis", "inverse", "onesided"), [(1, 0, 0), (2, 0, 1), (1, 1, 0)])
def test_transforms(axis: int, inverse: int, onesided: int) -> None:
    parts = 1 if onesided else 2
    x = np.random.default_rng(4).standard_normal((2, 12, 5, parts)).astype("float32")
    constants = {"length": None, "axis": np.array(axis)}
    flags = {"inverse": inverse, "onesided": onesided}
    found = tvm_fusion.compile(model_of("DFT", {"x": x}, constants, "float32", **flags))(x)
    signal = x[..., 0] + (1j * x[..., 1] if parts == 2 else 0)
    transform = np.fft.ifft if inverse else np.fft.rfft if onesided else np.fft.fft
    wanted = transform(signal, axis=axis)
    np.testing.assert_allclose(found, np.stack([wanted.real, wanted.imag], -1), atol=1e-4)


def test_frames_have_one_side_by_default() -> None:
    x = np.random.default_rng(4).standard_normal((2, 40, 1)).astype("float32")
    constants = {"step": np.array(5), "window": np.hanning(12).astype("float32")}
    found = tvm_fusion.compile(model_of("STFT", {"x": x}, constants, "float32"))(x)
    frames = np.stack([x[:, at : at + 12, 0] for at in range(0, 29, 5)], axis=1)
    wanted = np.fft.rfft(frames * constants["window"])
    np.testing.assert_allclose(found, np.stack([wanted.real, wanted.imag], -1), atol=1e-4)


def test_long_transforms_are_refused() -> None:
    x = np.zeros((1, 5000, 1), "float32")
    model = model_of("DFT", {"x": x}, {"length": None, "axis": np.array(1)}, "float32")
    with pytest.raises(UnsupportedOperatorError, match="its length is 5000; at most 4096 is"):
        import_onnx(model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8"])
def test_clipped_numbers_are_cast_without_wrapping(kind: str) -> None:
    """Nothing looks for infinities or repeats its operand, which takes TVM half a minute."""
    limits = ml_dtypes.iinfo(kind)
    x = np.array([-1e9, -8.6, -0.4, 0, 3.5, 7.4, 300, np.inf], "float32")
    target = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    graph = helper.make_graph(
        [
            helper.make_node("Clip", ["x", "low", "high"], ["clipped"]),
            helper.make_node("Cast", ["clipped"], ["whole"], to=target),
            helper.make_node("Cast", ["whole"], ["y"], to=onnx.TensorProto.FLOAT),
        ],
        "clip",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, x.shape)],
        [
            numpy_helper.from_array(np.array(end, "float32"), name)
            for name, end in (("low", limits.min), ("high", limits.max))
        ],
    )
    opset = [helper.make_operatorsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    assert "isfinite" not in str(import_onnx(model).mod)
    wanted = np.trunc(np.clip(x, int(limits.min), int(limits.max)))
    np.testing.assert_array_equal(tvm_fusion.compile(model, threads=1)(x), wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "zero"), [("int16", -6460), ("uint16", 40000)])
def test_zero_points_that_a_float16_cannot_hold(kind: str, zero: int) -> None:
    """Numbers of 16 bits are quantised in float32, whatever the type of their scale."""
    x = np.random.default_rng(5).uniform(-8, 8, (3, 7)).astype("float16")
    scale, point = np.float16(0.7686), np.array(zero, kind)
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        "quantize",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, x.shape)],
        [
            helper.make_tensor_value_info("q", helper.np_dtype_to_tensor_dtype(point.dtype), None),
            helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, None),
        ],
        [numpy_helper.from_array(scale, "scale"), numpy_helper.from_array(point, "zero")],
    )
    opset = [helper.make_operatorsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    numbers, again = tvm_fusion.compile(model, threads=1)(x)
    exact = np.rint(x.astype("float64") / np.float64(scale))
    np.testing.assert_array_equal(numbers, exact + zero)
    np.testing.assert_allclose(again, exact * np.float64(scale), rtol=1e-3)
