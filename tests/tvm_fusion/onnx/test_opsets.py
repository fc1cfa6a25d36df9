# SPDX-License-Identifier: Apache-2.0
"""Nodes that are newer than the opset of their model, or of a version that ONNX gave up."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_cases import assert_same_as_onnx_runtime, normal, one_node, onnx_model, run_relax

from tvm_fusion.errors import InvalidModelError, ModelWarning
from tvm_fusion.onnx.frontend import import_onnx


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [11, 14, 16])
def test_a_layer_normalisation_before_opset_17(opset: int) -> None:
    """ONNX Runtime takes it; the rest of the model keeps the meaning of its own opset."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["c"]),
        helper.make_node("LayerNormalization", ["c", "s"], ["n"], name="norm", axis=-1),
        helper.make_node("Softmax", ["n"], ["y"], axis=1),
    ]
    model = onnx_model(nodes, {"x": (2, 3, 5)}, ["y"], {"s": normal(5)}, opset)
    message = rf"says opset {opset}, .*: node 'norm' \(LayerNormalization, of opset 17\); .*export"
    with pytest.warns(ModelWarning, match=message) as told:
        assert_same_as_onnx_runtime(model)
    assert len(told) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("op_type", "opset", "newer"), [("HardSwish", 11, 14), ("Mish", 16, 18), ("Gelu", 12, 20)]
)
def test_activations_before_their_opset(op_type: str, opset: int, newer: int) -> None:
    """ONNX Runtime refuses these."""
    model = one_node(op_type, (3, 4), opset=opset)
    with pytest.warns(ModelWarning, match=rf"\({op_type}, of opset {newer}\)"):
        (found,) = run_relax(import_onnx(model), [normal(3, 4)])
    model.opset_import[0].version = newer
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": normal(3, 4)})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [18, 20])
def test_group_norms_with_a_scale_for_each_group(opset: int) -> None:
    constants = normal(2), normal(2, seed=3)
    model = one_node("GroupNormalization", (2, 6, 3, 4), *constants, opset=opset, num_groups=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_as_onnx_runtime(model)


@pytest.mark.parametrize(
    ("op_type", "opset"), [("GroupNormalization", 17), ("GroupNormalization", 18), ("Nothing", 18)]
)
def test_operators_that_stay_refused(op_type: str, opset: int) -> None:
    """Such operators have two meanings, lack inputs, or are unknown to ONNX."""
    model = one_node(op_type, (2, 6, 3), opset=opset)
    with pytest.raises(Exception, match=op_type) as caught:
        import_onnx(model)
    assert type(caught.value).__module__ == InvalidModelError.__module__


def test_operators_of_onnx_runtime_without_a_version() -> None:
    node = helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")
    model: onnx.ModelProto = onnx_model([node], {"x": (3, 4)}, ["y"])
    assert [entry.domain for entry in model.opset_import] == [""]
    assert_same_as_onnx_runtime(model)
