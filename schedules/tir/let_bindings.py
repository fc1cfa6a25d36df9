# SPDX-License-Identifier: Apache-2.0
"""Shared values of an expression in a form that TVM processes in linear time.

TVM's analyzer, also in code generation, replaces the variables of lets by their values, as a tree:
nested lets take exponential time. :func:`share_values` keeps values in small buffers instead, which
the analyzer does not expand; LLVM turns them into registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx

from .expression_walk import is_if_then_else, substitute

Rewrite = Callable[[ir.Expr], ir.Expr]


def share_values(
    func: tirx.PrimFunc,  # A scheduled function.
    # Function from a stored value to a new one with pure lets, each of its own variable; to the
    # same object where there is nothing to do.
    rewrite: Rewrite,
    scope: str = "global",  # Scope of the buffers: "local" in kernels of GPUs.
) -> tirx.PrimFunc:
    """Rewrite what a function stores, each let becoming a store before it.

    With ``let b = x[v] + 1 in b * b`` as the new value of ``y[v]``, v being ``o * 8 + i``::

        for i in T.vectorized(8):                       b = T.alloc_buffer((8,))
            with T.sblock("y"):                         for i in T.vectorized(8):
                v = T.axis.spatial(64, o * 8 + i)           with T.sblock("y"):
                y[v] = f(x[v])                                  v = T.axis.spatial(64, o * 8 + i)
                                                                lane = T.axis.spatial(8, i)
                                                                b[lane] = x[v] + 1
                                                                y[v] = b[lane] * b[lane]

    Returns the same function when nothing is rewritten. Lets inside a branch of ``if_then_else``
    are computed only where the branch is taken.
    """

    def in_vector(loop: tirx.For) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.VECTORIZED:
            return loop
        shared = _Shared(rewrite, loop.loop_var - loop.min, loop.extent, scope)
        body = tvm_ffi.structural_map(loop.body, (tirx.BufferStore, shared.store))
        if not shared.buffers:
            return loop if body.same_as(loop.body) else _with_body(loop, body)
        named = tvm_ffi.structural_map(
            body, (s_tir.SBlockRealize, lambda realize: _with_lane(realize, loop))
        )
        return shared.allocate(_with_body(loop, named))

    def alone(store: tirx.BufferStore) -> tirx.Stmt:
        if store not in outside:
            return store
        shared = _Shared(rewrite, tirx.IntImm("int32", 0), tirx.IntImm("int32", 1), scope)
        return shared.allocate(shared.store(store))

    vectors = tvm_ffi.structural_map(func, (tirx.For, in_vector))
    outside = _stores_outside_vectors(func)
    return tvm_ffi.structural_map(vectors, (tirx.BufferStore, alone))


def _stores_outside_vectors(func: tirx.PrimFunc) -> set[tirx.BufferStore]:
    stores: set[tirx.BufferStore] = set()

    def skip_vectors(loop: tirx.For) -> tvm_ffi.WalkResult:
        vector = loop.kind == tirx.ForKind.VECTORIZED
        return tvm_ffi.WalkResult.SKIP if vector else tvm_ffi.WalkResult.ADVANCE

    callbacks = ((tirx.For, skip_vectors), (tirx.BufferStore, stores.add))
    tvm_ffi.structural_walk(func.body, callbacks, order="pre")
    return stores


class _Shared:
    """The buffers of one vectorised loop, or of one store outside of any."""

    def __init__(self, rewrite: Rewrite, lane: ir.Expr, lanes: ir.Expr, scope: str) -> None:
        self._rewrite, self._scope = rewrite, scope
        self._lane, self._lanes = lane, lanes
        self.buffers: list[ir.Var] = []

    def store(self, store: tirx.BufferStore) -> tirx.Stmt:
        """The store of the rewritten value, after the stores of its shared values."""
        value = self._rewrite(store.value)
        if value.same_as(store.value):
            return store
        lets = _Lets(value)
        if not lets.ordered:
            return tirx.BufferStore(store.buffer, lets.stripped, store.indices)
        loads: dict[ir.Var, ir.Expr] = {}
        steps: list[tirx.Stmt] = []
        for var in lets.ordered:
            buffer, index = self._place(var)
            definition = substitute(lets.values[var], loads)
            step: tirx.Stmt = tirx.BufferStore(buffer, definition, [index])
            for condition in lets.conditions.get(var, ()):
                step = tirx.IfThenElse(substitute(condition, loads), step, None)
            steps.append(step)
            loads[var] = tirx.BufferLoad(buffer, [index])
        last = substitute(lets.stripped, loads)
        return tirx.SeqStmt([*steps, tirx.BufferStore(store.buffer, last, store.indices)])

    def _place(self, var: ir.Var) -> tuple[ir.Var, ir.Expr]:
        """A new buffer for a variable, and the place of this lane's value in it."""
        lanes = int(var.ty.dtype.lanes)
        element = str(var.ty.dtype).removesuffix(f"x{lanes}")
        shape, scope = (self._lanes * lanes,), self._scope
        buffer = tirx.decl_buffer(shape, element, var.name, scope=scope, layout=None)
        self.buffers.append(buffer)
        # A buffer of vectors would conflict with one of scalars when TVM shares their memory.
        return buffer, self._lane if lanes == 1 else tirx.Ramp(self._lane * lanes, 1, lanes)

    def allocate(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """The statement after the allocations of all buffers."""
        if not self.buffers:
            return stmt
        return tirx.SeqStmt([*map(tirx.AllocBuffer, self.buffers), stmt])


class _Lets:
    """Decomposition of an expression.

    ``stripped`` is the expression without lets, ``values`` the values of their variables,
    ``ordered`` the variables, each after those that its value uses, and ``conditions`` those under
    which a value may be computed, the innermost one first.
    """

    def __init__(self, expr: ir.Expr) -> None:
        self.values: dict[ir.Var, ir.Expr] = {}
        self.conditions: dict[ir.Var, list[ir.Expr]] = {}

        def strip(let: tirx.Let) -> ir.Expr:
            self.values[let.var] = let.value
            return let.body

        def note(call: ir.Call) -> ir.Call:
            if is_if_then_else(call):
                condition, yes, no = call.args
                for branch, taken in ((yes, condition), (no, tirx.Not(condition))):
                    for var in self._used([branch]):
                        self.conditions.setdefault(var, []).append(taken)
            return call

        self.stripped = tvm_ffi.structural_map(expr, ((tirx.Let, strip), (ir.Call, note)))
        self.ordered = self._used([self.stripped])

    def _used(self, exprs: Sequence[ir.Expr]) -> list[ir.Var]:
        """The let variables that expressions use, directly or through others."""
        used: dict[ir.Var, None] = {}

        def visit(var: ir.Var) -> None:
            if var in self.values and var not in used:
                for expr in (self.values[var], *self.conditions.get(var, ())):
                    tvm_ffi.structural_walk(expr, (ir.Var, visit))
                used[var] = None

        for expr in exprs:
            tvm_ffi.structural_walk(expr, (ir.Var, visit))
        return list(used)


def _with_lane(realize: s_tir.SBlockRealize, loop: tirx.For) -> s_tir.SBlockRealize:
    """Pass the loop's variable to a block that uses it, by a new iteration variable."""
    lane = tirx.Var("lane", loop.loop_var.ty)
    block = substitute(realize.block, {loop.loop_var: lane})
    if block.same_as(realize.block):
        return realize
    domain = ir.Range.from_min_extent(loop.min, loop.extent)
    named = s_tir.SBlock(
        [*block.iter_vars, tirx.IterVar(domain, lane, tirx.IterVar.DataPar)],
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return s_tir.SBlockRealize([*realize.iter_values, loop.loop_var], realize.predicate, named)


def _with_body(loop: tirx.For, body: tirx.Stmt) -> tirx.For:
    return tirx.For(
        loop.loop_var,
        loop.min,
        loop.extent,
        loop.kind,
        body,
        loop.thread_binding,
        loop.annotations,
    )
