# SPDX-License-Identifier: Apache-2.0
"""Sequences and optionals of constant lengths have the numbers of ONNX Runtime."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
from onnx_cases import assert_same_as_onnx_runtime, relax_ops

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx


def parsed(body: str, shape: str, constants: str = "", opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": {opset}]> g (float[4,3] x) => (float[{shape}] y)'
        f"<{constants}> {{ {body} }}"
    )


I = "int64 i = {1}, int64 j = {-2}"  # noqa: E741

CASES = [
    ("s = SequenceConstruct(x, x) y = ConcatFromSequence<axis = 0>(s)", "8,3", ""),
    ("s = SequenceConstruct(x, x) y = ConcatFromSequence<axis = -1, new_axis = 1>(s)", "4,3,2", ""),
    ("s = SplitToSequence<axis = 0>(x, k) y = SequenceAt(s, i)", "3,3", "int64[2] k = {1,3}, " + I),
    ("s = SplitToSequence<axis = 0>(x, k) y = SequenceAt(s, i)", "1,3", "int64 k = {3}, " + I),
    ("s = SplitToSequence<axis = 1, keepdims = 0>(x) y = SequenceAt(s, j)", "4", I),
    ("s = SplitToSequence<axis = -1>(x) y = SequenceAt(s, j)", "4,1", I),
    (
        """e = SequenceEmpty() a = SequenceInsert(e, x) n = Neg(x) b = SequenceInsert(a, n, z)
        r = Relu(x) c = SequenceInsert(b, r, i) d = Identity(c) y = ConcatFromSequence<axis = 0>(d)
        """,
        "12,3",
        "int64 z = {0}, " + I,
    ),
    (
        """n = Neg(x) s = SequenceConstruct(x, n, x) t = SequenceErase(s, j) u = SequenceErase(t)
        c = SequenceLength(s) f = Cast<to = 1>(c) a = SequenceAt(u, z) y = Mul(a, f)""",
        "4,3",
        "int64 z = {-1}, " + I,
    ),
    ("o = Optional(x) y = OptionalGetElement(o)", "4,3", ""),
    (
        """s = SequenceConstruct(x, x) o = Optional(s) h = OptionalHasElement(o)
        t = OptionalGetElement(o) a = SequenceAt(t, i) f = Cast<to = 1>(h) y = Add(a, f)""",
        "4,3",
        I,
    ),
    ("h = OptionalHasElement() f = Cast<to = 1>(h) y = Add(x, f)", "4,3", ""),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("body", "shape", "constants"), CASES)
def test_lists_are_written_out(body: str, shape: str, constants: str) -> None:
    imported = assert_same_as_onnx_runtime(parsed(body, shape, constants))
    assert not any("sequence" in op for op in relax_ops(imported))


def test_lists_that_a_loop_fills() -> None:
    body = """
        e = SequenceEmpty()
        s = Loop(count, true, e) <body = step (int64 k, bool go, seq(float[4,3]) before)
            => (bool on, seq(float[4,3]) after) {
                on = Identity(go) f = Cast<to = 1>(k) p = Add(x, f)
                after = SequenceInsert(before, p)
            }>
        y = ConcatFromSequence<axis = 1>(s)"""
    model = parsed(body, "4,9", "int64 count = {3}, bool true = {1}")
    onnxruntime.InferenceSession(model.SerializeToString())  # it is a valid model
    assert_same_as_onnx_runtime(model)


@pytest.mark.parametrize(
    "body",
    [
        "m = ArgMax<axis = 0, keepdims = 0>(x) q = ReduceMax<keepdims = 0>(m)"
        " s = SequenceConstruct(x, x) y = SequenceAt(s, q)",
        "s = SequenceConstruct(x, x) y = SequenceAt(s, far)",
    ],
)
def test_positions_that_are_not_known(body: str) -> None:
    model = parsed(body, "4,3", "int64 far = {7}")
    with pytest.raises(
        UnsupportedOperatorError, match=r"'y': SequenceAt .*a position in it, is not"
    ):
        import_onnx(model)
