# SPDX-License-Identifier: Apache-2.0
"""Commands start without PyTorch: TVM imports it wherever it is installed, which takes seconds."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _NoTorch(importlib.abc.MetaPathFinder):
    """A finder that hides PyTorch."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Refuse to find PyTorch; other finders look for other modules."""
        if fullname == "torch":
            raise ModuleNotFoundError("this command does without PyTorch", name="torch")


def hide_torch() -> None:
    """Let this process not find PyTorch."""
    sys.meta_path.insert(0, _NoTorch())


def allow_torch() -> None:
    """Let this process find PyTorch again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _NoTorch)]
