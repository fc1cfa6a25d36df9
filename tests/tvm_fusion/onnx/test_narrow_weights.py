# SPDX-License-Identifier: Apache-2.0
"""Weights of 8 and 4 bits stay so in compiled models, with the numbers of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import onnx_model

import tvm_fusion
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

Array = np.ndarray


def model_of(
    nodes: list[onnx.NodeProto], constants: dict[str, Array], rows: Any, depth: int, dtype: int
) -> onnx.ModelProto:
    """A model from ``x`` [1, rows, depth], or [rows, depth] for a Gemm, to ``y``."""
    shape = [rows, depth] if nodes[-1].op_type == "Gemm" else [1, rows, depth]
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def nbits(
    depth: int,
    columns: int,
    bits: int,
    block: int,
    *,
    zeros: bool = False,
    bias: bool = False,
    dtype: str = "float32",
    rows: Any = 3,
    **attributes: int,
) -> onnx.ModelProto:
    """A MatMulNBits."""
    random = np.random.default_rng(depth + bits)
    blocks = -(-depth // block)
    constants = {
        "b": random.integers(0, 256, (columns, blocks, block * bits // 8)).astype("uint8"),
        "scales": random.uniform(0.01, 0.02, (columns, blocks)).astype(dtype),
    }
    if zeros:
        size = -(-blocks * bits // 8)
        constants["zeros"] = random.integers(0, 256, (columns, size)).astype("uint8")
    names = ["x", *constants]
    if bias:
        constants["bias"] = random.standard_normal(columns).astype(dtype)
        names += [""] * (5 - len(names)) + ["bias"]
    node = helper.make_node(
        "MatMulNBits",
        names,
        ["y"],
        domain="com.microsoft",
        K=depth,
        N=columns,
        bits=bits,
        block_size=block,
        **attributes,
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model_of([node], constants, rows, depth, kind)


def kernels(model: onnx.ModelProto) -> bool:
    """Whether the model's matrix is still narrow once it is imported."""
    return "widen_weight" in import_onnx(model, {"rows": "rows"}).mod.script()


def kernels_of(model: onnx.ModelProto) -> str:
    """The optimised module."""
    target = resolve("native")
    return pipeline.optimize(import_onnx(model).mod, target).script()


