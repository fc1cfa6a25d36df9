# SPDX-License-Identifier: Apache-2.0
"""Predicted beside measured: a model is predicted, then compiled and run on this CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ...bench.profiler import Profile, Progress, profile
from ...errors import PredictionError
from ...runtime.thread_pool import choose_threads
from ..machines import NATIVE
from .ask import predict
from .predict_model import ModelPrediction

LEAST_ERROR = 4e-4
"""Added to each error of a geometric mean, which an exact prediction would make 0."""


@dataclass(frozen=True)
class CheckedModel:
    """A prediction and a measurement of the same model."""

    prediction: ModelPrediction  # Made before anything ran.
    measured: tuple[float, ...]
    """Median seconds of each kernel, in the order of the prediction, without what timing each of
    them adds to the run."""
    seconds: float  # Median of a whole run.

    @property
    def errors(self) -> list[float]:
        """Relative error of each kernel."""
        pairs = zip(self.prediction.kernels, self.measured, strict=True)
        return [kernel.seconds / measured - 1 for kernel, measured in pairs]

    @property
    def error(self) -> float:
        """Relative error of the whole run."""
        return self.prediction.seconds / self.seconds - 1

    @property
    def inside(self) -> float:
        """Share of the kernels whose time lies in its interval."""
        pairs = zip(self.prediction.kernels, self.measured, strict=True)
        found = [kernel.low <= measured <= kernel.high for kernel, measured in pairs]
        return sum(found) / max(1, len(found))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists."""
        return {
            "prediction": self.prediction.to_json(),
            "seconds": self.seconds,
            "measured": list(self.measured),
            "error": self.error,
            "kernels_gmae": geometric_error(self.errors),
            "kernels_mape": mean_error(self.errors),
            "inside_interval": self.inside,
        }


def geometric_error(errors: Sequence[float]) -> float:
    """Geometric mean of absolute errors, GMAE."""
    logs = [math.log(abs(error) + LEAST_ERROR) for error in errors]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def mean_error(errors: Sequence[float]) -> float:
    """Mean of absolute errors, MAPE as a share."""
    return sum(map(abs, errors)) / len(errors) if errors else 0.0


def check_model(
    # ``model``, ``shapes``, ``fuse``, ``winograd``, ``records``, ``threads``: as for
    # :func:`.predict`.
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: Any = "auto",
    winograd: str = "auto",
    records: Any = None,
    threads: int | None = None,
    # ``runs``, ``rounds``: timed runs, and times that they are repeated; the fastest round counts.
    runs: int = 30,
    rounds: int = 1,
    progress: Progress | None = None,  # Called as ``progress(text, done, total)``.
) -> CheckedModel:
    """Predict a model on this CPU, then compile and run it.

    Raises ``PredictionError`` as for :func:`.predict`, or if the model ran other kernels than were
    predicted. Raises ``InvalidModelError, UnsupportedOperatorError, CompilationError`` as for
    ``compile``.
    """
    count = choose_threads(threads)
    choices: dict[str, Any] = {"fuse": fuse, "winograd": winograd, "records": records}
    prediction = predict(model, NATIVE, shapes=shapes, threads=count, **choices)
    timing: dict[str, Any] = {"runs": runs, "rounds": rounds, "progress": progress}
    return pair(prediction, profile(model, shapes=shapes, threads=count, **timing, **choices))


def pair(prediction: ModelPrediction, measured: Profile) -> CheckedModel:
    """Put the measured time beside each predicted one.

    Raises ``PredictionError`` if the kernels are not the same.
    """
    predicted = [row.kernel for row in prediction.kernels]
    ran = [kernel.kernel for kernel in measured.kernels]
    if predicted != ran:
        odd = next((name for name, other in zip(predicted, ran, strict=False) if name != other), "")
        raise PredictionError(
            f"predicted {len(predicted)} kernels, and {len(ran)} ran; the first that differs is "
            f"{odd!r}: please report the model"
        )
    times = [kernel.seconds for kernel in measured.kernels]
    # What timing a kernel adds: the sum of all exceeds the run that was timed as a whole.
    added = max(0.0, sum(times) - measured.seconds) / max(1, len(times))
    kernels = tuple(max(seconds - added, seconds / 10) for seconds in times)
    return CheckedModel(prediction, kernels, measured.seconds)


def check_table(checked: CheckedModel, title: str = "") -> Table:
    """One row a kernel: predicted and measured."""
    prediction = checked.prediction
    table = Table(
        title=f"{title}, predicted and measured on {prediction.title}",
        caption="\n".join(
            [
                f"A run: predicted {prediction.seconds * 1e3:.3f} ms, measured "
                f"{checked.seconds * 1e3:.3f} ms ({checked.error:+.1%}). Kernels: GMAE "
                f"{geometric_error(checked.errors):.1%}, MAPE {mean_error(checked.errors):.1%}, "
                f"{checked.inside:.0%} inside their intervals.",
                *prediction.notes,
            ]
        ),
    )
    table.add_column("call", justify="right")
    table.add_column("kernel")
    for heading in ("predicted us", "from", "to", "measured us", "error"):
        table.add_column(heading, justify="right")
    table.add_column("model")
    rows = zip(prediction.kernels, checked.measured, checked.errors, strict=True)
    for row, measured, error in rows:
        table.add_row(
            str(row.position),
            row.operator,
            *(f"{seconds * 1e6:.1f}" for seconds in (row.seconds, row.low, row.high, measured)),
            f"{error:+.0%}",
            row.model,
        )
    return table
