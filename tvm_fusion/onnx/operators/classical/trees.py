# SPDX-License-Identifier: Apache-2.0
"""Tree ensembles of ``ai.onnx.ml``: nodes as attributes of all versions, aggregates and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, tirx

from schedules.cpu.loops.trees import NEUTRAL, Forest, trees

from ...model.expansion import Expansion
from ..operator import ML_DOMAIN, Operator
from .carriers import carry
from .features import cast, float_rows
from .refusals import classical_refusal
from .scores import TRANSFORMS, both, label_if, label_of_largest, transformed
from .tree_tables import EQ, LEAF, MEMBER, NEQ, Nodes, make_tables, split_equalities, split_members

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
"""Names of aggregates, in the order of the numbers that TreeEnsemble has for them."""


def tensor_or_list(parts: Expansion, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An attribute, or the tensor that is given instead."""
    tensor = parts.get(f"{name}_as_tensor")
    if tensor is not None and tensor.data_type:
        return numpy_helper.to_array(tensor).ravel().astype(dtype)
    found = parts.get(name, [])
    found = numpy_helper.to_array(found) if isinstance(found, TensorProto) else found
    return np.array(found).astype(dtype).ravel()


def threshold_type(parts: Expansion) -> np.dtype[Any]:
    """Type of thresholds and sums: float64 if the input has it, else float32."""
    is_double = parts.facts.dtype(parts.input(0)) == TensorProto.DOUBLE
    return np.dtype(np.float64 if is_double else np.float32)


def _missing(parts: Expansion, count: int) -> npt.NDArray[np.bool_]:
    tracks = tensor_or_list(parts, "nodes_missing_value_tracks_true", np.int64)
    return tracks.astype(bool) if len(tracks) else np.zeros(count, bool)


def _neutral(parts: Expansion) -> float:
    return NEUTRAL.get(str(aggregate_name(parts)), 0.0)


def _infinite(parts: Expansion, weights: npt.NDArray[Any]) -> str:
    """Return why the least or largest weight cannot be found, if so: infinity stands for none."""
    if aggregate_name(parts) not in ("MIN", "MAX") or np.isfinite(weights).all():
        return ""
    return f"its weights are not finite; expected numbers for {aggregate_name(parts)}"


def aggregate_name(parts: Expansion) -> str:
    """Name of the aggregate, which may be none of :data:`AGGREGATES`."""
    found = parts.get("aggregate_function", "SUM")
    return AGGREGATES[found] if found in range(len(AGGREGATES)) else str(found)


def read_nodes(parts: Expansion, what: str, outputs: int) -> Nodes | str:
    """The nodes of a TreeEnsembleRegressor or TreeEnsembleClassifier, or what is wrong with them.

    Parameters
    ----------
    parts : Expansion
        Expansion of the node.
    what : str
        ``"target"`` or ``"class"``, with which the names of attributes of leaves begin.
    outputs : int
        Targets or classes.
    """
    dtype = threshold_type(parts)
    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    tree, node, feature, true, false = (
        tensor_or_list(parts, f"nodes_{n}", np.int64) for n in names
    )
    modes = [mode.decode() for mode in parts.get("nodes_modes", [])]
    unknown = set(modes) - {*MODES, "LEAF"}
    if unknown:
        return f"it has nodes of the mode {min(unknown)!r}"
    mode = np.array([LEAF if name == "LEAF" else MODES.index(name) for name in modes], np.int64)
    threshold = tensor_or_list(parts, "nodes_values", dtype)
    tracks = _missing(parts, len(mode))
    fields = (node, feature, true, false, mode, threshold, tracks)
    if not len(tree) or any(len(field) != len(tree) for field in fields):
        return f"its attributes of nodes have other lengths than nodes_treeids, {len(tree)}"
    leaf = [tensor_or_list(parts, f"{what}_{n}", np.int64) for n in ("treeids", "nodeids", "ids")]
    weights = tensor_or_list(parts, f"{what}_weights", dtype)
    if any(len(field) != len(weights) for field in leaf):
        return f"its attributes of leaves have other lengths than {what}_weights, {len(weights)}"
    if _infinite(parts, weights):
        return _infinite(parts, weights)
    targets = leaf[2]
    if len(targets) and not 0 <= targets.min() <= targets.max() < outputs:
        return f"its {what}_ids go from {targets.min()} to {targets.max()}; it has {outputs}"
    is_branch = mode != LEAF
    places = _Places(tree, node)
    true, false = (places.find(tree, np.where(is_branch, ids, node)) for ids in (true, false))
    leaves = places.find(leaf[0], leaf[1])
    if any((found < 0).any() for found in (true, false, leaves)):
        return "some of its nodes have children, or some of its weights nodes, that are not there"
    value = np.full((len(mode), outputs), _neutral(parts), dtype)
    combine = {"MIN": np.minimum, "MAX": np.maximum}.get(aggregate_name(parts), np.add)
    combine.at(value, (leaves, targets), weights)
    _, roots = np.unique(tree, return_index=True)
    return Nodes(mode, feature, threshold, true, false, tracks, value, np.sort(roots))


