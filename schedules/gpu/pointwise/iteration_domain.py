# SPDX-License-Identifier: Apache-2.0
"""Loops over the elements of outputs, split and merged so that accesses are linear in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tvm_ffi
from tvm import ir, sym, tirx

from schedules.tir.expression_walk import nodes, substitute, uses, variables
from schedules.tir.extents import Extent, constant, extent_of
from schedules.tir.index_math import i64, ravel, volume

from .element_program import Read, Step, Value

Linear = tuple[tuple[tirx.Expr, ...], tirx.Expr]


@dataclass(frozen=True)
class Store:
    """An element of an output."""

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    value: tirx.Expr

    @property
    def index(self) -> tirx.Expr:
        """Row-major position."""
        return ravel(self.indices, self.buffer.shape)


@dataclass(frozen=True)
class IterationSpace:
    """Computation at each point of a loop nest, outermost loop first."""

    axes: tuple[tirx.Var, ...]  # The loops' variables, int64.
    extents: tuple[Extent, ...]  # Their extents.
    steps: tuple[Step, ...]  # Steps that compute the values.
    stores: tuple[Store, ...]  # Places of the values.

    @property
    def size(self) -> Extent:
        """Number of points."""
        return extent_of(volume(self.extents))

    @property
    def accesses(self) -> list[Read | Store]:
        """All reads, then all stores."""
        return [*(step for step in self.steps if isinstance(step, Read)), *self.stores]

    def analyzer(self) -> sym.Analyzer:
        """An analyzer that knows the range of each axis."""
        analyzer = sym.Analyzer()
        for axis, extent in zip(self.axes, self.extents, strict=True):
            analyzer.bind(axis, ir.Range.from_min_extent(i64(0), i64(extent)))
        return analyzer

    def uses_of(self, var: tirx.Var) -> int:
        """Number of uses of a step's variable in steps and stores."""
        return self._uses[var]

    @cached_property
    def _uses(self) -> Counter[tirx.Var]:
        expressions = [store.value for store in self.stores]
        for step in self.steps:
            expressions += step.guards
            expressions += [step.expression] if isinstance(step, Value) else step.indices
        found: Counter[tirx.Var] = Counter()
        for expression in expressions:
            found.update(nodes(expression, ir.Var))
        return found

    def position(self, access: Read | Store) -> tirx.Expr:
        """Row-major position of an access, simplified."""
        if id(access) not in self._positions:
            self._positions[id(access)] = self.analyzer().simplify(access.index)
        return self._positions[id(access)]

    def linear(self, access: Read | Store) -> Linear | None:
        """Factor of each axis in the row-major position, and the rest; None if it is not linear."""
        if id(access) not in self._linears:
            self._linears[id(access)] = self._find_linear(self.position(access))
        return self._linears[id(access)]

    @cached_property
    def _positions(self) -> dict[int, tirx.Expr]:
        """Positions found so far, by the identity of the space's own accesses."""
        return {}

    @cached_property
    def _linears(self) -> dict[int, Linear | None]:
        """Linear forms found so far."""
        return {}

    def _find_linear(self, index: tirx.Expr) -> Linear | None:
        present = variables(index)
        used = [axis for axis in self.axes if axis in present]
        if not used:
            return tuple(i64(0) for _ in self.axes), index
        found = sym.detect_linear_equation(index, used)
        left = set().union(*map(variables, found)) if found else set(used)
        if left & set(used):
            return None
        factors = dict(zip(used, found, strict=False))
        return tuple(factors.get(axis, i64(0)) for axis in self.axes), found[-1]

    def with_axes(
        self,
        axes: Sequence[tirx.Var],
        extents: Sequence[Extent],
        values: Mapping[tirx.Var, tirx.Expr],
    ) -> IterationSpace:
        """The same space over other axes, on which the old ones depend."""
        fresh = IterationSpace(tuple(axes), tuple(extents), (), ())
        analyzer = fresh.analyzer()

        def new(expression: tirx.Expr) -> tirx.Expr:
            return analyzer.simplify(substitute(expression, values))

        steps: list[Step] = []
        for step in self.steps:
            guards = tuple(map(new, step.guards))
            if isinstance(step, Read):
                steps.append(replace(step, indices=tuple(map(new, step.indices)), guards=guards))
            else:
                expression = substitute(step.expression, values)
                steps.append(replace(step, expression=expression, guards=guards))
        stores = tuple(
            replace(
                store,
                indices=tuple(map(new, store.indices)),
                value=substitute(store.value, values),
            )
            for store in self.stores
        )
        return replace(fresh, steps=tuple(steps), stores=stores)

    def permuted(self, order: Sequence[int]) -> IterationSpace:
        """The same space with its loops in another order."""
        axes = tuple(self.axes[k] for k in order)
        return replace(self, axes=axes, extents=tuple(self.extents[k] for k in order))


