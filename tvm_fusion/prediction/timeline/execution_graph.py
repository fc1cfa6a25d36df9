# SPDX-License-Identifier: Apache-2.0
"""Execution graph of one rank: its operators in the order in which the host calls them.

All times are seconds. Operators launch kernels on streams or wait for them; between two operators
and around each launch the host spends overheads T1 to T5 (dissertation, section 4.3.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from schedules.cost.kernel_call import KernelCall

from ...errors import PredictionError

HOST = -1
"""Stream of a kernel that runs on the host, inside its operator."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Part of one rank in a collective."""

    kind: str
    """``all_reduce``, ``all_to_all``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``send``,
    ``recv`` or another name."""
    group: str  # Process group.
    sequence: int  # Number within the group; ranks meet by group and number.
    ranks: tuple[int, ...] = ()  # Ranks of the group; empty for all ranks that are simulated.
    bytes: float = 0.0
    """Bytes of the message on this rank: the larger of what it sends and what it receives."""

    def __str__(self) -> str:
        return f"{self.kind} number {self.sequence} of group {self.group!r}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Launch of a kernel or a copy."""

    id: int  # Name within the graph, by which others wait for it.
    name: str  # Name of the device function.
    seconds: float  # Time on the device; of a collective without the wait for other ranks.
    stream: int = 0  # Stream, in order of launch; ``HOST`` for one that runs inside its operator.
    after: tuple[int, ...] = ()  # Kernels of other streams that must have ended.
    collective: Collective | None = None  # Collective that ends on all of its ranks together.
    call: KernelCall | None = None  # Operator, sizes and dtype, where they are known.


@dataclass(frozen=True, slots=True)
class Launch:
    """Runtime call that launches a kernel."""

    kernel: Kernel  # What it launches.
    call: str = "launch"  # Name of the runtime function.
    blocking: bool = False
    """Whether it returns when the kernel has ended, as a copy from pageable memory does."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Runtime call that returns when kernels have ended."""

    after: tuple[int, ...] | None = None
    """Kernels that it waits for; None for all that were launched so far."""
    call: str = "synchronize"  # Name of the runtime function.


@dataclass(frozen=True, slots=True)
class Op:
    """Operator that the host calls."""

    name: str  # Name by which overheads are found.
    steps: tuple[Launch | Wait, ...] = ()  # Runtime calls in order.
    thread: int = 0  # Thread that calls it.
    follows: bool = True
    """Whether it starts after the operator before it, whichever thread that ran on; otherwise only
    after the one before it on its own thread."""
    gap: float | None = None
    """Host time before it, in place of T1: work of the host that no operator does."""
    before: int = 0
    """Calls of Python functions between it and the operator before it, where they are known."""
    events: tuple[int, ...] = ()
    """Operators and other events inside it, before each of its steps and after the last."""
    graph: bool = False  # Whether one call launches all of its kernels.
    after: tuple[int, ...] = ()
    """Kernels that the host waits for before it, and before the gap or T1."""

    @property
    def kernels(self) -> Iterator[Kernel]:
        """Kernels in order of launch."""
        return (step.kernel for step in self.steps if isinstance(step, Launch))


@dataclass(frozen=True)
class ExecutionGraph:
    """Operators of one rank in the order of their calls.

    Raises
    ------
    PredictionError
        If a time is negative or not finite, an id comes twice, or a kernel waits for a later one.
    """

    ops: tuple[Op, ...]  # Operators.
    rank: int = 0
    start: float = 0.0  # Time at which the rank starts, by a clock that all ranks share.
    name: str = field(default="", compare=False)  # What a report calls it.
    queued: tuple[Kernel, ...] = ()
    """Kernels that were launched before the start and have not ended."""

    def __post_init__(self) -> None:
        everything = {kernel.id for op in self.ops for kernel in op.kernels}
        seen = {kernel.id for kernel in self.queued}
        for op in self.ops:
            if op.gap is not None:
                self._check_time(op.gap, f"gap before {op.name}")
            self._check_order(op, op.after, everything, seen)
            for step in op.steps:
                awaited = step.after if isinstance(step, Wait) else step.kernel.after
                self._check_order(op, awaited or (), everything, seen)
                if isinstance(step, Launch):
                    self._check_time(step.kernel.seconds, f"time of {step.kernel.name}")
                    if step.kernel.id in seen:
                        raise PredictionError(f"rank {self.rank}: two kernels {step.kernel.id}")
                    seen.add(step.kernel.id)

    def _check_order(
        self, op: Op, awaited: tuple[int, ...], everything: set[int], seen: set[int]
    ) -> None:
        late = [id_ for id_ in awaited if id_ in everything and id_ not in seen]
        if late:
            raise PredictionError(
                f"rank {self.rank}: {op.name} waits for kernel {late[0]}, which is launched by it "
                "or later: a cycle"
            )

    def _check_time(self, seconds: float, what: str) -> None:
        if not 0 <= seconds < math.inf:
            raise PredictionError(
                f"rank {self.rank}: {what} is {seconds}; expected a finite time of 0 or more"
            )

    @property
    def kernels(self) -> Iterator[Kernel]:
        """Kernels in order of launch."""
        return (kernel for op in self.ops for kernel in op.kernels)


class HostCosts(Protocol):
    """Overheads of the host, in seconds."""

    def t1(self, previous: str, op: Op) -> float:
        """Time between two operators."""

    def t2(self, op: Op) -> float:
        """Time of an operator before its first runtime call."""

    def t3(self, op: Op) -> float:
        """Time of an operator after its last runtime call."""

    def t4(self, call: str) -> float:
        """Time of a runtime call; of one that waits, what remains after the wait."""

    def t5(self, op: Op, step: int) -> float:
        """Time between two runtime calls of an operator, the second of them number ``step``."""

    def whole(self, op: Op) -> float:
        """Time of an operator that makes no runtime call; T5 of the source, too."""

    def delay(self, call: str) -> float:
        """Time from the begin of a launching call to the kernel's start on an idle stream."""
