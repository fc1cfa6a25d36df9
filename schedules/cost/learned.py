# SPDX-License-Identifier: Apache-2.0
"""Learned models of kernels: trees that correct a roofline, with intervals from held-out errors.

``models/KERNEL-DTYPE-KIND.npz`` holds one model; the report beside it (``.json``) says what it was
trained on and how far off it is. KIND is the GPU, or ``unseen``: trained on all of them, for those
that were never measured. Times were taken launch by launch, so that none is below the host's share
(the *harness*); the models predict such times, t = base * exp(trees) with base = max(harness,
latency + roofline).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from schedules.errors import PredictionError

from .features import Limits, limits
from .kernel_call import KernelCall
from .machine import Machine, load_machine
from .prediction import Prediction
from .trees import Trees, read_arrays, trees_from_arrays

FOLDER = Path(__file__).with_name("models")

KINDS = {
    "a100-40": "a100",
    "a100-80": "a100",
    "a100-sxm-40": "a100",
    "h200": "h100",
}
"""Machines that share another's model; all others go by their own name."""

STAND_INS = {"a100-sxm-40": "a100-80"}
"""Machine whose limits the model is asked with: the same chip, whose clock falls less under load
than that of the trained machine with the same memory."""

Sizes = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LearnedKernel:
    """View of a kernel by its learned models.

    Parameters
    ----------
    name : str
        Kernel of the model files.
    sizes : tuple[str, ...]
        Sizes that a call must have, in the order of the models' ranges.
    work : Callable
        Floating-point operations and bytes, from sizes and bytes an element.
    features : Callable
        (launches, features) from sizes, limits, least seconds and bytes an element.
    group : Callable
        Which of the model's harnesses a launch has, from sizes.
    optional : tuple[str, ...]
        Sizes that a call may lack and that are 1 then.
    """

    name: str
    sizes: tuple[str, ...]
    work: Callable[[Sizes, int], tuple[np.ndarray, np.ndarray]]
    features: Callable[[Sizes, Limits, np.ndarray, int], np.ndarray]
    group: Callable[[Sizes], np.ndarray]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class LearnedModel:
    """One trained model.

    Parameters
    ----------
    trees : Trees
        Logarithm of time over base.
    harness, latency : np.ndarray
        Seconds by group of launches: least time, and what is added to the roofline.
    low, high : np.ndarray
        (sizes,): trained range.
    edges : np.ndarray
        (bins - 1,) seconds of the base where one bin of the interval ends and the next begins.
    below, above : np.ndarray
        (bins,): ends of the interval, as factors of the predicted time.
    """

    trees: Trees
    harness: np.ndarray
    latency: np.ndarray
    low: np.ndarray
    high: np.ndarray
    edges: np.ndarray
    below: np.ndarray
    above: np.ndarray

    def base(self, roofline: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Seconds that the trees correct."""
        return np.maximum(self.harness_of(group), self.latency_of(group) + roofline)

    def harness_of(self, group: np.ndarray) -> np.ndarray:
        """Harness of a group, the last one's where that was not measured."""
        return self.harness[np.minimum(group, len(self.harness) - 1)]

    def latency_of(self, group: np.ndarray) -> np.ndarray:
        """Latency of a group, the last one's where that was not measured."""
        return self.latency[np.minimum(group, len(self.latency) - 1)]


def model_from_arrays(arrays: Mapping[str, np.ndarray]) -> LearnedModel:
    """Check the arrays of a model file.

    Raises
    ------
    PredictionError
        If one is missing, of another length, or holds what cannot be.
    """
    names = ("harness", "latency", "low", "high", "edges", "below", "above")
    found = []
    for name in names:
        array = arrays.get(name)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            raise PredictionError(f"no vector {name!r} of numbers")
        if not np.isfinite(array).all() or (array < 0).any():
            raise PredictionError(f"{name!r} holds what is no positive finite number")
        found.append(array.astype(np.float64))
    harness, latency, low, high, edges, below, above = found
    lengths = len(below) == len(above) == len(edges) + 1 and len(low) == len(high)
    if not lengths or len(harness) != len(latency) or not len(harness):
        raise PredictionError(f"two of the vectors {', '.join(names)} do not match in length")
    if (below > 1).any() or (above < 1).any() or (below == 0).any():
        raise PredictionError("'below' and 'above' do not enclose 1")
    return LearnedModel(trees_from_arrays(arrays), *found)


@lru_cache(maxsize=64)
def load_model(path: Path) -> LearnedModel | None:
    """Read a model, or None where there is no such file.

    Raises
    ------
    PredictionError
        If the file is damaged; the message names it.
    """
    if not path.is_file():
        return None
    try:
        return model_from_arrays(read_arrays(path))
    except PredictionError as error:
        raise PredictionError(f"{path.name}: {error}") from None


@lru_cache(maxsize=64)
def find_model(kernel: str, dtype: str, machine: str) -> tuple[LearnedModel, str] | None:
    """Model of a kernel on a machine and its name; the one for unseen GPUs where it has none."""
    for kind in (KINDS.get(machine, machine), "unseen"):
        name = f"{kernel}-{dtype}-{kind}"
        model = load_model(FOLDER / f"{name}.npz") if kind.replace("-", "").isalnum() else None
        if model is not None:
            return model, name
    return None


def seconds(kernel: LearnedKernel, model: LearnedModel, sizes: Sizes, machine: Limits, width: int):
    """Times, bases and rooflines of many launches.

    Parameters
    ----------
    kernel : LearnedKernel
        How to see the launches.
    model : LearnedModel
        Its model.
    sizes : Mapping[str, np.ndarray]
        (launches,) each.
    machine : Limits
        Of one machine, or (launches,) each.
    width : int
        Bytes of an element.

    Returns
    -------
    tuple[np.ndarray, np.ndarray, np.ndarray]
        (launches,) seconds each.
    """
    roofline = machine.roofline(*kernel.work(sizes, width))
    base = model.base(roofline, kernel.group(sizes))
    rows = kernel.features(sizes, machine, roofline, width)
    return base * np.exp(model.trees(rows)), base, roofline


_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
_TRAINED_AS = {"bfloat16": "float16"}
_FARTHER = 2.0  # the interval, on a logarithmic scale, outside the trained range


def predict_learned(kernel: LearnedKernel, call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a launch by the learned model, or None where there is none for dtype or machine.

    Raises
    ------
    PredictionError
        If the call lacks a size, or one is not positive.
    """
    if machine.kind != "gpu" or call.dtype not in _WIDTHS:
        return None
    found = find_model(kernel.name, _TRAINED_AS.get(call.dtype, call.dtype), machine.name)
    if found is None or f"peak_flops.{call.dtype}" not in machine.figures:
        return None
    model, name = found
    wanted = {size: 1 if size in kernel.optional else None for size in kernel.sizes}
    sizes = {size: np.array([float(call.size(size, wanted[size]))]) for size in wanted}
    stand_in = STAND_INS.get(machine.name)
    bounds = limits(load_machine(stand_in) if stand_in else machine, call.dtype)
    width = _WIDTHS[call.dtype]
    time, base, roofline = (x[0] for x in seconds(kernel, model, sizes, bounds, width))
    values = np.array([sizes[size][0] for size in kernel.sizes])
    is_inside = bool(((model.low <= values) & (values <= model.high)).all())
    bin_ = int(np.searchsorted(model.edges, base))
    spread = 1.0 if is_inside else _FARTHER
    group = kernel.group(sizes)[0]
    flops, _ = kernel.work(sizes, width)
    harness = float(model.harness_of(group))
    compute = flops[0] / bounds.peak
    bound = "compute" if compute >= roofline else "memory"
    if time < 1.1 * harness or harness == 0 and roofline < machine.get("launch_floor", 0.0):
        bound = "latency"
    return Prediction(
        float(time),
        float(time * model.below[bin_] ** spread),
        float(time * model.above[bin_] ** spread),
        bound,
        float(roofline),
        name,
        is_inside and not name.endswith("unseen"),
        harness,
        float(model.latency_of(group)),
    )
