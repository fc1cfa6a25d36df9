# SPDX-License-Identifier: Apache-2.0
"""Blocks of an unscheduled function as expressions, for rules that write kernels from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx

from schedules.schedule_rule import KernelFacts

from .expression_walk import loads, substitute
from .extents import Extent, constant, extent_of
from .index_math import as_type


@dataclass(frozen=True)
class Stage:
    """A block that computes each element of one buffer, or of several by a store for each.

    Of several there is a stage for each buffer, in the order of the stores.
    """

    output: tirx.Buffer  # The buffer that it writes, at ``axes``.
    axes: tuple[tirx.IterVar, ...]
    reduced: tuple[tirx.IterVar, ...]
    """``axes`` and ``reduced``: its spatial variables, one for each axis of the output, and the
    reduced ones."""
    value: tirx.Expr
    """The stored value; in a reduction it reads the block's outputs at ``axes``, as they were
    before the first store."""
    init: tirx.Expr | None  # First value of a reduction.
    name: str = ""  # Name of the block.
    loops: tuple[str, ...] = ()
    """Names of the loops over ``axes`` and ``reduced``; empty for an axis without a loop."""
    together: tuple[tirx.Buffer, ...] = ()
    """The buffers that its block computes, if these are several."""

    @property
    def outputs(self) -> tuple[tirx.Buffer, ...]:
        """The buffers that its block computes."""
        return self.together or (self.output,)

    def at(self, indices: Sequence[tirx.Expr], expression: tirx.Expr | None = None) -> tirx.Expr:
        """The value, or another expression of the stage's variables, at a given place."""
        places = {
            axis.var: as_type(index, str(axis.var.ty.dtype))
            for axis, index in zip(self.axes, indices, strict=True)
        }
        return substitute(self.value if expression is None else expression, places)

    @property
    def shape(self) -> tuple[Extent, ...]:
        """Extents of the output."""
        return tuple(extent_of(axis.dom.extent) for axis in self.axes)


def stages_of(facts: KernelFacts) -> list[Stage] | None:
    """Stages of a function, for :meth:`.KernelFacts.read`."""
    return read_stages(facts.func)


def read_stages(func: tirx.PrimFunc, several: bool = False) -> list[Stage] | None:
    """Read the stages of a function; None if a block is no plain nest that computes a buffer.

    A stage comes after those which it reads. Left alone: functions with thread bindings,
    statements other than one store in a block, buffers with strides or an offset, and blocks that
    write a buffer twice, in another order than that of their variables, or only a part of it. With
    ``several``, blocks that compute several buffers from bound values are read, too.
    """
    root = func.body
    if not isinstance(root, s_tir.SBlockRealize) or any(map(_is_strided, _buffers(func, root))):
        return None
    body = root.block.body
    parts = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    stages: list[Stage] = []
    for part in parts:
        found = _read_nest(part, several)
        if found is None:
            return None
        stages += found
    outputs = {stage.output for stage in stages}
    return stages if len(outputs) == len(stages) else None


def _buffers(func: tirx.PrimFunc, root: s_tir.SBlockRealize) -> list[tirx.Buffer]:
    params = [param for param in func.params if isinstance(param.ty, tirx.BufferType)]
    return [*params, *root.block.alloc_buffers]


def _is_strided(buffer: tirx.Buffer) -> bool:
    offset = buffer.elem_offset
    return bool(list(buffer.strides)) or not (offset is None or constant(offset) == 0)


