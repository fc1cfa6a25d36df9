# SPDX-License-Identifier: Apache-2.0
"""Copies of 16 bytes: four floats, at places counted in fours."""

from __future__ import annotations

import functools

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .implicit_gemm import LANES, Index


def copy4(target: tirx.Buffer, to: Index, source: tirx.Buffer, at: Index) -> None:
    """Emit one copy of 16 bytes."""
    with T.vectorized(0, LANES) as lane:
        T.buffer_store(target, source[at * LANES + lane], [to * LANES + lane])


def zero4(target: tirx.Buffer, to: Index) -> None:
    """Emit a store of four zeros."""
    with T.vectorized(0, LANES) as lane:
        T.buffer_store(target, tirx.const(0, "float32"), [to * LANES + lane])


def without_jumps(condition: tirx.Expr) -> tirx.Expr:
    """A condition of which all parts are computed, so that a load under it is predicated."""
    return tvm_ffi.structural_map(
        condition, (tirx.And, lambda both: tirx.bitwise_and(both.a, both.b)), order="post"
    )


def at_once(conditions: list[tirx.Expr]) -> tirx.Expr | None:
    """Conjunction of conditions without jumps between them, so that a load is predicated."""
    return functools.reduce(tirx.bitwise_and, conditions) if conditions else None
