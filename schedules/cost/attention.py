# SPDX-License-Identifier: Apache-2.0
"""Attention of libraries on GPUs as one kernel, learned: softmax(Q K^T) V of causal queries.

B sequences of H heads of queries that share KV heads of keys; D elements a head; L queries behind
the last of S keys, so that L = S is the prefill of a sequence, and L = 1 the step of a decoder.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .kernel_call import KernelCall, Prediction
from .learned import FARTHER, LearnedKernel, Limits, Sizes, predict_jointly, waves
from .machine import Machine

_TILES = ((16, 256), (64, 512), (128, 128), (128, 4096))
"""Queries and keys of a block's part."""

_SIDE = 128
"""Queries and keys of the tiles that the law counts."""

_TYPES = ("float16", "bfloat16")

_EXPONENTIALS = 16
"""A cycle of a multiprocessor."""

_PIPELINED = 150
"""Most tiles that one block of an unshared step goes along in the time of one that is shared."""


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, queries, keys, heads, shared, size = (sizes[name] for name in ATTENTION_SIZES)
    pairs = queries * keys - queries * (queries - 1) / 2
    read = 2 * keys * shared + 2 * queries * heads
    return 4 * b * heads * size * pairs, width * b * size * read


def _law(sizes: Sizes, machine: Limits, width: int, constants: np.ndarray) -> np.ndarray:
    """Seconds of a prefill or a step, from what bounds it at once; constants of each in a row."""
    b, queries, keys, heads, shared, size = (sizes[name] for name in ATTENTION_SIZES)
    cycles = machine.multiprocessors * machine.clock
    _, moved = _work(sizes, width)
    streamed = moved / machine.bandwidth
    down, along = np.ceil(queries / _SIDE), np.ceil(keys / _SIDE)
    # A block of a prefill goes along its keys; a step shares them out, or each block has them all.
    tiles = b * heads * down * (along - (down - 1) / 2)
    prefill = (
        constants[: len(constants) // 2],
        (
            along * _SIDE / machine.clock * (size / 128) ** constants[6],
            tiles * 4 * _SIDE**2 * size / machine.peak,
            tiles * _SIDE**2 / (cycles * _EXPONENTIALS),
            streamed,
            b * heads * down / cycles,
        ),
    )
    parts = b * shared * along * np.ceil(heads / shared / 64)
    rounds = np.maximum(np.ceil(parts / machine.multiprocessors), 1)
    alone = along * np.ceil(b * shared / machine.multiprocessors)
    step = (
        constants[len(constants) // 2 :],
        (
            rounds * _SIDE / machine.clock * (size / 128) ** constants[13],
            parts * 4 * 64 * _SIDE * size / machine.peak,
            streamed,
            np.minimum(alone, _PIPELINED * rounds) * _SIDE / machine.clock,
            b * shared / cycles,
        ),
    )
    found = [_together(*both) for both in (prefill, step)]
    return np.where(queries == 1, found[1], found[0])


def _together(constants: np.ndarray, parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Norm of the first part, the next two one after the other, and the fourth; then the last."""
    first, second, third, fourth, begin = (
        factor * part for factor, part in zip(constants, parts, strict=False)
    )
    sharpness = 1 + constants[5]
    together = first, second + third, fourth
    longest = np.maximum.reduce(together)
    return longest * sum((x / longest) ** sharpness for x in together) ** (1 / sharpness) + begin


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, queries, keys, heads, shared, size = (sizes[name] for name in ATTENTION_SIZES)
    flops, moved = _work(sizes, width)
    alone = queries == 1
    pairs = flops / (4 * size)
    arithmetic, streamed = flops / machine.peak, moved / machine.bandwidth
    exponentials = pairs / (machine.multiprocessors * machine.clock * _EXPONENTIALS)
    columns = [np.log(x) for x in (queries, keys, size, heads / shared, arithmetic, streamed)]
    columns += [np.log(arithmetic / streamed), np.log(exponentials / arithmetic)]
    columns += [np.log(moved / machine.cache), np.log(b * heads / machine.multiprocessors)]
    columns += [np.log(b * shared / machine.multiprocessors), alone]
    for rows, span in _TILES:
        # A decoder's step shares the keys among the queries of a group, and splits their length.
        down = np.where(alone, np.ceil(heads / shared / rows), np.ceil(queries / rows))
        blocks = b * np.where(alone, shared * np.ceil(keys / span), heads) * down
        columns += waves(blocks, flops / blocks, roofline, machine)
    # From here on what tells machines apart.
    count = len(b)
    columns += [np.log(x) for x in (b, heads, shared, flops, moved, roofline)]
    return np.stack(columns + machine.features(count) + machine.chip(count), axis=1)


_OF_NEW_MACHINES = 24
"""Features, the first ones, that hold for a machine whatever it is called."""

ATTENTION_SIZES = ("B", "L", "S", "H", "KV", "D")

ATTENTION = LearnedKernel(
    "attention",
    ATTENTION_SIZES,
    _work,
    _features,
    lambda sizes: np.where(sizes["L"] == 1, 1, 0),
    ("B", "L"),
    _law,
    2 * (2.0, 1.2, 0.7, 1.2, 300.0, 2.0, 1.0),
    _OF_NEW_MACHINES,
    1.1,
)


def has_fused_attention(machine: Machine, dtype: str) -> bool:
    """Return whether PyTorch has attention as one kernel of this type on a machine.

    That is every GPU that multiplies matrices in a type of 16 bits, of NVIDIA's those of compute
    capability 8.0 and above.
    """
    if machine.kind != "gpu" or dtype not in _TYPES or f"peak_flops.{dtype}" not in machine.figures:
        return False
    known = machine.figures.get("compute_capability")
    return known is None or known.value >= 8.0


def predict_attention(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict an attention in 16 bits.

    One without a causal mask (``full``) is predicted as a causal one behind more keys that has as
    many pairs of queries and keys; its interval is wider.
    """
    if call.dtype not in _TYPES:
        return None
    if not call.sizes.get("full"):
        return predict_jointly(ATTENTION, call, machine)
    sizes = {**call.sizes, "S": call.size("S") + (call.size("L", 1) - 1) // 2}
    prediction = predict_jointly(ATTENTION, replace(call, sizes=sizes), machine)
    if prediction is None:
        return None
    low, high = ((end / prediction.seconds) ** FARTHER for end in (prediction.low, prediction.high))
    ends = prediction.seconds * low, prediction.seconds * high
    beyond = (*prediction.extrapolated, "mask")
    return replace(prediction, low=ends[0], high=ends[1], in_range=False, extrapolated=beyond)
