# SPDX-License-Identifier: Apache-2.0
"""The stages of a network for higher images, for weak scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import OpError
from .row_plan import Enlargement, NetworkStage, RowMap, RowWindow, StageOperand

_ANY_HEIGHT = ("mean", "sum", "max", "min", "nn.adaptive_avg_pool2d", "result", "Tuple", "Var")


def heighten(stages: Sequence[NetworkStage], factor: int) -> list[NetworkStage]:
    """The network for images of ``factor`` times the height.

    Parameters
    ----------
    stages : Sequence[NetworkStage]
        The network.
    factor : int
        At least 1.

    Raises
    ------
    OpError
        If an operation takes images of one height only, such as a fully connected layer.
    """
    found: list[NetworkStage] = []
    for stage in stages:
        if stage.is_input:
            found.append(replace(stage, rows=stage.rows * factor if stage.rows > 1 else 1))
            continue
        rows, read = stage.rows, []
        is_whole = all(operand.maps is None for operand in stage.operands)
        for operand in stage.operands:
            before, source = stages[operand.stage], found[operand.stage]
            if operand.maps is None:
                _check(stage, before, source)
                read.append(operand)
                if is_whole and stage.rows == before.rows > 1:
                    rows = source.rows  # a result that is all of another stage
            else:
                maps, rows = _heighten(operand.maps, before.rows, source.rows, stage.rows)
                read.append(StageOperand(operand.stage, maps))
        grain = rows if is_whole else stage.grain
        found.append(replace(stage, rows=rows, operands=tuple(read), grain=grain))
    return found


def _check(stage: NetworkStage, before: NetworkStage, after: NetworkStage) -> None:
    if before.rows != after.rows and stage.op not in _ANY_HEIGHT:
        raise OpError(
            f"weak scaling needs a network for images of any height: {stage.name!r} ({stage.op}) "
            f"reads {before.rows} rows and no more"
        )


def _heighten(
    maps: Sequence[RowMap], before: int, after: int, result: int
) -> tuple[tuple[RowMap, ...], int]:
    """Maps for an operand of ``after`` instead of ``before`` rows, and the rows of the result."""
    found: list[RowMap] = []
    for index in reversed(range(len(maps))):
        one = maps[index]
        made = result if index == 0 else maps[index - 1].extent  # type: ignore[attr-defined]
        if isinstance(one, RowWindow):
            bottom = (made - 1) * one.stride + one.reach - one.top - before
            found.append(replace(one, extent=after))
            before, after = made, (after + one.top + bottom - one.reach) // one.stride + 1
        else:
            assert isinstance(one, Enlargement)
            found.append(replace(one, extent=after))
            before, after = made, after * one.factor
    return tuple(reversed(found)), after
