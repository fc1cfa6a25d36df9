# SPDX-License-Identifier: Apache-2.0
"""States of a reduction in memory: one buffer a field."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..reduce_operator import State, combine, field_dtypes, identity, replaces
from ..reduce_workload import ReduceWorkload

Buffers = Sequence[tirx.Buffer]
Index = tirx.Expr | int


def allocate(workload: ReduceWorkload, size: int, scope: str) -> list[tirx.Buffer]:
    """Buffers for ``size`` states."""
    return [T.alloc_buffer((size,), dtype, scope=scope) for dtype in field_dtypes(workload)]


def clear(workload: ReduceWorkload, buffers: Buffers, size: int) -> None:
    """Put the identity into the first ``size`` places."""
    for k in range(size):
        store(buffers, k, identity(workload))


def load(buffers: Buffers, index: Index) -> State:
    """The state at ``index``."""
    return tuple(buffer[index] for buffer in buffers)


def store(buffers: Buffers, index: Index, state: State) -> None:
    """Put a state at ``index``."""
    for buffer, value in zip(buffers, state, strict=True):
        T.buffer_store(buffer, value, [index])


def update(workload: ReduceWorkload, buffers: Buffers, index: Index, state: State) -> None:
    """Combine a state into the one at ``index``."""
    right = tuple(T.bind(value) for value in state)
    left = load(buffers, index)
    if workload.is_arg:  # one condition for both fields
        with T.If(replaces(workload, left, right)):
            with T.Then():
                store(buffers, index, right)
    else:
        store(buffers, index, combine(workload, left, right))


def fold(workload: ReduceWorkload, buffers: Buffers, size: int) -> None:
    """Combine ``size`` states, a power of two, into the one at 0, as a tree."""
    while size > 1:
        size //= 2
        for k in range(size):
            update(workload, buffers, k, load(buffers, k + size))
