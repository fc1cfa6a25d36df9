# SPDX-License-Identifier: Apache-2.0
"""Paths of the warps of a block through machine code, and the cycles that they take."""

from __future__ import annotations

import operator
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from .sass import Instruction

_ISSUE = 2  # cycles between two instructions of a warp
# Cycles until a result may be used, after published microbenchmarks of sm_70 to sm_90 (Jia et al.,
# 2018; Luo et al., 2024); rounded, since the generations differ by a few.
_LATENCY: dict[str, float] = {
    **{"LDS": 30, "LDSM": 33, "LD": 180, "LDC": 30, "ULDC": 10, "ATOMS": 60, "SHFL": 24},
    **{"S2R": 20, "S2UR": 20, "MUFU": 20, "F2F": 12, "I2F": 12, "F2I": 12},
    **{"DADD": 16, "DMUL": 16, "DFMA": 16},
    **{"BAR": 30, "MEMBAR.ALL.CTA": 10, "MEMBAR.SC.CTA": 10, "UCGABAR_WAIT": 190},
}
_OTHERS = 5
_BLOCKING = ("BAR", "MEMBAR", "UCGABAR_WAIT")
_PAUSES = ("NANOSLEEP", "CALL")
_COMPARE = {
    **{"EQ": operator.eq, "NE": operator.ne, "LT": operator.lt},
    **{"LE": operator.le, "GT": operator.gt, "GE": operator.ge},
}

Warp = Generator[float, float, float]  # yields its arrival at a barrier, is sent when that opens


def block_cycles(
    code: Sequence[Instruction],
    places: range,
    latencies: Mapping[str, float],
    threads: Sequence[int | None] = (None,),
    waits: bool = True,
) -> float:
    """Cycles in which some warps of a block issue a part of a kernel and get its results.

    Each warp goes its way as if it ran alone; barriers wait for the last of them. Instructions are
    issued in their order, each when its sources are there.

    Parameters
    ----------
    code, places : Sequence[Instruction], range
        The kernel, and the part of it.
    latencies : Mapping[str, float]
        Latencies of instructions by their names with or without modifiers, beside or instead of the
        usual ones.
    threads : Sequence[int | None]
        The first thread of each warp, whose number decides its branches; None takes those that
        depend on it like others, see :func:`warp_path`.
    waits : bool
        Whether results that the part itself does not use count.
    """
    known = {**_LATENCY, **latencies}
    warps = [_timed(warp_path(code, places, thread), known, waits) for thread in threads]
    end, opens = 0.0, 0.0
    arrivals: dict[int, float] = {}
    running = dict(enumerate(warps))
    while running:
        for number, warp in list(running.items()):
            try:
                arrivals[number] = warp.send(opens) if number in arrivals else next(warp)
            except StopIteration as stop:
                end = max(end, stop.value)
                del running[number]
        opens = max((arrivals[number] for number in running), default=0.0)
    return end


def _timed(path: Iterator[Instruction], known: Mapping[str, float], waits: bool) -> Warp:
    ready: dict[str, float] = {}
    now, end = 0.0, 0.0
    for instruction in path:
        now = max([now + _ISSUE, *(ready.get(source, 0.0) for source in instruction.sources)])
        latency = known.get(instruction.opcode, known.get(instruction.name, _OTHERS))
        if instruction.name == "BAR":
            now = yield now
        now += latency if instruction.name in _BLOCKING else 0
        ready |= dict.fromkeys(instruction.results, now + latency)
        end = max([end, now, *(ready[result] for result in instruction.results if waits)])
    return end


