# SPDX-License-Identifier: Apache-2.0
"""Attention of libraries on GPUs as one kernel, learned: softmax(Q K^T) V of causal queries.

B sequences of H heads of queries that share KV heads of keys; D elements a head; L queries behind
the last of S keys, so that L = S is the prefill of a sequence, and L = 1 the step of a decoder.
"""

from __future__ import annotations

import numpy as np

from ..features import Limits, waves
from ..kernel_call import KernelCall
from ..learned import LearnedKernel, Sizes, predict_jointly
from ..machine import Machine
from ..prediction import Prediction

_TILES = ((64, 512), (128, 128), (128, 4096))
"""Queries and keys of a block's part."""


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    b, queries, keys, heads, shared, size = (sizes[name] for name in ATTENTION_SIZES)
    pairs = queries * keys - queries * (queries - 1) / 2
    read = 2 * keys * shared + 2 * queries * heads
    return 4 * b * heads * size * pairs, width * b * size * read


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, queries, keys, heads, shared, size = (sizes[name] for name in ATTENTION_SIZES)
    flops, moved = _work(sizes, width)
    ridge = machine.peak / machine.bandwidth
    columns = [np.log(sizes[name]) for name in ATTENTION_SIZES]
    columns += [np.log(x) for x in (heads / shared, flops, moved, roofline)]
    columns += [np.log(flops / moved / ridge), np.log(moved / machine.cache)]
    columns += [np.log(b * heads / machine.multiprocessors)]
    columns += [np.log(b * shared / machine.multiprocessors)]
    for rows, span in _TILES:
        # A decoder's step shares the keys among the queries of a group, and splits their length.
        alone = queries == 1
        down = np.where(alone, np.ceil(heads / shared / rows), np.ceil(queries / rows))
        blocks = b * np.where(alone, shared * np.ceil(keys / span), heads) * down
        columns += waves(blocks, flops / blocks, roofline, machine)
    count = len(b)
    return np.stack(columns + machine.features(count) + machine.chip(count), axis=1)


ATTENTION_SIZES = ("B", "L", "S", "H", "KV", "D")

ATTENTION = LearnedKernel(
    "attention",
    ATTENTION_SIZES,
    _work,
    _features,
    lambda sizes: np.where(sizes["L"] == 1, 1, 0),
    ("B", "L"),
)


def predict_attention(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict an attention in 16 bits."""
    if call.dtype not in ("float16", "bfloat16"):
        return None
    return predict_jointly(ATTENTION, call, machine)
