# SPDX-License-Identifier: Apache-2.0
"""Spaces of settings from which records choose, and templates: kernels whose knobs they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from ast import literal_eval
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from tvm import s_tir, tirx
from tvm.target import Target

from schedules.errors import OpError

Workload = TypeVar("Workload")
Knobs = TypeVar("Knobs")
Machine = TypeVar("Machine")


class Space(ABC, Generic[Workload, Knobs, Machine]):
    """Settings from which a record can choose.

    Attributes
    ----------
    name : str
        Its name in records.
    version : int
        Raised whenever its settings or their code change: records of another version do not count.
    knobs : type
        A frozen dataclass of integers, booleans, tuples of strings, and strings of a ``Literal``.
    most : int
        Largest extent of a workload whose settings are enumerated to check a stranger's record.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    knobs: ClassVar[type]
    most: ClassVar[int] = 1 << 20

    @abstractmethod
    def read_workload(self, text: str) -> Workload:
        """Read the JSON of a workload; it may raise anything for another one."""

    @abstractmethod
    def describe(self, workload: Workload) -> str:
        """Return a workload in a few words."""

    @abstractmethod
    def settings(self, workload: Workload, machine: Machine) -> Iterable[Knobs]:
        """Yield every legal setting, in any order."""

    def contains(self, workload: Workload, knobs: Knobs, machine: Machine) -> bool:
        """Return whether a setting is legal."""
        return knobs in self.settings(workload, machine)

    def knob_kinds(self) -> dict[str, str]:
        """Return the knobs' names with their types."""
        return {field.name: str(field.type) for field in fields(self.knobs)}

    def read_knobs(self, values: Mapping[str, Any]) -> Knobs:
        """Build a setting from JSON; that it is legal remains to be checked.

        Raises
        ------
        ValueError
            If a knob is unknown, missing, or of another type.
        """
        kinds = self.knob_kinds()
        if set(values) != set(kinds):
            raise ValueError(f"the knobs are {sorted(values)}; expected {sorted(kinds)}")
        read = {name: _read(name, values[name], kind) for name, kind in kinds.items()}
        try:
            return self.knobs(**read)
        except OpError as error:
            raise ValueError(str(error)) from error


class Template(Space[Workload, Knobs, Machine]):
    """One family of kernels with knobs."""

    @abstractmethod
    def default(self, workload: Workload, machine: Machine) -> Knobs:
        """Return the setting that is used without a record."""

    @abstractmethod
    def write(
        self, func: tirx.PrimFunc, workload: Workload, knobs: Knobs, target: Target
    ) -> s_tir.Schedule:
        """Write the loop nest of a setting; the function keeps its signature and attributes."""

    @abstractmethod
    def cycles(self, workload: Workload, knobs: Knobs, machine: Machine) -> float:
        """Return the clock cycles that the analytic model predicts."""

    def clear_padding(self, workload: Workload, position: int, array: np.ndarray) -> None:
        """Zero the elements of a parameter that are padding, if kernels rely on that."""

    def features(self, workload: Workload, knobs: Knobs, machine: Machine) -> dict[str, float]:
        """Return what a learnt model sees of a setting: its numbers, and the predicted cycles."""
        found = {"cycles": self.cycles(workload, knobs, machine)}
        values = asdict(knobs)  # type: ignore[call-overload]
        return found | {
            name: float(value) for name, value in values.items() if isinstance(value, int)
        }

    def wide_settings(self, workload: Workload, machine: Machine) -> Iterable[Knobs]:
        """Yield the settings of a wider space, where the family has one."""
        return self.settings(workload, machine)

    def space(self, workload: Workload, machine: Machine, wide: bool = False) -> list[Knobs]:
        """Return every legal setting of a space once, the default first."""
        default = self.default(workload, machine)
        settings = self.wide_settings if wide else self.settings
        return list(dict.fromkeys([default, *settings(workload, machine)]))

    def contains(self, workload: Workload, knobs: Knobs, machine: Machine) -> bool:
        """Return whether a setting is legal."""
        return super().contains(workload, knobs, machine) or knobs == self.default(
            workload, machine
        )


def choices_of(kind: str) -> list[str]:
    """Strings of a ``Literal`` that is the annotation of a knob; none for another one."""
    return literal_eval(kind.removeprefix("Literal")) if kind.startswith("Literal[") else []


def _read(name: str, value: Any, kind: str) -> Any:
    """Check the type of a knob by its annotation; lists become tuples."""
    if value in choices_of(kind):
        return value
    if kind.startswith("tuple") and isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return tuple(value)
    elif type(value) is (bool if kind == "bool" else int) or (value is None and "None" in kind):
        return value
    raise ValueError(f"the knob {name} is {value!r:.50}; expected {kind}")
