# SPDX-License-Identifier: Apache-2.0
"""Indices from data: numbers of ONNX Runtime within bounds, and an error outside of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_cases import int64, normal, one_node

import tvm_fusion
from tvm_fusion.errors import InvalidInputError

GRAPHS = {
    "Gather": "(float[3,4] x, int64[2,2] i) => (float[2,2,4] y) { y = Gather(x, i) }",
    "Gather of a number": "(float[3,4] x, int32 i) => (float[3] y) { y = Gather<axis = 1>(x, i) }",
    "GatherElements": (
        "(float[3,4] x, int32[3,2] i) => (float[3,2] y) { y = GatherElements<axis = -1>(x, i) }"
    ),
    "GatherND": "(float[3,4] x, int64[2,2] i) => (float[2] y) { y = GatherND(x, i) }",
    "GatherND of a batch": (
        "(float[3,4] x, int64[3,2,1] i) => (float[3,2] y) { y = GatherND<batch_dims = 1>(x, i) }"
    ),
    "ScatterElements": (
        "(float[3,4] x, int64[1,4] i) => (float[3,4] y) <float[1,4] u = {1, 2, 3, 4}>"
        " { y = ScatterElements(x, i, u) }"
    ),
    "ScatterND": (
        "(float[3,4] x, int64[1,1] i) => (float[3,4] y) <float[1,4] u = {1, 2, 3, 4}>"
        " { y = ScatterND(x, i, u) }"
    ),
}
INSIDE = {
    "Gather": ([[0, -1], [2, -3]], [[2, 2], [0, 1]]),
    "Gather of a number": (-4, 3),
    "GatherElements": ([[-4, 3], [0, -1], [2, 1]],),
    "GatherND": ([[2, 3], [-3, -4]],),
    "GatherND of a batch": ([[[0], [3]], [[-4], [-1]], [[1], [2]]],),
    "ScatterElements": ([[0, -1, -3, 2]],),
    "ScatterND": ([[-3]], [[2]]),
}
OUTSIDE = {
    "Gather": ([[0, 0], [0, 3]], [[-4, 0], [0, 0]], [[0, 1 << 40], [0, 0]]),
    "Gather of a number": (4, -5),
    "GatherElements": ([[0, 0], [4, 0], [0, 0]], [[0, 0], [0, 0], [0, -5]]),
    "GatherND": ([[3, 0], [0, 0]], [[0, 0], [0, 4]], [[0, -5], [0, 0]], [[-4, 3], [0, 0]]),
    "GatherND of a batch": ([[[0], [0]], [[0], [0]], [[0], [4]]],),
    "ScatterElements": ([[0, 0, 0, 3]], [[-4, 0, 0, 0]]),
    "ScatterND": ([[3]], [[-4]]),
}


def _model(name: str, rows: str = "3") -> onnx.ModelProto:
    graph = GRAPHS[name].replace("float[3,4] x", f"float[{rows},4] x")
    header = '<ir_version: 8, opset_import: ["": 17]> graph '
    model = onnx.parser.parse_model(header + graph.replace("{ y", "{ [op] y"))
    onnx.checker.check_model(model)
    return model


def _indices(model: onnx.ModelProto, values: object) -> np.ndarray:
    kind = model.graph.input[1].type.tensor_type.elem_type
    return np.array(values, onnx.helper.tensor_dtype_to_np_dtype(kind))


def _expected(model: onnx.ModelProto, *arguments: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, arguments, strict=True)))[0]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", GRAPHS)
def test_indices_from_data(name: str) -> None:
    model = _model(name)
    compiled = tvm_fusion.compile(model, threads=2)
    data = normal(3, 4)
    message = (
        rf"node 'op' \({name.split()[0]}\) has an index out of bounds; 'x' has the shape \(3, 4\)"
    )
    for wrong in OUTSIDE[name]:
        with pytest.raises(InvalidInputError, match=message):
            compiled(data, _indices(model, wrong))
    for right in INSIDE[name]:  # No error before lasts.
        indices = _indices(model, right)
        np.testing.assert_array_equal(compiled(data, indices), _expected(model, data, indices))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["Gather", "GatherND", "ScatterND"])
def test_indices_into_an_open_dimension(name: str) -> None:
    model = _model(name, rows="n")
    if name == "ScatterND":
        model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    compiled = tvm_fusion.compile(model, shapes={"n": "n"}, threads=2)
    shape = r"'x' has the shape \(n, 4\)"
    for rows in (3, 7):
        data = normal(rows, 4)
        for right in INSIDE[name]:
            indices = _indices(model, right)
            np.testing.assert_array_equal(compiled(data, indices), _expected(model, data, indices))
    with pytest.raises(InvalidInputError, match=shape):
        compiled(normal(2, 4), _indices(model, INSIDE[name][-1]))


def test_constant_indices_into_an_open_dimension() -> None:
    model = one_node("Gather", (3, 4), int64(1, -1, 0), axis=0)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    compiled = tvm_fusion.compile(model, shapes={"n": "n"}, threads=2)
    for size in (5, 2):
        data = normal(size, 4)
        np.testing.assert_array_equal(compiled(data), data[[1, -1, 0]])
    with pytest.raises(InvalidInputError, match=r"\(Gather\) has an index out of bounds"):
        compiled(normal(1, 4))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(150_001,), (3, 70_000), (1, 90_000)])
def test_many_indices_are_checked_in_chunks(shape: tuple[int, ...]) -> None:
    """An index in each chunk, in any of which threads may be wrong."""
    kinds = ",".join(map(str, shape))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> graph '
        f"(float[9] x, int64[{kinds}] i) => (float[{kinds}] y) {{ y = Gather(x, i) }}"
    )
    compiled = tvm_fusion.compile(model, threads=2)
    data = normal(9)
    indices = np.random.default_rng(3).integers(-9, 9, shape)
    np.testing.assert_array_equal(compiled(data, indices), data[indices])
    for place in (0, indices.size // 2, indices.size - 1):
        wrong = indices.copy()
        wrong.flat[place] = 9
        with pytest.raises(InvalidInputError, match="out of bounds"):
            compiled(data, wrong)


def test_only_the_branch_that_is_taken_raises_an_error() -> None:
    """Both branches are computed where the condition depends on data."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[3,4] x, int64[2] i, bool safe) => (float[2,4] y) {
            y = If (safe) <
                then_branch = first () => (float[2,4] a) {
                    zero = Constant<value_ints = [0, 0]>() a = Gather(x, zero)
                },
                else_branch = second () => (float[2,4] b) { b = Gather(x, i) }
            >
        }
    """)
    compiled = tvm_fusion.compile(model, threads=2)
    data = normal(3, 4)
    for wild in ([7, -9], [0, 1 << 62], [-(1 << 63), 0]):
        indices = np.array(wild)
        np.testing.assert_array_equal(compiled(data, indices, np.array(True)), data[[0, 0]])
        with pytest.raises(InvalidInputError, match=r"\(Gather\) has an index out of bounds"):
            compiled(data, indices, np.array(False))
    np.testing.assert_array_equal(compiled(data, np.array([2, -3]), np.array(False)), data[[2, 0]])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", ["bool", "bool[1]"])
def test_a_branch_in_a_branch_raises_an_error_where_both_are_taken(shape: str) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[3,4] x, int64[2,2] i, {shape} outer, {shape} inner) => (float[2] y) {{
            y = If (outer) <
                then_branch = first () => (float[2] a) {{
                    a = If (inner) <
                        then_branch = third () => (float[2] c) {{ c = GatherND(x, i) }},
                        else_branch = fourth () => (float[2] d) {{
                            d = Constant<value_floats = [0.0, 0.0]>()
                        }}
                    >
                }},
                else_branch = second () => (float[2] b) {{
                    b = Constant<value_floats = [1.0, 1.0]>()
                }}
            >
        }}
    """)
    compiled = tvm_fusion.compile(model, threads=2)
    data, wild = normal(3, 4), np.array([[0, 0], [0, 4]])
    size = (1,) if shape == "bool[1]" else ()
    for outer, inner in ((True, False), (False, True), (False, False)):
        flags = [np.full(size, flag) for flag in (outer, inner)]
        np.testing.assert_array_equal(compiled(data, wild, *flags), [1 - outer] * 2)
    with pytest.raises(InvalidInputError, match=r"\(GatherND\) has an index out of bounds"):
        compiled(data, wild, *[np.full(size, True)] * 2)
    right = compiled(data, np.array([[2, 3], [-3, -4]]), *[np.full(size, True)] * 2)
    np.testing.assert_array_equal(right, data[[2, 0], [3, 0]])


