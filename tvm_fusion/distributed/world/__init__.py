# SPDX-License-Identifier: Apache-2.0
"""World of MPI ranks: the communicator, one message a neighbour, failures that end all ranks.

Imports ``errors`` and ``runtime``; the rest of ``tvm_fusion.distributed`` may import it.
Start with ``communicator.py``, then with ``failure.py``.
"""
