# SPDX-License-Identifier: Apache-2.0
"""Programs over MPI ranks: the session, exchanges, reductions, failures.

Imports ``compiler`` and ``runtime``; only ``cli`` may import it. Without mpi4py all but a session
works. Start with ``communicator.py``.
"""

from .communicator import World
from .session import session

__all__ = ["World", "session"]
