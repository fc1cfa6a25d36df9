# SPDX-License-Identifier: Apache-2.0
"""Prefetching of data."""

from __future__ import annotations

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from .tiles import Index

CACHE_LINE_BYTES = 64
MOST_LINES = 16  # prefetched in one step, more than a core can have in flight


def line_elements(dtype: str) -> int:
    """Number of elements in a cache line."""
    return CACHE_LINE_BYTES * 8 // DataType(dtype).bits


def lines_a_step(needed: int, tiles: int) -> int:
    """Cache lines of the ``needed`` ones that each of ``tiles`` has to prefetch in a step."""
    return max(1, min(MOST_LINES, -(-needed // max(1, tiles))))


def prefetch(buffer: tirx.Buffer, offset: Index, level: int = 1, write: bool = False) -> None:
    """Prefetch the cache line of an element; beyond the buffer it does nothing.

    May only be called between the ``with`` statements of an open ``IRBuilder``.

    Parameters
    ----------
    buffer : tirx.Buffer
        One-dimensional.
    offset : Index
        The element.
    level : int
        The cache to hold it, 1 or 2.
    write : bool
        Whether it will be written, so that no other core may hold it.
    """
    purpose, locality, data = T.int32(int(write)), T.int32(4 - level), T.int32(1)
    address = T.address_of(buffer[offset])
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", address, purpose, locality, data))
