# SPDX-License-Identifier: Apache-2.0
"""Kernel of tree ensembles: branch-free descents, several at a time.

::

    for part in T.parallel(parts):                   # some rows, or some of the trees
        for tree in trees:
            for r in rows:                           # LANES of them at a time
                i = 0
                for level in range(depth[tree]):
                    i = first[tree, i] + (x[r, feature[tree, i]] <= threshold[tree, i])
                out[r] += value[tree, i]

A leaf is its own first child, and compares with a threshold that is no number: a descent that has
ended stays where it is. The loads of a descent wait for each other, those of several do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent

from .selections import Shapes, cpu_kernel, long, own_extents

LANES = 8
"""Descents that a thread makes at a time: their places and the addresses fit into registers."""

ROWS_AT_ONCE = 512
"""Most rows that go through one tree before the next one, so that they stay in the L2 cache."""

PARTS = 32
"""Parts for threads, if there are rows enough."""

WORTH_A_FORK = 10_000
"""Steps of descents from which on threads share them: a step takes about a nanosecond."""

NEUTRAL = {"SUM": 0.0, "MIN": float("inf"), "MAX": float("-inf")}
"""Value of an aggregate of no tree."""


@dataclass(frozen=True)
class Forest:
    """Sizes of the tables of an ensemble, and types of their elements."""

    nodes: int  # Nodes of all trees.
    trees: int
    outputs: int  # values of a leaf
    steps: int  # Steps of a row through all trees.
    feature: str
    first: str
    dtype: str
    """Types of the indices of features, of places in a tree, and of thresholds and values."""
    aggregate: str  # ``"SUM"``, ``"MIN"`` or ``"MAX"`` of the values of all trees.

    def is_worth_threads(self, rows: Extent) -> bool:
        """Return whether threads share the descents of rows; they do if their number is open."""
        known = getattr(rows, "value", rows)
        return not isinstance(known, int) or known * self.steps >= WORTH_A_FORK


def trees(
    rows: Extent,  # Rows of the input; it may be symbolic.
    features: int,  # Numbers of a row.
    forest: Forest,
    chunks: int = 1,  # Parts of equally many trees, each with results of its own.
) -> tirx.PrimFunc:
    """Build the kernel of an ensemble of trees.

    Returns ``main(x, roots, depths, feature, threshold, first, value, out)``: ``x`` [rows,
    features]; ``roots`` and ``depths`` int32 [trees], the first node of each tree, and the steps to
    its farthest leaf; ``feature``, ``threshold`` and ``first`` [nodes], the last from the root on;
    ``value`` [nodes, outputs]; ``out`` [chunks, rows, outputs].
    """
    (rows,) = own_extents((rows,))
    buffers: Shapes = {
        "x": ((rows, features), forest.dtype),
        "roots": ((forest.trees,), "int32"),
        "depths": ((forest.trees,), "int32"),
        "feature": ((forest.nodes,), forest.feature),
        "threshold": ((forest.nodes,), forest.dtype),
        "first": ((forest.nodes,), forest.first),
        "value": ((forest.nodes, forest.outputs), forest.dtype),
        "out": ((chunks, rows, forest.outputs), forest.dtype),
    }
    count = rows.value if isinstance(rows, tirx.IntImm) else LANES
    together = max(lanes for lanes in (1, 2, 4, LANES) if lanes <= max(count, 1))
    chunk_trees = -(-forest.trees // chunks)

    def write(*arguments: tirx.Buffer) -> None:
        descents = _Descents(forest, rows, together, *arguments)
        groups = tirx.ceildiv(rows, long(PARTS * together))
        share = tirx.min(groups * long(together), long(ROWS_AT_ONCE))
        parts = tirx.ceildiv(rows, share)
        loop = T.parallel if forest.is_worth_threads(rows) else T.serial
        with loop(long(0), parts * long(chunks)) as part:
            # A buffer becomes registers; formulas would be copied everywhere.
            bounds = T.sblock_alloc_buffer((3,), "int64")
            chunk, start, end = (bounds[place] for place in range(3))
            T.buffer_store(bounds, tirx.floordiv(part, parts), [0])
            T.buffer_store(bounds, tirx.floormod(part, parts) * share, [1])
            T.buffer_store(bounds, tirx.min(start + share, rows), [2])
            with T.grid(end - start, long(forest.outputs)) as (row, column):
                neutral = tirx.const(NEUTRAL[forest.aggregate], forest.dtype)
                T.buffer_store(descents.out, neutral, [chunk, start + row, column])
            last = tirx.min((chunk + long(1)) * long(chunk_trees), long(forest.trees))
            descents.write(chunk, (start, end), (chunk * long(chunk_trees), last))

    return cpu_kernel("TreeEnsemble", buffers, write)


@dataclass(frozen=True)
class _Descents:
    """Writer of descents of some rows in some trees.

    Its fields are the trees, all rows, how many of them descend at a time, and the kernel's
    arguments.
    """

    forest: Forest
    rows: tirx.Expr
    lanes: int
    x: tirx.Buffer
    roots: tirx.Buffer
    depths: tirx.Buffer
    feature: tirx.Buffer
    threshold: tirx.Buffer
    first: tirx.Buffer
    value: tirx.Buffer
    out: tirx.Buffer

    def write(
        self,
        chunk: tirx.Expr,
        rows: tuple[tirx.Expr, tirx.Expr],
        own_trees: tuple[tirx.Expr, tirx.Expr],
    ) -> None:
        """Write the loops over the trees and rows of a part."""
        abreast = LANES // self.lanes
        (start, end), (first, last) = rows, own_trees
        groups = tirx.floordiv(end - start, long(self.lanes))
        with T.serial(long(0), tirx.ceildiv(last - first, long(abreast))) as group:
            several = [
                T.bind(first + group * long(abreast) + long(lane)) for lane in range(abreast)
            ]
            with T.serial(long(0), groups) as step:
                base = T.bind(start + step * long(self.lanes))
                self._descend(
                    chunk, [base + long(lane) for lane in range(self.lanes)], several, last
                )
            base = T.bind(start + groups * long(self.lanes))
            if self.lanes > 1:
                with T.If(base < end), T.Then():
                    places = [base + long(lane) for lane in range(self.lanes)]
                    self._descend(chunk, places, several, last, end)

    def _descend(
        self,
        chunk: tirx.Expr,
        rows: Sequence[tirx.Expr],
        own_trees: Sequence[tirx.Expr],
        last: tirx.Expr,
        end: tirx.Expr | None = None,
    ) -> None:
        """Write the descents of rows in trees; those from an ``end`` on are left out."""
        kept = [row if end is None else T.bind(tirx.min(row, end - long(1))) for row in rows]
        lanes = [(place, tree) for tree in own_trees for place in range(len(rows))]
        inside = [tirx.min(tree, last - long(1)) for tree in own_trees]
        roots = [T.bind(tirx.Cast("int64", self.roots[tree])) for tree in inside]
        depth = self.depths[inside[0]]
        for tree in inside[1:]:
            depth = tirx.max(depth, self.depths[tree])
        places = T.sblock_alloc_buffer((len(lanes),), "int64")
        root_of = [root for root in roots for _ in rows]
        for lane in range(len(lanes)):
            T.buffer_store(places, long(0), [lane])
        with T.serial(0, depth):
            nodes = [T.bind(root + places[lane]) for lane, root in enumerate(root_of)]
            for lane, node in enumerate(nodes):
                number = self.x[kept[lanes[lane][0]], tirx.Cast("int64", self.feature[node])]
                second = tirx.Cast("int64", number <= self.threshold[node])
                T.buffer_store(places, tirx.Cast("int64", self.first[node]) + second, [lane])
        for lane, (place, tree) in enumerate(lanes):
            row = rows[place]
            counts = [] if end is None else [row < end]
            counts += [tree < last] if len(own_trees) > 1 else []
            leaf = root_of[lane] + places[lane]
            if not counts:
                self._add(chunk, row, leaf)
                continue
            with T.If(tirx.all(*counts)), T.Then():
                self._add(chunk, row, leaf)

    def _add(self, chunk: tirx.Expr, row: tirx.Expr, leaf: tirx.Expr) -> None:
        """Write the aggregation of a leaf's values with those of a row."""
        combine = {"SUM": lambda a, b: a + b, "MIN": tirx.min, "MAX": tirx.max}
        with T.serial(long(0), long(self.forest.outputs)) as column:
            place = [chunk, row, column]
            total = combine[self.forest.aggregate](self.out[tuple(place)], self.value[leaf, column])
            T.buffer_store(self.out, total, place)
