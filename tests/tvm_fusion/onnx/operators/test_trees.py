# SPDX-License-Identifier: Apache-2.0
"""Tree ensembles decide and add as ONNX Runtime does, whatever the modes, types and shapes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from classical_models import DOMAIN, MODES, RandomForest, check, model_of, node, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import tvm_fusion
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

LABELS = {"label": TensorProto.INT64}


def regressor(forest: RandomForest, outputs: int = 1, **others: Any) -> onnx.NodeProto:
    attributes = forest.attributes("target", outputs, n_targets=outputs, **others)
    return node("TreeEnsembleRegressor", "x", "y", **attributes)


def classifier(forest: RandomForest, classes: int, scored: int, **others: Any) -> onnx.NodeProto:
    attributes = forest.attributes("class", scored, **others)
    attributes.setdefault("classlabels_int64s", [7 * place - 3 for place in range(classes)])
    return node("TreeEnsembleClassifier", "x", "label scores", **attributes)


@given(
    seed=st.integers(0, 10**6),
    trees=st.integers(1, 20),
    depth=st.integers(0, 9),
    features=st.sampled_from([1, 3, 300]),
    rows=st.sampled_from([1, 2, 3, 5, 8, 13, 530]),
    outputs=st.integers(1, 3),
    modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3),
)
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_forests(
    seed: int, trees: int, depth: int, features: int, rows: int, outputs: int, modes: list[str]
) -> None:
    forest = RandomForest(seed, trees, depth, features, modes)
    check([regressor(forest, outputs)], tolerance=0, x=forest.rows(rows))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_where_thresholds_are_met_or_missing(mode: str) -> None:
    special = (0.0, -0.0, np.inf, -np.inf, float(np.finfo("f4").tiny), np.nan)
    forest = RandomForest(1, 9, 3, 2, [mode], special)
    check([regressor(forest)], tolerance=0, x=forest.rows(300))


@pytest.mark.slow
def test_float64_thresholds() -> None:
    """Neighbours in float64 that are one number in float32."""
    near = [1 + step * 2.0**-40 for step in range(-3, 4)]
    forest = RandomForest(2, 6, 4, 3, MODES, near)
    attributes = forest.attributes("target", 2, n_targets=2)
    for name in ("nodes_values", "target_weights"):
        tensor = numpy_helper.from_array(np.array(attributes.pop(name)), name)
        attributes[f"{name}_as_tensor"] = tensor
    base = numpy_helper.from_array(np.array([0.5, -1.0]), "base")
    attributes["base_values_as_tensor"] = base
    nodes = [node("TreeEnsembleRegressor", "x", "y", **attributes)]
    check(nodes, tolerance=0, x=forest.rows(64, "float64"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_integers_as_features(kind: str) -> None:
    forest = RandomForest(3, 6, 4, 3, MODES)
    x = np.random.default_rng(1).integers(-2, 3, (40, 3)).astype(kind)
    check([classifier(forest, 3, 3)], LABELS, x=x)


@pytest.mark.slow
def test_aggregates_and_bases() -> None:
    forest, nodes = RandomForest(4, 8, 3), []
    for aggregate, outputs in product(("SUM", "AVERAGE", "MIN", "MAX"), (1, 3)):
        base = [0.5, -2.0, 3.0][:outputs]
        others = {"aggregate_function": aggregate, "base_values": base, "n_targets": outputs}
        attributes = forest.attributes("target", outputs, **others)
        nodes.append(node("TreeEnsembleRegressor", "x", f"y{len(nodes)}", **attributes))
    check(nodes, x=forest.rows(50))


@pytest.mark.slow
def test_targets_without_weights_count_for_nothing() -> None:
    forest = RandomForest(5, 4, 3)
    attributes = forest.attributes("target", 1, n_targets=3, aggregate_function="MIN")
    attributes["target_ids"] = [2 * (place % 2) for place in range(len(attributes["target_ids"]))]
    check([node("TreeEnsembleRegressor", "x", "y", **attributes)], x=forest.rows(30))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"])
def test_transforms(transform: str) -> None:
    forest = RandomForest(6, 3, 3)
    x = forest.rows(50)
    for outputs in (1, 3):
        check([regressor(forest, outputs, post_transform=transform)], x=x)
    check([classifier(forest, 4, 4, post_transform=transform)], LABELS, x=x)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_two_classes(sign: int) -> None:
    """One score, or two; of probabilities, or of any numbers; with bases of none, one or both."""
    forest = RandomForest(7, 3, 3)
    nodes, types = [], {}
    bases: list[list[float]] = [[], [0.75], [0.5, -0.25]]
    for scored, base, transform in product(([0], [1], [0, 1]), bases, ("NONE", "LOGISTIC")):
        attributes = forest.attributes("class", len(scored), post_transform=transform)
        attributes["class_ids"] = [scored[place] for place in attributes["class_ids"]]
        weights = np.array(attributes["class_weights"])
        attributes["class_weights"] = list(np.abs(weights) / 16 if sign > 0 else weights)
        attributes |= {"classlabels_int64s": [4, 9], **({"base_values": base} if base else {})}
        label, scores = f"label{len(nodes)}", f"scores{len(nodes)}"
        nodes.append(node("TreeEnsembleClassifier", "x", f"{label} {scores}", **attributes))
        types[label] = TensorProto.INT64
    check(nodes, types, x=forest.rows(50))


@pytest.mark.slow
def test_classes_without_weights_are_never_chosen() -> None:
    forest = RandomForest(8, 3, 3)
    attributes = forest.attributes("class", 2, classlabels_int64s=[5, 6, 7, 8])
    attributes["class_weights"] = [-abs(weight) - 1 for weight in attributes["class_weights"]]
    nodes = [node("TreeEnsembleClassifier", "x", "label scores", **attributes)]
    check(nodes, LABELS, x=forest.rows(40))


def ensemble(dtype: str, members: list[float], y: str = "y", **others: Any) -> onnx.NodeProto:
    """A TreeEnsemble of version 5: two tests of membership, a comparison, and a single leaf."""

    def tensor(values: list[float], kind: str = dtype) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(values, kind), "")

    attributes = {
        "n_targets": 2,
        "tree_roots": [0, 3],
        "nodes_modes": tensor([6, 6, 2, 0], "uint8"),
        "nodes_featureids": [0, 1, 1, 0],
        "nodes_splits": tensor([0, 0, 0.5, 0]),
        "nodes_truenodeids": [1, 0, 2, 3],
        "nodes_trueleafs": [0, 1, 1, 1],
        "nodes_falsenodeids": [2, 1, 1, 3],
        "nodes_falseleafs": [0, 1, 1, 1],
        "nodes_missing_value_tracks_true": [0, 1, 0, 0],
        "membership_values": tensor([*members, np.nan, 2.0, np.nan]),
        "leaf_targetids": [0, 1, 0, 1],
        "leaf_weights": tensor([5.25, 10.0, -3.0, 0.5]),
    }
    return node("TreeEnsemble", "x", y, **(attributes | others))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("members", [[3.0], [1.0, 7.0, 3.0], [float(2 * i) for i in range(40)]])
def test_membership(dtype: str, members: list[float]) -> None:
    generator = np.random.default_rng(1)
    # ONNX Runtime ignores fractions of many members.
    x = generator.choice([*members, 1, 2, 3, 4, 5, -1, np.inf], (60, 2)).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [ensemble(dtype, members, f"y{a}", aggregate_function=a) for a in range(4)]
    check(nodes, {each.output[0]: kind for each in nodes}, {"": 18, DOMAIN: 5}, x=x)


@pytest.mark.slow
def test_missing_values_and_fractions_are_no_members() -> None:
    x = np.array([[np.nan, np.nan], [3.5, 2.0], [3.0, np.nan], [3.0, 2.0]], "float32")
    nodes = [ensemble("float32", [3.0, 4.0])]
    found = tvm_fusion.compile(model_of(nodes, {"x": x}, None, {"": 18, DOMAIN: 5}), threads=1)(x)
    # The second test counts a missing value as a member.
    np.testing.assert_array_equal(found, [[0, 10.5], [-3, 0.5], [5.25, 0.5], [5.25, 0.5]])


@pytest.mark.slow
def test_open_batch_and_variants() -> None:
    forest = RandomForest(9, 12, 5)
    nodes = [classifier(forest, 3, 3, post_transform="SOFTMAX")]
    model = model_of(nodes, {"x": forest.rows(2)}, LABELS, batch="N")
    opened = tvm_fusion.compile(model, shapes={"N": "N"}, threads=2)
    special = tvm_fusion.specialize(model, threads=2)
    for count in (1, 7, 8, 9, 1000):
        x = forest.rows(count)
        for found in (opened(x), special(x)):
            for one, other in zip(found, reference(model, {"x": x}), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_many_trees_of_few_rows_are_shared_out() -> None:
    forest = RandomForest(10, 300, 12)
    for aggregate in ("SUM", "MAX"):
        nodes = [regressor(forest, 2, aggregate_function=aggregate)]
        for count in (1, 3, 6):
            check(nodes, tolerance=0, x=forest.rows(count))


@pytest.mark.slow
def test_features_beside_a_network_and_chained_ensembles() -> None:
    forest, second = RandomForest(11, 4, 3), RandomForest(12, 4, 3, features=3)
    first = forest.attributes("target", 2, n_targets=2)
    nodes = [
        node("Scaler", "x", "scaled", offset=[0.5], scale=[2.0]),
        node("TreeEnsembleRegressor", "scaled", "two", **first),
        helper.make_node("MatMul", ["scaled", "w"], ["product"]),
        helper.make_node("Concat", ["two", "product"], ["three"], axis=1),
        node("TreeEnsembleRegressor", "three", "z", **second.attributes("target", 1, n_targets=1)),
    ]
    x = np.random.default_rng(1).standard_normal((20, 4)).astype("float32")
    check(nodes, x=x, w=np.ones((4, 1), "float32"))


@pytest.mark.slow
def test_a_model_without_onnx_operators_and_an_old_one() -> None:
    forest = RandomForest(13, 3, 3)
    nodes, x = [regressor(forest)], forest.rows(10)
    check(nodes, opsets={DOMAIN: 1}, tolerance=0, x=x)
    squeeze = helper.make_node("Squeeze", ["y"], ["z"], axes=[1])
    check([*nodes, squeeze], opsets={"": 9, DOMAIN: 1}, tolerance=0, x=x)


def _changed(forest: RandomForest, **changed: Any) -> onnx.ModelProto:
    attributes = forest.attributes("target", 1, n_targets=1) | changed
    nodes = [node("TreeEnsembleRegressor", "x", "y", **attributes)]
    return model_of(nodes, {"x": forest.rows(3)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes_featureids": [9] * 7}, "compares feature 9; 'x' has 4 features"),
        ({"nodes_truenodeids": [1] * 7}, "one of its nodes is the child of several"),
        ({"nodes_truenodeids": [50] * 7}, "have children, or .* that are not there"),
        ({"nodes_values": [0.0]}, "other lengths than nodes_treeids, 7"),
        ({"nodes_modes": ["BRANCH"] * 7}, "nodes of the mode 'BRANCH'"),
        ({"target_ids": [3] * 4}, "target_ids go from 3 to 3; it has 1"),
        ({"target_ids": [0]}, "other lengths than target_weights, 4"),
        (
            {"aggregate_function": "MIN", "target_weights": [1.0, 2.0, 3.0, float("inf")]},
            "its weights are not finite; expected numbers for MIN",
        ),
        ({"base_values": [1.0, 2.0]}, "it has 2 base_values"),
        ({"aggregate_function": "PRODUCT"}, "its aggregate_function is 'PRODUCT'"),
        ({"post_transform": "TANH"}, "its post_transform is 'TANH'"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    forest = RandomForest(0, 1, 2)
    forest.nodes = []
    for number in range(7):
        entry = {"tree": 0, "node": number, "feature": 1, "value": 0.0, "tracks": 0}
        entry |= {"mode": "LEAF" if number > 2 else "BRANCH_LEQ"}
        entry |= {"true": 2 * number + 1, "false": 2 * number + 2} if number < 3 else {}
        forest.nodes.append({"true": 0, "false": 0} | entry)
    import_onnx(_changed(forest))
    with pytest.raises(UnsupportedOperatorError, match=f"'TreeEnsembleRegressor_y': .*{message}"):
        import_onnx(_changed(forest, **changed))
