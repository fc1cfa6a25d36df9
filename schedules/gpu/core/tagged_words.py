# SPDX-License-Identifier: Apache-2.0
"""Words that blocks pass to each other through memory, each with a tag that says whose it is.

A word of 32 bits and its tag are stored at once, so a reader that finds the tag it waits for has
the word that belongs to it: neither side needs a fence or a barrier. On OpenCL the device needs
``cl_khr_int64_base_atomics``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.index_math import i64
from schedules.tir.statements import when

from .intrinsics import differences, read_now, store_tagged
from .machine import GPUInfo

Wait = Callable[[tirx.Expr, Callable[[], None]], None]
"""Emitter of a pause, from the number of the turn and what a thread does that gives up."""

# Reads without a pause between them, about a millisecond.
BUSY_TURNS = 4096


def word_count(dtype: str) -> int:
    """32-bit words of one element, at least one."""
    return max(32, DataType(dtype).bits) // 32


def store(
    gpu: GPUInfo,
    words: tirx.Buffer,
    places: Sequence[tirx.Expr],
    value: tirx.Expr,
    tag: tirx.Expr,
    condition: tirx.Expr | None = None,
) -> None:
    """Store the words of a value of 32 or 64 bits, the lowest first.

    Parameters
    ----------
    gpu : GPUInfo
        The device.
    words : tirx.Buffer
        Words with their tags, as int64.
    places : Sequence[tirx.Expr]
        Places of the value's words.
    value : tirx.Expr
        An integer or a float.
    tag : tirx.Expr
        An int32.
    condition : tirx.Expr, optional
        Whether anything is stored.
    """
    bits = T.bind(tirx.reinterpret(f"int{32 * len(places)}", value))
    for number, place in enumerate(places):
        part = tirx.shift_right(bits, i64(32 * number)) if len(places) > 1 else bits
        store_tagged(gpu, words, (place, 0), part.astype("int32"), tag, condition)


def wait_for(
    gpu: GPUInfo,
    words: tirx.Buffer,
    places: Sequence[tuple[tirx.Expr, int]],
    tag: tirx.Expr,
    wait: Wait,
    condition: tirx.Expr | None = None,
) -> list[tirx.Expr]:
    """The words at places and offsets, of type int32, once all have the tag.

    All are read at once, and again until they are there, with pauses by ``wait`` after some time.
    A thread that gives up stores zeros with the tag in place of the words. Threads for which
    ``condition`` does not hold read nothing.
    """
    zero, one = (tirx.const(number, "int32") for number in (0, 1))

    def give_up() -> None:
        for place in places:
            store_tagged(gpu, words, place, zero, tag)

    received = T.alloc_buffer((len(places),), "int64", scope="local")
    waits, turn = (T.alloc_buffer((1,), "int32", scope="local") for _ in range(2))
    T.buffer_store(waits, one if condition is None else condition.astype("int32"), [0])
    T.buffer_store(turn, zero, [0])
    with T.While(waits[0] > zero):
        for number, (place, offset) in enumerate(places):
            T.buffer_store(received, read_now(gpu, words, place, offset), [number])
        # While the words are on their way.
        busy = tirx.const(BUSY_TURNS, "int32")
        with when(turn[0] > busy):
            wait(turn[0] - busy, give_up)
        T.buffer_store(turn, turn[0] + one, [0])
        tags = [_high(received[number]) for number in range(len(places))]
        is_old = tirx.NE(differences(gpu, tags, tag), zero)
        T.buffer_store(waits, is_old.astype("int32"), [0])
    return [received[number].astype("int32") for number in range(len(places))]


def value_of(words: Sequence[tirx.Expr], dtype: str) -> tirx.Expr:
    """A value of 32 or 64 bits, of its words."""
    if len(words) == 1:
        return tirx.reinterpret(dtype, words[0])
    low = tirx.bitwise_and(words[0].astype("int64"), i64(0xFFFFFFFF))
    bits = tirx.bitwise_or(tirx.shift_left(words[1].astype("int64"), i64(32)), low)
    return tirx.reinterpret(dtype, bits)


def _high(both: tirx.Expr) -> tirx.Expr:
    return tirx.shift_right(both, i64(32)).astype("int32")
