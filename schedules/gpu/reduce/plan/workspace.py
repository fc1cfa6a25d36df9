# SPDX-License-Identifier: Apache-2.0
"""Workspace of a kernel whose last block combines the partial results of all.

It begins with slots and tickets (:mod:`schedules.gpu.core.workspace_slot`). The partial results of
a block follow those of the block before: the first word of each of its outputs, then the second one
of each, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

from schedules.gpu.core.tagged_words import word_count
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload
from schedules.workload.workspace_layout import PLACES, first_word

from .config import ReduceConfig, fields_of, tiles


def workspace_words(
    config: ReduceConfig, loops: CanonicalLoops, workloads: Sequence[ReduceWorkload]
) -> int:
    """32-bit words of all, a multiple of two."""
    blocks = PLACES * tiles(config, loops) * config.splits
    tagged = blocks * config.tile_outputs * state_words(workloads)
    return first_word(tiles(config, loops)) + 2 * tagged


def state_words(workloads: Sequence[ReduceWorkload]) -> int:
    """Words of the states of an output."""
    return sum(map(word_count, fields_of(workloads)))