BRANCHES = {
    "several nodes": "a = ReverseSequence <batch_axis = 1, time_axis = 0> (x, i)",
    "a function of ONNX": """
        c = Cast <to = 7> (i)
        one = NegativeLogLikelihoodLoss <reduction = "none"> (x, c)
        a = Add (x, one)
    """,
    "a branch that is always taken": """
        yes = Constant <value = bool {1}> ()
        a = If (yes) <
            then_branch = third () => (float[3,3] c) { c = Gather(x, i) },
            else_branch = fourth () => (float[3,3] d) { d = Neg(x) }
        >
    """,
    "a loop": """
        yes = Constant <value = bool {1}> ()
        two = Constant <value = int64 {2}> ()
        a = Loop (two, yes, x) <
            body = step (int64 number, bool on, float[3,3] old) => (bool more, float[3,3] new) {
                more = Identity (on)
                row = Gather (x, i)
                new = Add (old, row)
            }
        >
    """,
}
"""Nodes of a branch that other nodes take the place of."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", BRANCHES)
def test_what_takes_the_place_of_a_node_is_in_the_same_branch(name: str) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[3,3] x, int64[3] i, bool taken) => (float[3,3] y) {{
            y = If (taken) <
                then_branch = first () => (float[3,3] a) {{ {BRANCHES[name]} }},
                else_branch = second () => (float[3,3] b) {{ b = Neg(x) }}
            >
        }}
    """)
    compiled = tvm_fusion.compile(model, threads=2)
    data, wild, right = normal(3, 3), np.array([0, 99, 1]), np.array([2, 0, 1])
    np.testing.assert_array_equal(compiled(data, wild, np.array(False)), -data)
    with pytest.raises(InvalidInputError, match="out of bounds"):
        compiled(data, wild, np.array(True))
    expected = _expected(model, data, right, np.array(True))
    np.testing.assert_allclose(compiled(data, right, np.array(True)), expected, 1e-6)


def test_a_branch_with_coordinates_of_an_open_dimension() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        graph (float[n,4] x, int64[2,1] i, bool safe, float[2,4] z) => (float[2,4] y) {
            y = If (safe) <
                then_branch = first () => (float[2,4] a) { a = Neg(z) },
                else_branch = second () => (float[2,4] b) { b = GatherND(x, i) }
            >
        }
    """)
    compiled = tvm_fusion.compile(model, shapes={"n": "n"}, threads=2)
    data, other, yes, no = normal(5, 4), normal(2, 4), np.array(True), np.array(False)
    inside, outside = np.array([[4], [-5]]), np.array([[5], [0]])
    np.testing.assert_array_equal(compiled(data, inside, no, other), data[[4, 0]])
    np.testing.assert_array_equal(compiled(data, outside, yes, other), -other)
    message = r"\(GatherND\) has an index out of bounds; 'x' has the shape \(n, 4\)"
    for arguments in ((data, outside, no), (data[:0], inside, no), (data[:0], inside, yes)):
        # There is no nearest element of nothing.
        with pytest.raises(InvalidInputError, match=message):
            compiled(*arguments, other)
