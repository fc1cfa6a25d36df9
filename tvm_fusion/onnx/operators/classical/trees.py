# SPDX-License-Identifier: Apache-2.0
"""Tree ensembles of ``ai.onnx.ml``: their aggregates, labels and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper
from tvm import relax, tirx

from schedules.cpu.loops.trees import NEUTRAL, Forest, trees

from ...model.expansion import Expansion
from ..operator import ML_DOMAIN, Operator
from .carriers import carry
from .features import cast, float_rows
from .read_trees import (
    AGGREGATES,
    aggregate_name,
    read_ensemble,
    read_nodes,
    tensor_or_list,
    threshold_type,
)
from .refusals import classical_refusal
from .scores import TRANSFORMS, both, label_if, label_of_largest, transformed
from .tree_tables import EQ, LEAF, NEQ, Nodes, make_tables, split_equalities

FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE

TREES = "tvm_fusion.Trees"
"""Operator that :func:`translate_trees` translates."""

_FEW_ROWS = 8
"""Rows up to which threads share out the trees, in ``_MOST_CHUNKS`` parts."""

_MOST_CHUNKS = 16

_WORTH_A_FORK = 20_000
"""Steps of descents from which on that is worth its time."""


def _totals(parts: Expansion, nodes: Nodes) -> tuple[str, str]:
    """Aggregates of an ensemble, [rows, outputs], of the type of its thresholds; or a refusal."""
    features = (parts.facts.dims(parts.input(0)) or (None,))[-1]
    is_branch = nodes.mode < LEAF
    own = nodes.feature[is_branch]
    if features is None or (len(own) and not 0 <= own.min() <= own.max() < features):
        most = own.max(initial=0)
        return "", f"it compares feature {most}; {parts.input(0)!r} has {features} features"
    outputs, aggregate = nodes.value.shape[1], aggregate_name(parts)
    if aggregate not in AGGREGATES:
        return "", f"its aggregate_function is {aggregate!r}"
    if ((nodes.mode == EQ) | (nodes.mode == NEQ)).any():
        split_equalities(nodes)
    tables = make_tables(nodes, features)
    if tables is None:
        return "", "one of its nodes is the child of several"
    kind = helper.np_dtype_to_tensor_dtype(nodes.threshold.dtype)
    x = float_rows(parts, kind)
    if tables.has_negative:
        x = parts.emit("Concat", x, parts.emit("Neg", x), axis=1)
    kernels = "SUM" if aggregate == "AVERAGE" else aggregate
    names = ("roots", "depths", "feature", "threshold", "first", "value")
    total = carry(
        parts,
        TREES,
        x,
        outputs,
        {name: getattr(tables, name) for name in names},
        kind,
        aggregate=kernels,
        steps=int(tables.depths.sum()),
    )
    if aggregate == "AVERAGE":
        total = parts.emit("Div", total, parts.number(len(nodes.roots), kind))
    if kernels != "SUM":
        nothing, zero = parts.number(NEUTRAL[kernels], kind), parts.number(0, kind)
        total = parts.emit("Where", parts.emit("Equal", total, nothing), zero, total)
    return total, ""


def tree_ensemble(parts: Expansion) -> str | None:
    """The aggregates of all trees."""
    outputs, number = parts.get("n_targets", 1), parts.get("post_transform", 0)
    nodes = read_ensemble(parts, outputs)
    total, reason = ("", nodes) if isinstance(nodes, str) else _totals(parts, nodes)
    if reason or number not in range(len(TRANSFORMS)):
        return reason or f"its post_transform is {number}"
    own = parts.facts.dtype(parts.input(0))
    parts.finish(_finished(parts, total, outputs, TRANSFORMS[number], own))
    return None


def _finished(parts: Expansion, total: str, count: int, transform: str, kind: int) -> str:
    """Scores of totals, of an element type."""
    if transform != "NONE":
        total = parts.emit("Cast", total, to=FLOAT)
    return parts.emit("Cast", transformed(parts, total, count, transform), to=kind)


def tree_regressor(parts: Expansion) -> str | None:
    """The aggregates of all trees, and a base."""
    outputs, transform = parts.get("n_targets", 1), parts.get("post_transform", "NONE")
    nodes = read_nodes(parts, "target", outputs)
    total, reason = ("", nodes) if isinstance(nodes, str) else _totals(parts, nodes)
    base = tensor_or_list(parts, "base_values", threshold_type(parts))
    if reason or transform not in TRANSFORMS or len(base) not in (0, outputs):
        return reason or f"it has {len(base)} base_values, or its post_transform is {transform!r}"
    if len(base):
        total = parts.emit("Add", total, parts.constant("base", base))
    parts.finish(_finished(parts, total, outputs, transform, FLOAT))
    return None


def tree_classifier(parts: Expansion) -> str | None:
    """Labels and scores of classes."""
    labels = list(parts.get("classlabels_int64s", []))
    transform = parts.get("post_transform", "NONE")
    nodes = read_nodes(parts, "class", len(labels))
    total, reason = ("", nodes) if isinstance(nodes, str) else _totals(parts, nodes)
    base = tensor_or_list(parts, "base_values", threshold_type(parts))
    if reason or transform not in TRANSFORMS:
        return reason or f"its post_transform is {transform!r}"
    if len(labels) > 2:
        return _many_classes(parts, total, labels, base)
    return _two_classes(parts, total, labels, base)


def _weighted(parts: Expansion) -> list[int]:
    """Classes for which some leaf has a weight."""
    return sorted(set(parts.get("class_ids", [])))


def _many_classes(
    parts: Expansion, total: str, labels: Sequence[int], base: npt.NDArray[Any]
) -> str | None:
    """The label of the largest score among the classes that have one."""
    kind = helper.np_dtype_to_tensor_dtype(base.dtype)
    count, scored = len(labels), set(_weighted(parts))
    if len(base) not in (0, count):
        return f"it has {len(base)} base_values for {count} classes"
    if len(base):
        total = parts.emit("Add", total, parts.constant("base", base))
    candidates = total
    if len(scored) < count and not len(base):
        absent = [0.0 if place in scored else -math.inf for place in range(count)]
        candidates = parts.emit(
            "Add", total, parts.constant("absent", np.array(absent, base.dtype))
        )
    label = label_of_largest(parts, candidates, labels)
    scores = cast(parts, total, kind)
    parts.finish(label, _finished(parts, scores, count, parts.get("post_transform", "NONE"), FLOAT))
    return None


def _two_classes(
    parts: Expansion, total: str, labels: Sequence[int], base: npt.NDArray[Any]
) -> str | None:
    """The second label where a score is above a limit; one score may be that of both classes."""
    kind = helper.np_dtype_to_tensor_dtype(base.dtype)
    scored, count = _weighted(parts), len(labels)
    if len(base) > count:
        return f"it has {len(base)} base_values for {count} classes"
    transform = parts.get("post_transform", "NONE")
    first, second = absent = _columns(parts, total, count)
    if len(base) == 1:
        first = parts.emit("Add", first, parts.number(base[0], kind))
    if len(base) == 2 and 1 in scored:
        second = parts.emit("Add", first, parts.number(base[1], kind))
        first = parts.emit("Neg", second)
    elif len(base) == 2:
        first = parts.emit("Add", first, parts.number(base[0], kind))
    deciding = second if 1 in scored else first
    weights = tensor_or_list(parts, "class_weights", base.dtype)
    is_binary = count == 2 and len(scored) == 1
    is_probability = is_binary and bool((weights >= 0).all())
    above = parts.emit("Greater", deciding, parts.number(0.5 if is_probability else 0.0, kind))
    label = label_if(parts, above, labels if is_binary else (0, 1))
    if count == 2 and 1 not in scored and len(base) < 2:
        if transform == "PROBIT":
            return "its post_transform PROBIT has no meaning for two classes with one score"
        score = parts.emit("Cast", first, to=FLOAT)
        parts.finish(label, both(parts, score, transform, is_probability))
        return None
    first = first if 0 in scored or count == 1 else absent[0]
    scores = first if count == 1 else parts.emit("Concat", first, second, axis=1)
    parts.finish(label, _finished(parts, scores, count, transform, FLOAT))
    return None


def _columns(parts: Expansion, total: str, count: int) -> tuple[str, str]:
    """Scores of the first and the second class, [rows, 1] each."""
    if count == 1:
        return total, total
    first, second = (
        parts.emit("Gather", total, parts.integers([column]), axis=1) for column in (0, 1)
    )
    return first, second


def translate_trees(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Aggregates of trees, [rows, outputs], by the kernel of ``schedules/cpu/loops/trees.py``."""
    x, roots, _, feature, threshold, first, value = inputs
    rows, features = x.ty.shape
    nodes, outputs = (int(size) for size in value.ty.shape)
    aggregate = attributes["aggregate"].decode()
    kinds = (str(table.ty.dtype) for table in (feature, first, threshold))
    feature_kind, first_kind, dtype = kinds
    count = int(roots.ty.shape[0])
    forest = Forest(nodes, count, outputs, feature_kind, first_kind, dtype, aggregate)
    chunks = 1
    if isinstance(rows, tirx.IntImm) and int(rows) <= _FEW_ROWS:
        is_worth_it = int(rows) * attributes["steps"] > _WORTH_A_FORK
        chunks = min(_MOST_CHUNKS, count) if is_worth_it else 1
    kernel = builder.add_func(trees(rows, int(features), forest, chunks), "trees")
    result = relax.TensorType((chunks, rows, outputs), dtype)
    found = builder.emit(relax.call_tir(kernel, [*inputs], result))
    if chunks == 1:
        return relax.op.squeeze(found, [0])
    reduce = {"SUM": relax.op.sum, "MIN": relax.op.min, "MAX": relax.op.max}[aggregate]
    return reduce(found, axis=[0])


OPERATORS = [
    Operator(
        name, ML_DOMAIN, refuse=classical_refusal, is_foreign=True, needs_shapes=True, expand=rule
    )
    for name, rule in (
        ("TreeEnsemble", tree_ensemble),
        ("TreeEnsembleClassifier", tree_classifier),
        ("TreeEnsembleRegressor", tree_regressor),
    )
]
OPERATORS.append(Operator(TREES, translate=translate_trees))
