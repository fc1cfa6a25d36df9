# SPDX-License-Identifier: Apache-2.0
"""Rows of an output that are computed together, since they read the same.

A filter reads most of its inputs, and computes most of its inlined stages, again for the next row.
With several rows in one step LLVM keeps in registers what they share::

    before: for i, j in T.grid(1024, 64):          after: for i, j in T.grid(256, 64):
                for v in T.vectorized(16):                    for r in T.unroll(4):
                    o[i, j * 16 + v] = ...                        for v in T.vectorized(16):
                                                                      o[i * 4 + r, j * 16 + v] = ...

A product that two rows share would no longer be rounded together with its sum, which makes other
bits than those of a single row. So sums of products are explicit multiply-adds in every filter,
however few rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.tirx.op import fma

from schedules import attributes
from schedules.tir.extents import constant
from schedules.tir.index_math import simplified

from ...core.machine import CPUInfo
from ..blocks import Access, BlockFacts
from .conditional_rows import is_interval

ROWS = 4
"""Rows of a step at least: more would need more streams from memory than are prefetched."""

_WORTHWHILE = 0.8  # of the loads are left; 0.79 of a stencil of 7 points
_FLOATS = ("float32", "float64")


def shared_rows(
    block: s_tir.SBlock, facts: BlockFacts, groups: Sequence[Sequence[int]]
) -> int | None:
    """Choose the loop whose iterations share the most loads.

    Parameters
    ----------
    block : SBlock
        An injective block.
    facts : BlockFacts
        Its facts.
    groups : Sequence[Sequence[int]]
        Its loops in groups that are fused; the last one is vectorised.

    Returns
    -------
    int | None
        The position of the loop, alone in its group, whose conditions hold for an interval of it;
        None if less than a quarter of the loads is saved, or the addresses of some are not known to
        be linear.
    """
    lane = groups[-1][-1]
    moving = [load for load in facts.loads if load.strides[lane] != 0]
    if not moving or any(stride is None for load in moving for stride in load.strides):
        return None
    if not is_filter(facts):
        return None
    along = [facts.vars[k] for k in groups[-1]]
    rows = [
        group[0]
        for group in groups[:-1]
        if len(group) == 1 and (not facts.guards or is_interval(block, facts.vars[group[0]], along))
    ]
    left = {k: _share_left(moving, k) for k in rows if facts.volume([k]) >= 2 * ROWS}
    best = min(left, key=left.__getitem__, default=None)
    return best if best is not None and left[best] <= _WORTHWHILE else None


def rows_of_step(cpu: CPUInfo, facts: BlockFacts, row: int) -> int:
    """Rows of a step: more where pixels, which are converted, are not awaited from memory."""
    is_pixel = tvm_ffi.dtype(str(facts.store.buffer.dtype)).bits < 32
    is_computed = is_pixel and cpu.num_vector_registers >= 32
    return 2 * ROWS if is_computed and facts.volume([row]) >= 4 * ROWS else ROWS


def _share_left(loads: Sequence[Access], row: int) -> float:
    """Loads of several rows together, a load of each of them alone."""
    bases: dict[ir.Var, tirx.Expr] = {}
    places: set[tuple[ir.Var, tuple[int | None, ...], int | str]] = set()
    for load in loads:
        base = bases.setdefault(load.buffer, load.offset)
        ahead = constant(simplified(load.offset - base))
        # A load that is no shifted copy of the first one shares nothing with it.
        place = str(load.offset) if ahead is None else ahead
        places.add((load.buffer, load.strides, place))
    together = set()
    for buffer, strides, at in places:
        for step in range(ROWS):
            stride = strides[row] or 0
            moved = step * stride + at if isinstance(at, int) else (at, step)
            together.add((buffer, strides, moved))
    return len(together) / (ROWS * len(places))


def is_filter(facts: BlockFacts) -> bool:
    """Return whether a block computes an element in floats from several places of a tensor."""
    if facts.float_bytes < 4:
        return False
    places = {(load.buffer, str(load.offset)) for load in facts.loads}
    return len(places) > len({buffer for buffer, _ in places})


def multiply_add(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make the sums of products of blocks with ``MULTIPLY_ADD`` explicit multiply-adds."""

    def rewrite(block: s_tir.SBlock) -> s_tir.SBlock:
        if attributes.MULTIPLY_ADD not in block.annotations:
            return block
        return tvm_ffi.structural_map(block, [(tirx.Add, _sum), (tirx.Sub, _difference)])

    return tvm_ffi.structural_map(func, (s_tir.SBlock, rewrite))


def _is_product(value: tirx.Expr) -> bool:
    return isinstance(value, tirx.Mul)


def _sum(node: tirx.Add) -> tirx.Expr:
    if str(node.ty.dtype) not in _FLOATS:
        return node
    if _is_product(node.a):
        return fma(node.a.a, node.a.b, node.b)
    return fma(node.b.a, node.b.b, node.a) if _is_product(node.b) else node


def _difference(node: tirx.Sub) -> tirx.Expr:
    if str(node.ty.dtype) not in _FLOATS:
        return node
    if _is_product(node.a):
        return fma(node.a.a, node.a.b, -node.b)
    return fma(-node.b.a, node.b.b, node.a) if _is_product(node.b) else node