def _read_nest(stmt: tirx.Stmt, several: bool) -> list[Stage] | None:
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For):
        if stmt.kind != tirx.ForKind.SERIAL or constant(stmt.min) != 0:
            return None
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, s_tir.SBlockRealize) or not _is_canonical(stmt, loops):
        return None
    block = stmt.block
    if block.alloc_buffers or block.match_buffers:
        return None
    stores, inits = _stores(block.body), _stores(block.init)
    if not stores or inits is None or not (several or isinstance(block.body, tirx.BufferStore)):
        return None
    if inits and [one.buffer for one in inits] != [one.buffer for one in stores]:
        return None
    spatial = [v for v in block.iter_vars if int(v.iter_type) == int(tirx.IterVar.DataPar)]
    reduced = [v for v in block.iter_vars if int(v.iter_type) == int(tirx.IterVar.CommReduce)]
    if len(spatial) + len(reduced) < len(block.iter_vars) or bool(reduced) != bool(inits):
        return None
    axes = _axes_of(stores[0], spatial)
    if axes is None or any(_axes_of(store, spatial) != axes for store in stores[1:]):
        return None
    used = {axis.var for axis in axes}
    units = {v.var: tirx.const(0, v.var.ty.dtype) for v in spatial if v.var not in used}
    bound = dict(zip((v.var for v in block.iter_vars), stmt.iter_values, strict=True))
    names = tuple(_loop_name(bound.get(axis.var)) for axis in (*axes, *reduced))
    together = tuple(store.buffer for store in stores) if len(stores) > 1 else ()
    return [
        Stage(
            store.buffer,
            axes,
            tuple(reduced),
            substitute(store.value, units),
            substitute(init.value, units) if init else None,
            block.name_hint,
            names,
            together,
        )
        for store, init in itertools.zip_longest(stores, inits)
    ]


def _stores(stmt: tirx.Stmt | None) -> list[tirx.BufferStore] | None:
    """The stores of a block, whose values may be bound before; None if there is anything else.

    None of them reads what another one has written.
    """
    bound: dict[ir.Var, tirx.Expr] = {}
    stores: list[tirx.BufferStore] = []
    for part in list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt] if stmt else []:
        if isinstance(part, tirx.Bind) and not stores:
            bound[part.var] = substitute(part.value, bound)
            continue
        written = {store.buffer for store in stores}
        if not isinstance(part, tirx.BufferStore) or any(
            load.source in written for load in loads(part.value)
        ):
            return None
        value = substitute(part.value, bound)
        stores.append(tirx.BufferStore(part.buffer, value, part.indices))
    return stores


def _loop_name(value: tirx.Expr | None) -> str:
    return value.name if isinstance(value, ir.Var) else ""


def _is_canonical(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> bool:
    """Return whether each variable of the block is a whole loop, or has one value."""
    if constant(realize.predicate) != 1:
        return False
    free = list(loops)
    for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=True):
        if constant(axis.dom.min) != 0:
            return False
        if constant(axis.dom.extent) == 1 and constant(value) == 0:
            continue
        found = [loop for loop in free if loop.loop_var.same_as(value)]
        if not found or not _equal(found[0].extent, axis.dom.extent):
            return False
        free.remove(found[0])
    return all(constant(loop.extent) == 1 for loop in free)


def _axes_of(
    store: tirx.BufferStore, spatial: Sequence[tirx.IterVar]
) -> tuple[tirx.IterVar, ...] | None:
    """The variable of each axis of a store, if all are there and cover it."""
    axes = []
    for index, extent in zip(store.indices, store.buffer.shape, strict=True):
        matches = [axis for axis in spatial if axis.var.same_as(index)]
        if not matches and constant(extent) == 1 and constant(index) == 0:
            zero = tirx.Var("zero", "int64")
            matches = [tirx.IterVar(ir.Range(0, 1), zero, tirx.IterVar.DataPar)]
        if not matches or not _equal(matches[0].dom.extent, extent):
            return None
        axes.append(matches[0])
    used = {axis.var for axis in axes}
    if len(used) < len(axes):
        return None
    unused = [axis for axis in spatial if axis.var not in used]
    return tuple(axes) if all(constant(axis.dom.extent) == 1 for axis in unused) else None


def _equal(a: Extent, b: Extent) -> bool:
    known, other = constant(a), constant(b)
    if known is not None or other is not None:
        return known == other
    return bool(tvm_ffi.structural_equal(a, b))
