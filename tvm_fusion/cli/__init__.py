# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion``: the commands, in ``commands``, and what they share.

Imports everything below; of ours only the examples may import it, for ``output`` and ``json_text``.
Start with ``command_line.py``, whose table ``COMMANDS`` names the modules.
"""

from .command_line import main, program

__all__ = ["main", "program"]