def rows_of(model: onnx.ModelProto, rows: int) -> Array:
    value = model.graph.input[0]
    shape = [dim.dim_value or rows for dim in value.type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return np.random.default_rng(rows).standard_normal(shape).astype(kind)


def check(model: onnx.ModelProto, tolerance: float, rows: tuple[int, ...] = (3,)) -> None:
    """Compare with ONNX Runtime, in parts of the largest magnitude."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    compiled = tvm_fusion.compile(model, shapes={"rows": "rows"} if len(rows) > 1 else None)
    for count in rows:
        x = rows_of(model, count)
        wanted = session.run(None, {"x": x})[0]
        found = compiled(x)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        error = np.abs(found.astype("float64") - wanted).max() / np.abs(wanted).max()
        assert error <= tolerance, (count, error)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_matmul_of_few_bits(bits: int, zeros: bool) -> None:
    model = nbits(256, 72, bits, 32, zeros=zeros, bias=True, rows="rows")
    assert kernels(model)
    check(model, 1e-5, (1, 2, 3, 14))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "model",
    [
        nbits(250, 70, 4, 32, zeros=True),  # the last block is short
        nbits(130, 100, 8, 16),
        nbits(128, 70, 4, 128, zeros=True),
        nbits(32, 8, 4, 32),  # small: floats
    ],
)
def test_odd_matrices(model: onnx.ModelProto) -> None:
    check(model, 1e-5)


@pytest.mark.slow
def test_rows_of_16_bits() -> None:
    check(nbits(256, 72, 4, 32, zeros=True, dtype="float16"), 2e-3)


@pytest.mark.slow
def test_rows_in_bytes() -> None:
    """At accuracy level 4 rows may be rounded to bytes, as ONNX Runtime does."""
    model = nbits(512, 96, 4, 32, zeros=True, accuracy_level=4, rows="rows")
    check(model, 1e-2, (1, 2, 5, 9))
    exact = tvm_fusion.compile(nbits(512, 96, 4, 32, zeros=True))
    rounded = tvm_fusion.compile(nbits(512, 96, 4, 32, zeros=True, accuracy_level=4))
    x = rows_of(nbits(512, 96, 4, 32), 3)
    error = np.abs(exact(x) - rounded(x)).max() / np.abs(exact(x)).max()
    assert 0 < error < 1e-2


def dequantized(
    kind: str, axis: int, block: int, form: str, with_zero: bool = True
) -> onnx.ModelProto:
    """A product with a dequantised matrix, [96, 80] or transposed."""
    random = np.random.default_rng(block)
    shape = (80, 96) if form != "MatMul" else (96, 80)
    limits = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[kind]
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    integers = random.integers(*limits, shape).astype(dtype)
    if block:
        groups = list(shape)
        groups[axis] = -(-shape[axis] // block)
    else:
        groups = [shape[axis]] if axis >= 0 else []
    constants = {
        "w": integers,
        "scale": random.uniform(0.01, 0.02, groups).astype("float32"),
    }
    if with_zero:
        constants["zero"] = random.integers(*limits, groups or None, dtype=int)
        constants["zero"] = np.asarray(constants["zero"]).astype(dtype)
    attributes: dict[str, int] = {"block_size": block} if block else {}
    nodes = [
        helper.make_node("DequantizeLinear", [*constants], ["d"], axis=max(axis, 0), **attributes)
    ]
    matrix = "d"
    if form == "Transpose":
        nodes.append(helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0]))
        matrix = "t"
    if form == "Gemm":
        nodes.append(helper.make_node("Gemm", ["x", matrix], ["y"], transB=1))
    else:
        nodes.append(helper.make_node("MatMul", ["x", matrix], ["y"]))
    return model_of(nodes, constants, 3, 96, TensorProto.FLOAT)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("kind", "axis", "block", "form"),
    [
        ("int8", 1, 0, "MatMul"),
        ("uint8", 0, 0, "Transpose"),
        ("int8", -1, 0, "MatMul"),
        ("uint8", -1, 0, "Gemm"),
        ("int4", 0, 32, "MatMul"),
        ("uint4", 1, 16, "Gemm"),
        ("uint4", 1, 32, "Transpose"),
        ("int4", 1, 16, "MatMul"),  # blocks along the columns: floats
        ("int8", 0, 0, "MatMul"),
    ],
)
@pytest.mark.parametrize("with_zero", [False, True])
def test_dequantised_matrices(kind: str, axis: int, block: int, form: str, with_zero: bool) -> None:
    model = dequantized(kind, axis, block, form, with_zero)
    x = rows_of(model, 3)
    wanted = ReferenceEvaluator(model).run(None, {"x": x})[0]
    found = tvm_fusion.compile(model)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def network(depth: int = 256) -> onnx.ModelProto:
    """Three products, one of them small, with activations between them."""
    random = np.random.default_rng(0)
    sizes = [depth, 512, 256, 10]
    constants, nodes, x = {}, [], "x"
    for number, (rows, columns) in enumerate(zip(sizes, sizes[1:], strict=False)):
        matrix = random.standard_normal((rows, columns)) * rows**-0.5
        constants[f"w{number}"] = matrix.astype("float32")
        nodes.append(helper.make_node("MatMul", [x, f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Tanh", [f"m{number}"], [f"t{number}"]))
        x = f"t{number}"
    nodes[-1].output[0] = "y"
    return model_of(nodes, constants, 2, depth, TensorProto.FLOAT)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("turned", [False, True])
def test_matrices_of_16_bits(dtype: str, turned: bool) -> None:
    """Products of few rows read them as they are stored."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = np.random.default_rng(1).standard_normal((128, 60)).astype(np.dtype(dtype))
    constants = {"w": weight.T.copy() if turned else weight}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if turned:
        nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)]
    found = {}
    for rows in (2, 40):
        compiled = tvm_fusion.compile(model_of(nodes, constants, rows, 128, kind))
        x = rows_of(model_of(nodes, constants, rows, 128, kind), rows)
        wanted = x.astype("float64") @ weight.astype("float64")
        error = np.abs(compiled(x).astype("float64") - wanted).max() / np.abs(wanted).max()
        assert error < (2e-3 if dtype == "float16" else 1e-2)
        found[rows] = "narrow_matmul" in kernels_of(model_of(nodes, constants, rows, 128, kind))
    assert found == {2: True, 40: False}


