# SPDX-License-Identifier: Apache-2.0
"""Programs and networks over MPI ranks: the session, exchanges, reductions, failures.

Imports ``compiler`` and ``runtime``; only ``cli`` may import it. Without mpi4py all but a session
works. Start with ``program.py``, then ``build_network.py`` and ``network_model.py`` (models),
``world`` (messages) and ``accelerator`` (CPU and GPU together).
"""

# TVM's compiler is imported with the first name that needs it: ranks that run a saved model, or
# only exchange, begin without it.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator.device import Device, accelerator_of
    from .build_network import compile_network
    from .network_figures import network_of, processor_of
    from .network_model import DistributedModel, load
    from .program import Program, compile, estimated_processor, measure_split
    from .rank_reduce import reduce
    from .world.communicator import World
    from .world.job_session import session
    from .world.local_world import run_ranks

__all__ = [
    "Device",
    "DistributedModel",
    "Program",
    "World",
    "accelerator_of",
    "compile",
    "compile_network",
    "estimated_processor",
    "load",
    "measure_split",
    "network_of",
    "processor_of",
    "reduce",
    "run_ranks",
    "session",
]

_LATER = {
    **dict.fromkeys(("network_of", "processor_of"), "network_figures"),
    **dict.fromkeys(("Device", "accelerator_of"), "accelerator.device"),
    "compile_network": "build_network",
    **dict.fromkeys(("DistributedModel", "load"), "network_model"),
    **dict.fromkeys(("Program", "compile", "estimated_processor", "measure_split"), "program"),
    "reduce": "rank_reduce",
    "World": "world.communicator",
    "session": "world.job_session",
    "run_ranks": "world.local_world",
}
"""Public names, and the modules that are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    """Import what a name needs on its first use."""
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return sorted({*globals(), *__all__})
