# SPDX-License-Identifier: Apache-2.0
"""Layout of tickets and partial results in the scratch operands of a kernel.

The first operand begins with the header of the slots (:mod:`schedules.gpu.core.workspace_slot`),
then the tickets, one for each tile of outputs in every slot. Each field of a state follows in the
first operand that has room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import DataType


def place_fields(
    operands: Sequence[int], tickets: int, partials: int, dtypes: Sequence[str]
) -> list[tuple[int, int]] | None:
    """Find a place for every field.

    Parameters
    ----------
    operands : Sequence[int]
        Sizes in 32-bit words.
    tickets : int
        Words before the first field, a multiple of 4.
    partials : int
        States.
    dtypes : Sequence[str]
        Types of the fields.

    Returns
    -------
    list[tuple[int, int]] | None
        For each field operand and first word; None if there is no room for it or the tickets.
    """
    if tickets > operands[0]:
        return None
    ends = [tickets if number == 0 else 0 for number in range(len(operands))]
    places = []
    for dtype in dtypes:
        words = field_words(dtype, partials)
        fitting = [number for number, size in enumerate(operands) if ends[number] + words <= size]
        if not fitting:
            return None
        places.append((fitting[0], ends[fitting[0]]))
        ends[fitting[0]] += words
    return places


def field_words(dtype: str, partials: int) -> int:
    """Words of a field of all states; fields begin at multiples of 8 bytes."""
    return word_count(dtype) * (-(-partials // 2) * 2)


def word_count(dtype: str) -> int:
    """Words of one element, at least one."""
    return max(32, DataType(dtype).bits) // 32