def split_axes(space: IterationSpace) -> IterationSpace:
    """Split axes where a position divides them, so that no division of an axis is left.

    ``x[c // 4, h, c % 4]`` becomes linear in ``c0`` and ``c1`` with ``c = c0 * 4 + c1``.
    """
    for _ in range(8):  # each time one axis, of which there are few
        place = _find_divisor(space)
        if place is None:
            return space
        number, divisor = place
        axis, extent = space.axes[number], constant(space.extents[number])
        assert extent is not None, "only constant extents are split"
        outer, inner = tirx.Var(f"{axis.name}o", "int64"), tirx.Var(f"{axis.name}i", "int64")
        axes = [*space.axes[:number], outer, inner, *space.axes[number + 1 :]]
        parts = (extent // divisor, divisor)
        extents = [*space.extents[:number], *parts, *space.extents[number + 1 :]]
        space = space.with_axes(axes, extents, {axis: outer * i64(divisor) + inner})
    return space


def merge_axes(space: IterationSpace) -> IterationSpace:
    """Merge neighbouring loops that every access traverses as if they were one; drop unit loops."""
    live = [k for k, extent in enumerate(space.extents) if constant(extent) != 1]
    gone = {axis: i64(0) for k, axis in enumerate(space.axes) if k not in live}
    if gone:
        axes, extents = [space.axes[k] for k in live], [space.extents[k] for k in live]
        space = space.with_axes(axes, extents, gone)
    number = 0
    while number + 1 < len(space.axes):
        if _are_one(space, number):
            space = _merge(space, number)
        else:
            number += 1
    return space


def _find_divisor(space: IterationSpace) -> tuple[int, int] | None:
    """An axis and a number by which some position divides it."""
    divisors: list[tuple[int, int]] = []

    def note(node: tirx.FloorDiv | tirx.FloorMod) -> None:
        for number, axis in enumerate(space.axes):
            extent, divisor = constant(space.extents[number]), constant(node.b)
            if not axis.same_as(node.a) or extent is None or divisor is None:
                continue
            if 1 < divisor < extent and extent % divisor == 0:
                divisors.append((number, divisor))

    for access in space.accesses:
        position = space.position(access)
        tvm_ffi.structural_walk(position, ((tirx.FloorDiv, note), (tirx.FloorMod, note)))
    return divisors[0] if divisors else None


def _are_one(space: IterationSpace, number: int) -> bool:
    """Return whether all accesses traverse an axis and the next as one, with no other use."""
    outer, inner = space.axes[number], space.axes[number + 1]
    analyzer = space.analyzer()
    for step in space.steps:
        others = [*step.guards, *([step.expression] if isinstance(step, Value) else [])]
        if any(uses(other, outer, inner) for other in others):
            return False
    if any(uses(store.value, outer, inner) for store in space.stores):
        return False
    for access in space.accesses:
        if not uses(access.index, outer, inner):
            continue
        linear = space.linear(access)
        if linear is None:
            return False
        factors, _ = linear
        whole = factors[number + 1] * i64(space.extents[number + 1])
        if not analyzer.can_prove_equal(factors[number], whole):
            return False
    return True


def _merge(space: IterationSpace, number: int) -> IterationSpace:
    outer, inner = space.axes[number], space.axes[number + 1]
    extent = space.extents[number + 1]
    both = tirx.Var(f"{outer.name}{inner.name}", "int64")
    axes = [*space.axes[:number], both, *space.axes[number + 2 :]]
    size = extent_of(volume(space.extents[number : number + 2]))
    extents = [*space.extents[:number], size, *space.extents[number + 2 :]]
    values = {
        outer: tirx.floordiv(both, i64(extent)),
        inner: tirx.floormod(both, i64(extent)),
    }
    return space.with_axes(axes, extents, values)
