# SPDX-License-Identifier: Apache-2.0
"""Waits for explicit transfers inside a scheduled function, before a block of the user's choice.

They stand apart from ``transfer.py``, which ranks import without TVM's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, s_tir, tirx

from ..errors import OpError
from ..tir.expression_walk import nodes
from .transfer import FINISH, Transfer


def with_waits(
    func: tirx.PrimFunc,  # Scheduled function of a part.
    transfers: Sequence[Transfer],  # Transfers to wait for, each with a block.
) -> tirx.PrimFunc:
    """Wait for transfers before the blocks that they name.

    Returns the function, with a call of :data:`FINISH` for each transfer before the outermost loops
    in which the block is computed, or those of the first statement that reads what is received.
    Raises ``OpError`` if the schedule has left no such block, and nothing reads what is received.
    """
    root = func.body.block
    body = list(root.body) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    places = [_place(func, body, transfer) for transfer in transfers]
    merged: list[tirx.Stmt] = []
    for number, statement in enumerate(body):
        for transfer, place in zip(transfers, places, strict=True):
            if place == number:
                merged.append(tirx.Evaluate(tirx.call_packed(FINISH, transfer.id)))
        merged.append(statement)
    block = s_tir.SBlock(
        root.iter_vars,
        root.reads,
        root.writes,
        root.name_hint,
        tirx.SeqStmt(merged),
        root.init,
        root.alloc_buffers,
        root.match_buffers,
        root.annotations,
    )
    realized = s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block)
    # The call writes to a parameter.
    return func.with_body(realized).without_attr("tirx.noalias")


def _place(func: tirx.PrimFunc, body: Sequence[tirx.Stmt], transfer: Transfer) -> int:
    """Number of the statement before which a transfer is waited for."""
    [received] = [buffer for buffer in func.params if buffer.name == transfer.buffer]
    for number, statement in enumerate(body):
        named = any(block.name_hint == transfer.before for block in nodes(statement, s_tir.SBlock))
        read = any(load.source.same_as(received) for load in nodes(statement, ir.TensorLoad))
        if named or read:
            return number
    raise OpError(
        f"the transfer of {transfer.buffer!r} from rank {transfer.source} to {transfer.dest} is to "
        f"be waited for before block {transfer.before!r}, of which the schedule has left none; "
        "schedule it with a function that does not inline it"
    )
