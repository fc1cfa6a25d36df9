# SPDX-License-Identifier: Apache-2.0
"""Input of a product, contiguous for each tile of columns: a copy, or the input's own layout."""

from __future__ import annotations

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV

from schedules import attributes
from schedules.tir.expression_walk import uses

from .blocks import BlockFacts, realize_of
from .loop_transforms import static_extent


def copy_of_input(sch: s_tir.Schedule, facts: BlockFacts, index: int) -> SBlockRV:
    """Let a block read a copy of one of its inputs, with the block's columns innermost.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    facts : BlockFacts
        Of the block; its columns are its last spatial variable.
    index : int
        Index among the block's reads.

    Returns
    -------
    SBlockRV
        The block that copies.
    """
    buffer = sch.get(facts.block).reads[index].source
    rank, place = len(buffer.shape), column_axis(facts, buffer)
    copy = sch.cache_read(facts.block, index, "global")
    if place != rank - 1:
        order = [d for d in range(rank) if d != place] + [place]
        sch.transform_layout(copy, ("write", 0), _permutation(order))
    return copy


def reads_columns_in_order(sch: s_tir.Schedule, facts: BlockFacts, index: int) -> bool:
    """Return whether column ``n`` of a block reads column ``n`` of an input: no steps, no offset.

    Parameters are those of :func:`copy_of_input`.
    """
    buffer = sch.get(facts.block).reads[index].source
    column = facts.vars[facts.positions("S")[-1]]
    load = next(load for load in facts.loads if load.buffer.same_as(buffer))
    return load.indices[column_axis(facts, buffer)].same_as(column)


def column_axis(facts: BlockFacts, buffer: tirx.Buffer) -> int:
    """Return the axis of an input along which the columns of a block run."""
    column = facts.vars[facts.positions("S")[-1]]
    load = next(load for load in facts.loads if load.buffer.same_as(buffer))
    return next(axis for axis, expr in enumerate(load.indices) if uses(expr, column))


def lay_out_matrix(func: tirx.PrimFunc, place: int, axis: int, lanes: int) -> tirx.PrimFunc:
    """Let a function read one of its matrices in the layout [columns / lanes, depth, lanes].

    Parameters
    ----------
    func : PrimFunc
        A scheduled function, which only reads the matrix.
    place : int
        Position of the matrix among the parameters.
    axis : int
        Axis of the columns.
    lanes : int
        Lanes of a vector; they divide the columns.

    Returns
    -------
    PrimFunc
        The function with another parameter, and the attribute ``LAID_OUT``.
    """
    plain = func.params[place]
    shape = [plain.shape[axis] // lanes, plain.shape[1 - axis], lanes]
    matrix = tirx.decl_buffer(shape, str(plain.dtype), plain.name)

    def load(node: ir.TensorLoad) -> ir.TensorLoad:
        if not node.source.same_as(plain):
            return node
        column, depth = node.indices[axis], node.indices[1 - axis]
        return matrix[tirx.floordiv(column, lanes), depth, tirx.floormod(column, lanes)]

    def region(node: ir.TensorRegion) -> ir.TensorRegion:
        if not node.source.same_as(plain):
            return node
        return tirx.BufferRegion(matrix, [ir.Range(0, extent) for extent in matrix.shape])

    body = tvm_ffi.structural_map(func.body, [(ir.TensorLoad, load), (ir.TensorRegion, region)])
    params = [matrix if k == place else param for k, param in enumerate(func.params)]
    result = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
    return result.with_attr(attributes.LAID_OUT, [place, axis, lanes])


def _permutation(order: list[int]):  # noqa: ANN202 - an index map is any callable
    return lambda *indices: [indices[d] for d in order]


def vectorize_copy(sch: s_tir.Schedule, copy: SBlockRV, columns: LoopRV, lanes: int) -> None:
    """Vectorise a copy along the columns of its tile.

    Parameters
    ----------
    sch : Schedule
        The schedule.
    copy : SBlockRV
        What :func:`copy_of_input` returned, computed at ``columns``.
    columns : LoopRV
        The loop over tiles of columns.
    lanes : int
        Lanes of a vector; they divide the tile.
    """
    realize = realize_of(sch, copy)
    written = realize.block.body.indices[-1]
    axis = next(k for k, i in enumerate(realize.block.iter_vars) if uses(written, i.var))
    shared = sch.get(columns).loop_var
    loops = sch.get_loops(copy)
    depth = [sch.get(loop).loop_var.same_as(shared) for loop in loops].index(True) + 1
    last = [
        k
        for k, loop in enumerate(loops)
        if k >= depth and uses(realize.iter_values[axis], sch.get(loop).loop_var)
    ]
    if not last:
        return
    rest = [loop for k, loop in enumerate(loops) if k >= depth and k not in last]
    extent = static_extent(sch, loops[last[0]]) or 1
    vector, lane = sch.split(loops[last[0]], [None, min(lanes, extent)])
    sch.reorder(*rest, vector, lane)
    sch.vectorize(lane)
