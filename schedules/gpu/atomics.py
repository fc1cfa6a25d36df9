# SPDX-License-Identifier: Apache-2.0
"""Atomic updates of an output by the partial result of a block.

Where the hardware has an instruction without a return value (``red``) it is used: sums of float32,
float64, and integers; extremes of integers, and of floats by the order of their bits. ``and`` and
``or`` store the absorbing value, which every block may do at any time. Everything else loops over
compare-and-swap of the 32- or 64-bit word that holds the element.
"""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from ..reduce_operator import combine, finish
from ..reduce_workload import FLOATS, ReduceWorkload
from .device_ops import compare_and_swap, native_atomic
from .index_math import i64
from .reduce_context import ReduceContext

_SUMS = ("sum", "mean", "sum_squares")


def atomic_update(ctx: ReduceContext, m: tirx.Expr, value: tirx.Expr) -> None:
    """Combine one element of the output with ``value``, of the type of the accumulators."""
    workload = ctx.workload
    if workload.operator == "mean":
        value = finish(_in_accumulators(workload), (value,), ctx.reduction.reduced)
    if workload.out_dtype == "bool":
        _absorb(ctx, m, value)
        return
    output = ctx.flat(ctx.reduction.output)
    assert output is not None, "atomic is not chosen for outputs without a view"
    dtype = workload.out_dtype
    native = native_atomic(ctx.gpu, _instruction(workload), dtype)
    if native is not None:
        native(T.address_of(output[m]), value.astype(dtype))
    else:
        _swap_until_kept(ctx, m, value)


def _instruction(workload: ReduceWorkload) -> str:
    return "add" if workload.operator in _SUMS else workload.operator


def _in_accumulators(workload: ReduceWorkload) -> ReduceWorkload:
    return ReduceWorkload(
        workload.operator,
        workload.axes,
        workload.keepdims,
        workload.acc_dtype,
        workload.acc_dtype,
        workload.finish,
    )


def _absorb(ctx: ReduceContext, m: tirx.Expr, value: tirx.Expr) -> None:
    """Store the value that no other changes, if this block has it."""
    absorbing = 1 if ctx.workload.operator in ("or", "max") else 0
    with T.If(tirx.EQ(value, tirx.const(absorbing, value.ty.dtype))):
        with T.Then():
            ctx.write(m, tirx.const(bool(absorbing), "bool"))


def _swap_until_kept(ctx: ReduceContext, m: tirx.Expr, value: tirx.Expr) -> None:
    """Replace the word that holds the element until no other block comes between."""
    dtype = ctx.workload.out_dtype
    bits = DataType(dtype).bits
    word_bits = max(32, bits)
    per_word = word_bits // bits
    word_type = f"int{word_bits}"
    words = T.decl_buffer((m + i64(1),), word_type, data=ctx.reduction.output.data)
    place = T.bind(m // i64(per_word))
    shift = T.bind(((m % i64(per_word)) * i64(bits)).astype(word_type))
    mine = T.bind(value)
    seen = T.alloc_buffer((1,), word_type, scope="local")
    kept = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(seen, words[place], [0])
    T.buffer_store(kept, tirx.const(0, "int32"), [0])
    with T.While(tirx.EQ(kept[0], tirx.const(0, "int32"))):
        expected = T.bind(seen[0])
        old = T.bind(_decode(expected, shift, dtype).astype(mine.ty.dtype))
        new = combine(ctx.workload, (old,), (mine,))[0]
        desired = T.bind(_encode(expected, shift, T.bind(new.astype(dtype)), dtype))
        found = T.bind(compare_and_swap(ctx.gpu, T.address_of(words[place]), expected, desired))
        T.buffer_store(kept, tirx.EQ(found, expected).astype("int32"), [0])
        T.buffer_store(seen, found, [0])


def _decode(word: tirx.Expr, shift: tirx.Expr, dtype: str) -> tirx.Expr:
    """The element that stands at a bit of a word."""
    bits = DataType(dtype).bits
    if bits >= 32:
        return word if dtype.startswith("int") else tirx.reinterpret(dtype, word)
    part = (word >> shift) & tirx.const((1 << bits) - 1, "int32")
    if dtype in FLOATS:
        return tirx.reinterpret(dtype, part.astype("uint16"))
    return part.astype("uint8").astype(dtype)


def _encode(word: tirx.Expr, shift: tirx.Expr, element: tirx.Expr, dtype: str) -> tirx.Expr:
    """The word with another element."""
    bits = DataType(dtype).bits
    if bits >= 32:
        return element if dtype.startswith("int") else tirx.reinterpret(f"int{bits}", element)
    mask = tirx.const((1 << bits) - 1, "int32")
    if dtype in FLOATS:
        part = tirx.reinterpret("uint16", element).astype("int32")
    else:
        part = element.astype("int32") & mask
    return (word & ~(mask << shift)) | (part << shift)
