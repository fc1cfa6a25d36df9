# SPDX-License-Identifier: Apache-2.0
"""Tables of tree ensembles, as the kernel in ``schedules/cpu/loops/trees.py`` reads them.

The kernel knows one comparison, whose second child is taken if it holds::

    x[feature] <= threshold

The others become it: ``x < t`` is ``x <= p`` with the number p below t, ``x >= t`` is
``-x <= -t``, where ``-x`` are further features. Where a missing value (NaN) must take the true
child, the children are exchanged and the opposite is compared. ``x == t`` is two nodes, and
membership a search tree of equalities. Both reach a child in several ways, by nodes that only jump
to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

LEQ, LT, GTE, GT, EQ, NEQ, MEMBER, LEAF, JUMP = range(9)
"""Modes of nodes, ONNX's and two more."""

OPPOSITE = np.array([GT, GTE, LT, LEQ])


@dataclass
class Nodes:
    """Nodes of an ensemble; all fields but ``roots`` have one entry a node.

    Parameters
    ----------
    mode, feature : numpy.ndarray
        Mode of the comparison, and index of the feature that is compared.
    threshold : numpy.ndarray
        What it is compared with, float32 or float64.
    true, false : numpy.ndarray
        Numbers of the children; of a jump, ``true`` is its target.
    tracks : numpy.ndarray
        Whether a missing value goes to the true child.
    value : numpy.ndarray
        Values of leaves, [nodes, outputs].
    roots : numpy.ndarray
        Number of the first node of each tree.
    """

    mode: Integers
    feature: Integers
    threshold: npt.NDArray[Any]
    true: Integers
    false: Integers
    tracks: npt.NDArray[np.bool_]
    value: npt.NDArray[Any]
    roots: Integers

    def append(self, source: Integers, **changed: npt.ArrayLike) -> Integers:
        """Append copies of nodes with some fields changed; return their numbers."""
        start = len(self.mode)
        for name in ("mode", "feature", "threshold", "true", "false", "tracks", "value"):
            field = getattr(self, name)
            new = field[source].copy()
            if name in changed:
                new[:] = changed[name]
            setattr(self, name, np.concatenate([field, new]))
        return np.arange(start, len(self.mode))

    def jump_to(self, targets: Integers) -> Integers:
        """Append a jump to each of some nodes, or to where it jumps itself."""
        is_jump = self.mode[targets] == JUMP
        return self.append(targets, mode=JUMP, true=np.where(is_jump, self.true[targets], targets))


def split_members(nodes: Nodes, members: dict[int, npt.NDArray[Any]]) -> None:
    """Replace tests of membership by search trees of equalities."""
    for number, values in members.items():
        _search(nodes, number, np.unique(values), int(nodes.true[number]), int(nodes.false[number]))


def _search(nodes: Nodes, number: int, values: npt.NDArray[Any], yes: int, no: int) -> None:
    """Make a node the root of a search for its feature among sorted values."""
    if len(values) < 2:
        # No number equals a threshold that is none.
        nodes.mode[number], nodes.true[number], nodes.false[number] = EQ, yes, no
        nodes.threshold[number] = values[0] if len(values) else np.nan
        return
    middle = len(values) // 2
    children = nodes.append(np.array([number, number]))
    jumps = nodes.jump_to(np.array([yes, no]))
    nodes.mode[number], nodes.threshold[number] = LEQ, values[middle - 1]
    nodes.true[number], nodes.false[number] = children
    _search(nodes, int(children[0]), values[:middle], int(jumps[0]), int(jumps[1]))
    _search(nodes, int(children[1]), values[middle:], yes, no)


def split_equalities(nodes: Nodes) -> None:
    """Replace tests of equality by two comparisons."""
    unequal = nodes.mode == NEQ
    nodes.true[unequal], nodes.false[unequal] = nodes.false[unequal], nodes.true[unequal]
    nodes.tracks[unequal] = False
    nodes.mode[unequal] = EQ
    (equal,) = np.nonzero(nodes.mode == EQ)
    second = nodes.append(equal, mode=GTE)
    nodes.mode[equal] = LEQ
    nodes.true[equal] = second
    nodes.false[equal] = nodes.jump_to(nodes.false[equal])


@dataclass(frozen=True)
class Tables:
    """Tables of the kernel.

    Parameters
    ----------
    roots, depths : numpy.ndarray
        First node of each tree, and steps to its farthest leaf, int32.
    feature, threshold, first : numpy.ndarray
        Index of a feature, threshold, and place of the first child in the tree, one a node.
    value : numpy.ndarray
        [nodes, outputs].
    has_negative : bool
        Whether indices from the number of features on are those of negative features.
    """

    roots: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    feature: npt.NDArray[Any]
    threshold: npt.NDArray[Any]
    first: npt.NDArray[Any]
    value: npt.NDArray[Any]
    has_negative: bool


