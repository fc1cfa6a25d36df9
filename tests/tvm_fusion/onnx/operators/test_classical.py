# SPDX-License-Identifier: Apache-2.0
"""Features, linear models and support vectors of ``ai.onnx.ml`` are those of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from classical_models import DOMAIN, check, model_of, node, reference
from onnx import TensorProto, helper, numpy_helper
from onnx_cases import normal

import tvm_fusion
from tvm_fusion.errors import InvalidInputError, InvalidModelError, UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
EDGES = np.array([[0, -0.0, 1], [np.nan, 1, -2], [np.inf, 1, 2], [-3, -1, -2], [0, 0, 0]], "f4")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_scaling(dtype: str) -> None:
    x = (normal(7, 3) * 5).astype(dtype)
    nodes = [
        node("Scaler", "x", "a", offset=[0.5, -1.0, 2.0], scale=[2.0, 0.25, -1.0]),
        node("Scaler", "x", "b", offset=[0.5], scale=[2.0]),
        node("Normalizer", "x", "c", norm="L1"),
        node("Normalizer", "x", "d", norm="L2"),
        node("Normalizer", "x", "e"),
    ]
    check(nodes, x=x)


def test_norms_of_edge_values() -> None:
    check([node("Normalizer", "x", f"y{norm}", norm=norm) for norm in ("L1", "L2", "MAX")], x=EDGES)


def test_imputation_and_thresholds() -> None:
    nan = float("nan")
    floats = {"imputed_value_floats": [7.0, 8.0, 9.0]}
    nodes = [
        node("Imputer", "x", "a", replaced_value_float=nan, **floats),
        node("Imputer", "x", "b", replaced_value_float=0.0, imputed_value_floats=[5.0]),
        node("Binarizer", "z", "c", threshold=0.25),
        node("Imputer", "i", "d", replaced_value_int64=2, imputed_value_int64s=[-7]),
        node("FeatureVectorizer", "x z", "e", inputdimensions=[2, 4]),
    ]
    integers = np.arange(15).reshape(5, 3) % 4
    check(nodes, {"d": INT64}, x=EDGES, i=integers, z=normal(5, 3))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_columns(shape: tuple[int, ...]) -> None:
    nodes = [node("ArrayFeatureExtractor", "x places", "y")]
    check(nodes, x=normal(*shape), places=np.array([[3, 0, 3]]))


@pytest.mark.slow
def test_labels() -> None:
    keys, values = [5, -3, 5, 2**40], [10, 20, 30, 40]
    nodes = [
        node("LabelEncoder", "i", "a", keys_int64s=keys, values_int64s=values, default_int64=-9),
        node("LabelEncoder", "i", "b", keys_int64s=keys, values_floats=[0.5, 1.5, 2.5, 3.5]),
        node("LabelEncoder", "x", "c", keys_floats=[1.0, 0.0, -2.0], values_int64s=[1, 2, 3]),
    ]
    types = {"a": INT64, "c": INT64}
    i = np.array([[5, -3, 2**40], [4, 6, -(2**50)]])
    check(nodes, types, {"": 18, DOMAIN: 2}, i=i, x=EDGES)


def test_labels_of_tensors() -> None:
    def tensor(values: Any, dtype: str) -> onnx.TensorProto:
        return numpy_helper.from_array(np.array(values, dtype), "")

    doubles = {"keys_tensor": tensor([np.nan, 1.0, 0.5], "f8")}
    nodes = [
        node(
            "LabelEncoder",
            "x",
            "y",
            **doubles,
            values_tensor=tensor([4.0, 2.0, -0.5], "f8"),
            default_tensor=tensor([9.0], "f8"),
        )
    ]
    x = np.array([[np.nan, 1.0], [0.5, 0.25], [np.inf, -np.inf]])
    check(nodes, {"y": TensorProto.DOUBLE}, {"": 18, DOMAIN: 4}, x=x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_one_hot(dtype: str) -> None:
    x = np.array([[5, 2], [-3, 7], [2, 5]], dtype)
    check([node("OneHotEncoder", "x", "y", cats_int64s=[2, 5, -3], zeros=1)], x=x)


def test_unknown_categories_are_errors_if_asked_for() -> None:
    x = np.array([[5, 2], [2, 5]])
    nodes = [node("OneHotEncoder", "x", "y", cats_int64s=[2, 5, -3], zeros=0)]
    check(nodes, x=x)
    compiled = tvm_fusion.compile(model_of(nodes, {"x": x}), threads=1)
    with pytest.raises(tvm_fusion.errors.TVMFusionError, match="a category that the OneHotEncoder"):
        compiled(x + 1)


TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_linear_models(transform: str) -> None:
    """One score, and several, with and without intercepts; probabilities for PROBIT."""
    scale = 0.1
    weights = [float(value) for value in np.abs(normal(12)) * scale]
    x = np.abs(normal(9, 4, seed=2)) * scale
    x[0] = 0
    several = {"coefficients": weights, "post_transform": transform}
    one = several | {"coefficients": weights[:4]}
    base = [0.2, 0.4, 0.3] if transform == "PROBIT" else [0.0, 0.5, -0.25]
    nodes = [
        node("LinearRegressor", "x", "a", targets=3, intercepts=base, **several),
        node("LinearRegressor", "x", "b", intercepts=base[1:2], **one),
        node(
            "LinearClassifier", "x", "l m", classlabels_ints=[4, 2, 9], intercepts=base, **several
        ),
    ]
    if transform != "PROBIT":
        binary = one | {"classlabels_ints": [8, 3], "intercepts": [-0.05]}
        nodes.append(node("LinearClassifier", "x", "n o", **binary))
    check(nodes, {"l": INT64, "n": INT64}, tolerance=1e-4, x=x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_linear_classifier_of_other_types(dtype: str) -> None:
    x = (normal(9, 4) * 3).astype(dtype)
    weights = [float(value) for value in normal(12, seed=2)]
    attributes = {"coefficients": weights, "intercepts": [0.5, 0.0, -1.0]}
    nodes = [node("LinearClassifier", "x", "l m", classlabels_ints=[0, 1, 2], **attributes)]
    check(nodes, {"l": INT64}, x=x)


def _vectors(classes: int, probabilities: bool, kernel: str) -> dict[str, Any]:
    """Attributes of an SVMClassifier of 4 features."""
    counts = [3, 2, 4, 1][:classes]
    pairs = classes * (classes - 1) // 2
    generator = np.random.default_rng(classes)

    def floats(count: int, scale: float = 1.0) -> list[float]:
        return [float(value) for value in generator.standard_normal(count) * scale]

    attributes = {
        "classlabels_ints": [3 * label + 1 for label in range(classes)],
        "vectors_per_class": counts,
        "support_vectors": floats(4 * sum(counts)),
        "coefficients": floats((classes - 1) * sum(counts)),
        "rho": floats(pairs, 0.3),
        "kernel_type": kernel,
        "kernel_params": [0.3, 0.5, 3.0],
    }
    if probabilities:
        attributes |= {"prob_a": [-1 - abs(a) for a in floats(pairs)], "prob_b": floats(pairs)}
    return attributes


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vectors(kernel: str) -> None:
    nodes, types = [], {}
    for classes in (2, 3, 4):
        for probabilities in (False, True):
            name = f"{classes}{probabilities}"
            attributes = _vectors(classes, probabilities, kernel)
            nodes.append(node("SVMClassifier", "x", f"l{name} s{name}", **attributes))
            types[f"l{name}"] = INT64
    logistic = _vectors(2, False, kernel) | {"post_transform": "LOGISTIC"}
    nodes.append(node("SVMClassifier", "x", "lz sz", **logistic))
    regression = {
        name: value
        for name, value in _vectors(2, False, kernel).items()
        if name in ("support_vectors", "coefficients", "kernel_type", "kernel_params")
    } | {"rho": [0.25], "n_supports": 5}
    nodes.append(node("SVMRegressor", "x", "r", **regression))
    nodes.append(node("SVMRegressor", "x", "o", one_class=1, **regression))
    check(nodes, types | {"lz": INT64}, tolerance=1e-4, x=normal(40, 4, seed=7))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("sign", [1, -1])
def test_linear_support_vectors(sign: int) -> None:
    nodes, types = [], {}
    for classes in (2, 3):
        weights = normal(4 * classes, seed=classes)
        attributes = {
            "classlabels_ints": [5, 6, 7][:classes],
            "coefficients": [float(w) for w in (np.abs(weights) if sign > 0 else weights)],
            "rho": [0.1],
            "kernel_params": [0.0, 0.0, 0.0],
        }
        nodes.append(node("SVMClassifier", "x", f"l{classes} s{classes}", **attributes))
        types[f"l{classes}"] = INT64
    only = {"coefficients": [1.0, -1.0, 0.5, 2.0], "rho": [0.5], "kernel_params": [0.0, 0.0, 0.0]}
    nodes.append(node("SVMRegressor", "x", "r", n_supports=0, **only))
    check(nodes, types, x=normal(30, 4, seed=3))


@pytest.mark.slow
def test_open_batch() -> None:
    nodes = [
        node("Scaler", "x", "scaled", offset=[0.5], scale=[2.0]),
        node("SVMClassifier", "scaled", "label scores", **_vectors(3, True, "RBF")),
    ]
    x = normal(11, 4)
    model = model_of(nodes, {"x": x}, {"label": INT64}, batch="N")
    opened = tvm_fusion.compile(model, shapes={"N": "N"}, threads=2)
    fixed = tvm_fusion.compile(model, shapes={"N": 11}, threads=2)
    for one, other in zip(opened(x), fixed(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_vector_is_one_row() -> None:
    attributes = {"coefficients": [1.0, -2.0, 0.5], "intercepts": [0.25]}
    check([node("LinearRegressor", "x", "y", **attributes)], x=normal(3))


def _single(op_type: str, **attributes: Any) -> onnx.ModelProto:
    outputs = "y z" if "Classifier" in op_type else "y"
    types = {"y": INT64} if "Classifier" in op_type else {}
    return model_of([node(op_type, "x", outputs, **attributes)], {"x": normal(2, 3)}, types)


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("Scaler", {"offset": [1.0, 2.0]}, "its offset has 2 values; expected 1 or one for each"),
        ("Normalizer", {"norm": "L3"}, "its norm is 'L3'"),
        ("Imputer", {}, "it has no imputed_value_floats"),
        ("FeatureVectorizer", {}, "it has 0 inputdimensions for 1 inputs"),
        (
            "LabelEncoder",
            {"keys_floats": [1.0], "values_floats": [1.0, 2.0]},
            "it has no keys and values of numbers",
        ),
        ("OneHotEncoder", {"cats_int64s": [1, 1]}, "missing, or repeat a category"),
        (
            "LinearRegressor",
            {"coefficients": [1.0]},
            "its 1 coefficients do not fit 1 results of 3",
        ),
        ("LinearRegressor", {"intercepts": [1.0, 2.0]}, "it has 2 intercepts for 1 targets"),
        (
            "LinearClassifier",
            {"coefficients": [1.0] * 6, "intercepts": [0.0] * 2, "classlabels_ints": [1]},
            "it has 1 labels for 2 classes",
        ),
        (
            "LinearClassifier",
            {"coefficients": [1.0] * 3, "classlabels_ints": [1, 2], "post_transform": "PROBIT"},
            "PROBIT has no meaning for two classes with one score",
        ),
        ("SVMRegressor", {"n_supports": 2}, "its 2 support vectors do not fit its features"),
        ("SVMClassifier", {"vectors_per_class": [1, 1]}, "do not fit its features"),
        ("ZipMap", {}, r"outputs=\[\.\.\., 'x'\].*options=\{id\(model\): \{'zipmap': False\}\}"),
        ("DictVectorizer", {}, "maps cannot be compiled"),
        ("CategoryMapper", {}, "encode it as integers before the model"),
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "encode it as integers"),
        (
            "LinearClassifier",
            {"coefficients": [1.0] * 3, "classlabels_strings": ["a", "b"]},
            "'nocl': True",
        ),
    ],
)
def test_refusals(op_type: str, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=f"'{op_type}_y': .*{message}"):
        import_onnx(_single(op_type, **attributes))


def test_keys_that_are_no_tensor() -> None:
    with pytest.raises(InvalidModelError, match="onnx.checker refuses the model: .*keys_tensor"):
        import_onnx(_single("LabelEncoder", keys_tensor=1.0, values_floats=[1.0]))


@pytest.mark.slow
def test_scores_in_front_of_maps_and_beside_labels_of_text() -> None:
    x = normal(5, 3)
    weights: dict[str, Any] = {"coefficients": normal(9).tolist(), "intercepts": [0.5, 0.0, -0.5]}
    trees: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [1, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "class_treeids": [0, 0],
        "class_nodeids": [1, 2],
        "class_ids": [0, 2],
        "class_weights": [0.25, 1.0],
    }
    labels = ["setosa", "versicolor", "virginica"]
    nodes = [
        node("LinearClassifier", "x", "label s", classlabels_strings=labels, **weights),
        node("TreeEnsembleClassifier", "x", "label2 t", classlabels_strings=labels, **trees),
        node("Normalizer", "s", "share", norm="L1"),
        node("ZipMap", "share", "maps", classlabels_strings=labels),
    ]
    model = model_of(nodes, {"x": x})
    with pytest.raises(UnsupportedOperatorError, match=r"outputs=\[\.\.\., 'share'\]"):
        tvm_fusion.compile(model)
    found = tvm_fusion.compile(model, outputs=["t", "share"])(x)
    numbers = {"classlabels_ints": [0, 1, 2]}
    same = [
        node("LinearClassifier", "x", "label s", **numbers, **weights),
        node("TreeEnsembleClassifier", "x", "n t", classlabels_int64s=[0, 1, 2], **trees),
        node("Normalizer", "s", "share", norm="L1"),
    ]
    types = {"label": INT64, "n": INT64}
    _, _, t, share = reference(model_of(same, {"x": x}, types), {"x": x})
    np.testing.assert_allclose(found[0], t, rtol=1e-6)
    np.testing.assert_allclose(found[1], share, rtol=1e-5)
    for wrong in ([], ["t", "t"], ["x"], ["absent"], "t"):
        with pytest.raises(InvalidInputError, match="outputs (is|has)"):
            tvm_fusion.compile(model, outputs=wrong)


def test_text_as_input() -> None:
    model = _single("LabelEncoder", keys_floats=[1.0], values_floats=[2.0])
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    with pytest.raises(UnsupportedOperatorError, match="elements of STRING.*encode it as integers"):
        import_onnx(model)


def test_unknown_ranks_are_told() -> None:
    model = _single("Scaler", offset=[0.0], scale=[1.0])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    model.graph.node[0].input[0] = "less"
    model.graph.node.insert(0, helper.make_node("Squeeze", ["x"], ["less"]))
    with pytest.raises(UnsupportedOperatorError, match="type of 'less' is only known at run time"):
        import_onnx(model, {"N": "N"})


def test_vectors_of_features_of_unknown_number_are_told() -> None:
    nodes = [node("FeatureVectorizer", "x", "y", inputdimensions=[3])]
    model = model_of(nodes, {"x": normal(2, 3)})
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "M"
    with pytest.raises(UnsupportedOperatorError, match="number of features of 'x' is only known"):
        import_onnx(model, {"M": "M"})
