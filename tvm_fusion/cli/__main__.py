# SPDX-License-Identifier: Apache-2.0
"""The command as ``python -m tvm_fusion.cli``."""

import sys

from .commands import program

sys.exit(program())
