# SPDX-License-Identifier: Apache-2.0
"""Registers of a thread's scores, and their change to the values of logits."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.tir.branch import when
from schedules.tir.index_math import i64

from ..gemm.matmul.matmul_pattern import divides
from ..pointwise.coalescing import Lanes, classify
from ..pointwise.point_kernel import PointWriter, Views
from .attention_pattern import AttentionFunction

FLOAT = "float32"


def registers(count: int) -> tirx.Buffer:
    """Allocate some registers of a thread."""
    return T.alloc_buffer((count,), FLOAT, scope="local")


def fill(buffer: tirx.Buffer, value: float) -> None:
    """Store a value in all registers of a buffer."""
    for e in range(int(buffer.shape[0])):
        T.buffer_store(buffer, tirx.const(value, FLOAT), [e])


def logit_lanes(attention: AttentionFunction, count: int) -> Lanes:
    """Lanes that read the bias and mask of ``count`` neighbouring scores at once, if aligned."""
    logit = attention.logit
    lanes = classify(logit.space, count, [logit.score])
    return lanes if lanes.is_aligned else classify(logit.space, 1, [logit.score])


def row_that_exists(attention: AttentionFunction, rows: int, row: tirx.Expr) -> tirx.Expr:
    """A row of a tile of ``rows``, or the last one for those past the end."""
    if not divides(rows, attention.m):
        row = tirx.min(row, i64(attention.m) - i64(1))
    return T.bind(row)


def store_logits(
    attention: AttentionFunction,
    lanes: Lanes,
    views: Views,
    place: Sequence[tirx.Expr],
    scores: tirx.Buffer,
    at: Sequence[int],
    keys: int | None,
) -> None:
    """Replace neighbouring scores by the values of logits; -inf past the last key.

    Parameters
    ----------
    attention, lanes, views
        The function, a result of :func:`logit_lanes`, and views of its tensors.
    place : Sequence[tirx.Expr]
        Batch, row and column of the first score.
    scores : tirx.Buffer
        Registers.
    at : Sequence[int]
        Those of the scores.
    keys : int | None
        Keys of a tile, or None if all of them exist and are visible.
    """
    *before, column = place
    logit = attention.logit
    is_whole = keys is None or divides(keys, attention.n)
    value = logit.visible if keys is None else logit.value
    with when(None if is_whole else column < i64(attention.n)):
        places = [[*before, column + i64(k)] for k in range(lanes.vector)]
        writer = PointWriter(lanes, views, places)
        writer.give(logit.score, [scores[e] for e in at])
        writer.steps()
        for k, e in enumerate(at):
            T.buffer_store(scores, writer.value(value, k), [e])
    if not is_whole:
        with when(column >= i64(attention.n)):
            for e in at:
                T.buffer_store(scores, tirx.const(float("-inf"), FLOAT), [e])
