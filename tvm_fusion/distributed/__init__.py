# SPDX-License-Identifier: Apache-2.0
"""Programs and networks over MPI ranks: the session, exchanges, reductions, failures.

Imports ``compiler`` and ``runtime``; only ``cli`` may import it. Without mpi4py all but a session
works. Start with ``program.py`` and ``model.py``, then with ``communicator.py``.
"""

from .communicator import World
from .compile_network import compile_network
from .job_session import session
from .model import DistributedModel, load
from .program import Program, compile, estimated_processor
from .rank_reduce import reduce

__all__ = [
    "DistributedModel",
    "Program",
    "World",
    "compile",
    "compile_network",
    "estimated_processor",
    "load",
    "reduce",
    "session",
]
