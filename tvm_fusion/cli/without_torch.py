# SPDX-License-Identifier: Apache-2.0
"""Commands start without PyTorch: TVM imports it wherever it is installed, which takes seconds."""

from __future__ import annotations

import sys

from ..plugin import NoTorch


def hide_torch() -> None:
    """Let this process not find PyTorch."""
    sys.meta_path.insert(0, NoTorch())


def allow_torch() -> None:
    """Let this process find PyTorch again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NoTorch)]
