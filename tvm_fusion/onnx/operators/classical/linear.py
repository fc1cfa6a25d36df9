# SPDX-License-Identifier: Apache-2.0
"""Linear models and support vector machines of ``ai.onnx.ml``.

::

    LinearRegressor:  x @ coefficients.T + intercepts
    SVMRegressor:     kernel(x, support_vectors) @ coefficients + rho
    SVMClassifier:    the same for each pair of classes; a pair votes for one of its classes
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from onnx import TensorProto
from tvm import relax

from schedules.cpu.loops.pairwise_coupling import pairwise_coupling

from ...model.expansion import Expansion
from ..operator import ML_DOMAIN, Operator
from .carriers import carry
from .features import float_rows
from .refusals import classical_refusal
from .scores import both, label_if, label_of_largest, positive, transform_problem, transformed

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE

PAIRWISE_COUPLING = "tvm_fusion.PairwiseCoupling"
"""Operator that makes probabilities of classes of those of pairs."""


def _floats(parts: Expansion, name: str) -> np.ndarray:
    return np.array(parts.get(name, []), np.float32)


def _features(parts: Expansion) -> int | None:
    return (parts.facts.dims(parts.input(0)) or (None,))[-1]


def _linear(
    parts: Expansion, coefficients: np.ndarray, rows: int, offset: np.ndarray
) -> str | None:
    """``x @ coefficients.T + offset`` for ``rows`` results; None if their numbers do not fit."""
    features = _features(parts)
    if features is None or coefficients.size != rows * features:
        return None
    weights = parts.constant("coefficients", coefficients.reshape(rows, features).T.copy())
    product = parts.emit("MatMul", float_rows(parts), weights)
    return parts.emit("Add", product, parts.constant("offset", offset)) if offset.size else product


def _misfit(parts: Expansion, rows: int) -> str:
    count = len(parts.get("coefficients", []))
    return f"its {count} coefficients do not fit {rows} results of {_features(parts)} features"


def linear_regressor(parts: Expansion) -> str | None:
    """A product with the coefficients of each target."""
    targets, offset = parts.get("targets", 1), _floats(parts, "intercepts")
    if len(offset) not in (0, targets):
        return f"it has {len(offset)} intercepts for {targets} targets"
    scores = _linear(parts, _floats(parts, "coefficients"), targets, offset)
    if scores is None:
        return _misfit(parts, targets)
    transform = parts.get("post_transform", "NONE")
    parts.finish(transformed(parts, scores, targets, transform))
    return transform_problem(parts)


def linear_classifier(parts: Expansion) -> str | None:
    """Labels and scores of a linear model; one row of coefficients is that of the second class."""
    labels = list(parts.get("classlabels_ints", []))
    offset, coefficients = _floats(parts, "intercepts"), _floats(parts, "coefficients")
    count = len(offset) or len(coefficients) // max(_features(parts) or 1, 1)
    scores = _linear(parts, coefficients, count, offset)
    if scores is None:
        return _misfit(parts, count)
    transform = parts.get("post_transform", "NONE")
    if count == 1:
        is_binary = len(labels) == 2
        if is_binary and transform == "PROBIT":
            return "its post_transform PROBIT has no meaning for two classes with one score"
        label = label_if(parts, positive(parts, scores), labels if is_binary else (0, 1))
        if is_binary:
            result = both(parts, scores, transform, is_probability=True)
        else:
            result = transformed(parts, scores, 1, transform)
    elif len(labels) < count:
        return f"it has {len(labels)} labels for {count} classes"
    else:
        label = label_of_largest(parts, scores, labels)
        result = transformed(parts, scores, count, transform)
    parts.finish(label, result)
    return transform_problem(parts)


def _kernel(parts: Expansion, vectors: np.ndarray) -> str | None:
    """The kernel of each row with each vector, float32 [rows, vectors]."""
    kind = parts.get("kernel_type", "LINEAR")
    gamma, offset, degree = [*parts.get("kernel_params", []), 0.0, 0.0, 0.0][:3]
    x = float_rows(parts)
    if kind == "RBF":
        column = parts.emit("Unsqueeze", x, parts.integers([1]))
        difference = parts.emit("Sub", column, parts.constant("vectors", vectors[None]))
        square = parts.emit("Mul", difference, difference)
        distance = parts.emit("ReduceSum", square, parts.integers([-1]), keepdims=0)
        return parts.emit("Exp", parts.emit("Mul", distance, parts.number(-gamma, FLOAT)))
    product = parts.emit("MatMul", x, parts.constant("vectors", vectors.T.copy()))
    if kind == "LINEAR":
        return product
    scaled = parts.emit("Mul", product, parts.number(gamma, FLOAT))
    total = parts.emit("Add", scaled, parts.number(offset, FLOAT))
    if kind == "SIGMOID":
        return parts.emit("Tanh", total)
    return parts.emit("Pow", total, parts.number(degree, FLOAT)) if kind == "POLY" else None


def _vectors(parts: Expansion, count: int) -> np.ndarray | None:
    """The support vectors, [count, features], or None if they do not fit the features."""
    vectors, features = _floats(parts, "support_vectors"), _features(parts)
    if features is None or vectors.size != count * features:
        return None
    return vectors.reshape(count, features)


def svm_regressor(parts: Expansion) -> str | None:
    """A sum of the kernels with all support vectors, or 1 and -1 by its sign."""
    count, coefficients = parts.get("n_supports", 0), _floats(parts, "coefficients")
    rho = _floats(parts, "rho")[:1]
    if count:
        vectors = _vectors(parts, count)
        kernel = None if vectors is None else _kernel(parts, vectors)
        if kernel is None or len(coefficients) != count:
            return f"its {count} support vectors do not fit its features, or its kernel is unknown"
        column = parts.constant("coefficients", coefficients[:, None])
        result = parts.emit("MatMul", kernel, column)
        result = parts.emit("Add", result, parts.constant("rho", rho)) if rho.size else result
    else:
        linear = _linear(parts, coefficients, 1, rho)
        if linear is None:
            return _misfit(parts, 1)
        result = linear
    if parts.get("one_class", 0):
        inside = positive(parts, result)
        result = parts.emit("Where", inside, parts.number(1, FLOAT), parts.number(-1, FLOAT))
    parts.finish(result)
    return transform_problem(parts)


def svm_classifier(parts: Expansion) -> str | None:
    """Labels and scores of pairs of classes, or probabilities of classes."""
    labels = list(parts.get("classlabels_ints", []))
    if not parts.get("vectors_per_class", []):
        return _linear_svm(parts, labels)
    scores = _pair_scores(parts, len(labels))
    if scores is None:
        return "its support vectors, coefficients, rho and labels do not fit its features"
    pairs = list(combinations(range(len(labels)), 2))
    wins = parts.emit("Cast", positive(parts, scores), to=FLOAT)
    first, second = np.moveaxis(np.eye(len(labels), dtype=np.float32)[np.array(pairs)], 1, 0)
    votes = parts.emit("MatMul", wins, parts.constant("votes", first - second))
    votes = parts.emit("Add", votes, parts.constant("others", second.sum(axis=0)))
    label = label_of_largest(parts, votes, labels)
    transform = parts.get("post_transform", "NONE")
    slopes, offsets = _floats(parts, "prob_a"), _floats(parts, "prob_b")
    if slopes.size:
        if not len(slopes) == len(offsets) == len(pairs):
            return f"it has {len(slopes)} prob_a and {len(offsets)} prob_b for {len(pairs)} pairs"
        line = parts.emit("Mul", scores, parts.constant("slopes", slopes))
        line = parts.emit("Add", line, parts.constant("offsets", offsets))
        share = parts.emit("Sigmoid", parts.emit("Neg", line))
        result = carry(parts, PAIRWISE_COUPLING, share, len(labels))
        result = transformed(parts, result, len(labels), transform)
    elif len(labels) > 2:
        result = transformed(parts, scores, len(pairs), transform)
    elif transform == "PROBIT":
        return "its post_transform PROBIT has no meaning for two classes with one score"
    else:
        result = both(parts, scores, transform, is_probability=transform != "NONE")
    parts.finish(label, result)
    return transform_problem(parts)


def _pair_scores(parts: Expansion, classes: int) -> str | None:
    """Scores of all pairs of classes, [rows, pairs], summed in float64; None if sizes are wrong."""
    counts = list(parts.get("vectors_per_class", []))
    total, pairs = sum(counts), classes * (classes - 1) // 2
    coefficients, rho = _floats(parts, "coefficients"), _floats(parts, "rho")
    vectors = _vectors(parts, total)
    fits = len(counts) == classes > 1 and coefficients.size == (classes - 1) * total
    if vectors is None or not fits or len(rho) < pairs:
        return None
    coefficients = coefficients.reshape(classes - 1, total)
    ends = np.cumsum(counts)
    weights = np.zeros((total, pairs))
    for pair, (i, j) in enumerate(combinations(range(classes), 2)):
        for own, row in ((i, j - 1), (j, i)):
            own_vectors = slice(ends[own] - counts[own], ends[own])
            weights[own_vectors, pair] = coefficients[row, own_vectors]
    kernel = _kernel(parts, vectors)
    if kernel is None:
        return None
    product = parts.emit(
        "MatMul", parts.emit("Cast", kernel, to=DOUBLE), parts.constant("pairs", weights)
    )
    total_score = parts.emit("Add", product, parts.constant("rho", rho[:pairs].astype(float)))
    return parts.emit("Cast", total_score, to=FLOAT)


def _linear_svm(parts: Expansion, labels: list[int]) -> str | None:
    """Labels and scores of one product a class."""
    coefficients, count = _floats(parts, "coefficients"), len(labels)
    scores = _linear(parts, coefficients, count, _floats(parts, "rho")[:1])
    if scores is None or not count:
        return _misfit(parts, count)
    label = label_of_largest(parts, scores, labels)
    if count == 2:
        limit, operator = (0.5, "GreaterOrEqual") if (coefficients >= 0).all() else (0, "Greater")
        largest = parts.reduced("ReduceMax", scores)
        is_second = parts.emit(operator, largest, parts.number(limit, FLOAT))
        second = parts.integers(labels[1])
        label = parts.emit("Where", parts.reshape(is_second, -1), second, label)
    parts.finish(label, transformed(parts, scores, count, parts.get("post_transform", "NONE")))
    return transform_problem(parts)


def translate_pairwise_coupling(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Probabilities of classes, [rows, classes], of those of the first class of each pair."""
    (pairs,) = inputs
    rows, classes = pairs.ty.shape[0], attributes["columns"]
    kernel = builder.add_func(pairwise_coupling(rows, classes), "pairwise_coupling")
    shapes = [(rows, classes), (rows, classes, classes), (rows, classes)]
    types = [relax.TensorType(shape, "float32") for shape in shapes]
    found = builder.emit(relax.call_tir(kernel, [pairs], types))
    return relax.TupleGetItem(found, 0)


OPERATORS = [
    Operator(
        name, ML_DOMAIN, refuse=classical_refusal, is_foreign=True, needs_shapes=True, expand=rule
    )
    for name, rule in (
        ("LinearClassifier", linear_classifier),
        ("LinearRegressor", linear_regressor),
        ("SVMClassifier", svm_classifier),
        ("SVMRegressor", svm_regressor),
    )
]
OPERATORS.append(Operator(PAIRWISE_COUPLING, translate=translate_pairwise_coupling))