def warp_path(
    code: Sequence[Instruction], places: range, thread: int | None = None
) -> Iterator[Instruction]:
    """Instructions of a part of a kernel that the warp of a thread issues, in their order.

    Branches forward are taken where they have no predicate, where the number of the thread gives
    it, or where they lead around a pause or a call; loops are run through once. So this is the way
    of the block that has most to do, and that waits for nothing.
    """
    values: dict[str, int] = {}
    place = 0
    while place < places.stop:
        instruction = code[place]
        runs = _holds(instruction.guard, values)
        if instruction.name == "EXIT" and (runs or not instruction.guard):
            return
        if place >= places.start:  # what does not run is issued all the same
            yield (
                instruction
                if runs is not False
                else replace(instruction, opcode="NOP", operands="")
            )
        if runs is not False:
            _evaluate(instruction, values, thread, certain=runs is True)
        forward = instruction.target is not None and instruction.target > place
        if forward and instruction.name == "BRA" and _is_taken(code, place, runs):
            assert instruction.target is not None, "it leads forward"
            place = instruction.target
        else:
            place += 1


def _is_taken(code: Sequence[Instruction], place: int, runs: bool | None) -> bool:
    each = code[place]
    if each.guard and runs is not None:
        return runs
    if each.guard:
        return any(code[k].name in _PAUSES for k in range(place + 1, each.target or 0))
    return not each.sources


def _holds(guard: str, values: Mapping[str, int]) -> bool | None:
    """Whether an instruction runs; None if nobody knows."""
    return True if not guard else _truth(guard[1:], values)


def _truth(predicate: str, values: Mapping[str, int]) -> bool | None:
    name = predicate.strip().lstrip("!")
    value = 1 if name in ("PT", "UPT") else values.get(name)
    return None if value is None else bool(value) != ("!" in predicate)


def _number(operand: str, values: Mapping[str, int]) -> int | None:
    text = operand.strip().partition(".")[0]
    if text in ("RZ", "URZ"):
        return 0
    if re.fullmatch(r"-?0x[0-9a-f]+", text):
        return int(text, 16)
    return values.get(text)


def _evaluate(
    instruction: Instruction, values: dict[str, int], thread: int | None, certain: bool
) -> None:
    """Note what an instruction writes, as far as it follows from the number of the thread."""
    found = _result(instruction, values, thread) if certain else None
    for result in instruction.results:
        values.pop(result, None)
    if found is not None and instruction.results:
        [name] = instruction.results
        values[name] = found


def _result(instruction: Instruction, values: Mapping[str, int], thread: int | None) -> int | None:
    if len(instruction.results) != 1:
        return None
    parts = [part.strip() for part in instruction.operands.split(",")]
    words = instruction.opcode.split(".")
    if words[0] == "S2R":
        return thread if parts[1] == "SR_TID.X" else None
    if words[0] == "MOV":
        return _number(parts[1], values)
    if instruction.opcode == "IMAD.MOV.U32":
        return _number(parts[3], values)
    # A constant, as two halves.
    if instruction.opcode == "HFMA2.MMA" and parts[1:3] == ["-RZ", "RZ"]:
        return int(np.array([parts[4], parts[3]], "float16").view("uint32")[0])
    if words[0] == "P2R" and parts[3] == "0x1":
        known = _truth("P0", values)
        return None if known is None else int(known)
    if words[0] == "ISETP" and "EX" not in words:
        return _comparison(words, parts, values)
    if words[0] == "SHF" and words[1] == "R" and parts[1] == "RZ":
        shifted, by = _number(parts[3], values), _number(parts[2], values)
        return None if shifted is None or by is None else shifted >> by
    if instruction.opcode == "LOP3.LUT" and parts[-2] == "0xc0":
        first = 1 if parts[0].startswith("P") else 0
        numbers = [_number(part, values) for part in parts[first + 1 : first + 3]]
        if None not in numbers:
            both = numbers[0] & numbers[1]  # type: ignore[operator]
            return int(both != 0) if first else both
    return None


def _comparison(
    words: Sequence[str], parts: Sequence[str], values: Mapping[str, int]
) -> int | None:
    left, right = (_number(part, values) for part in parts[2:4])
    other = _truth(parts[4], values)
    if left is None or right is None or other is None or words[1] not in _COMPARE:
        return None
    found = _COMPARE[words[1]](left, right)
    return int(found or other if "OR" in words else found and other)
