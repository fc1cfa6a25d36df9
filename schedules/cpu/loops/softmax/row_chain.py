# SPDX-License-Identifier: Apache-2.0
"""Recognising chains of blocks in which each works on one row at a time."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir
from tvm.s_tir.dlight.analysis import SBlockInfo

from ...nests.blocks import Access, BlockFacts, Kernel, block_facts


@dataclass
class RowStage:
    """One block of the chain with its loops over the rows.

    Parameters
    ----------
    info : SBlockInfo
        The block.
    facts : BlockFacts
        Its facts.
    rows : list[int]
        Positions of the iteration variables that number the rows.
    """

    info: SBlockInfo
    facts: BlockFacts
    rows: list[int]


def find_stages(kernel: Kernel, blocks: list[SBlockInfo]) -> list[RowStage] | None:
    """Find the rows in each block; None if a block depends on more than its row.

    A reduction's rows are its spatial variables; an element-wise block has the rows of the
    reductions that it reads. Every access to a temporary must lead to the row itself.
    """
    stages: list[RowStage] = []
    written: dict[ir.Var, tuple[int | None, ...]] = {}
    for info in blocks:
        facts = block_facts(kernel.sch, info.block_rv)
        if facts is None or set(facts.kinds) - set("SR"):
            return None
        if info.is_injective():
            rows = _rows_read(facts, written)
        else:
            rows = facts.positions("S")
        if rows is None or not _same_rows(stages, facts, rows):
            return None
        if any(extent is None for k, extent in enumerate(facts.extents) if k not in rows):
            return None
        for load in facts.loads:
            if load.buffer in written and _row_dims(facts, load, rows) != written[load.buffer]:
                return None
        written[facts.store.buffer] = _row_dims(facts, facts.store, rows)
        stages.append(RowStage(info, facts, rows))
    return stages


def _same_rows(stages: list[RowStage], facts: BlockFacts, rows: list[int]) -> bool:
    """Return whether there are as many rows as in the first stage."""
    if not stages:
        return True
    first = stages[0]
    return [facts.extents[k] for k in rows] == [first.facts.extents[k] for k in first.rows]


def _row_dims(facts: BlockFacts, access: Access, rows: list[int]) -> tuple[int | None, ...]:
    """Dimension of the buffer that each row variable indexes."""
    return tuple(
        next((d for d, index in enumerate(access.indices) if index.same_as(facts.vars[k])), None)
        for k in rows
    )


def _rows_read(
    facts: BlockFacts, written: dict[ir.Var, tuple[int | None, ...]]
) -> list[int] | None:
    """The row variables of a block that reads a temporary, from its accesses."""
    for load in facts.loads:
        dims = written.get(load.buffer)
        if dims is None or None in dims:
            continue
        rows = [
            next((k for k, var in enumerate(facts.vars) if load.indices[d].same_as(var)), None)
            for d in dims
            if d is not None
        ]
        return None if None in rows else [k for k in rows if k is not None]
    return None
