# SPDX-License-Identifier: Apache-2.0
"""Programs over MPI ranks: the session, exchanges, reductions, failures.

Imports ``compiler`` and ``runtime``; only ``cli`` may import it. Without mpi4py all but a session
works. Start with ``program.py``, then with ``communicator.py``.
"""

from .communicator import World
from .job_session import session
from .program import Program, compile
from .rank_reduce import reduce

__all__ = ["Program", "World", "compile", "reduce", "session"]
