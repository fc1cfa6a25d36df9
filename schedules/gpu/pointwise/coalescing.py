# SPDX-License-Identifier: Apache-2.0
"""Cost of a warp's accesses, wide accesses, and the iteration space that moves the least memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import DataType, tirx

from schedules.gpu.core.lane_run import LaneRun
from schedules.gpu.core.machine_costs import COSTS
from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import Stage, stages_of
from schedules.tir.expression_walk import substitute, variables
from schedules.tir.extents import constant, unravel
from schedules.tir.index_math import is_multiple

from .element_program import ElementProgram, Read, Value
from .iteration_domain import IterationSpace, Store, merge_axes, split_axes

_FAR = 1 << 24  # stands for an unknown extent or factor


@dataclass(frozen=True)
class Lanes:
    """A space computed in vectors of ``vector`` neighbouring points."""

    space: IterationSpace
    vector: int  # Lanes, a power of two.
    is_aligned: bool  # Whether all lanes lie along the last axis; else they may run over its end.
    kinds: dict[object, str]
    """Kind of the variable of each read, and of the number of each store: ``vector`` (one wide
    access), ``uniform`` (the same place for all lanes), or ``each``."""
    varying: frozenset[tirx.Var]  # Variables of steps that differ between lanes.
    contiguous: frozenset[object]
    """Accesses, named as in ``kinds``, whose position is that of the point plus a constant."""

    def depends(self, expression: tirx.Expr) -> bool:
        """Return whether an expression differs between lanes."""
        return _depends(self.space, self.is_aligned, self.varying, expression)


def classify(
    space: IterationSpace,  # The points; lanes are neighbours along its last axis.
    vector: int,  # Lanes, a power of two.
    differing: Iterable[tirx.Var] = (),  # Variables without a step that differ between lanes.
) -> Lanes:
    """Classify each access by its stride from lane to lane."""
    extent = constant(space.extents[-1]) if space.extents else 1
    aligned = extent is not None and extent % vector == 0
    varying: set[tirx.Var] = set(differing)
    kinds: dict[object, str] = {}
    contiguous: set[object] = set()
    for step in space.steps:
        if isinstance(step, Value):
            # If only one lane may compute it, the others would lack it.
            if _depends(space, aligned, varying, step.expression) or any(
                _varies(space, aligned, varying, guard, vector) for guard in step.guards
            ):
                varying.add(step.var)
            continue
        kind, follows = _kind(space, aligned, varying, step, vector)
        kinds[step.var] = kind
        if follows:
            contiguous.add(step.var)
        if kind != "uniform":
            varying.add(step.var)
    for number, store in enumerate(space.stores):
        kinds[number], follows = _kind(space, aligned, varying, store, vector)
        if follows:
            contiguous.add(number)
    return Lanes(space, vector, aligned, kinds, frozenset(varying), frozenset(contiguous))


def _depends(
    space: IterationSpace,
    aligned: bool,
    varying: set[tirx.Var] | frozenset[tirx.Var],
    expression: tirx.Expr,
) -> bool:
    moving = space.axes[-1:] if aligned else space.axes
    return bool(variables(expression) & {*moving, *varying})


def _kind(
    space: IterationSpace,
    aligned: bool,
    varying: set[tirx.Var],
    access: Read | Store,
    vector: int,
) -> tuple[str, bool]:
    """Kind of an access, and whether it is contiguous in the whole space."""
    index = space.position(access)
    if not _depends(space, aligned, varying, index):
        return "uniform", False
    linear = space.linear(access)
    follows = linear is not None and _is_row_major(space, linear[0])
    if variables(index) & varying:
        return "each", False
    guards = access.guards if isinstance(access, Read) else ()
    if any(_varies(space, aligned, varying, guard, vector) for guard in guards):
        return "each", follows
    if not aligned:
        whole = follows and linear is not None and is_multiple(linear[1], vector)
        return ("vector" if vector > 1 and whole else "each"), follows
    run, axis = LaneRun(vector), space.axes[-1]
    places = [substitute(index, {axis: place}) for place in (run.start, run.start + run.lane)]
    return ("each" if vector == 1 else run.kind(*places)), follows


def _varies(
    space: IterationSpace,
    aligned: bool,
    varying: set[tirx.Var],
    guard: tirx.Expr,
    vector: int,
) -> bool:
    """Return whether a condition may hold for some lanes only; multiples as bounds do not."""
    if not _depends(space, aligned, varying, guard):
        return False
    if variables(guard) & varying:
        return True
    run = LaneRun(vector)
    point = run.start + run.lane
    places = [point] if aligned else unravel(point, space.extents, is_natural=True)
    moving = space.axes[-1:] if aligned else space.axes
    return not run.is_even(substitute(guard, dict(zip(moving, places, strict=True))))


def _is_row_major(space: IterationSpace, factors: Sequence[tirx.Expr]) -> bool:
    analyzer, stride = space.analyzer(), tirx.const(1, "int64")
    for factor, extent in zip(reversed(factors), reversed(space.extents), strict=True):
        if not analyzer.can_prove_equal(factor, stride):
            return False
        stride = stride * extent
    return True


def warp_cost(lanes: Lanes) -> float:
    """Cost of a warp's accesses for each point: sectors moved, sectors touched, instructions."""
    points = COSTS.warp * lanes.vector
    total = 0.0
    for number, access in _named(lanes.space):
        item = DataType(str(access.buffer.dtype)).bits // 8 or 1
        address = _addresses(lanes.space, access, points) * item
        by_thread = address.reshape(COSTS.warp, lanes.vector)
        kind = lanes.kinds[number]
        width = {"vector": max(1, COSTS.widest_load // item), "uniform": lanes.vector, "each": 1}[
            kind
        ]
        moved = len(np.unique(address // COSTS.sector))
        touched, instructions = 0, 0
        for start in range(0, lanes.vector, width):
            part = by_thread[:, start : start + width]
            part = part[:, :1] if kind == "uniform" else part
            touched += len(np.unique(part // COSTS.sector))
            instructions += 1
        total += moved + 0.5 * touched + instructions
    return total / points


def is_scattered(lanes: Lanes) -> bool:
    """Return whether a warp moves over twice the sectors that its elements of a tensor fill.

    Reads at places that are themselves read from memory do not count.
    """
    points = COSTS.warp * lanes.vector
    steps = {step.var for step in lanes.space.steps}
    touched: dict[tirx.Buffer, list[np.ndarray]] = {}
    for _, access in _named(lanes.space):
        linear = lanes.space.linear(access)
        if linear is None or any(variables(index) & steps for index in access.indices):
            continue
        offset = constant(linear[1]) or 0
        address = _addresses(lanes.space, access, points) + offset
        touched.setdefault(access.buffer, []).append(address)
    for buffer, parts in touched.items():
        item = DataType(str(buffer.dtype)).bits // 8 or 1
        address = np.unique(np.concatenate(parts) * item)
        if len(np.unique(address // COSTS.sector)) > 2 * max(
            2, -(-len(address) * item // COSTS.sector)
        ):
            return True
    return False


def _named(space: IterationSpace) -> list[tuple[object, Read | Store]]:
    reads = [(step.var, step) for step in space.steps if isinstance(step, Read)]
    return [*reads, *enumerate(space.stores)]


def _addresses(space: IterationSpace, access: Read | Store, points: int) -> np.ndarray:
    """Positions of a warp's points, in elements; far from each other where they are not known."""
    linear = space.linear(access)
    point = np.arange(points, dtype=np.int64)
    if linear is None:
        return point * COSTS.sector
    address = np.zeros(points, np.int64)
    for number in reversed(range(len(space.axes))):
        extent = constant(space.extents[number]) or _FAR
        factor = constant(linear[0][number])
        address += point % extent * (_FAR if factor is None else factor)
        point = point // extent
    return address - address.min()


VECTORS = (16, 8, 4, 2, 1)


def injective_spaces(facts: KernelFacts) -> list[IterationSpace] | None:
    """One space for all outputs of one shape; None if a block reduces or is no plain nest."""
    stages = facts.read(stages_of)
    if stages is None or any(stage.reduced for stage in stages):
        return None
    return spaces_of(facts.func, stages)


def spaces_of(func: tirx.PrimFunc, stages: Sequence[Stage]) -> list[IterationSpace]:
    """One space for all outputs of one shape; reductions are unrolled."""
    written = [stage for stage in stages if any(stage.output.same_as(p) for p in func.params)]
    groups: list[list[Stage]] = []
    for stage in written:
        for group in groups:
            if tvm_ffi.structural_equal(list(group[0].output.shape), list(stage.output.shape)):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return [_space(group, stages) for group in groups]


def _space(outputs: Sequence[Stage], stages: Sequence[Stage]) -> IterationSpace:
    program = ElementProgram(stages)
    axes = tuple(tirx.Var(f"i{k}", "int64") for k in range(len(outputs[0].axes)))
    stores = [Store(s.output, axes, program.element(s.output, axes)) for s in outputs]
    space = IterationSpace(axes, outputs[0].shape, tuple(program.steps), tuple(stores))
    return split_axes(space)


def best_lanes(
    space: IterationSpace,  # Space from :func:`injective_spaces`.
    widest: int = COSTS.widest_load,  # Lanes at most.
) -> Lanes:
    """The order of loops and the vector that move the least memory.

    The order of the loops is that of the outputs or of one of the inputs.
    """
    natural = merge_axes(space)
    best = _best_vector(natural, widest)
    for order in _orders(space):
        lanes = _best_vector(merge_axes(space.permuted(order)), widest)
        if warp_cost(lanes) < 0.9 * warp_cost(best):
            best = lanes
    return best


def _best_vector(space: IterationSpace, widest: int) -> Lanes:
    candidates = [classify(space, vector) for vector in _vectors(space) if vector <= widest]
    return min(candidates, key=warp_cost)


def _vectors(space: IterationSpace) -> list[int]:
    """Numbers of lanes that some access moves at once."""
    bits = {DataType(str(access.buffer.dtype)).bits for access in space.accesses}
    most = COSTS.widest_load * 8 // min(8 if b < 8 else b for b in bits) if bits else 1
    size = constant(space.size)
    return [v for v in VECTORS if v <= most and (size is None or v <= size)] or [1]


def _orders(space: IterationSpace) -> list[list[int]]:
    """Orders in which a read runs through its tensor, where they differ from the outputs'."""
    orders = []
    for step in space.steps:
        linear = space.linear(step) if isinstance(step, Read) else None
        if linear is None or not linear[0]:
            continue
        factors = [constant(factor) for factor in linear[0]]
        if any(factor is None for factor in factors):
            continue
        order = sorted(range(len(factors)), key=lambda k: -(factors[k] or 1 << 60))
        if order != sorted(order) and order not in orders:
            orders.append(order)
    return orders
