# SPDX-License-Identifier: Apache-2.0
"""Times of collectives by the bytes of their message, from measured points.

Three models of a curve, after section 5.4.3.2 of the dissertation: Equation 5.1 (latency and
bandwidth), Equation 5.2 (constant, S-shaped bandwidth, constant bandwidth), and interpolation
between the points, which follows the jumps where a library changes its protocol. Leave-one-out
chooses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from schedules.cost.machine import Machine, load_machine, read_json

from ..errors import PredictionError
from ..paths import written_aside

Model = Callable[[float], float]
"""Seconds by bytes."""

LINKS = Path(__file__).with_name("links")
"""Curves of NCCL on the GPUs of a node, a file a machine."""

_FORMAT = "tvm-fusion collectives 1"
_MAX_FILE_BYTES = 16 << 20
_ZOOMS = 3
"""Grids of a fit, each within a step of the best point of the one before."""

_FEWEST = 6
"""Points below which nothing is interpolated."""

_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
}


def bus_factor(kind: str, ranks: int) -> float:
    """Bytes that pass each rank's link for each byte of the message; 1 for other kinds.

    The message is the larger of what a rank puts in and gets out.
    """
    return _FACTORS.get(kind, lambda _: 1.0)(ranks) or 1.0


def bus_bandwidth(kind: str, ranks: int, message: float, seconds: float) -> float:
    """Bandwidth of the links in bytes/s, comparable between kinds and numbers of ranks."""
    return message / seconds * bus_factor(kind, ranks)


def all_to_all_bytes(
    # Bytes from each rank (rows) to each rank (columns), also what it keeps.
    sent: Sequence[Sequence[float]],
) -> float:
    """Message of an unequal all-to-all: the most that a rank sends or receives.

    Raises ``PredictionError`` if it is not square, or a number is negative or not finite.
    """
    table = np.asarray(sent, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
        raise PredictionError(f"all-to-all of shape {table.shape}; expected ranks x ranks")
    if not np.isfinite(table).all() or (table < 0).any():
        raise PredictionError("all-to-all with bytes that are negative or not finite")
    return float(max(table.sum(axis=0).max(), table.sum(axis=1).max()))


@dataclass(frozen=True)
class CollectiveTime:
    """Predicted time of a collective."""

    seconds: float  # Most likely time.
    low: float
    high: float
    """``low`` and ``high``: interval from the 10th and 90th percentile of the leave-one-out
    errors."""
    model: str  # ``interpolation``, ``equation 5.2`` or ``equation 5.1``.
    in_range: bool  # Whether the message lies between the measured ones.


@dataclass(frozen=True)
class Curve:
    """Measured times of a collective on so many ranks.

    Raises
    ------
    PredictionError
        If there are fewer than two points, or one is not positive, finite and larger than the one
        before.
    """

    kind: str  # Kind of the collective.
    ranks: int  # Number of ranks.
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    """``bytes`` and ``seconds``: messages, ascending, and their times."""
    origin: str = ""  # Where they were measured.

    def __post_init__(self) -> None:
        name = f"{self.kind} of {self.ranks} ranks"
        if len(self.bytes) != len(self.seconds) or len(self.bytes) < 2 or self.ranks < 1:
            raise PredictionError(f"{name}: expected two or more points")
        for number in (*self.bytes, *self.seconds):
            if not 0 < number < math.inf:
                raise PredictionError(f"{name}: {number} is no positive, finite number")
        if any(b <= a for a, b in zip(self.bytes, self.bytes[1:], strict=False)):
            raise PredictionError(f"{name}: messages must ascend")

    def predict(self, message: float) -> CollectiveTime:
        """Predict the time of a message of so many bytes."""
        name, model, (low, high) = self._chosen
        in_range = self.bytes[0] <= message <= self.bytes[-1]
        seconds = model(message) if message <= self.bytes[-1] else self._beyond(message)
        return CollectiveTime(seconds, seconds * low, seconds * high, name, in_range)

    @cached_property
    def _chosen(self) -> tuple[str, Model, tuple[float, float]]:
        """Model with the least leave-one-out error, and percentiles of measured to predicted."""
        points = np.array(self.bytes), np.array(self.seconds)
        names = [name for name in MODELS if name != "interpolation" or len(self.bytes) >= _FEWEST]
        errors = {name: _left_out(MODELS[name], *points) for name in names}
        if "interpolation" in errors:
            # Without a point its step is twice as wide as when it is used.
            errors["interpolation"] /= 2
        best = min(names, key=lambda name: float(np.mean(np.abs(errors[name]))))
        low, high = np.exp(np.percentile(errors[best], [10, 90]))
        return best, MODELS[best](*points), (min(float(low), 1.0), max(float(high), 1.0))

    def _beyond(self, message: float) -> float:
        """Time past the last point, at the largest bandwidth, as Equation 5.2 has it."""
        bandwidth = max(b / t for b, t in zip(self.bytes, self.seconds, strict=True))
        return self.seconds[-1] + (message - self.bytes[-1]) / bandwidth


def _left_out(fit: Callable[..., Model], message: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Log of measured over predicted time of each inner point, by a fit to the others."""
    if len(message) < 4:
        return np.log(seconds) - np.log([fit(message, seconds)(one) for one in message])
    errors = []
    for index in range(1, len(message) - 1):
        model = fit(np.delete(message, index), np.delete(seconds, index))
        errors.append(math.log(seconds[index] / model(message[index])))
    return np.array(errors)


