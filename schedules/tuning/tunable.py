# SPDX-License-Identifier: Apache-2.0
"""Knobs as decisions of a trace: the form in which MetaSchedule searches a template.

An open function is a function without a schedule whose root block names its template and has an
annotation for each knob; the trace of its schedule samples their values. Closing it reads the
annotations, and leaves the nest to the template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import permutations
from typing import Any

from tvm import s_tir, tirx

from schedules import attributes
from schedules.errors import OpError

from .template import Template, choices_of

AnyTemplate = Template[Any, Any, Any]


def sample_knobs(
    sch: s_tir.Schedule,
    template: AnyTemplate,
    workload: str,
    space: Iterable[Any],
    chosen: Any | None = None,
) -> None:
    """Sample the knobs of a template, and annotate the root block of function ``main``.

    One after the other: each from the values that it has in settings with the earlier ones, by
    their number, so that all settings are equally likely and each is legal.

    Parameters
    ----------
    sch : Schedule
        Schedule of the function that has none yet.
    template : Template
        The template.
    workload : str
        The workload as JSON.
    space : iterable
        Its settings.
    chosen : object, optional
        A setting of the space, whose decisions are then taken.
    """
    root = sch.get_sblock("root")
    for key, text in (
        (attributes.TEMPLATE, template.name),
        (attributes.VERSION, template.version),
        (attributes.WORKLOAD, workload),
    ):
        sch.annotate(root, key, text)
    settings = [_numbers(template, setting) for setting in space]
    wanted = None if chosen is None else _numbers(template, chosen)
    for name in settings[0]:
        counts = sorted(Counter(setting[name] for setting in settings).items())
        values = [value for value, _ in counts]
        decision = None if wanted is None else values.index(wanted[name])
        sampled = sch.sample_categorical(
            values, [count / len(settings) for _, count in counts], decision
        )
        sch.annotate(root, attributes.KNOB + name, sampled)
        value = int(sch.get(sampled))
        settings = [setting for setting in settings if setting[name] == value]


def decisions_of(func: tirx.PrimFunc) -> dict[str, Any]:
    """Return the annotations of an open function, numbers and texts; of another one there are none.

    The knobs' keys begin with :data:`PREFIX`.
    """
    root = getattr(func.body, "block", None)
    annotations = dict(root.annotations) if root is not None else {}
    if attributes.TEMPLATE not in annotations:
        return {}
    return {
        str(key): int(value) if isinstance(value, int | tirx.IntImm) else str(value)
        for key, value in annotations.items()
        if key in (attributes.TEMPLATE, attributes.VERSION, attributes.WORKLOAD)
        or key.startswith(attributes.KNOB)
    }


def without_decisions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function as it was before it was opened."""
    decisions = decisions_of(func)
    if not decisions:
        return func
    sch = s_tir.Schedule(func)
    root = sch.get_sblock("root")
    for key in decisions:
        sch.unannotate(root, key)
    return sch.mod["main"]


def read_setting(
    decisions: Mapping[str, Any], templates: Sequence[AnyTemplate]
) -> tuple[AnyTemplate, dict[str, Any]]:
    """Return the template and the knobs, as JSON, that decisions name.

    Raises
    ------
    OpError
        If they name another template or another version, or lack a knob.
    """
    name = decisions.get(attributes.TEMPLATE)
    template = next((one for one in templates if one.name == name), None)
    if template is None or decisions.get(attributes.VERSION) != template.version:
        known = ", ".join(f"{one.name} {one.version}" for one in templates)
        raise OpError(
            f"the decisions are for version {decisions.get(attributes.VERSION)} of {name!r}; "
            f"expected {known}"
        )
    values: dict[str, Any] = {}
    for knob, kind in template.knob_kinds().items():
        number = decisions.get(attributes.KNOB + knob)
        if type(number) is not int:
            raise OpError(f"the decision on the knob {knob} is {number!r}; expected an integer")
        values[knob] = _value(number, kind, getattr(template.knobs, knob, None))
    return template, values


def _numbers(template: AnyTemplate, setting: Any) -> dict[str, int]:
    """A setting as integers."""
    kinds = template.knob_kinds()
    return {name: _number(value, kinds[name]) for name, value in asdict(setting).items()}


def _number(value: Any, kind: str) -> int:
    """A knob as an integer: None as 0, a permutation as its rank, a string by its place."""
    if isinstance(value, str):
        return choices_of(kind).index(value)
    if isinstance(value, tuple):
        return list(permutations(sorted(value))).index(value)
    return int(value or 0)


def _value(number: int, kind: str, usual: Any) -> Any:
    """The knob of a number, as JSON; ``usual`` is any permutation of a knob that is one."""
    if kind.startswith("tuple"):
        orders = list(permutations(sorted(usual)))
        if not 0 <= number < len(orders):
            raise OpError(f"{number} is not a permutation of {len(usual)} loops")
        return list(orders[number])
    choices = choices_of(kind)
    if choices:
        if not 0 <= number < len(choices):
            raise OpError(f"{number} is not one of the {len(choices)} choices {', '.join(choices)}")
        return choices[number]
    if kind == "bool":
        return number != 0
    return None if "None" in kind and number == 0 else number