@pytest.mark.slow
def test_weights_are_rounded(tmp_path: Path) -> None:
    model = network()
    x = rows_of(model, 2)
    sizes, errors = {}, {}
    exact = tvm_fusion.compile(model)(x)
    for weights in (None, "bf16", "int8", "int4"):
        compiled = tvm_fusion.compile(model, weights=weights)
        path = tmp_path / f"{weights}.so"
        compiled.save(path)
        loaded = tvm_fusion.load(path)
        sizes[weights] = path.stat().st_size
        errors[weights] = np.abs(loaded(x) - exact).max() / np.abs(exact).max()
        np.testing.assert_array_equal(loaded(x), compiled(x))
    floats = 4 * 2 * 256 * 512  # The two matrices that are not small.
    assert sizes[None] - sizes["bf16"] > 0.48 * floats and 0 < errors["bf16"] < 0.01
    assert sizes[None] - sizes["int8"] > 0.72 * floats
    assert sizes[None] - sizes["int4"] > 0.82 * floats
    assert errors[None] == 0 and 0 < errors["int8"] < 0.02 and 0 < errors["int4"] < 0.2


@pytest.mark.parametrize(
    ("weights", "block", "low", "high", "tolerance"),
    [("int8", 128, -127, 127, 1e-5), ("int4", 32, -8, 7, 1e-2)],
)
def test_columns_that_are_no_whole_number_of_blocks(weights, block, low, high, tolerance) -> None:
    """Their last block holds what is left; the other factor of 4 bits is rounded to bytes."""
    depth, columns = 2 * block + 5, 96
    random = np.random.default_rng()
    matrix = random.standard_normal((depth, columns)).astype("float32")
    matrix[2 * block :] *= 1e-3  # The scale of another block would make them 0.
    expected = np.empty_like(matrix)
    for first in range(0, depth, block):
        part = matrix[first : first + block]
        largest = np.take_along_axis(part, np.abs(part).argmax(0)[None], 0)
        scale = largest / low
        expected[first : first + block] = np.clip(np.rint(part / scale), low, high) * scale
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = model_of(nodes, {"w": matrix}, 2, depth, TensorProto.FLOAT)
    compiled = tvm_fusion.compile(model, weights=weights, threads=1)
    x = random.standard_normal((1, 2, depth)).astype("float32")
    for given in (x, np.where(np.arange(depth) < 2 * block, np.float32(0), x)):
        wanted = given @ expected
        assert np.abs(compiled(given) - wanted).max() <= tolerance * np.abs(wanted).max()


