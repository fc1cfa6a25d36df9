# SPDX-License-Identifier: Apache-2.0
"""Iteration spaces of an injective function, in the order that moves the least memory."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import DataType, tirx

from schedules.schedule_rule import KernelFacts
from schedules.tir.block_expressions import Stage, stages_of
from schedules.tir.extents import constant

from ..core.machine_costs import COSTS
from .coalescing import Lanes, classify, warp_cost
from .element_program import ElementProgram, Read
from .iteration_domain import IterationSpace, Store, merge_axes, split_axes

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


def best_lanes(space: IterationSpace, widest: int = COSTS.widest_load) -> Lanes:
    """The order of loops and the vector that move the least memory.

    The order of the loops is that of the outputs or of one of the inputs.

    Parameters
    ----------
    space : IterationSpace
        From :func:`injective_spaces`.
    widest : int
        Lanes at most.
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
