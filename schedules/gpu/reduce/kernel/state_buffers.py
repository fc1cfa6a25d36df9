# SPDX-License-Identifier: Apache-2.0
"""States of sister reductions in memory: one buffer a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.workload.reduce import ReduceWorkload
from schedules.workload.reduce_operator import (
    State,
    combine,
    field_dtypes,
    identity,
    improves,
    replaces,
)

Workloads = Sequence[ReduceWorkload]
Buffers = Sequence[Sequence[tirx.Buffer]]  # Buffers of the fields of each reduction.
States = Sequence[State]  # State of each reduction.
Index: TypeAlias = "tirx.Expr | int"


def allocate(workloads: Workloads, size: int, scope: str) -> Buffers:
    """Buffers for ``size`` states of each reduction."""
    return [
        [T.alloc_buffer((size,), dtype, scope=scope) for dtype in field_dtypes(workload)]
        for workload in workloads
    ]


def clear(workloads: Workloads, buffers: Buffers, size: int) -> None:
    """Store the identities into the first ``size`` places."""
    for k in range(size):
        store(buffers, k, [identity(workload) for workload in workloads])


def load(buffers: Buffers, index: Index) -> list[State]:
    """The states at ``index``."""
    return [tuple(buffer[index] for buffer in fields) for fields in buffers]


def store(buffers: Buffers, index: Index, states: States) -> None:
    """Store states at ``index``."""
    for fields, state in zip(buffers, states, strict=True):
        for buffer, value in zip(fields, state, strict=True):
            T.buffer_store(buffer, value, [index])


def begin_positions(workloads: Workloads, buffers: Buffers, size: int) -> None:
    """Mark the first ``size`` states with a position as those of no element, for ``append``."""
    for workload, fields in zip(workloads, buffers, strict=True):
        for k in range(size if workload.is_arg else 0):
            T.buffer_store(fields[1], tirx.const(-1, "int64"), [k])


def end_positions(workloads: Workloads, buffers: Buffers, size: int) -> None:
    """Give those that are still of no element the position of the identity, behind all others."""
    for workload, fields in zip(workloads, buffers, strict=True):
        for k in range(size if workload.is_arg else 0):
            none = identity(workload)[1]
            at = fields[1][k]
            T.buffer_store(fields[1], tirx.Select(at < 0, none, at), [k])


def append(workloads: Workloads, buffers: Buffers, index: Index, states: States) -> None:
    """Combine states of later elements into those at ``index``."""
    for workload, fields, state in zip(workloads, buffers, states, strict=True):
        if not workload.is_arg:
            update([workload], [fields], index, [state])
            continue
        right = tuple(T.bind(value) for value in state)
        left = tuple(T.bind(buffer[index]) for buffer in fields)
        wins = T.bind(improves(workload, left, right))
        pairs = zip(left, right, strict=True)
        store([fields], index, [tuple(tirx.Select(wins, b, a) for a, b in pairs)])


def update(workloads: Workloads, buffers: Buffers, index: Index, states: States) -> None:
    """Combine states into those at ``index``."""
    for workload, fields, state in zip(workloads, buffers, states, strict=True):
        right = tuple(T.bind(value) for value in state)
        left = tuple(buffer[index] for buffer in fields)
        if workload.is_arg:  # one condition for both fields
            with T.If(replaces(workload, left, right)):
                with T.Then():
                    store([fields], index, [right])
        else:
            combined = combine(workload, left, right)
            if len(combined) > 1:  # each field depends on all old ones
                combined = tuple(T.bind(value) for value in combined)
            store([fields], index, [combined])


def fold(workloads: Workloads, buffers: Buffers, size: int) -> None:
    """Combine ``size`` states, a power of two, into the one at 0, as a tree."""
    while size > 1:
        size //= 2
        for k in range(size):
            update(workloads, buffers, k, load(buffers, k + size))