def in_blocks(lines: Array, block: int, low: int, high: int) -> Array:
    """Lines of numbers that are rounded as ``weights=`` says, blocks along a line; float64."""
    found = np.empty(lines.shape)
    for first in range(0, lines.shape[1], block):
        part = lines[:, first : first + block]
        largest = np.take_along_axis(part, np.abs(part).argmax(1)[:, None], 1)
        scale = np.abs(largest) / 127 if high == 127 else largest / -8
        integers = np.clip(np.rint(part / scale), low, high)
        found[:, first : first + block] = integers.astype("float64") * scale
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.INT64])
@pytest.mark.parametrize(
    ("weights", "block", "low", "high", "tolerance", "share"),
    [("int4", 32, -8, 7, 1e-2, 0.2), ("int8", 128, -127, 127, 1e-5, 0.32)],
)
def test_tables_are_rounded_and_stored_once(
    weights, block, low, high, tolerance, share, kind, tmp_path
) -> None:
    """An embedding that is the last matrix, too, and sines, which stay; rows from the end."""
    random = np.random.default_rng()
    table = random.standard_normal((12001, 250)).astype("float32")
    sines = np.sin(np.outer(np.arange(12001), np.arange(1, 17))).astype("float32")
    constants = {
        "w": table,
        "sines": sines,
        "m": random.standard_normal((250, 16)).astype("float32"),
    }
    nodes = [
        helper.make_node("Gather", ["w", "ids"], ["rows"]),
        helper.make_node("Tanh", ["rows"], ["t"]),
        helper.make_node("Gather", ["sines", "ids"], ["s"]),
        helper.make_node("MatMul", ["t", "m"], ["q"]),
        helper.make_node("Mul", ["q", "s"], ["turned"]),
        helper.make_node("Transpose", ["w"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["t", "head"], ["logits"]),
    ]
    model = looked_up(nodes, constants)
    model.graph.input[0].type.tensor_type.elem_type = kind
    del model.graph.output[:]
    for name in ("rows", "turned", "logits"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    ids = random.integers(-12001, 12001, (2, 5)).astype(helper.tensor_dtype_to_np_dtype(kind))
    ids[0, :3] = 12000, -12001, -1
    compiled = tvm_fusion.compile(model, weights=weights, threads=1)
    rows, turned, logits = compiled(ids)
    rounded = in_blocks(table, block, low, high)
    np.testing.assert_array_equal(rows, rounded[ids].astype("float32"))
    wanted = np.tanh(rounded[ids]) @ rounded.T
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()
    wanted = np.tanh(rounded[ids]) @ constants["m"] * sines[ids]
    assert np.abs(turned - wanted).max() <= 1e-5 * np.abs(wanted).max()
    compiled.save(tmp_path / "model.so")
    assert (tmp_path / "model.so").stat().st_size < share * table.nbytes + sines.nbytes


@pytest.mark.parametrize("with_zero", [False, True])
def test_quantised_tables_that_are_matrices_are_stored_once(with_zero, tmp_path) -> None:
    """An integer matrix that GatherBlockQuantized and MatMulNBits read; rows in odd numbers."""
    random, rows, columns, block = np.random.default_rng(), 6001, 160, 16
    groups = columns // block
    integers = random.integers(0, 256, (rows, columns // 2), "uint8")
    constants = {
        "table": integers,
        "scales": random.uniform(0.01, 0.02, (rows, groups)).astype("float32"),
        "zero": random.integers(0, 256, (rows, groups // 2), "uint8"),
        "matrix": integers.reshape(rows, groups, block // 2),
    }
    zeros = ["zero"] * with_zero
    if not with_zero:
        del constants["zero"]
    given = {"block_size": block, "bits": 4}
    nodes = [
        helper.make_node(
            "GatherBlockQuantized",
            ["table", "ids", "scales", *zeros],
            ["e"],
            domain="com.microsoft",
            quantize_axis=1,
            **given,
        ),
        helper.make_node(
            "MatMulNBits",
            ["e", "matrix", "scales", *zeros],
            ["y"],
            domain="com.microsoft",
            K=columns,
            N=rows,
            **given,
        ),
    ]
    model = looked_up(nodes, constants)
    text = kernels_of(model)
    assert "take_packed" in text and "take_widened" not in text
    ids = random.integers(0, rows, (2, 5))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (wanted,) = session.run(None, {"ids": ids})
    compiled = tvm_fusion.compile(model, threads=1)
    assert np.abs(compiled(ids) - wanted).max() <= 1e-5 * np.abs(wanted).max()
    compiled.save(tmp_path / "model.so")
    bytes_ = integers.nbytes + constants["scales"].nbytes * (1.25 if with_zero else 1)
    assert (tmp_path / "model.so").stat().st_size < bytes_ + 250_000


@pytest.mark.slow
def test_check_knows_what_rounding_may_cost() -> None:
    for weights in ("bf16", "int8", "int4"):
        tvm_fusion.compile(network(), weights=weights, check=True)


def test_rounding_that_has_no_effect_is_refused() -> None:
    with pytest.raises(TargetError, match="weights is 'int2'; expected 'bf16' or 'int8' or 'int4'"):
        tvm_fusion.compile(network(), weights="int2")
    with pytest.raises(TargetError, match="weights is {'w': 4}; expected 'bf16' or"):
        tvm_fusion.compile(network(), weights={"w": 4})
    with pytest.raises(TargetError, match="narrow weights are for CPUs"):
        tvm_fusion.compile(network(), "opencl", weights="int8")
    with pytest.raises(TargetError, match="weights='int8' has no effect with ranks"):
        tvm_fusion.compile(network(), ranks=2, weights="int8")


def looked_up(
    nodes: list[onnx.NodeProto], constants: dict[str, Array], kind: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """A model from row numbers ``ids`` [2, 5] to ``y``."""
    graph = helper.make_graph(
        nodes,
        "embedding",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [2, 5])],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def check_rows(model: onnx.ModelProto, first: int, bytes_: int, path: Path) -> None:
    """The rows of ONNX Runtime to the bit, from a table of few bytes in the file."""
    ids = np.random.default_rng(3).integers(first, 300, (2, 5))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (wanted,) = session.run(None, {"ids": ids})
    compiled = tvm_fusion.compile(model, threads=1)
    found = compiled(ids)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    compiled.save(path / "model.so")
    code = 250_000  # more than that of one kernel
    assert (path / "model.so").stat().st_size < bytes_ + code


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["int8", "uint4"])
@pytest.mark.parametrize(
    ("axis", "block", "groups"), [(0, 0, (300,)), (1, 16, (300, 63)), (0, 32, (10, 1001))]
)
def test_rows_of_a_dequantised_table(kind, axis, block, groups, tmp_path) -> None:
    """An odd number of columns, and numbers of rows from the end."""
    random, few = np.random.default_rng(axis + block), 16 if kind == "uint4" else 128
    dtype = getattr(ml_dtypes, kind, None) or np.dtype(kind)
    constants = {
        "w": random.integers(0, few, (300, 1001)).astype(dtype),
        "scale": random.uniform(0.01, 0.02, groups).astype("float32"),
        "zero": random.integers(0, few, groups).astype(dtype),
    }
    given = {"block_size": block} if block else {}
    nodes = [
        helper.make_node("DequantizeLinear", [*constants], ["d"], axis=axis, **given),
        helper.make_node("Gather", ["d", "ids"], ["y"]),
    ]
    numbers = 300 * 1001 if kind == "int8" else 300 * 1001 // 2
    scales = int(np.prod(groups)) * 5
    check_rows(looked_up(nodes, constants), -300, numbers + scales, tmp_path)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zero", [False, True])
@pytest.mark.parametrize("columns", [512, 32], ids=["large", "small"])
def test_rows_that_are_gathered_in_blocks(bits, with_zero, columns, tmp_path) -> None:
    random, per_byte = np.random.default_rng(bits), 8 // bits
    rows, blocks = 300 if columns == 512 else 40, columns // 16
    shapes = {"w": (rows, columns // per_byte), "zero": (rows, -(-blocks // per_byte))}
    constants = {name: random.integers(0, 256, shape, "uint8") for name, shape in shapes.items()}
    constants["scale"] = random.uniform(0.01, 0.02, (rows, blocks)).astype("float32")
    names = ["w", "ids", "scale", *["zero"] * with_zero]
    constants = {name: constants[name] for name in names if name != "ids"}
    attributes = {"block_size": 16, "bits": bits, "quantize_axis": 1}
    node = helper.make_node(
        "GatherBlockQuantized", names, ["y"], domain="com.microsoft", **attributes
    )
    model = looked_up([node], constants)
    if columns == 32:
        model.graph.node.insert(0, helper.make_node("Mod", ["ids", "rows"], ["some"]))
        model.graph.node[1].input[1] = "some"
        model.graph.initializer.append(numpy_helper.from_array(np.array(rows), "rows"))
    check_rows(
        model, 0, sum(array.nbytes for array in constants.values()) + rows * blocks, tmp_path
    )


@pytest.mark.parametrize(
    ("attributes", "groups", "message"),
    [
        ({"bits": 2}, 4, "its numbers have 2 bits; expected 4 or 8"),
        ({"gather_axis": 1}, 4, "it gathers along axis 1 of 2 with blocks along 1"),
        ({}, 3, r"its scales have shape \(300, 3\); expected \(300, 4\) for blocks of 32"),
    ],
)
def test_rows_in_blocks_that_have_no_kernel(attributes, groups, message) -> None:
    constants = {"w": np.zeros((300, 64), "uint8"), "s": np.ones((300, groups), "float32")}
    given = {"block_size": 32, "quantize_axis": 1} | attributes
    node = helper.make_node(
        "GatherBlockQuantized", ["w", "ids", "s"], ["y"], domain="com.microsoft", **given
    )
    with pytest.raises(UnsupportedOperatorError, match=message):
        tvm_fusion.compile(looked_up([node], constants))


CONVOLUTIONS = {  # input channels, output channels, kernel, stride, groups, zero point, size
    "dense": (136, 200, 1, 1, 1, 0, 5),
    "deep": (512, 72, 1, 1, 1, 0, 3),
    "strided": (72, 136, 3, 2, 1, 0, 9),
    "padded": (60, 75, 5, 1, 1, 0, 6),
    "groups": (96, 192, 3, 2, 2, 0, 7),
    "cut": (120, 120, 3, 2, 6, 0, 4),
    "per tensor": (128, 128, 1, 1, 1, 0, 4),
    "wide": (128, 136, 1, 1, 1, 9, 4),  # They have nine bits without their zero point.
    "centred": (136, 128, 1, 1, 1, 128, 4),  # uint8
}


def convolutions(random: np.random.Generator) -> onnx.ModelProto:
    """Convolutions of dequantised weights with biases, residuals, and activations."""
    nodes, constants, inputs, outputs = [], {}, [], []
    for name, (channels, count, kernel, stride, groups, zero, size) in CONVOLUTIONS.items():
        kind, low = (np.uint8, 0) if zero == 128 else (np.int8, -128)
        integers = random.integers(low, low + 256, (count, channels // groups, kernel, kernel))
        if zero == 128:
            integers = np.maximum(integers, 1)
        scale = random.uniform(0.01, 0.02, () if name == "per tensor" else count)
        constants |= {
            f"q {name}": integers.astype(kind),
            f"s {name}": (scale / (channels * kernel**2 / groups) ** 0.5).astype("float32"),
            f"z {name}": np.full(scale.shape, zero, kind),
            f"b {name}": random.standard_normal(count).astype("float32"),
        }
        out_size = (size - 1) // stride + 1
        pads = dict(pads=[kernel // 2] * 4, strides=[stride] * 2, group=groups)
        quantised = [f"q {name}", f"s {name}", f"z {name}"]
        nodes += [
            helper.make_node("DequantizeLinear", quantised, [f"w {name}"], axis=0),
            helper.make_node(
                "Conv", [f"x {name}", f"w {name}", f"b {name}"], [f"c {name}"], **pads
            ),
            helper.make_node("Add", [f"c {name}", f"r {name}"], [f"a {name}"]),
            helper.make_node("Relu", [f"a {name}"], [f"y {name}"]),
        ]
        for tensor, shape in (
            ("x", (2, channels, size, size)),
            ("r", (2, count, out_size, out_size)),
        ):
            value = helper.make_tensor_value_info(f"{tensor} {name}", TensorProto.FLOAT, shape)
            inputs.append(value)
        outputs.append(helper.make_tensor_value_info(f"y {name}", TensorProto.FLOAT, None))
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "convolutions", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_weights_of_convolutions_stay_bytes() -> None:
    random = np.random.default_rng()
    model = convolutions(random)
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    feeds = {name: random.standard_normal(size).astype("float32") for name, size in shapes.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = session.run(None, feeds)
    found = tvm_fusion.compile(model, weights="int8")(**feeds)
    for name, expected, got in zip(CONVOLUTIONS, wanted, found, strict=True):
        tolerance = 2e-2 if name == "wide" else 1e-5  # rounded to eight bits
        assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max(), name
    kept = {}
    for options in (None, "int8"):
        chosen = pipeline.Options(weights=options)
        text = pipeline.optimize(import_onnx(model).mod, resolve("znver3", 2), chosen).script()
        kept[options] = text.count('weight_dtype\\": \\"int8')
    assert 0 < kept[None] < kept["int8"] == len(CONVOLUTIONS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weights", [None, "int8"])
def test_scales_of_zero_infinity_and_nan_reach_their_channels_alone(weights: str | None) -> None:
    random = np.random.default_rng()
    scale = random.uniform(0.01, 0.02, 64).astype("float32")
    scale[[3, 20, 41]] = 0, np.nan, np.inf
    constants = {
        "q": random.integers(1, 127, (64, 72, 3, 3)).astype("int8"),
        "s": scale,
        "z": np.zeros(64, "int8"),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0),
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4),
    ]
    shape = (1, 72, 8, 8)
    model = onnx_model(nodes, {"x": shape}, ["y"], constants)
    data = random.uniform(0.5, 1, shape).astype("float32")
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": data})
    found = tvm_fusion.compile(model, weights=weights)(data)
    assert not found[:, 3].any() and np.isnan(found[:, 20]).all()
    assert not np.isfinite(found[:, 41]).any()
    others = np.isfinite(scale)
    np.testing.assert_allclose(found[:, others], wanted[:, others], rtol=1e-4, atol=1e-4)


def products_of_scales(random: np.random.Generator, special: Array) -> onnx.ModelProto:
    """Products with matrices of which some columns, blocks, or all numbers have such scales."""
    places = [3, 40, 70]
    columns, blocks = np.full(128, 0.01, "float32"), np.full((4, 128), 0.01, "float32")
    columns[places] = blocks[range(3), places] = special
    constants = {
        "columns": columns,
        "blocks": blocks,
        "packed": random.integers(0, 256, (128, 4, 16)).astype("uint8"),
        "packed scales": np.ascontiguousarray(blocks.T),
        "q": random.integers(-127, 128, (128, 128)).astype("int8"),
        "step": np.float32(0.02),
        "zero": np.uint8(3),
        **{f"scale {number}": scale for number, scale in enumerate(special)},
    }
    node = helper.make_node
    nodes = [
        node("DequantizeLinear", ["q", "columns"], ["by column"], axis=1),
        node("DequantizeLinear", ["q", "blocks"], ["by block"], axis=0, block_size=32),
        node("DequantizeLinear", ["a", "step", "zero"], ["bytes"]),
        node("DequantizeLinear", ["q", "step"], ["right"]),
        node("DequantizeLinear", ["b", "step"], ["other"]),
        node("MatMul", ["x", "by column"], ["columns of floats"]),
        node("MatMul", ["bytes", "by column"], ["columns of bytes"]),
        node("MatMul", ["x", "by block"], ["blocks of floats"]),
    ]
    for level in (0, 4):
        names = ["x", "packed", "packed scales"]
        given = {"K": 128, "N": 128, "bits": 4, "block_size": 32, "accuracy_level": level}
        nodes.append(
            node("MatMulNBits", names, [f"level {level}"], domain="com.microsoft", **given)
        )
    for number in range(len(special)):
        alone = f"alone {number}"
        nodes += [
            node("DequantizeLinear", ["a", f"scale {number}", "zero"], [alone]),
            node("MatMul", [alone, "right"], [f"constant {number}"]),
            node("MatMul", [alone, "other"], [f"two {number}"]),
        ]
    kinds = {"x": np.float32, "a": np.uint8, "b": np.int8}
    shapes = {"x": (2, 128), "a": (6, 128), "b": (128, 40)}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)
        for (name, kind), shape in zip(kinds.items(), shapes.values(), strict=True)
    ]
    results = [name for one in nodes[5:] for name in one.output]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "scales", inputs, outputs, tensors)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


@pytest.mark.filterwarnings("error")
def test_products_of_scales_of_zero_infinity_and_nan() -> None:
    """They are sums of floats, though kernels may multiply a sum of integers by its scale."""
    random = np.random.default_rng()
    model = products_of_scales(random, np.array([0, np.nan, np.inf], "float32"))
    feeds = {
        "x": random.standard_normal((2, 128)).astype("float32"),
        "a": random.integers(0, 256, (6, 128)).astype("uint8"),
        "b": random.integers(-127, 128, (128, 40)).astype("int8"),
    }
    feeds["a"][0, :9] = 3
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    wanted = session.run(None, feeds)
    found = tvm_fusion.compile(model, threads=1)(**feeds)
    for value, expected, got in zip(model.graph.output, wanted, found, strict=True):
        tolerance = 2e-2 if value.name == "level 4" else 1e-4  # there it rounds to eight bits
        np.testing.assert_allclose(got, expected, tolerance, tolerance, err_msg=value.name)


@pytest.mark.slow
def test_weights_of_convolutions_are_rounded_when_asked(tmp_path: Path) -> None:
    random = np.random.default_rng()
    codes = random.integers(-126, 127, (192, 256, 3, 3)).astype("float32")
    codes[:, 0, 0, 0] = 127
    # Far from ties, so that one rounding of the scale more or less changes no code.
    weight = codes + random.uniform(-0.4, 0.4, codes.shape).astype("float32")
    weight[:, 0, 0, 0] = 127
    weight *= random.uniform(0.01, 0.02, (192, 1, 1, 1)).astype("float32")
    codes[7] = weight[7] = 0
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 256, 6, 6))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    data = random.standard_normal((1, 256, 6, 6)).astype("float32")
    compiled = tvm_fusion.compile(model, weights="int8")
    compiled.save(tmp_path / "small.so")
    assert (tmp_path / "small.so").stat().st_size < weight.nbytes / 2
    scale = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    tensor = numpy_helper.from_array(codes * scale, "w")
    model.graph.initializer[0].CopyFrom(tensor)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": data})[0]
    assert np.abs(compiled(data) - expected).max() <= 1e-5 * np.abs(expected).max()
