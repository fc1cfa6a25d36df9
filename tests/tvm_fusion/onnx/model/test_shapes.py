# SPDX-License-Identifier: Apache-2.0
"""Sizes of symbolic dimensions: bound, missing, contradicting, absurd."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_cases import assert_same_as_onnx_runtime, normal, onnx_model

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx


def _sum(*dims: Any, other: Any = None) -> onnx.ModelProto:
    """A model y = a + b."""
    node = helper.make_node("Add", ["a", "b"], ["y"])
    return onnx_model([node], {"a": dims, "b": other or dims}, ["y"])


def _shapes(model: onnx.ModelProto, shapes: Any) -> list[tuple[int | str, ...]]:
    imported = import_onnx(model, shapes)
    return [spec.shape for spec in (*imported.inputs, *imported.outputs)]


def test_by_name_of_the_dimension() -> None:
    assert _shapes(_sum("n", 3), {"n": 5}) == [(5, 3)] * 3


def test_by_name_of_the_input() -> None:
    assert _shapes(_sum("n", 3), {"a": (5, 3), "b": [5, 3]}) == [(5, 3)] * 3


def test_both_ways_at_once_and_numpy_sizes() -> None:
    model = _sum("n", 3, other=("m", 3))
    assert _shapes(model, {"a": (np.int64(5), 3), "m": np.int32(1)}) == [(5, 3), (1, 3), (5, 3)]


def test_names_that_look_like_arithmetic() -> None:
    assert _shapes(_sum("batch-size", "4*k"), {"batch-size": 2, "4*k": 8}) == [(2, 8)] * 3


def test_unknown_rank() -> None:
    model = _sum(2, 3)
    model.graph.input[1].type.tensor_type.ClearField("shape")
    assert _shapes(model, {"b": (2, 3)}) == [(2, 3)] * 3
    with pytest.raises(InvalidModelError, match=r"input 'b' has no shape; pass shapes=\{'b': "):
        import_onnx(model)


def test_shapes_that_the_model_declared_before_do_not_matter() -> None:
    model = _sum("n", 3)
    model.graph.value_info.append(helper.make_tensor_value_info("y", 1, ("stale", 3)))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, ("stale", 3)))
    assert _shapes(model, {"n": 2}) == [(2, 3)] * 3


def test_a_group_norm_has_the_shape_of_its_data() -> None:
    nodes = [
        helper.make_node("GroupNormalization", ["x", "s", "b"], ["t"], num_groups=2),
        helper.make_node("GroupNormalization", ["t", "s", "b"], ["u"], num_groups=1),
        helper.make_node("Resize", ["u", "", "scales"], ["y"], mode="linear"),
    ]
    constants = {
        "s": np.ones(4, np.float32),
        "b": np.zeros(4, np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    model = onnx_model(nodes, {"x": (1, 4, 3, 5)}, ["y"], constants, 21)
    assert_same_as_onnx_runtime(model, {"x": normal(1, 4, 3, 5)})


def test_the_types_of_a_group_norm_are_checked() -> None:
    node = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=2)
    constants = {"s": np.ones(4, np.float64), "b": np.zeros(4, np.float32)}
    model = onnx_model([node], {"x": (1, 4, 3, 5)}, ["y"], constants, 21)
    with pytest.raises(InvalidModelError, match=r"scale has inconsistent type tensor\(double\)"):
        import_onnx(model)


def test_missing_sizes_say_what_to_pass() -> None:
    with pytest.raises(InvalidModelError) as caught:
        import_onnx(_sum("batch", 3, "width", other=(1, None, 1)))
    first, second = str(caught.value).split("; input ")
    assert first == (
        "input 'a' has no size for dimensions 0 ('batch'), 2 ('width'); pass for example "
        "shapes={'a': (1, 3, 1)} or shapes={'batch': 1, 'width': 1} "
        "(--shape batch=1 --shape width=1)"
    )
    assert second == "'b' has no size for dimension 1; pass for example shapes={'b': (1, 1, 1)}"


def test_inputs_of_size_0_have_it_or_another_one() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"output .* of shape \(0, 3\) is empty"):
        import_onnx(_sum(0, 3))
    assert _shapes(_sum(0, 3), {"a": (2, 3), "b": (2, 3)}) == [(2, 3)] * 3


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (5, 4), "n": 5}, "gives dimension 1 of input 'a' the size 4; the model fixes it at"),
        ({"a": (5,)}, r"shapes gives input 'a' the shape \(5,\) of 1 dimensions; the model"),
        ({"c": (5, 3)}, r"shapes names 'c', which is neither .* inputs: 'a' \(n, 3\), 'b' \(n, 3"),
        ({"n": 1 << 70}, "the size 1180591620717411303424; tensors have up to 2147483647 elem"),
        ({"n": 0}, "shapes gives dimension 'n' the size 0; expected a whole number of 1 or more"),
        ({"n": -2}, "shapes gives dimension 'n' the size -2"),
        ({"a": (True, 3)}, "shapes gives dimension 0 of input 'a' the size True"),
        ({"a": (2.5, 3)}, "shapes gives dimension 0 of input 'a' the size 2.5"),
        ({"n": 2.5}, "shapes gives 'n' the value 2.5; expected a shape or a size"),
        ({"n": "a b"}, "shapes gives dimension 'n' the name 'a b'; expected letters"),
        ({"a": (5, 3), "b": (4, 3)}, "shapes do not fit together"),
        ({"n": 10**9}, r"tensor 'a' of shape \(1000000000, 3\) has 3000000000 elements; at most"),
    ],
)
def test_shapes_that_do_not_fit(shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        import_onnx(_sum("n", 3), shapes)


def test_intermediate_tensors_can_be_too_large_as_well() -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"])
    model = onnx_model([node], {"a": (1, 60_000), "b": (60_000, 1)}, ["y"])
    with pytest.raises(InvalidModelError, match="tensor 'y' of shape .* has 3600000000 elements"):
        import_onnx(model)


def test_declared_sizes_that_are_absurd() -> None:
    with pytest.raises(InvalidModelError, match="at most 2147483647 can be compiled"):
        import_onnx(_sum(2**62))
