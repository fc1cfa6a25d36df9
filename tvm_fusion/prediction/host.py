# SPDX-License-Identifier: Apache-2.0
"""Host overheads of a model's run where no trace gives them: of our runtime, and of PyTorch.

T1 is spent between two operators, T2 before an operator's first launch, T3 after its last, T4 in
the launch, T5 between two launches (dissertation, section 4.3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedules.cost.machine import Machine

from .timeline.execution_graph import Op

CALL_SECONDS = 0.2e-6
"""Our runtime's call of one kernel, where the machine has no figure ``overhead.call``."""
RUN_SECONDS = 2e-6
"""Our runtime's call of a model, where the machine has no figure ``overhead.run``."""
LAUNCH_SECONDS = 4.5e-6
"""A call of ``cudaLaunchKernel``, as in the traces below."""

EAGER_ORIGIN = (
    "host overheads of eager PyTorch are means of three inferences on an H100, profiler on "
    "(traces of AMD-AGI/TraceLens, MIT): other hosts differ; --overheads takes those of your own"
)

_EAGER: Mapping[str, tuple[float, float, float]] = {
    "aten::linear": (16.5e-6, 38e-6, 5e-6),
    "aten::conv2d": (40e-6, 36.5e-6, 3.6e-6),
    "aten::layer_norm": (22e-6, 15.8e-6, 5.4e-6),
    "aten::gelu": (11.3e-6, 7.2e-6, 1.1e-6),
    "aten::embedding": (23.9e-6, 28.8e-6, 3e-6),
    "aten::add": (6.8e-6, 5.5e-6, 1e-6),
    "aten::mul": (3.7e-6, 5.2e-6, 1e-6),
    "aten::contiguous": (10.1e-6, 9.5e-6, 1.6e-6),
    "aten::cat": (4.9e-6, 7.5e-6, 0.8e-6),
    "aten::mean": (3.8e-6, 7.6e-6, 1e-6),
    "aten::tanh": (14.8e-6, 6.6e-6, 1e-6),
}
_OTHER = (9.1e-6, 15.2e-6, 2.4e-6)
"""T1, T2 and T3 of all operators that launch, means weighted by their number."""


@dataclass(frozen=True)
class FixedCosts:
    """Overheads by operator; in seconds.

    Parameters
    ----------
    other : tuple of float
        T1, T2 and T3 of operators that ``table`` does not have.
    launch, between, view : float
        T4, T5, and an operator that launches nothing.
    first : float
        Before the first operator, besides its T1.
    table : mapping of str to tuple
        T1, T2 and T3 by operator.
    """

    other: tuple[float, float, float]
    launch: float
    between: float = 0.0
    view: float = 0.0
    first: float = 0.0
    table: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    def t1(self, previous: str, op: Op) -> float:
        """Time between two operators."""
        return self._of(op)[0] + (0.0 if previous else self.first)

    def t2(self, op: Op) -> float:
        """Time of an operator before its first runtime call."""
        return self._of(op)[1]

    def t3(self, op: Op) -> float:
        """Time of an operator after its last runtime call."""
        return self._of(op)[2]

    def t4(self, call: str) -> float:
        """Time of a runtime call."""
        return self.launch

    def t5(self, op: Op, step: int) -> float:
        """Time between two runtime calls of an operator."""
        return self.between

    def whole(self, op: Op) -> float:
        """Time of an operator that makes no runtime call."""
        return self.view

    def delay(self, call: str) -> float:
        """Half of T4, as the source has it."""
        return self.launch / 2

    def _of(self, op: Op) -> tuple[float, float, float]:
        return self.table.get(op.name, self.other)


def host_costs(machine: Machine, engine: str) -> tuple[FixedCosts, tuple[str, ...]]:
    """Overheads of an engine on a machine, and where they come from."""
    if engine == "pytorch" and "overhead.eager" in machine.figures:
        return FixedCosts((machine["overhead.eager"], 0.0, 0.0), 0.0), ()
    if engine == "pytorch":
        return FixedCosts(_OTHER, LAUNCH_SECONDS, 2e-6, 1.6e-6, table=_EAGER), (EAGER_ORIGIN,)
    call = machine.get("overhead.call", CALL_SECONDS)
    first = machine.get("overhead.run", RUN_SECONDS)
    launch = LAUNCH_SECONDS if machine.kind == "gpu" else 0.0
    notes: tuple[str, ...] = ()
    if "overhead.call" not in machine.figures:
        notes = ("host overheads of our runtime were measured on another machine, a Zen 4",)
    return FixedCosts((call, 0.0, 0.0), launch, first=first), notes