def alpha_beta(message: np.ndarray, seconds: np.ndarray) -> Model:
    """Fit Equation 5.1, ``t_s + t_w m``, by relative errors."""
    rows = np.stack([1 / seconds, message / seconds], axis=1)
    (latency, byte_seconds), *_ = np.linalg.lstsq(rows, np.ones(len(message)), rcond=None)
    if latency <= 0:
        latency = 0.0
        byte_seconds = 1 / np.mean(message / seconds)
    elif byte_seconds <= 0:
        latency, byte_seconds = float(np.exp(np.mean(np.log(seconds)))), 0.0
    return lambda one: float(latency + byte_seconds * one)


def three_sections(message: np.ndarray, seconds: np.ndarray) -> Model:
    """Fit Equation 5.2: ``t_s``, then ``m / 10^sigmoid(log2 m)``, then ``t_s + m / BW_max``.

    The bounds m1 and m2 lie where the ratio of the latencies beside a point exceeds 1.1, and that
    of the bandwidths (smaller over larger message) no longer falls below 0.9.
    """
    bandwidth = message / seconds
    inner = range(1, len(message) - 1)
    rising = [i for i in inner if seconds[i + 1] / seconds[i - 1] > 1.1]
    growing = [i for i in inner if bandwidth[i - 1] / bandwidth[i + 1] < 0.9]
    first = rising[0] if rising else len(message) - 1
    last = max(growing[-1] if growing else first, first)
    latency = float(np.median(seconds[: first + 1]))
    largest = float(bandwidth.max())
    middle = slice(max(first - 1, 0), last + 2)
    curve = _sigmoid_fit(np.log2(message[middle]), np.log10(bandwidth[middle]))
    low, high = message[first], message[last]

    def model(one: float) -> float:
        if one <= low:
            return latency
        if one <= high:
            return float(one / 10 ** curve(math.log2(one)))
        return float(latency + one / largest)

    return model


def _sigmoid_fit(x: np.ndarray, y: np.ndarray) -> Callable[[float], float]:
    """Fit Equation 5.4, ``L / (1 + exp(-k (x - x0))) + b``: grid of k and x0, L and b linear."""
    centres, slopes = np.linspace(x[0] - 4, x[-1] + 2, 40), np.geomspace(0.05, 4, 24)
    for _ in range(_ZOOMS):
        centre, slope = (axis.reshape(-1, 1) for axis in np.meshgrid(centres, slopes))
        shape = 1 / (1 + np.exp(-slope * (x - centre)))
        mean = shape.mean(axis=1, keepdims=True)
        spread = ((shape - mean) ** 2).sum(axis=1)
        height = ((shape - mean) * (y - y.mean())).sum(axis=1) / np.maximum(spread, 1e-12)
        base = y.mean() - height * mean[:, 0]
        errors = ((height[:, None] * shape + base[:, None] - y) ** 2).sum(axis=1)
        best = int(errors.argmin())
        params = [float(axis.ravel()[best]) for axis in (height, slope, centre, base)]
        step = centres[1] - centres[0]
        centres = np.linspace(params[2] - step, params[2] + step, 40)
        ratio = slopes[1] / slopes[0]
        slopes = np.geomspace(params[1] / ratio, params[1] * ratio, 24)

    def curve(one: float) -> float:
        return params[0] / (1 + math.exp(-params[1] * (one - params[2]))) + params[3]

    return curve


def interpolation(message: np.ndarray, seconds: np.ndarray) -> Model:
    """Lines between the points, both axes logarithmic; below the first point its time."""
    x, y = np.log(message), np.log(seconds)
    return lambda one: float(np.exp(np.interp(math.log(max(one, message[0])), x, y)))


MODELS: dict[str, Callable[[np.ndarray, np.ndarray], Model]] = {
    "interpolation": interpolation,
    "equation 5.2": three_sections,
    "equation 5.1": alpha_beta,
}
"""Models of a curve by name."""


