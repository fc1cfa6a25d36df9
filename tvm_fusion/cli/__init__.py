# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion``: one module a command, and what they share: options, checks, output.

Imports everything below; of ours only the examples may import it, for ``output`` and ``json_text``.
Start with ``commands.py``, whose table ``COMMANDS`` names the modules.
"""

from .commands import main, program

__all__ = ["main", "program"]
