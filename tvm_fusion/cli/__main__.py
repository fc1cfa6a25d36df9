# SPDX-License-Identifier: Apache-2.0
"""The command as ``python -m tvm_fusion.cli``."""

import sys

from .command_line import program

sys.exit(program())
