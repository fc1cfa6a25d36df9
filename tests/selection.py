# SPDX-License-Identifier: Apache-2.0
"""Selection of quick cases of a test: every value of each parameter, not all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def mark_slow_cases(cases: Sequence[pytest.Function]) -> None:
    """Mark as slow the cases of a test that its mark ``quick_cases`` does not choose.

    ``quick_cases(2)`` chooses two: always the first of those that have most values of parameters
    which no chosen one has. ``quick_cases("mean-float16", "max-int8")`` chooses these.

    Raises
    ------
    ValueError
        If there is no case of a name, or no need of the mark.
    """
    mark = cases[0].get_closest_marker("quick_cases") if cases else None
    if mark is None:
        return
    left = [case for case in cases if case.get_closest_marker("slow") is None]
    if isinstance(mark.args[0], int):
        chosen = _with_most_values(left, mark.args[0])
    else:
        chosen = [case for case in left if case.callspec.id in mark.args]
        if len(chosen) < len(mark.args):
            names = ", ".join(case.callspec.id for case in left)
            raise ValueError(f"{cases[0].originalname}: quick_cases{mark.args}, of {names}")
    for case in left:
        if case not in chosen:
            case.add_marker(pytest.mark.slow)


def _with_most_values(cases: Sequence[pytest.Function], count: int) -> list[pytest.Function]:
    """``count`` cases, each the first of those that add most values of parameters."""
    if count >= len(cases):
        raise ValueError(f"{cases[0].originalname}: quick_cases({count}) of {len(cases)} cases")
    chosen: list[pytest.Function] = []
    seen: set[tuple[str, int]] = set()
    for _ in range(count):
        left = [case for case in cases if case not in chosen]
        best = max(left, key=lambda case: len(case.callspec.indices.items() - seen))
        chosen.append(best)
        seen |= best.callspec.indices.items()
    return chosen


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


def one_test(*tables: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """One test of all rows of a table, or of all combinations, which lists all wrong rows.

    Parameters
    ----------
    *tables : iterable
        The values of each parameter of the decorated function.
    """
    rows = list(itertools.product(*tables))

    def decorate(check: Callable[..., None]) -> Callable[[], None]:
        def test() -> None:
            wrong = []
            for row in rows:
                try:
                    check(*row)
                except Exception as error:
                    wrong.append(f"{row}: {type(error).__name__}: {error}")
            assert rows and not wrong, "\n".join([f"{len(wrong)} of {len(rows)}", *wrong])

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return test

    return decorate