def make_tables(nodes: Nodes, features: int) -> Tables | None:
    """Lay out trees, each by levels, children side by side; None if a node has several parents.

    Parameters
    ----------
    nodes : Nodes
        Nodes without equalities and tests of membership.
    features : int
        Numbers of a row.
    """
    feature, threshold, first_child, second = _comparisons(nodes, features)
    placed = _levels(nodes, first_child, second)
    if placed is None:
        return None
    order, tree, level = placed
    roots = np.searchsorted(tree, np.arange(len(nodes.roots)))
    place = np.zeros(len(nodes.mode), np.int64)
    place[order] = np.arange(len(order)) - roots[tree]
    is_leaf, is_jump = (nodes.mode[order] == mode for mode in (LEAF, JUMP))
    targets = np.where(is_jump, nodes.true[order], first_child[order])
    targets = np.where(is_leaf, order, targets)
    depths = np.zeros(len(nodes.roots), np.int32)
    steps = _steps(nodes, (first_child, second), order, level)
    np.maximum.at(depths, tree, steps)
    used = feature[order]
    ended = is_leaf | is_jump
    used[ended] = 0
    return Tables(
        roots.astype(np.int32),
        depths,
        _narrow(used),
        np.where(ended, np.nan, threshold[order]).astype(threshold.dtype),
        _narrow(place[targets]),
        nodes.value[order],
        bool((used >= features).any()),
    )


def _narrow(values: Integers) -> npt.NDArray[Any]:
    """The same numbers in the smallest type."""
    most = int(values.max(initial=0))
    kinds = [kind for kind in (np.uint8, np.uint16) if most <= np.iinfo(kind).max]
    return values.astype(kinds[0] if kinds else np.int32)


def _comparisons(
    nodes: Nodes, features: int
) -> tuple[Integers, npt.NDArray[Any], Integers, Integers]:
    """Features, thresholds, and first and second children of the kernel's comparison."""
    is_branch = nodes.mode <= GT
    tracks = nodes.tracks & is_branch
    mode = nodes.mode.copy()
    mode[tracks] = OPPOSITE[mode[tracks]]
    first = np.where(tracks, nodes.true, nodes.false)
    second = np.where(tracks, nodes.false, nodes.true)
    is_negative = (mode == GTE) | (mode == GT)
    threshold = np.where(is_negative, -nodes.threshold, nodes.threshold)
    is_strict = (mode == LT) | (mode == GT)
    lowest = np.array(-np.inf, threshold.dtype)
    below = np.where(threshold == lowest, np.nan, np.nextafter(threshold, lowest))
    threshold = np.where(is_strict, below, threshold)
    # All but missing values fail a comparison with what is no number.
    threshold = np.where(tracks & np.isnan(nodes.threshold), np.inf, threshold)
    feature = nodes.feature + features * is_negative
    return feature, threshold.astype(nodes.threshold.dtype), first, second


def _levels(
    nodes: Nodes, first: Integers, second: Integers
) -> tuple[Integers, Integers, Integers] | None:
    """Nodes in order of trees and levels, with both; None if one was reached twice."""
    seen = np.zeros(len(nodes.mode), bool)
    here, trees = nodes.roots, np.arange(len(nodes.roots))
    orders: list[Integers] = []
    owners: list[Integers] = []
    levels: list[Integers] = []
    while len(here):
        if seen[here].any() or len(np.unique(here)) < len(here):
            return None
        seen[here] = True
        orders.append(here)
        owners.append(trees)
        levels.append(np.full(len(here), len(levels)))
        is_branch = nodes.mode[here] <= GT
        parents = here[is_branch]
        here = np.stack([first[parents], second[parents]], axis=1).ravel()
        trees = np.repeat(trees[is_branch], 2)
    tree = np.concatenate(owners)
    by_tree = np.argsort(tree, kind="stable")
    return np.concatenate(orders)[by_tree], tree[by_tree], np.concatenate(levels)[by_tree]


def _steps(
    nodes: Nodes, children: tuple[Integers, Integers], order: Integers, level: Integers
) -> Integers:
    """Most steps from the root to each node, in the given order: jumps make detours."""
    steps = np.zeros(len(nodes.mode), np.int64)
    steps[order] = level
    jumps = order[nodes.mode[order] == JUMP]
    by_level = order[np.argsort(level, kind="stable")]
    parents = by_level[nodes.mode[by_level] <= GT]
    levels = np.split(parents, np.nonzero(np.diff(steps[parents]))[0] + 1)
    changes = len(jumps) > 0
    while changes:
        before = steps.copy()
        np.maximum.at(steps, nodes.true[jumps], steps[jumps] + 1)
        for here in levels:
            for side in children:
                steps[side[here]] = np.maximum(steps[side[here]], steps[here] + 1)
        changes = (steps != before).any()
    return steps[order]
