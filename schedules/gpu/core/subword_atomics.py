# SPDX-License-Identifier: Apache-2.0
"""Compare-and-swap of elements that may be narrower than a swapped word.

A narrow element is swapped with its neighbours in the aligned word that holds it. Other blocks may
be updating those at the same time: then the swap fails, and is retried on their result. No word
reaches out of the tensor: TVM aligns tensors to 64 bytes, rejects others when a function is called,
and :func:`consists_of_words` checks their ends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, constant
from schedules.tir.index_math import i64

from .intrinsics import compare_and_swap
from .machine import GPUInfo


def word_bits(gpu: GPUInfo, bits: int) -> int:
    """Bits of a swapped word for elements of ``bits``: on CUDA 16 are possible, too."""
    return max(bits, 16 if gpu.kind == "cuda" and bits == 16 else 32)


def consists_of_words(dtype: str, elements: Extent, gpu: GPUInfo) -> bool:
    """Return whether a tensor ends with a whole word, so that its last elements can be swapped."""
    known, bits = constant(elements), DataType(dtype).bits
    return known is not None and known * bits % word_bits(gpu, bits) == 0


def swap_until_kept(
    gpu: GPUInfo,
    output: tirx.Buffer,
    m: tirx.Expr,
    values: list[tirx.Expr],
    change: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
) -> None:
    """Replace neighbouring elements of one word, retrying until no other block interferes.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    output : tirx.Buffer
        The parameter with the elements.
    m : tirx.Expr
        Row-major position of the first one, a multiple of their number.
    values : list[tirx.Expr]
        One for each element.
    change : Callable
        The new element, of any type, from the old one and its value.
    """
    dtype = str(output.dtype)
    share = word_bits(gpu, DataType(dtype).bits) // DataType(dtype).bits
    word_type = f"int{word_bits(gpu, DataType(dtype).bits)}"
    place = m // i64(share)
    words = T.decl_buffer((place + i64(1),), word_type, data=output.data)
    mine = [T.bind(value) for value in values]
    shifts = _shifts(m, len(values), share, 32 // share)
    seen = T.alloc_buffer((1,), word_type, scope="local")
    kept = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(seen, words[place], [0])
    T.buffer_store(kept, tirx.const(0, "int32"), [0])
    with T.While(tirx.EQ(kept[0], tirx.const(0, "int32"))):
        expected = T.bind(seen[0])
        desired = expected
        for value, shift in zip(mine, shifts, strict=True):
            new = change(_element(expected, shift, dtype), value)
            desired = _insert(desired, shift, new.astype(dtype))
        desired = T.bind(desired)
        found = T.bind(compare_and_swap(gpu, T.address_of(words[place]), expected, desired))
        T.buffer_store(kept, tirx.EQ(found, expected).astype("int32"), [0])
        T.buffer_store(seen, found, [0])


def _shifts(m: tirx.Expr, count: int, share: int, bits: int) -> list[tirx.Expr | None]:
    """Bits of a word below each element; None where the element is the word."""
    if share == 1:
        return [None]
    first = tirx.const(0, "int32")
    if count < share:
        first = T.bind((m % i64(share)).astype("int32") * tirx.const(bits, "int32"))
    return [first + tirx.const(k * bits, "int32") for k in range(count)]


def _element(word: tirx.Expr, shift: tirx.Expr | None, dtype: str) -> tirx.Expr:
    """The element in some bits of a word."""
    integer = f"int{DataType(dtype).bits}"
    bits = word if shift is None else (word >> shift).astype(integer)
    return bits.astype(dtype) if "int" in dtype else tirx.reinterpret(dtype, bits)


def _insert(word: tirx.Expr, shift: tirx.Expr | None, element: tirx.Expr) -> tirx.Expr:
    """The word with an element in its place."""
    dtype = str(element.ty.dtype)
    if shift is None:
        return T.bind(_bits(element))
    ones = (1 << DataType(dtype).bits) - 1
    above = (_bits(element).astype("int32") & tirx.const(ones, "int32")) << shift
    if isinstance(shift, tirx.IntImm):  # TVM takes a constant shifted into the sign for an error
        kept = tirx.const(int(np.int64(~(ones << int(shift))).astype("int32")), "int32")
    else:
        kept = ~(tirx.const(ones, "int32") << shift)
    return (word & kept) | above


def _bits(element: tirx.Expr) -> tirx.Expr:
    dtype = str(element.ty.dtype)
    return element if "int" in dtype else tirx.reinterpret(f"int{DataType(dtype).bits}", element)
