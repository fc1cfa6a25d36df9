# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of an output by the partial result of a block.

Where the hardware has an instruction without a return value (``red``) it is used: sums of float32,
float64, and integers; extremes of integers, and of floats by the order of their bits. ``and`` and
``or`` store the absorbing value, which every block may do at any time. Everything else loops over
compare-and-swap of the element's bits: 32 or 64, on CUDA also 16.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from ..reduce_operator import SUMS, combine, finish
from ..reduce_workload import ReduceWorkload
from .device_ops import compare_and_swap, native_atomic, vector_add, vector_add_width
from .index_math import i64
from .reduce_context import ReduceContext
from .reduce_group import Reduction


def atomic_update_vector(
    ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, values: list[tirx.Expr]
) -> None:
    """Combine neighbouring elements of a reduction's output, from ``m`` on, with ``values``.

    Sums go in as vectors where the device adds them at once: pairs of 16-bit floats, and on sm_90
    two or four float32.
    """
    workload, step = reduction.workload, 1
    if workload.operator in SUMS:
        step = vector_add_width(ctx.gpu, workload.out_dtype, len(values))
    for start in range(0, len(values), step):
        part = values[start : start + step]
        if step == 1:
            atomic_update(ctx, reduction, m + i64(start), part[0])
        else:
            output = ctx.flat(reduction.output)
            assert output is not None, "atomic is not chosen for outputs without a view"
            ready = [_final(ctx, workload, value).astype(workload.out_dtype) for value in part]
            vector_add(T.address_of(output[m + i64(start)]), ready, workload.out_dtype)


def atomic_update(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, value: tirx.Expr) -> None:
    """Combine an element of a reduction's output with ``value``, of the accumulators' type."""
    workload = reduction.workload
    value = _final(ctx, workload, value)
    if workload.out_dtype == "bool":
        _absorb(ctx, reduction, m, value)
        return
    output = ctx.flat(reduction.output)
    assert output is not None, "atomic is not chosen for outputs without a view"
    dtype = workload.out_dtype
    native = native_atomic(ctx.gpu, _instruction(workload), dtype)
    if native is not None:
        native(T.address_of(output[m]), value.astype(dtype))
    else:
        _swap_until_kept(ctx, reduction, m, value)


def _instruction(workload: ReduceWorkload) -> str:
    return "add" if workload.operator in SUMS else workload.operator


def _final(ctx: ReduceContext, workload: ReduceWorkload, value: tirx.Expr) -> tirx.Expr:
    """A block's part of the result, still of the type of the accumulators."""
    if workload.operator != "mean":
        return value
    wide = replace(workload, dtype=workload.acc_dtype)
    [result] = finish(wide, (value,), ctx.group.reduced)
    return result


def _absorb(ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, value: tirx.Expr) -> None:
    """Store the value that no other changes, if this block has it."""
    absorbing = 1 if reduction.workload.operator in ("or", "max") else 0
    with T.If(tirx.EQ(value, tirx.const(absorbing, value.ty.dtype))):
        with T.Then():
            ctx.write(reduction.output, m, tirx.const(bool(absorbing), "bool"))


def _swap_until_kept(
    ctx: ReduceContext, reduction: Reduction, m: tirx.Expr, value: tirx.Expr
) -> None:
    """Replace the element until no other block comes between."""
    assert reduction.output is not None, "atomic is not chosen where there are epilogues"
    dtype = reduction.workload.out_dtype
    word_type = f"int{DataType(dtype).bits}"
    words = T.decl_buffer((m + i64(1),), word_type, data=reduction.output.data)
    mine = T.bind(value)
    seen = T.alloc_buffer((1,), word_type, scope="local")
    kept = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(seen, words[m], [0])
    T.buffer_store(kept, tirx.const(0, "int32"), [0])
    with T.While(tirx.EQ(kept[0], tirx.const(0, "int32"))):
        expected = T.bind(seen[0])
        old = T.bind(_decode(expected, dtype).astype(mine.ty.dtype))
        new = combine(reduction.workload, (old,), (mine,))[0]
        desired = T.bind(_encode(T.bind(new.astype(dtype)), dtype))
        found = T.bind(compare_and_swap(ctx.gpu, T.address_of(words[m]), expected, desired))
        T.buffer_store(kept, tirx.EQ(found, expected).astype("int32"), [0])
        T.buffer_store(seen, found, [0])


def _decode(bits: tirx.Expr, dtype: str) -> tirx.Expr:
    """The element that some bits stand for."""
    return bits if dtype.startswith("int") else tirx.reinterpret(dtype, bits)


def _encode(element: tirx.Expr, dtype: str) -> tirx.Expr:
    """The bits of an element."""
    integer = f"int{DataType(dtype).bits}"
    return element if dtype.startswith("int") else tirx.reinterpret(integer, element)
