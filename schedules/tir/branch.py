# SPDX-License-Identifier: Apache-2.0
"""Branches in functions written by the rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T


@contextmanager
def when(*conditions: tirx.Expr | bool | None) -> Iterator[None]:
    """Emit the code built inside under all conditions; None and True always hold."""
    open_ones = [given for given in conditions if given is not None and given is not True]
    if not open_ones:
        yield
        return
    with T.If(tirx.all(*open_ones) if len(open_ones) > 1 else open_ones[0]), T.Then():
        yield
