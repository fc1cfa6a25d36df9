# SPDX-License-Identifier: Apache-2.0
"""PrimFuncs: one of a function of Relax, and what one computes for each element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, s_tir, tirx
from tvm.relax.utils import copy_with_new_vars

from schedules.tir.expression_walk import loads, substitute
from schedules.tir.extents import constant


def lowered_function(builder: relax.BlockBuilder, name: str) -> tirx.PrimFunc | None:
    """The unscheduled PrimFunc that computes all of a function.

    ``builder``: holds the function, which has the attribute ``Primitive``; gets a caller of it.
    Returns with the function's parameters, then its outputs. None where it has symbolic extents
    that do not follow from the shapes of its parameters.
    """
    var = builder.get().get_global_var(name)
    function = builder.get()[var]
    if relax.analysis.free_symbolic_vars(function):
        return None
    params = list(copy_with_new_vars(function).params)
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Call(var, params))
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(), relax.transform.FuseTIR()]
    lowered = tvm.transform.Sequential(passes)(builder.get())
    [binding] = lowered["main"].body.blocks[0].bindings
    return lowered[binding.value.args[0]]


@dataclass(frozen=True)
class ElementFunction:
    """A function whose only block computes one element of the output at a time."""

    params: tuple[tirx.Buffer, ...]
    """Buffers of the tensors that it reads, in the order of the call."""
    output: tirx.Buffer  # The buffer that it writes.
    variables: tuple[tirx.Var, ...]  # Numbers of the element along each axis of the output.
    value: tirx.Expr  # The element.

    @classmethod
    def read(cls, func: tirx.PrimFunc) -> ElementFunction | None:
        """Read a function; None if it has another form, or takes numbers."""
        if not all(isinstance(param.ty, tirx.buffer.BufferType) for param in func.params):
            return None
        sch = s_tir.Schedule(tvm.IRModule({"main": func}))
        try:
            *inner, last = sch.get_child_blocks(sch.get_sblock("root"))
            for block in inner:
                sch.compute_inline(block)
        except (s_tir.ScheduleError, ValueError):
            return None
        block = sch.get(last)
        variables = tuple(iter_var.var for iter_var in block.iter_vars)
        *params, output = func.params
        store = block.body
        if isinstance(store, tirx.BufferStore) and not store.indices:
            return cls._read_scalar(block, tuple(params), output)
        plain = (
            isinstance(store, tirx.BufferStore)
            and block.init is None
            and all(int(iter_var.iter_type) == tirx.IterVar.DataPar for iter_var in block.iter_vars)
            and store.buffer.same_as(output)
            and len(store.indices) == len(variables)
            and all(map(lambda a, b: a.same_as(b), store.indices, variables))
            and all(str(var.ty.dtype) == "int64" for var in variables)
        )
        return cls(tuple(params), output, variables, store.value) if plain else None

    @classmethod
    def _read_scalar(
        cls, block: s_tir.SBlock, params: tuple[tirx.Buffer, ...], output: tirx.Buffer
    ) -> ElementFunction | None:
        """The only element of a tensor without axes, whose block still has a loop."""
        if block.init is not None or not block.body.buffer.same_as(output):
            return None
        loops = [iter_var for iter_var in block.iter_vars if constant(iter_var.dom.extent) == 1]
        if len(loops) < len(block.iter_vars):
            return None
        first = {loop.var: tirx.const(0, loop.var.ty.dtype) for loop in loops}
        return cls(params, output, (), substitute(block.body.value, first))

    def reads(
        self, call: relax.Call, element: Sequence[tirx.Expr]
    ) -> list[tuple[relax.Expr, list[tirx.Expr]]]:
        """Every read of a call: the operand, and the indices into it.

        ``call``: a ``call_tir`` of the function. ``element``: the indices of the element in the
        output.
        """
        extents = self._extents(call)
        values = dict(zip(self.variables, element, strict=True))
        pairs = []
        operands = [e for e in call.args[1].fields if isinstance(e.ty, relax.TensorType)]
        for load in loads(self.value):
            known = (k for k, param in enumerate(self.params) if load.source.same_as(param))
            position = next(known, None)
            if position is None:
                continue
            operand = operands[position]
            indices = [substitute(index, values | extents) for index in load.indices]
            pairs.append((operand, indices))
        return pairs

    def _extents(self, call: relax.Call) -> dict[tirx.Var, tirx.Expr]:
        """Values of the function's symbolic extents in the call."""
        extents: dict[tirx.Var, tirx.Expr] = {}
        operands = [e for e in call.args[1].fields if isinstance(e.ty, relax.TensorType)]
        for param, operand in zip([*self.params, self.output], [*operands, call], strict=True):
            for inner, outer in zip(param.shape, operand.ty.shape, strict=True):
                if isinstance(inner, tirx.Var):
                    extents[inner] = outer
        return extents
