# SPDX-License-Identifier: Apache-2.0
"""Knobs of chains of reductions over the same rows: the default ones, and all that are legal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tvm import s_tir, tirx

from schedules.tir.expression_walk import nodes
from schedules.tir.vector_math import is_expensive

from ...core.machine import CPUInfo, vector_sizes
from ...nests.blocks import Kernel
from ...nests.loop_transforms import SERIAL_ELEMENTS
from .row_chain import RowStage

_VECTORS = 4
_ALL_VECTORS = (1, 2, 3, 4, 6, 8)
_TEMPORARY_BYTES = 16 * 1024
_SYMBOLIC = 64  # rows that a symbolic extent stands for
_FUNCTION = 12.0  # cycles of an elementary function of a vector
_COMBINE = 4.0  # cycles until a sum can be used again
_OPERATORS = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}
MAP = "map"


@dataclass(frozen=True)
class RowChain:
    """A chain of reductions and element-wise steps, row by row.

    Parameters
    ----------
    rows : tuple[int | None, ...]
        Extents of the loops over rows; None where symbolic.
    stages : tuple[tuple[str, int, bool], ...]
        For each block its operator, ``map`` if it reduces nothing; the elements of a row that it
        computes or reduces; and whether each takes an elementary function.
    item_bytes : int
        Of the widest element.
    side_by_side : bool
        Whether neighbouring rows are adjacent in memory, not the elements of a row.
    """

    rows: tuple[int | None, ...]
    stages: tuple[tuple[str, int, bool], ...]
    item_bytes: int
    side_by_side: bool = False

    @classmethod
    def of(cls, kernel: Kernel, stages: Sequence[RowStage], side_by_side: bool) -> RowChain:
        """The chain of some blocks."""
        first = stages[0]
        return cls(
            rows=tuple(first.facts.extents[k] for k in first.rows),
            stages=tuple(_described(kernel, stage) for stage in stages),
            item_bytes=first.facts.itemsize,
            side_by_side=side_by_side,
        )

    @classmethod
    def from_json(cls, text: str) -> RowChain:
        """Read the JSON of a workload.

        Raises
        ------
        ValueError
            If it is anything else, or the number of rows is symbolic.
        """
        values = json.loads(text)
        stages = tuple((str(name), int(size), bool(more)) for name, size, more in values["stages"])
        found = cls(**{**values, "rows": tuple(values["rows"]), "stages": stages})
        extents = (*found.rows, *(size for _, size, _ in stages), found.item_bytes)
        if not stages or not all(type(extent) is int and extent > 0 for extent in extents):
            raise ValueError(f"{text:.100} describes no chain of reductions")
        return found

    @property
    def is_static(self) -> bool:
        """Return whether the number of rows is known."""
        return None not in self.rows

    @property
    def row_count(self) -> int:
        """Number of rows; a symbolic extent counts as a few."""
        return math.prod(_SYMBOLIC if extent is None else extent for extent in self.rows)

    def lanes(self, vector_bits: int) -> int:
        """Elements of a vector."""
        return max(1, vector_bits // 8 // self.item_bytes)


@dataclass(frozen=True)
class RowChainKnobs:
    """Knobs of a chain.

    Parameters
    ----------
    vector_bits : int
        Of a vector.
    vectors : int
        Vectors of sums of one row; of rows that are side by side, vectors of rows of a tile.
    threads : bool
        Whether threads share the rows.
    """

    vector_bits: int
    vectors: int
    threads: bool


def default_row_chain(chain: RowChain, cpu: CPUInfo) -> RowChainKnobs:
    """Sums enough to hide their latency, or as many rows as keep a temporary in the L1 cache."""
    elements = chain.row_count * chain.stages[0][1]
    threads = bool(chain.rows) and elements >= SERIAL_ELEMENTS // 4
    if not chain.side_by_side:
        return RowChainKnobs(cpu.vector_bits, _VECTORS, threads)
    extent = chain.rows[-1] or 1
    lanes = min(extent, chain.lanes(cpu.vector_bits))
    row = chain.stages[0][1] * lanes * chain.item_bytes
    vectors = max(1, min(_VECTORS, extent // lanes, _TEMPORARY_BYTES // max(1, row)))
    return RowChainKnobs(cpu.vector_bits, vectors, threads)


def all_row_chains(chain: RowChain, cpu: CPUInfo) -> Iterator[RowChainKnobs]:
    """Whole or half vectors, several sums, with threads or without."""
    threads = (False, True) if chain.rows and cpu.num_cores > 1 else (False,)
    for vector_bits, vectors, shared in product(vector_sizes(cpu), _ALL_VECTORS, threads):
        lanes = chain.lanes(vector_bits)
        extent = int(chain.rows[-1] or 1) if chain.side_by_side else chain.stages[0][1]
        if vectors == 1 or vectors * lanes <= extent:
            yield RowChainKnobs(vector_bits, vectors, shared)


def row_chain_cycles(chain: RowChain, knobs: RowChainKnobs, cpu: CPUInfo) -> float:
    """Cycles of the busiest thread: steps of all stages, and adding up the lanes of each sum."""
    lanes, rows = chain.lanes(knobs.vector_bits), chain.row_count
    at_once = lanes * knobs.vectors if chain.side_by_side else 1
    per_row = 0.0
    for operator, elements, functions in chain.stages:
        steps = elements if chain.side_by_side else -(-elements // lanes)
        cycles = 2 / cpu.costs.loads_per_cycle + _FUNCTION * functions
        if operator != MAP:
            cycles = max(cycles, _COMBINE / knobs.vectors)
            folds = math.log2(knobs.vectors) + (0 if chain.side_by_side else lanes)
            per_row += _COMBINE * folds / (at_once if chain.side_by_side else 1)
        per_row += steps * cycles / (lanes if chain.side_by_side else 1)
    tiles = -(-rows // at_once)
    cores = cpu.num_cores if knobs.threads else 1
    share = -(-tiles // cores) / tiles
    return tiles * at_once * per_row * share + (cpu.costs.fork if knobs.threads else 0.0)


def _described(kernel: Kernel, stage: RowStage) -> tuple[str, int, bool]:
    block: s_tir.SBlock = kernel.sch.get(stage.info.block_rv)
    others = [k for k in range(len(stage.facts.extents)) if k not in stage.rows]
    operator = MAP
    if "R" in stage.facts.kinds:
        kind = type(nodes(block.body, tirx.BufferStore)[0].value)
        operator = _OPERATORS.get(kind, kind.__name__)
    return operator, stage.facts.volume(others), is_expensive(block.body)
