# SPDX-License-Identifier: Apache-2.0
"""Scan, Loop and If have the numbers of ONNX Runtime, or are refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import assert_same_as_onnx_runtime, int64, normal, onnx_model

import tvm_fusion
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

FLOAT = TensorProto.FLOAT


def info(name: str, *shape: int, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def scan(steps: int, **attributes: Any) -> onnx.ModelProto:
    """A sum of what was seen, and each product with a constant of the body."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["s", "v"], ["t"]),
            helper.make_node("Mul", ["t", "factor"], ["u"]),
        ],
        "body",
        [info("s", 4), info("v", 4)],
        [info("t", 4), info("u", 4)],
        [numpy_helper.from_array(normal(4, seed=5), "factor")],
    )
    node = helper.make_node(
        "Scan", ["start", "x"], ["last", "y"], "op", body=body, num_scan_inputs=1, **attributes
    )
    shape = (4, steps) if "scan_input_axes" in attributes else (steps, 4)
    return onnx_model([node], {"start": (4,), "x": shape}, ["last", "y"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"scan_input_directions": [1]},
        {"scan_output_directions": [1]},
        {"scan_input_axes": [1], "scan_output_axes": [1]},
    ],
)
def test_scans(attributes: dict[str, Any]) -> None:
    assert_same_as_onnx_runtime(scan(5, **attributes))


@pytest.mark.slow
def test_outputs_of_many_steps() -> None:
    assert_same_as_onnx_runtime(scan(19))


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="'op': Scan .* its 9000 steps become 18000"):
        import_onnx(scan(9000))


def independent(steps: int | str, body: str, opset: int = 18) -> onnx.ModelProto:
    """A Scan over the rows of b and c, past which ``a`` only goes; its body yields u, v, w."""
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": {opset}]>
        g (float[5, 4] a, float[{steps}, 4] b, float[{steps}, 1] c, float[2, 3, 4] outer)
            => (float[5, 4] last, float[] u, float[] v, float[] w) <int64[1] end = {{-1}}> {{
            last, u, v, w = Scan<num_scan_inputs = 2, body = step
                (float[5, 4] s, float[4] p, float[1] q)
                => (float[5, 4] t, float[] u, float[] v, float[] w)
                <int64[1] rows = {{0}}> {{
                copy = Identity(s) t = Identity(copy) {body}
            }}>(a, b, c)
        }}""")


DISTANCES = """
    difference = Sub(s, p)
    squares = ReduceSumSquare<keepdims = 0>(difference, end)
    root = Sqrt(squares)
    u = Add(root, q)
    total = ReduceMean(difference, rows)
    row = Tanh(total)
    last_axis = Constant<value = int64[1] {1}>()
    v = ReduceSum<keepdims = 0>(row, last_axis)
    scaled = Mul(p, outer)
    above = Greater(scaled, q)
    w = Where(above, scaled, p)"""


@pytest.mark.parametrize("steps", [1, 5000])
def test_scans_of_independent_steps_are_computed_at_once(steps: int) -> None:
    """Their number may be beyond what can be unrolled."""
    assert_same_as_onnx_runtime(independent(steps, DISTANCES))


def test_independent_steps_with_axes_as_attributes() -> None:
    body = """
        difference = Sub(p, s)
        u = ReduceL1<axes = [1], keepdims = 0>(difference)
        v = ReduceMax<axes = [-2], keepdims = 1>(difference)
        w = ReduceSum<keepdims = 0>(v, end)"""
    assert_same_as_onnx_runtime(independent(5000, body, opset=13))


def test_open_number_of_independent_steps() -> None:
    model = independent("N", DISTANCES)
    compiled = tvm_fusion.compile(model, shapes={"N": "N"}, threads=1)
    for steps in (1, 7):
        feeds = {"a": normal(5, 4), "b": normal(steps, 4, seed=2), "c": normal(steps, 1, seed=3)}
        feeds["outer"] = normal(2, 3, 4, seed=4)
        expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
        for found, wanted in zip(compiled(**feeds), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "u = Sub(s, p) v = ReduceSum<keepdims = 0>(p) w = Neg(q)",  # all axes
        "zero = Constant<value = int64 {0}>() u = Sub(s, p) v = Identity(p) w = CumSum(p, zero)",
        "u = Sub(s, p) v = Neg(p) w = Neg(s)",  # the same in all steps
    ],
)
def test_other_scans_whose_states_pass_are_unrolled(body: str) -> None:
    assert_same_as_onnx_runtime(independent(4, body))


def loop(count: np.ndarray | None, condition: str = "go") -> onnx.ModelProto:
    """A running product, and the number of the step added to it."""
    end = {"computed": "is_small", "counted": "is_early"}.get(condition, "go_on")
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Cast", ["i"], ["number"], to=FLOAT),
            helper.make_node("Mul", ["s", "x"], ["t"]),
            helper.make_node("Add", ["t", "number"], ["u"]),
            helper.make_node("ReduceMax", ["u"], ["top"], keepdims=0),
            helper.make_node("Less", ["top", "top"], ["is_small"]),
            helper.make_node("Less", ["number", "limit"], ["is_early"]),
        ],
        "body",
        [info("i", kind=TensorProto.INT64), info("go", kind=TensorProto.BOOL), info("s", 3)],
        [info(end, kind=TensorProto.BOOL), info("t", 3), info("u", 3)],
        [numpy_helper.from_array(np.array(2.5, np.float32), "limit")],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["last", "y"], "op", body=body)]
    if count is None:
        nodes.insert(0, helper.make_node("Cast", ["total"], ["n"], to=TensorProto.INT64))
        nodes.insert(0, helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0))
        return onnx_model(nodes, {"x": (3,)}, ["last", "y"])
    return onnx_model(nodes, {"x": (3,)}, ["last", "y"], {"n": count})


def test_loops() -> None:
    assert_same_as_onnx_runtime(loop(np.array(4)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("most", [2, 9])
def test_loops_that_count(most: int) -> None:
    assert_same_as_onnx_runtime(loop(np.array(most), "counted"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (loop(None), "its number of steps depends on data; expected a constant"),
        (loop(np.array(4), "computed"), "its condition to go on depends on data; expected"),
        (loop(np.array(0)), "it has no steps, so its outputs may have no size"),
    ],
)
def test_loops_that_are_refused(model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=f"'op': Loop .* {reason}"):
        import_onnx(model)


def test_scans_with_a_batch_are_refused() -> None:
    """The first version of Scan had an axis of sequences before all others."""
    model = onnx.parser.parse_model("""
        <ir_version: 3, opset_import: ["": 8]>
        old (float[1, 2] s, float[1, 3, 2] x) => (float[1, 2] y, float[1, 3, 2] z) {
            y, z = Scan<num_scan_inputs = 1, body = add (float[2] a, float[2] b)
                => (float[2] c, float[2] d) { c = Add(a, b) d = Identity(c) }>("", s, x)
        }""")
    with pytest.raises(UnsupportedOperatorError, match="Scan .*: this version has a batch"):
        import_onnx(model)


def test_branches_of_other_shapes_are_refused() -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Slice", ["x", "zero", "one" if name == "then" else "two"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, FLOAT, [None])],
        )
        for name in ("then", "else")
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "sum"], ["flag"]),
        helper.make_node("If", ["flag"], ["y"], "op", **branches),
    ]
    constants = {"zero": int64(0), "one": int64(1), "two": int64(2)}
    model = onnx_model(nodes, {"x": (3,)}, ["y"], constants)
    with pytest.raises(UnsupportedOperatorError, match="its branches return other shapes"):
        import_onnx(model)