@dataclass(frozen=True)
class Collectives:
    """Curves of the collectives of a machine."""

    curves: Mapping[tuple[str, int], Curve]  # Curves by kind and number of ranks.

    def predict(self, kind: str, ranks: int, message: float) -> CollectiveTime:
        """Predict a collective.

        For a number of ranks that was not measured it takes the nearest that was, at the same bus
        bandwidth, and says that it is out of range.

        Raises
        ------
        PredictionError
            If no curve of this kind was measured.
        """
        if (kind, ranks) in self.curves:
            return self.curves[kind, ranks].predict(message)
        measured = sorted(number for other, number in self.curves if other == kind)
        if not measured:
            known = ", ".join(sorted({other for other, _ in self.curves}))
            raise PredictionError(f"no measured times of {kind}; there are those of {known}")
        nearest = min(measured, key=lambda number: abs(math.log(number / ranks)))
        factor = bus_factor(kind, ranks) / bus_factor(kind, nearest)
        time = self.curves[kind, nearest].predict(message)
        low, seconds, high = (factor * value for value in (time.low, time.seconds, time.high))
        return CollectiveTime(seconds, low, high, f"{time.model}, from {nearest} ranks", False)

    def save(self, path: Path) -> None:
        """Write a JSON file, or add the curves to that of a machine.

        In a machine's file curves of the same kind and number of ranks are replaced; any other file
        is replaced as a whole.

        Raises ``PredictionError`` if the file cannot be written, or exists and is no JSON.
        """
        known = _machine_file(path)
        merged = {**_curves_of(path, known), **self.curves}
        curves = [
            {
                "kind": curve.kind,
                "ranks": curve.ranks,
                "bytes": curve.bytes,
                "seconds": curve.seconds,
                "origin": curve.origin,
            }
            for curve in merged.values()
        ]
        with written_aside(path, PredictionError) as aside:
            aside.write_text(json.dumps({**known, "format": _FORMAT, "curves": curves}, indent=1))


def _machine_file(path: Path) -> dict[str, Any]:
    """Read the file of a machine; nothing where there is none, or another file."""
    data = read_json(path, _MAX_FILE_BYTES, "file of a machine") if path.is_file() else {}
    return data if isinstance(data, dict) and "figures" in data else {}


def _curves_of(path: Path, data: Mapping[str, Any]) -> dict[tuple[str, int], Curve]:
    """Curves in the JSON of a file; the message of an error names the file."""
    entries = data.get("curves", [])
    if not isinstance(entries, list):
        raise PredictionError(f"{path}: 'curves' is {entries!r:.50}; expected a list")
    try:
        curves = [_curve(entry) for entry in entries]
    except PredictionError as error:
        raise PredictionError(f"{path}: {error}") from None
    return {(curve.kind, curve.ranks): curve for curve in curves}


def load_collectives(path: Path) -> Collectives:
    """Read what :meth:`Collectives.save` wrote.

    Raises ``PredictionError`` if the file cannot be read or a curve is none: the message names it.
    """
    data = read_json(path, _MAX_FILE_BYTES, "file of collectives")
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise PredictionError(f"{path}: expected a file of collectives, of format {_FORMAT!r}")
    curves = _curves_of(path, data)
    if not curves:
        raise PredictionError(f"{path}: no curves")
    return Collectives(curves)


def link_bandwidth(machine: Machine) -> float:
    """Bytes/s of a GPU to others of its node in each direction: NVLink, else PCIe.

    Raises ``PredictionError`` if the machine has neither figure.
    """
    return machine.get("bandwidth.nvlink", 0.0) or machine["bandwidth.pcie"]


def node_collectives(machine: Machine) -> tuple[Collectives, str]:
    """Curves of a machine within a node, and what to know about them.

    A machine that was not measured takes those of the one with the most similar link; what a
    message takes beyond the shortest one is scaled by the bandwidth of the links.

    Raises ``PredictionError`` if the machine has no figure of a link.
    """
    return _node_curves(machine.name, link_bandwidth(machine))


@cache
def _node_curves(machine: str, bandwidth: float) -> tuple[Collectives, str]:
    known = {path.stem: path for path in sorted(LINKS.glob("*.json"))}
    if machine in known:
        return load_collectives(known[machine]), ""
    links = {name: link_bandwidth(load_machine(name)) for name in known}
    name = min(links, key=lambda each: abs(math.log(links[each] / bandwidth)))
    share = links[name] / bandwidth
    curves = {}
    for key, curve in load_collectives(known[name]).curves.items():
        least = min(curve.seconds)
        seconds = tuple(least + share * (each - least) for each in curve.seconds)
        curves[key] = replace(curve, seconds=seconds)
    note = f"collectives are estimated: those of {name}, at {1 / share:.2g} of its link's bandwidth"
    return Collectives(curves), note


def collectives_of(path: Path) -> Collectives | None:
    """Curves that the file of a machine holds beside its figures; None if it has none.

    Raises ``PredictionError`` if the file cannot be read or a curve is none: the message names it.
    """
    return Collectives(curves) if (curves := _curves_of(path, _machine_file(path))) else None


def _curve(entry: Any) -> Curve:
    entry = entry if isinstance(entry, dict) else {}
    kind, ranks, origin = entry.get("kind"), entry.get("ranks"), entry.get("origin")
    axes = [entry.get("bytes"), entry.get("seconds")]
    numbers = [
        isinstance(axis, list) and all(type(value) in (int, float) for value in axis)
        for axis in axes
    ]
    if not isinstance(kind, str) or type(ranks) is not int or not all(numbers):
        raise PredictionError(
            f"curve {kind!r} of {ranks!r} ranks: expected kind, ranks, and numbers of bytes and "
            "seconds"
        )
    return Curve(kind, ranks, tuple(axes[0]), tuple(axes[1]), str(origin or ""))
