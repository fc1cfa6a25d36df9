# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion``: its commands, their options, and their output.

Imports everything below; of ours only the examples may import it, for ``output`` and ``json_text``.
Start with ``commands.py``.
"""

from .commands import main

__all__ = ["main"]
