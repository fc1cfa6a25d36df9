# SPDX-License-Identifier: Apache-2.0
"""Program of a rank that runs files one after the other, so that they share its start."""

from __future__ import annotations

import json
import runpy
import sys

for command in json.loads(sys.argv[1]):
    sys.argv[:] = command
    runpy.run_path(command[0], run_name="__main__")
