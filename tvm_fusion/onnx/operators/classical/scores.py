# SPDX-License-Identifier: Apache-2.0
"""Scores of linear models, support vectors and trees: transformations and labels.

Numbers are those of ONNX Runtime, which leaves a single score as it is unless it is a PROBIT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ...model.expansion import Expansion

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""Names of ``post_transform``, in the order of the numbers that TreeEnsemble has for them."""

_ALMOST_ZERO = 1e-7
"""SOFTMAX_ZERO leaves scores up to this as they are."""


def transform_problem(parts: Expansion) -> str | None:
    """Return why a node's ``post_transform`` is none of ONNX's, if so."""
    name = parts.get("post_transform", "NONE")
    return None if name in TRANSFORMS else f"its post_transform is {name!r}"


def transformed(parts: Expansion, scores: str, count: int, transform: str) -> str:
    """Apply a ``post_transform`` to float32 scores [rows, count]."""
    if transform == "PROBIT":
        return _probit(parts, scores)
    if transform == "NONE" or count == 1:
        return scores
    if transform == "LOGISTIC":
        return parts.emit("Sigmoid", scores)
    if transform == "SOFTMAX":
        return parts.emit("Softmax", scores, axis=-1)
    return _softmax_of_others(parts, scores)


def _softmax_of_others(parts: Expansion, scores: str) -> str:
    """Softmax of the scores that are not 0; a score of 0 stays 0."""
    largest = parts.reduced("ReduceMax", scores)
    exponential = parts.emit("Exp", parts.emit("Sub", scores, largest))
    rest = parts.emit("Mul", scores, parts.emit("Exp", parts.emit("Neg", largest)))
    limit = parts.number(_ALMOST_ZERO, FLOAT)
    counts = parts.emit("Greater", parts.emit("Abs", scores), limit)
    zero = parts.number(0, FLOAT)
    counted = parts.emit("Where", counts, exponential, zero)
    total = parts.emit("ReduceSum", counted, parts.integers([-1]))
    return parts.emit("Div", parts.emit("Where", counts, exponential, rest), total)


def _probit(parts: Expansion, scores: str) -> str:
    """The quantile of the normal distribution, by Winitzki's inverse of the error function."""
    one, two, a = (parts.number(value, FLOAT) for value in (1, 2, 0.147))
    x = parts.emit("Sub", parts.emit("Mul", scores, two), one)
    product = parts.emit("Mul", parts.emit("Sub", one, x), parts.emit("Add", one, x))
    log = parts.emit("Log", product)
    half = parts.emit("Mul", log, parts.number(0.5, FLOAT))
    first = parts.emit("Add", parts.number(2 / (3.14159 * 0.147), FLOAT), half)
    second = parts.emit("Div", log, a)
    inner = parts.emit("Sub", parts.emit("Mul", first, first), second)
    size = parts.emit("Sqrt", parts.emit("Sub", parts.emit("Sqrt", inner), first))
    scaled = parts.emit("Mul", size, parts.number(math.sqrt(2), FLOAT))
    is_negative = parts.emit("Less", x, parts.number(0, FLOAT))
    return parts.emit("Where", is_negative, parts.emit("Neg", scaled), scaled)


def both(parts: Expansion, score: str, transform: str, is_probability: bool) -> str:
    """Scores of two classes, [rows, 2], by that of the second one, [rows, 1]."""
    if transform == "LOGISTIC":
        other, score = parts.emit("Sigmoid", parts.emit("Neg", score)), parts.emit("Sigmoid", score)
    elif is_probability:
        other = parts.emit("Sub", parts.number(1, FLOAT), score)
    else:
        other = parts.emit("Neg", score)
    return parts.emit("Concat", other, score, axis=1)


def label_of_largest(parts: Expansion, scores: str, labels: Sequence[int]) -> str:
    """The label of the largest score of each row, the first of several."""
    place = parts.emit("ArgMax", scores, axis=1, keepdims=0)
    if list(labels) == list(range(len(labels))):
        return place
    return parts.emit("Gather", parts.constant("labels", np.array(labels, np.int64)), place)


def label_if(parts: Expansion, condition: str, labels: Sequence[int]) -> str:
    """The second label where a condition [rows, 1] holds, else the first."""
    flat = parts.reshape(condition, -1)
    no, yes = (parts.integers(label) for label in labels)
    return parts.emit("Where", flat, yes, no)


def positive(parts: Expansion, score: str, limit: float = 0.0) -> str:
    """Whether scores are above a limit."""
    return parts.emit("Greater", score, parts.number(limit, FLOAT))
