# SPDX-License-Identifier: Apache-2.0
"""Workspace of a kernel whose last block combines the partial results of all.

It begins with the header of the slots (:mod:`schedules.gpu.core.workspace_slot`), then the tickets,
one for each tile of outputs in every slot. The fields of the partial results follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from schedules.gpu.core.workspace_slot import HEADER_WORDS, LINE_WORDS, PLACES
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload

from .config import ReduceConfig, fields_of, tiles, word_count


def workspace_layout(
    config: ReduceConfig, loops: CanonicalLoops, workloads: Sequence[ReduceWorkload]
) -> tuple[list[int], int]:
    """First word of the partial results of each field, and the number of words of all.

    Words have 32 bits; fields begin at multiples of 8 bytes.
    """
    count = -(-partials(config, loops) // 2) * 2
    sizes = (count * word_count(dtype) for dtype in fields_of(workloads))
    *places, end = accumulate(sizes, initial=ticket_words(config, loops))
    return places, end


def ticket_words(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """Words before the partial results, which are zero between calls."""
    return HEADER_WORDS + PLACES * ticket_stride(tiles(config, loops))


def ticket_stride(count: int) -> int:
    """Words between the tickets of two slots, which do not share a line of the cache."""
    return -(-count // LINE_WORDS) * LINE_WORDS


def partials(config: ReduceConfig, loops: CanonicalLoops) -> int:
    """States that all blocks write, in every slot."""
    return PLACES * tiles(config, loops) * config.splits * config.tile_outputs
