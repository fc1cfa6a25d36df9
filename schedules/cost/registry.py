# SPDX-License-Identifier: Apache-2.0
"""The one function that says how long a kernel takes on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .kernel_call import KernelCall
from .machine import Machine
from .roofline import roofline


@dataclass(frozen=True)
class Prediction:
    """Time of one launch.

    Parameters
    ----------
    seconds : float
        Most likely time.
    low, high : float
        Interval that holds four of five measured times, in seconds.
    bound : str
        ``compute``, ``memory`` or ``latency``.
    roofline_seconds : float
        Least time by the machine's peak and bandwidth.
    model : str
        Model that said so: ``roofline``, or the name of a kernel model and its origin.
    in_range : bool
        Whether the sizes lie in the range that the model was fitted to.
    """

    seconds: float
    low: float
    high: float
    bound: str
    roofline_seconds: float
    model: str
    in_range: bool

    @property
    def roofline_share(self) -> float:
        """Share of the roofline that is reached."""
        return self.roofline_seconds / self.seconds


KernelModel = Callable[[KernelCall, Machine], Prediction | None]
"""Model of some operators: a prediction, or None where it has none for the call or the machine."""

MODELS: dict[str, KernelModel] = {}
"""Kernel models by operator."""


def predict(call: KernelCall, machine: Machine) -> Prediction:
    """Predict the time of one launch, by the operator's model, else by the roofline.

    Raises
    ------
    PredictionError
        If the machine lacks a figure that the roofline needs.
    """
    model = MODELS.get(call.op)
    prediction = None if model is None else model(call, machine)
    return prediction or _by_roofline(call, machine)


def _by_roofline(call: KernelCall, machine: Machine) -> Prediction:
    seconds, bound = roofline(call, machine)
    floor = machine.get("launch_floor", 0.0)
    if floor > seconds:
        bound = "latency"
    least = max(seconds, floor)
    return Prediction(least, least, 4 * least, bound, seconds, "roofline", False)
