# SPDX-License-Identifier: Apache-2.0
"""Small execution graphs with round times, and overheads of round times."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_fusion.prediction.timeline.execution_graph import (
    Collective,
    ExecutionGraph,
    Kernel,
    Launch,
    Op,
    Wait,
)

US = 1e-6


@dataclass
class RoundCosts:
    """Overheads in microseconds: T1 10, T2 5, T3 3, T4 4, T5 2, an op without launch 7."""

    gap: float = 10
    before: float = 5
    after: float = 3
    call: float = 4
    between: float = 2
    alone: float = 7

    def t1(self, previous: str, op: Op) -> float:
        return self.gap * US

    def t2(self, op: Op) -> float:
        return self.before * US

    def t3(self, op: Op) -> float:
        return self.after * US

    def t4(self, call: str) -> float:
        return self.call * US

    def t5(self, op: Op, step: int) -> float:
        return self.between * US

    def whole(self, op: Op) -> float:
        return self.alone * US

    def delay(self, call: str) -> float:
        return self.call / 2 * US


def launch(id_: int, micros: float, stream: int = 0, blocking: bool = False, **more) -> Launch:
    """Launch of kernel ``id_`` of so many microseconds."""
    return Launch(Kernel(id_, f"k{id_}", micros * US, stream, **more), "launch", blocking)


def op(*steps: Launch | Wait, name: str = "op", **more) -> Op:
    """Operator of some steps."""
    return Op(name, steps, **more)


def graph(*ops: Op, rank: int = 0, start: float = 0.0, **more) -> ExecutionGraph:
    """Graph whose rank starts at so many microseconds."""
    return ExecutionGraph(ops, rank, start * US, **more)


def all_reduce(sequence: int, ranks: tuple[int, ...] = ()) -> Collective:
    """Part in an all-reduce."""
    return Collective("all_reduce", "world", sequence, ranks, 4096)
