# SPDX-License-Identifier: Apache-2.0
"""Selection of quick cases of a test: every value of each parameter, not all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def in_turns(*parameters: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations of some parameters for ``pytest.mark.parametrize``; most are slow.

    Quick are those whose numbers, counted in each parameter, add up to a multiple of ``every``: so
    each value is in a quick one, where no parameter has fewer values than that.

    Parameters
    ----------
    *parameters : iterable
        The values of each.
    every : int
        One in so many is quick.
    """
    found = []
    for numbered in itertools.product(*(list(enumerate(values)) for values in parameters)):
        is_quick = sum(number for number, _ in numbered) % every == 0
        values = [value for _, value in numbered]
        found.append(pytest.param(*values, marks=() if is_quick else pytest.mark.slow))
    return found


def slow_where(names: Iterable[str], cases: Iterable[Any]) -> list[Any]:
    """Cases for ``pytest.mark.parametrize`` of which those that begin with a name are slow.

    Parameters
    ----------
    names : iterable of str
        First values of slow cases.
    cases : iterable
        Values, or what :func:`in_turns` returns.
    """
    slow, found = set(names), []
    for case in cases:
        values, marks = getattr(case, "values", (case,)), tuple(getattr(case, "marks", ()))
        marks = (*marks, pytest.mark.slow) if values[0] in slow and not marks else marks
        found.append(pytest.param(*values, marks=marks))
    return found