class _Places:
    """Positions of nodes in the attributes, by the numbers of tree and node."""

    def __init__(self, tree: npt.NDArray[np.int64], node: npt.NDArray[np.int64]) -> None:
        keys = np.stack([tree, node], axis=1)
        self._order = np.lexsort((node, tree))
        self._keys = keys[self._order]
        self._width = int(abs(node).max()) + 1

    def _key(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return keys[:, 0] * self._width + keys[:, 1]

    def find(
        self, tree: npt.NDArray[np.int64], node: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Positions of nodes, -1 of those that are not there."""
        keys = np.stack([tree, node], axis=1)
        place = np.searchsorted(self._key(self._keys), self._key(keys))
        place = np.minimum(place, len(self._keys) - 1)
        is_there = (self._keys[place] == keys).all(axis=1)
        return np.where(is_there, self._order[place], -1)


def read_ensemble(parts: Expansion, outputs: int) -> Nodes | str:
    """The nodes of a TreeEnsemble, or what is wrong with them."""
    dtype = threshold_type(parts)
    roots = tensor_or_list(parts, "tree_roots", np.int64)
    mode, threshold = (
        tensor_or_list(parts, "nodes_modes", np.int64),
        tensor_or_list(parts, "nodes_splits", dtype),
    )
    names = ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    feature, true, false, *ends = (tensor_or_list(parts, f"nodes_{n}", np.int64) for n in names)
    count, tracks = len(mode), _missing(parts, len(mode))
    targets, weights = (
        tensor_or_list(parts, "leaf_targetids", np.int64),
        tensor_or_list(parts, "leaf_weights", dtype),
    )
    fields = (threshold, feature, true, false, *ends, tracks)
    if not count or not len(roots) or any(len(field) != count for field in fields):
        return f"its attributes of nodes have other lengths than nodes_modes, {count}"
    if len(targets) != len(weights) or not len(weights):
        return f"it has {len(targets)} leaf_targetids and {len(weights)} leaf_weights"
    if _infinite(parts, weights):
        return _infinite(parts, weights)
    if not 0 <= targets.min() <= targets.max() < outputs:
        return f"its leaf_targetids go from {targets.min()} to {targets.max()}; it has {outputs}"
    if not 0 <= roots.min() <= roots.max() < count or not 0 <= mode.min() <= mode.max() <= MEMBER:
        return "it has roots or modes that are not there"
    # A leaf may be named several times, and gets a node each time.
    children, used = [], []
    for side, (ids, is_leaf) in enumerate(((true, ends[0] != 0), (false, ends[1] != 0))):
        limit = np.where(is_leaf, len(weights), count)
        if ((ids < 0) | (ids >= limit)).any():
            return "some of its nodes have children that are not there"
        children.append(np.where(is_leaf, count * (side + 1) + np.arange(count), ids))
        used.append(np.where(is_leaf, ids, 0))
    is_single = (true == false) & (ends[0] != 0) & (ends[1] != 0)
    leaf = np.concatenate(used)
    value = np.full((3 * count, outputs), _neutral(parts), dtype)
    value[count + np.arange(2 * count), targets[leaf]] = weights[leaf]
    nodes = Nodes(
        np.concatenate([mode, np.full(2 * count, LEAF)]),
        np.concatenate([feature, np.zeros(2 * count, np.int64)]),
        np.concatenate([threshold, np.zeros(2 * count, dtype)]),
        np.concatenate([children[0], np.arange(count, 3 * count)]),
        np.concatenate([children[1], np.arange(count, 3 * count)]),
        np.concatenate([tracks, np.zeros(2 * count, bool)]),
        value,
        np.where(is_single[roots], children[0][roots], roots),
    )
    return _without_members(parts, nodes)


def _without_members(parts: Expansion, nodes: Nodes) -> Nodes | str:
    """Split the tests of membership; their sets end at what is no number."""
    (tests,) = np.nonzero(nodes.mode == MEMBER)
    values = tensor_or_list(parts, "membership_values", nodes.threshold.dtype)
    sets = np.split(values, np.nonzero(np.isnan(values))[0] + 1)
    if len(sets) < len(tests):
        return f"it has {len(sets)} sets of membership_values for {len(tests)} nodes"
    chosen = zip(tests, sets, strict=False)
    split_members(nodes, {int(test): members[~np.isnan(members)] for test, members in chosen})
    return nodes


FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE

TREES = "tvm_fusion.Trees"
"""Operator that :func:`translate_trees` translates."""

_FEW_ROWS = 8
"""Rows up to which threads share out the trees, in ``_MOST_CHUNKS`` parts."""

_MOST_CHUNKS = 16


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
    steps = attributes["steps"]
    forest = Forest(nodes, count, outputs, steps, feature_kind, first_kind, dtype, aggregate)
    has_few = isinstance(rows, tirx.IntImm) and int(rows) <= _FEW_ROWS
    chunks = min(_MOST_CHUNKS, count) if has_few and forest.is_worth_threads(rows) else 1
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
