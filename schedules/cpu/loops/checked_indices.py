# SPDX-License-Identifier: Apache-2.0
"""Kernel that checks indices: one that is out of bounds ends the call with an error.

::

    for c in T.parallel(chunks):
        for i in T.serial(rows of c):
            outside[c] |= indices[i] < -extent or indices[i] >= extent
            checked[i] = indices[i] + (extent if indices[i] < 0 else 0)
    for c in range(chunks):
        assert outside[c] == 0

With a condition, ``outside`` only counts where that is true, and an index outside becomes the
nearest inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, constant

from .selections import Shapes, cpu_kernel, long, own_extents

CHUNK = 1 << 16
"""Indices of a chunk, about 50 us of one core: many times what it takes to wake another."""


def check_indices(
    shape: Sequence[Extent],  # Shape of the indices; it may be symbolic.
    # Sizes of the indexed dimensions; they may be symbolic. Several belong to the coordinates along
    # the last axis.
    extents: Sequence[Extent],
    dtype: str,  # ``"int32"`` or ``"int64"``.
    # Text of the ``ValueError`` that an index outside of ``-extent`` to ``extent - 1`` raises.
    message: str,
    # Shape of a bool of one element, without which there is no error.
    taken: Sequence[Extent] | None = None,
    # Whether the reader reads no element where an extent is 0; else an extent of 0, which has no
    # nearest index, is an error, whatever ``taken`` is.
    guarded: bool = False,
) -> tirx.PrimFunc:
    """Build the kernel that checks indices, and counts negative ones from the beginning.

    Returns ``main(indices, [taken,] *bounds, checked)``; ``bounds`` are those of ``extents`` that
    are symbolic, as int64.
    """
    shape = own_extents(shape)
    bounds = [
        tirx.Var(f"bound_{axis}", "int64") if constant(extent) is None else long(int(extent))
        for axis, extent in enumerate(extents)
    ]
    loops = shape[:-1] if len(bounds) > 1 else shape
    rows, chunks = _chunks([constant(extent) for extent in loops])
    numbers = {bound.name: bound for bound in bounds if isinstance(bound, tirx.Var)}
    condition: Shapes = {} if taken is None else {"taken": (own_extents(taken), "bool")}
    arguments: Shapes = {
        "indices": (shape, dtype),
        **condition,
        **numbers,
        "checked": (shape, dtype),
    }

    def write(indices: tirx.Buffer, *others: tirx.Buffer) -> None:
        *conditions, checked = others
        outside = T.sblock_alloc_buffer((chunks,), "int32")
        with T.parallel(long(0), long(chunks)) if chunks > 1 else T.serial(long(0), long(1)) as c:
            T.buffer_store(outside, 0, [c])
            with ExitStack() as nest:
                places: list[tirx.Expr] = []
                for extent in loops:
                    begin, end = long(0), extent
                    if chunks > 1 and not places:
                        begin = c * long(rows)
                        end = tirx.min(begin + long(rows), extent)
                    places.append(nest.enter_context(T.serial(begin, end)))
                for axis, bound in enumerate(bounds):
                    place = [*places, long(axis)] if len(bounds) > 1 else places
                    index = T.bind(tirx.Cast("int64", indices[tuple(place)]))
                    is_outside = tirx.any(index < -bound, index >= bound)
                    for one in conditions:
                        is_outside = tirx.all(is_outside, one[(0,) * len(one.shape)])
                        if not guarded:
                            is_outside = tirx.any(is_outside, bound == 0)
                    flag = tirx.bitwise_or(outside[c], tirx.Cast("int32", is_outside))
                    T.buffer_store(outside, flag, [c])
                    from_start = index + tirx.Select(index < 0, bound, long(0))
                    if conditions:
                        from_start = tirx.max(tirx.min(from_start, bound - 1), long(0))
                    T.buffer_store(checked, tirx.Cast(dtype, from_start), place)
        with T.serial(long(0), long(chunks)) as c:
            with T.Assert(outside[c] == 0, message, "ValueError"):
                pass

    return cpu_kernel("CheckIndices", arguments, write)


def _chunks(sizes: Sequence[int | None]) -> tuple[int, int]:
    """Rows of a chunk, and the number of chunks; one if a size is symbolic."""
    if not sizes or None in sizes or 0 in sizes:
        return 0, 1
    first, *inner = [size for size in sizes if size is not None]
    rows = max(1, CHUNK // math.prod(inner))
    return rows, -(-first // rows)
