# SPDX-License-Identifier: Apache-2.0
"""Nodes of tree ensembles, read from the attributes of all versions of the operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from schedules.cpu.loops.trees import NEUTRAL

from ...model.expansion import Expansion
from .tree_tables import LEAF, MEMBER, Nodes, split_members

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
        Of the node.
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
