# SPDX-License-Identifier: Apache-2.0
"""Reading a coalesced reduction out of the function that FuseTIR left of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import DataType, ir, s_tir, tirx

from ..compute.coalesced_reduce import (
    ATTRIBUTE,
    FINISH,
    SCRATCH_ATTRIBUTE,
    SHAPE_ATTRIBUTE,
    STATE,
    VALUE,
)
from ..expression_walk import loads, substitute
from ..reduce_workload import CanonicalLoops, Extent, ReduceWorkload, constant


@dataclass(frozen=True)
class ReduceFunction:
    """A reduction with its producers inlined.

    Parameters
    ----------
    func : tirx.PrimFunc
        Signature and attributes.
    workload : ReduceWorkload
        Operator, types, finish.
    loops : CanonicalLoops
        Axes of the data; symbolic extents stand for themselves only in ``outputs``, ``reduced``.
    outputs, reduced : Extent
        ``M`` and ``N``.
    value : Callable
        The first field of the state of element ``(m, n)``, both int64.
    itemsize : int
        Bytes of the narrowest element that it reads.
    output : tirx.Buffer
        The result, row-major in ``m``.
    scratch : tirx.Buffer | None
        Zeroed 32-bit words for tickets and partial results.
    """

    func: tirx.PrimFunc
    workload: ReduceWorkload
    loops: CanonicalLoops
    outputs: Extent
    reduced: Extent
    value: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
    itemsize: int
    output: tirx.Buffer
    scratch: tirx.Buffer | None

    @property
    def scratch_bytes(self) -> int:
        """Size of the scratch."""
        return 0 if self.scratch is None else 4 * int(self.scratch.shape[0])


def read_reduction(func: tirx.PrimFunc) -> ReduceFunction | None:
    """Take a function apart, or return None if it is not one reduction behind its producers.

    Raises
    ------
    ScheduleError
        If something else than producers stands beside the reduction.
    """
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    found = sch.get_child_blocks(sch.get_sblock("root"))
    blocks = {sch.get(block).name_hint: block for block in found}
    if not {VALUE, STATE, FINISH} <= set(blocks):
        return None
    for name, block in blocks.items():
        if name not in (VALUE, STATE, FINISH):
            sch.compute_inline(block)
    source = sch.get(blocks[VALUE])
    annotations = source.annotations
    workload = ReduceWorkload.from_json(str(annotations[ATTRIBUTE]))
    shape = json.loads(str(annotations[SHAPE_ATTRIBUTE]))
    loops = CanonicalLoops(
        tuple(_unknown() if extent is None else extent for extent in shape), workload.axes
    )
    m_var, n_var = (iter_var.var for iter_var in source.iter_vars)
    expression = source.body.value
    outputs, reduced = (_extent(iter_var.dom.extent) for iter_var in source.iter_vars)
    *inputs, output = [param for param in func.params if isinstance(param, tirx.Buffer)]
    read = loads(expression)
    scratch = _find_scratch(inputs, read, int(annotations[SCRATCH_ATTRIBUTE]))
    return ReduceFunction(
        func,
        workload,
        loops,
        outputs,
        reduced,
        lambda m, n: substitute(expression, {m_var: m, n_var: n}),
        min((DataType(str(load.ty.dtype)).bits // 8 or 1 for load in read), default=1),
        output,
        scratch,
    )


def _find_scratch(
    inputs: Sequence[tirx.Buffer], read: Sequence[ir.TensorLoad], words: int
) -> tirx.Buffer | None:
    """The operand for partial results; None unless it can be nothing else."""
    found = [
        buffer
        for buffer in inputs
        if str(buffer.dtype) == "int32"
        and [constant(extent) for extent in buffer.shape] == [words]
        and not any(load.source.same_as(buffer) for load in read)
    ]
    return found[0] if words and len(found) == 1 else None


def _unknown() -> tirx.Expr:
    return tirx.Var("extent", "int64")


def _extent(extent: tirx.Expr) -> Extent:
    known = constant(extent)
    return extent if known is None else known
