# SPDX-License-Identifier: Apache-2.0
"""Layout of the memory in which blocks of one GPU kernel meet (a workspace).

The header has three lines of the cache: the names of launches, of two words each; the lock, and
behind it the note that a thread has given up, and that of a host that looks for it; the number of
finished tiles of each slot. All but the last note are zero between calls. The tickets follow, one
for each tile of outputs in every slot, then the tagged words
(:mod:`schedules.gpu.core.workspace_slot`).
"""

from __future__ import annotations

import numpy as np

# More than the priorities of streams: grids of one priority start one after the other, so that one
# of those that have a slot has started all its blocks, and ends.
PLACES = 8
LINE_WORDS = 32
LOCK = LINE_WORDS
FAILED = LOCK + 2
WATCHED = FAILED + 2
FINISHED = 2 * LINE_WORDS
HEADER_WORDS = 3 * LINE_WORDS
MARK = 0x510750
"""Last word of a workspace before it is used: the tag of a word, and that of no launch."""


def ticket_stride(tiles: int) -> int:
    """Words between the tickets of two slots, which do not share a line of the cache."""
    return -(-tiles // LINE_WORDS) * LINE_WORDS


def first_word(tiles: int) -> int:
    """Number of 32-bit words of the header and the tickets, behind which tagged words begin."""
    return HEADER_WORDS + PLACES * ticket_stride(tiles)


def is_workspace(content: np.ndarray) -> bool:
    """Return whether this is the content of a workspace that was not used yet."""
    is_row = content.dtype == np.int32 and content.ndim == 1 and content.size > HEADER_WORDS
    return is_row and content[-1] == MARK and not content[:HEADER_WORDS].any()
