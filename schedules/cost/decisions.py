# SPDX-License-Identifier: Apache-2.0
"""Times of kernels by the models of their operators, and decisions between alternatives by times.

An alternative is the calls of kernels, each with the ``cycles`` of its cost model, or with cycles
given beside them. Without a machine these cycles decide, at a nominal clock. Within
``deciding_for(machine)`` the kernel models of :func:`predict` do, with the clock,
bandwidths, overheads and ratios of measured to predicted times that ``tvm-fusion calibrate`` found.
A choice by a tuning record, whose times were measured, is only noted (:func:`note`).

The machine is a context, not an argument: passes, legalizations and rules, which TVM calls, get a
``Target``, and that holds texts and numbers under names that TVM knows. ``CPUInfo`` and ``GPUInfo``
are read from it in more than 70 places, each of which would need the machine beside the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .attention import predict_attention
from .cpu_kernels import predict_cpu_kernel, predict_cpu_library
from .elementwise import BY_BYTES, STREAMING, predict_layer_norm, predict_softmax, predict_streaming
from .embedding import predict_embedding_bag, predict_gather
from .gemm import predict_bmm, predict_conv2d, predict_gemm
from .gpu_kernels import predict_gpu_kernel
from .kernel_call import KernelCall, Prediction, roofline
from .machine import Machine

__all__ = ["MODELS", "KernelModel", "Prediction", "predict"]

KernelModel = Callable[[KernelCall, Machine], Prediction | None]
"""Model of some operators: a prediction, or None where it has none for the call or the machine."""

MODELS: dict[str, KernelModel] = {
    **dict.fromkeys(sorted(STREAMING | BY_BYTES), predict_streaming),
    "gemm": predict_gemm,
    "bmm": predict_bmm,
    "attention": predict_attention,
    "conv2d": predict_conv2d,
    "softmax": predict_softmax,
    "layer_norm": predict_layer_norm,
    "embedding_bag": predict_embedding_bag,
    "embedding_bag_backward": predict_embedding_bag,
    "gather": predict_gather,
}
"""Kernel models by operator."""

_OURS: dict[str, KernelModel] = {"cpu.": predict_cpu_kernel, "gpu.": predict_gpu_kernel}


def predict(call: KernelCall, machine: Machine) -> Prediction:
    """Predict the time of one launch, by the operator's model, else by the roofline.

    Raises
    ------
    PredictionError
        If the machine lacks a figure that the roofline needs, or the call a size of its model.
    """
    model = _OURS.get(call.op[:4], MODELS.get(call.op))
    prediction = None if model is None else model(call, machine)
    if machine.kind == "cpu" and (prediction is None or not prediction.in_range):
        prediction = predict_cpu_library(call, machine) or prediction
    return prediction or _by_roofline(call, machine)


def _by_roofline(call: KernelCall, machine: Machine) -> Prediction:
    seconds, bound = roofline(call, machine)
    floor = machine.launch_floor
    if floor > seconds:
        bound = "latency"
    least = max(seconds, floor)
    return Prediction(least, least, 4 * least, bound, seconds, "roofline", False)


MODEL = "model"
NOMINAL_CLOCK = 3.0e9  # scales what is shown; no choice depends on it

_machine: ContextVar[Machine | None] = ContextVar("machine", default=None)
_log: ContextVar[list[Comparison] | None] = ContextVar("log", default=None)


@dataclass(frozen=True)
class Comparison:
    """Times of alternatives: two predicted ones, or those that a record has.

    Parameters
    ----------
    decision : str
        What is decided: ``fuse``, ``winograd``, ``split``, ``finish``, ``store``, ``order``.
    subject : str
        The layers, or the reduction.
    seconds : Mapping[str, float]
        Time of each alternative by its name.
    gain : float
        Time of the last over that of the fastest other one, minus one; by a record that of the best
        other alternative over the chosen one.
    chosen : str
        The fastest where its gain is enough, else the last; by a record the fastest.
    source : str
        ``model``, or the name of the record's file.
    """

    decision: str
    subject: str
    seconds: Mapping[str, float]
    gain: float
    chosen: str
    source: str = MODEL


@contextmanager
def deciding_for(machine: Machine | None) -> Iterator[None]:
    """Decide by the figures of a machine; None for those of the target."""
    token = _machine.set(machine)
    try:
        yield
    finally:
        _machine.reset(token)


def machine_in_use() -> Machine | None:
    """Machine of the innermost :func:`deciding_for`."""
    return _machine.get()


@contextmanager
def recorded() -> Iterator[list[Comparison]]:
    """Collect all comparisons of a block, equal ones once."""
    found: list[Comparison] = []
    token = _log.set(found)
    try:
        yield found
    finally:
        _log.reset(token)


def compare(
    decision: str,
    subject: str,
    alternatives: Mapping[str, Sequence[KernelCall]],
    least_gain: float,
    nominal: Mapping[str, float] | None = None,
) -> Comparison:
    """Predict some alternatives, and choose the fastest if it gains enough over the last.

    Parameters
    ----------
    decision, subject : str
        Texts as in :class:`Comparison`.
    alternatives : Mapping[str, Sequence[KernelCall]]
        Two or more, by name: kernels that run one after another.
    least_gain : float
        Least value of (time of the last / time of the fastest other one) - 1 for which the latter
        is chosen.
    nominal : Mapping[str, float], optional
        Cycles of each alternative without a machine, if its calls have none.

    Raises
    ------
    PredictionError
        If the machine in use lacks a figure.
    """
    machine = machine_in_use()
    if machine is not None:
        costs = {
            name: sum(predict(call, machine).seconds for call in calls)
            for name, calls in alternatives.items()
        }
    else:
        costs = dict(nominal or {name: _cycles(calls) for name, calls in alternatives.items()})
    *others, last = costs
    fastest = min(others, key=costs.__getitem__)
    gain = costs[last] / costs[fastest] - 1
    scale = NOMINAL_CLOCK if machine is None else 1.0
    seconds = {name: cost / scale for name, cost in costs.items()}
    chosen = fastest if gain >= least_gain else last
    found = Comparison(decision, subject, seconds, gain, chosen)
    note(found)
    return found


def note(comparison: Comparison) -> None:
    """Let a surrounding :func:`recorded` have a comparison."""
    log = _log.get()
    if log is not None and comparison not in log:
        log.append(comparison)


def by_record(
    decision: str, subject: str, seconds: Mapping[str, float], chosen: str, source: str
) -> None:
    """Note a choice by measured times: those of a record in the file ``source``."""
    others = [time for name, time in seconds.items() if name != chosen]
    gain = min(others, default=seconds[chosen]) / seconds[chosen] - 1
    note(Comparison(decision, subject, seconds, gain, chosen, source))


def _cycles(calls: Sequence[KernelCall]) -> float:
    return sum(call.sizes["cycles"] for call in calls)
