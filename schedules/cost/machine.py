# SPDX-License-Identifier: Apache-2.0
"""Figures of a machine, each with its origin, and the files that hold them.

A machine is one JSON file of numbers and texts::

    {"name": "v100", "kind": "gpu", "title": "Tesla V100-PCIE-32GB",
     "figures": {"peak_flops.float32": {"value": 1.4e13, "origin": "data sheet"}, ...}}

``machines`` beside this file holds those that come with the package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PredictionError

KINDS = ("cpu", "gpu")
PORT_BYTES = 64
"""Bytes a cycle from the second-level cache to a multiprocessor of a GPU."""
_USUAL_LAUNCH = 2e-6
_FOLDER = Path(__file__).with_name("machines")
_MAX_FILE_BYTES = 4 << 20


def read_json(
    path: Path,
    largest: int,  # Bytes that it may have.
    what: str,  # Its kind, for the message: ``file of tables``.
) -> Any:
    """Read a JSON file, if it is not too large to be what it should be.

    Raises ``PredictionError`` if it cannot be read, is larger, or is not JSON: the message names
    the file.
    """
    try:
        if path.stat().st_size > largest:
            raise PredictionError(f"{path}: larger than any {what}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise PredictionError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise PredictionError(f"{path}: not JSON: {error}") from None


@dataclass(frozen=True)
class Figure:
    """One number, in SI units, and where it comes from."""

    value: float  # Positive and finite.
    origin: str  # ``data sheet``, ``measured`` with command and date, or ``fitted`` with the data.


@dataclass(frozen=True)
class Machine:
    """A machine by its figures."""

    name: str  # Short name, such as ``a100-40``.
    kind: str  # ``cpu`` or ``gpu``.
    title: str  # Full name of the device.
    figures: Mapping[str, Figure]
    """Figures by name: ``peak_flops.float32`` and of other dtypes (FLOP/s), ``bandwidth.memory``,
    ``bandwidth.L2``, ``bandwidth.exchange`` (bytes/s, the last of what another core has just
    written), ``capacity.memory``, ``capacity.L2`` (bytes), ``multiprocessors`` (cores of a CPU),
    ``clock`` (Hz), ``launch_floor`` (seconds of an empty kernel), ``latency.memory``,
    ``latency.L2`` (seconds), ``share.read`` (of the memory's bandwidth that reads reach) and
    figures that single models fit."""
    note: str = ""  # What to know about the figures; empty if they are the machine's own.

    def __getitem__(self, figure: str) -> float:
        """Value of a figure.

        Raises ``PredictionError`` if the machine has no such figure.
        """
        found = self.figures.get(figure)
        if found is None:
            raise PredictionError(
                f"machine {self.name!r} has no figure {figure!r}; it has {', '.join(self.figures)}"
            )
        return found.value

    def get(self, figure: str, default: float) -> float:
        """Value of a figure, or ``default``."""
        found = self.figures.get(figure)
        return default if found is None else found.value

    @property
    def cache_bandwidth(self) -> float:
        """Bytes/s of L2; of a GPU without that figure half of the ports of its multiprocessors.

        Raises ``PredictionError`` if it has no figure that says so.
        """
        if "bandwidth.L2" in self.figures or self.kind != "gpu":
            return self["bandwidth.L2"]
        return 0.5 * PORT_BYTES * self["multiprocessors"] * self["clock"]

    def peak_flops(self, dtype: str) -> float:
        """Peak of a data type, or what follows from that of float32 if it has no figure.

        That holds for integers, and on CPUs for floats: 64 bits are half the lanes, and narrow
        floats are computed in float32.

        Raises ``PredictionError`` if neither the type nor float32 has a figure, or a GPU has none
        of a float.
        """
        figure = f"peak_flops.{dtype}"
        if figure in self.figures or (self.kind == "gpu" and "float" in dtype):
            return self[figure]
        return self["peak_flops.float32"] * (0.5 if dtype.endswith("64") else 1.0)

    @property
    def launch_floor(self) -> float:
        """Seconds of an empty kernel; of a GPU without that figure what profilers report."""
        return self.get("launch_floor", _USUAL_LAUNCH if self.kind == "gpu" else 0.0)

    def to_json(self) -> dict[str, Any]:
        """The machine as its file holds it."""
        figures = {
            name: {"value": figure.value, "origin": figure.origin}
            for name, figure in self.figures.items()
        }
        data = {"name": self.name, "kind": self.kind, "title": self.title, "figures": figures}
        return data | ({"note": self.note} if self.note else {})


def estimate_note(cpu: str, known: str) -> str:
    """Say that the figures of a CPU are those of another one; both are LLVM's names."""
    return (
        f"nothing was measured on a CPU {cpu!r}: times are estimated from the figures of {known!r};"
        " run `tvm-fusion calibrate` on it"
    )


def known_machines() -> tuple[str, ...]:
    """Names of the machines that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def load_machine(machine: str | os.PathLike[str]) -> Machine:
    """Read a machine by its name, or from a file.

    Raises
    ------
    PredictionError
        If there is no such machine or file, or the file is not one of a machine: the message names
        the file and the figure.
    """
    if not isinstance(machine, str | os.PathLike):
        raise PredictionError(f"machine is {machine!r:.60}; expected a name or a path")
    path = _FOLDER / f"{machine}.json" if machine in known_machines() else Path(machine)
    if not os.path.isfile(path):  # noqa: PTH113  false where pathlib raises: a name too long
        raise PredictionError(
            f"no machine {str(machine)!r}; expected {', '.join(known_machines())} or a file"
        )
    data = read_json(path, _MAX_FILE_BYTES, "machine file")
    try:
        return machine_from_json(data)
    except PredictionError as error:
        raise PredictionError(f"{path}: {error}") from None


def machine_from_json(data: Any) -> Machine:
    """Check and build a machine.

    Raises ``PredictionError`` if a field is missing, or a figure is no positive finite number with
    an origin.
    """
    fields = {"name": str, "kind": str, "title": str, "figures": dict}
    for name, kind in fields.items():
        if not isinstance(data, dict) or not isinstance(data.get(name), kind):
            raise PredictionError(f"expected a {kind.__name__} {name!r}")
    if data["kind"] not in KINDS:
        raise PredictionError(f"kind is {data['kind']!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(note := data.get("note", ""), str):
        raise PredictionError(f"note is {note!r:.60}; expected a str")
    figures = {name: _figure(name, entry) for name, entry in data["figures"].items()}
    return Machine(data["name"], data["kind"], data["title"], figures, note)


def _figure(name: str, entry: Any) -> Figure:
    value: Any = entry.get("value") if isinstance(entry, dict) else None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise PredictionError(f"figure {name!r} is {value!r}; expected a positive finite number")
    origin = entry.get("origin")
    if not isinstance(origin, str) or not origin:
        raise PredictionError(f"figure {name!r} has no origin")
    return Figure(float(value), origin)
