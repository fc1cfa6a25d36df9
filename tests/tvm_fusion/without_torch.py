# SPDX-License-Identifier: Apache-2.0
"""Processes of Python without PyTorch, whose import by TVM would take them a second or more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
"""First line of programs that the tests run."""

START = f"""{WITHOUT_TORCH}
import runpy
del sys.argv[0]
if sys.argv[0].endswith(".py"):
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Program that runs the file or the module that its first argument names."""


def python(program: str, *arguments: str) -> list[str]:
    """Command line of a file or a module."""
    return [sys.executable, "-c", START, program, *arguments]


def importing_from(*folders: Path) -> dict[str, str]:
    """Environment of a process that also imports from some folders, and from them first."""
    before = os.environ.get("PYTHONPATH")
    paths = [*map(str, folders), *([before] if before else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
