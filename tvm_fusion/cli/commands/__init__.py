# SPDX-License-Identifier: Apache-2.0
"""Commands of ``tvm-fusion``, those of one kind in a module.

Imports everything below and the modules beside this folder; only ``command_line.py``, by the names
in its table ``COMMANDS``, may import it. Start with ``bench.py``.
"""
