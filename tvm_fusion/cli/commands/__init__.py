# SPDX-License-Identifier: Apache-2.0
"""Commands of ``tvm-fusion``, one module a command, and the steps of ``run``.

Imports everything below and the modules beside this folder; only ``command_line.py``, by the names
in its table ``COMMANDS``, may import it. Start with ``inspect.py``, the smallest command.
"""
