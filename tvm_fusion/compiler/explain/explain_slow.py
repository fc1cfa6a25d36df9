# SPDX-License-Identifier: Apache-2.0
"""Show the kernels that are likely to be slow, since no rule for their kind schedules them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table


def with_slow_kernels(table: Table, functions: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return ``table`` and, below it, one with a row for each function that has a ``slow``.

    Parameters
    ----------
    table : Table
        What comes first.
    functions : Sequence[Mapping]
        With ``name``, ``rule``, ``calls`` and ``slow``, as
        :class:`tvm_fusion.compiler.launches.KernelUse` has them.
    """
    slow = [use for use in functions if use["slow"]]
    if not slow:
        return table
    below = Table(title="kernels likely to be slow")
    for heading in ("function", "rule"):
        below.add_column(heading)
    below.add_column("calls", justify="right")
    below.add_column("why")
    for use in slow:
        below.add_row(use["name"], use["rule"], str(use["calls"]), use["slow"])
    return Group(table, below)
