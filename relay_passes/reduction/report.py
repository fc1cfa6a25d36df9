# SPDX-License-Identifier: Apache-2.0
"""Record of the rewritten and fused reductions, as a module attribute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tvm import IRModule

from schedules import attributes

Entry = dict[str, Any]


def read_reduction_report(mod: IRModule) -> Entry:
    """Return what passes did to the reductions of ``mod``.

    Returns
    -------
    dict
        ``rewritten``: the number that ``CoalesceReduction`` replaced. ``groups``: a list with an
        entry for each function that ``FuseReductions`` made: the ``function`` that calls it, its
        ``name`` and ``kind`` (``chain``, ``online``, ``stored``: elements that use no results,
        ``sisters``, ``epilogue`` or ``producers``),
        ``outputs`` and ``reduced`` (``M`` and ``N``; None where symbolic), and by the names of what
        they call its ``reductions``, its other ``members``, the ``producers`` that it absorbed, and
        the ``results`` that it returns.
    """
    text = mod.attrs.get(attributes.REDUCTION_REPORT) if mod.attrs else None
    return {"rewritten": 0, "groups": []} if text is None else json.loads(str(text))


def extend_reduction_report(
    mod: IRModule, rewritten: int = 0, groups: Sequence[Entry] = ()
) -> IRModule:
    """A copy of ``mod`` with an extended report; ``mod`` itself if there is nothing to add."""
    if not rewritten and not groups:
        return mod
    report = read_reduction_report(mod)
    report["rewritten"] += rewritten
    report["groups"] += groups
    return mod.with_attr(attributes.REDUCTION_REPORT, json.dumps(report))
