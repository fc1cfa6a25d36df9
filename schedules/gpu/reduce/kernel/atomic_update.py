# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of an output by partial results, and the kernel that initialises it.

An instruction without a return value (``red``) is used where the hardware has one: sums of float32,
float64, and integers; extremes of integers, and of floats by the order of their bits. ``and`` and
``or`` store the absorbing value, which every block may do at any time. Everything else loops over
compare-and-swap of the element's bits, narrow ones with their neighbours in a word of 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import ml_dtypes
import numpy as np
from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.gpu.core.intrinsics import native_atomic, vector_add, vector_add_width
from schedules.gpu.core.kernel_function import unless_empty
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.subword_atomics import swap_until_kept, word_bits
from schedules.tir.index_math import ceildiv, i64
from schedules.workload.reduce import ReduceWorkload
from schedules.workload.reduce_operator import SUMS, combine, finish, identity

from ..plan.config import ReduceConfig
from ..plan.group import ReduceGroup, Reduction
from .context import ReduceContext

Update: TypeAlias = Callable[[ReduceContext, Reduction, tirx.Expr, list[tirx.Expr]], None]


def atomic_update_vector(
    ctx: ReduceContext,
    reduction: Reduction,  # The reduction with the output.
    m: tirx.Expr,  # The first element, a multiple of the number of values.
    values: list[tirx.Expr],  # Values of the accumulators' type; a power of two of them.
) -> None:
    """Combine neighbouring elements of a reduction's output, from ``m`` on, with ``values``.

    Sums are added as vectors where the device supports it: pairs of 16-bit floats, and on sm_90 two
    or four float32. Elements that share a word are swapped together.
    """
    workload = reduction.workload
    update, step = _update(ctx.gpu, workload, len(values))
    for start in range(0, len(values), step):
        part = [_final(ctx, workload, value) for value in values[start : start + step]]
        update(ctx, reduction, m + i64(start), part)


def _update(gpu: GPUInfo, workload: ReduceWorkload, elements: int) -> tuple[Update, int]:
    """Method of updating neighbouring elements, and their number."""
    dtype = workload.out_dtype
    if dtype == "bool":
        return _absorb, 1
    width = vector_add_width(gpu, dtype, elements) if workload.operator in SUMS else 1
    if width > 1:
        return _add_vector, width
    if native_atomic(gpu, _instruction(workload), dtype) is not None:
        return _add_or_compare, 1
    bits = DataType(dtype).bits
    return _swap, min(elements, word_bits(gpu, bits) // bits)


def _instruction(workload: ReduceWorkload) -> str:
    return "add" if workload.operator in SUMS else workload.operator


def _final(ctx: ReduceContext, workload: ReduceWorkload, value: tirx.Expr) -> tirx.Expr:
    """A block's part of the result, still of the type of the accumulators."""
    if workload.operator != "mean":
        return value
    wide = replace(workload, dtype=workload.acc_dtype)
    [result] = finish(wide, (value,), ctx.group.reduced)
    return result


def _add_vector(
    ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, values: list[tirx.Expr]
) -> None:
    dtype = reduction.workload.out_dtype
    ready = [value.astype(dtype) for value in values]
    vector_add(T.address_of(_output(ctx, reduction)[m]), ready, dtype)


def _add_or_compare(
    ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, values: list[tirx.Expr]
) -> None:
    dtype = reduction.workload.out_dtype
    native = native_atomic(ctx.gpu, _instruction(reduction.workload), dtype)
    assert native is not None, "chosen where there is an instruction"
    native(T.address_of(_output(ctx, reduction)[m]), values[0].astype(dtype))


def _output(ctx: ReduceContext, reduction: Reduction) -> tirx.Buffer:
    output = None if reduction.output is None else ctx.flat(reduction.output)
    assert output is not None, "atomic is not chosen for outputs without a view"
    return output


def _absorb(
    ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, values: list[tirx.Expr]
) -> None:
    """Store the absorbing value, if this block has it."""
    [value] = values
    absorbing = 1 if reduction.workload.operator in ("or", "max") else 0
    with T.If(tirx.EQ(value, tirx.const(absorbing, value.ty.dtype))):
        with T.Then():
            ctx.write(reduction.output, m, tirx.const(bool(absorbing), "bool"))


def _swap(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, values: list[tirx.Expr]) -> None:
    assert reduction.output is not None, "atomic is not chosen where there are epilogues"

    def change(old: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
        wide = T.bind(old.astype(value.ty.dtype))
        return combine(reduction.workload, (wide,), (value,))[0]

    swap_until_kept(ctx.gpu, reduction.output, m, values, change)


def initialise_output(group: ReduceGroup, config: ReduceConfig, gpu: GPUInfo) -> None:
    """Emit the kernel, for the outputs of all reductions of the group."""
    count = ceildiv(group.outputs, config.threads)
    with unless_empty(count), T.launch_thread("blockIdx.x", count) as block:
        with T.launch_thread("threadIdx.x", i64(config.threads)) as thread:
            ctx = ReduceContext.open(group, config, gpu, block, i64(0), thread)
            m = block * i64(config.threads) + thread
            with T.If(m < i64(group.outputs)):
                with T.Then():
                    for reduction in group.reductions:
                        _write_identity(ctx, reduction, m)


def _write_identity(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr) -> None:
    workload = reduction.workload
    if workload.out_dtype in ("float16", "bfloat16"):
        _write_bits(ctx, reduction, m)
    elif workload.out_dtype == "bool":
        start = tirx.const(workload.operator in ("and", "min"), "bool")
        ctx.write(reduction.output, m, start)
    else:
        wide = replace(workload, acc_dtype=workload.out_dtype)
        ctx.write(reduction.output, m, identity(wide)[0])


def _write_bits(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr) -> None:
    """Store the identity of a 16-bit float by its bits: TVM has infinities of wider types only."""
    assert reduction.output is not None, "atomic is not chosen where there are epilogues"
    operator, dtype = reduction.workload.operator, reduction.workload.out_dtype
    number = {"prod": 1.0, "min": np.inf, "max": -np.inf}.get(operator, -0.0)
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    bits = int(np.array(number, kind).view(np.uint16))
    outputs = i64(ctx.group.outputs)
    view = T.decl_buffer((outputs,), "uint16", data=reduction.output.data)
    T.buffer_store(view, tirx.const(bits, "uint16"), [m])
