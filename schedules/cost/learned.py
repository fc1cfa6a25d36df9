# SPDX-License-Identifier: Apache-2.0
"""Learned models of kernels: trees that correct a roofline, with intervals from held-out errors.

``models/KERNEL-DTYPE-KIND.npz`` holds one model; the report beside it (``.json``) says what it was
trained on and how far off it is. KIND is the GPU, or ``unseen``: trained on all of them, for those
that were never measured. ``models/KERNEL-joint.npz`` is trained on all GPUs, types and harnesses at
once, and serves all types of 16 bits; its report says which sizes of which type it has seen on
which GPU. Times were taken launch by launch, so that none is below the host's share
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

from .features import OTHER_VENDOR, Limits, limits
from .json_file import read_json
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
    far_edges, far_below, far_above : np.ndarray
        The same where the machine was left out of the training; empty if there is no such interval.
    """

    trees: Trees
    harness: np.ndarray
    latency: np.ndarray
    low: np.ndarray
    high: np.ndarray
    edges: np.ndarray
    below: np.ndarray
    above: np.ndarray
    far_edges: np.ndarray
    far_below: np.ndarray
    far_above: np.ndarray

    def base(
        self, roofline: np.ndarray, group: np.ndarray, floor: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Seconds that the trees correct."""
        return np.maximum(self.harness_of(group, floor), self.latency_of(group, floor) + roofline)

    def harness_of(self, group: np.ndarray, floor: np.ndarray | float = 0.0) -> np.ndarray:
        """Harness of a group: the machine's own floor, if it is known."""
        usual = self.harness[np.minimum(group, len(self.harness) - 1)]
        return np.where((np.asarray(floor) > 0) & (usual > 0), floor, usual)

    def latency_of(self, group: np.ndarray, floor: np.ndarray | float = 0.0) -> np.ndarray:
        """Latency of a group, half of the machine's own floor, if that is known."""
        usual = self.latency[np.minimum(group, len(self.latency) - 1)]
        harness = self.harness[np.minimum(group, len(self.harness) - 1)]
        return np.where((np.asarray(floor) > 0) & (harness > 0), np.asarray(floor) / 2, usual)

    def interval(self, base: float, far: bool) -> tuple[float, float]:
        """Factors of the predicted time between which four of five measured ones lie."""
        if far and len(self.far_below):
            at = int(np.searchsorted(self.far_edges, base))
            return float(self.far_below[at]), float(self.far_above[at])
        at = int(np.searchsorted(self.edges, base))
        return float(self.below[at]), float(self.above[at])


def model_from_arrays(arrays: Mapping[str, np.ndarray]) -> LearnedModel:
    """Check the arrays of a model file.

    Raises
    ------
    PredictionError
        If one is missing, of another length, or holds what cannot be.
    """
    names = ("harness", "latency", "low", "high", "edges", "below", "above")
    far = ("far_edges", "far_below", "far_above")
    found = []
    for name in (*names, *far):
        array = arrays.get(name, np.zeros(0) if name in far else None)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            raise PredictionError(f"no vector {name!r} of numbers")
        if not np.isfinite(array).all() or (array < 0).any():
            raise PredictionError(f"{name!r} holds what is no positive finite number")
        found.append(array.astype(np.float64))
    harness, latency, low, high, edges, below, above, *farther = found
    lengths = len(below) == len(above) == len(edges) + 1 and len(low) == len(high)
    far_edges, far_below, far_above = map(len, farther)
    lengths &= far_below == far_above and far_edges == max(far_below - 1, 0)
    if not lengths or len(harness) != len(latency) or not len(harness):
        raise PredictionError(f"two of the vectors {', '.join(names)} do not match in length")
    below, above = np.append(below, farther[1]), np.append(above, farther[2])
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
    base = model.base(roofline, kernel.group(sizes), machine.floor)
    rows = kernel.features(sizes, machine, roofline, width)
    return base * np.exp(model.trees(rows)), base, roofline


@dataclass(frozen=True)
class Taught:
    """What a joint model has seen of one type.

    Parameters
    ----------
    machines : frozenset of str
        Names of the GPUs.
    ranges : dict of str to tuple
        Least and largest of each size.
    """

    machines: frozenset[str]
    ranges: dict[str, tuple[float, float]]


@lru_cache(maxsize=64)
def find_joint(kernel: str) -> tuple[LearnedModel, dict[str, Taught]] | None:
    """Joint model of a kernel, and what it has seen of each type; None where there is none.

    Raises
    ------
    PredictionError
        If model or report is damaged; the message names the file.
    """
    path = FOLDER / f"{kernel}-joint.npz"
    model = load_model(path)
    if model is None:
        return None
    report = read_json(path.with_suffix(".json"), 1 << 20, "report")
    try:
        taught = {
            str(dtype): Taught(
                frozenset(map(str, seen["machines"])),
                {str(name): (float(a), float(b)) for name, (a, b) in seen["ranges"].items()},
            )
            for dtype, seen in report["taught"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PredictionError(f"{path.stem}.json: 'taught' is damaged: {error}") from None
    return model, taught


_WIDTHS = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
FARTHER = 2.0
"""Width of the interval, on a logarithmic scale, outside the trained range, or for a machine of a
vendor that no other one stands for."""


def predict_learned(kernel: LearnedKernel, call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a launch by the learned model, or None where there is none for dtype or machine.

    Raises
    ------
    PredictionError
        If the call lacks a size, or one is not positive.
    """
    if machine.kind != "gpu" or call.dtype not in _WIDTHS:
        return None
    found = find_model(kernel.name, call.dtype, machine.name)
    if found is None or f"peak_flops.{call.dtype}" not in machine.figures:
        return None
    model, name = found
    sizes = _sizes(kernel, call)
    stand_in = STAND_INS.get(machine.name)
    bounds = limits(load_machine(stand_in) if stand_in else machine, call.dtype)
    values = np.array([sizes[size][0] for size in kernel.sizes])
    is_inside = bool(((model.low <= values) & (values <= model.high)).all())
    beyond = () if is_inside else ("size",)
    if name.endswith("unseen"):
        beyond = ("machine", *beyond)
    return _answer(kernel, model, name, call, machine, bounds, sizes, beyond)


def predict_jointly(
    kernel: LearnedKernel, call: KernelCall, machine: Machine, **extra: float
) -> Prediction | None:
    """Predict a launch by the joint model, or None where there is none for it.

    Parameters
    ----------
    kernel : LearnedKernel
        How to see the launch.
    call : KernelCall
        The launch.
    machine : Machine
        The GPU.
    extra : float
        What the features need beside the sizes, such as the harness.

    Raises
    ------
    PredictionError
        If the call lacks a size, or one is not positive.
    """
    figure = f"peak_flops.{call.dtype}"
    if machine.kind != "gpu" or call.dtype not in _WIDTHS or figure not in machine.figures:
        return None
    found = find_joint(kernel.name)
    if found is None:
        return None
    model, known = found
    sizes = _sizes(kernel, call) | {name: np.array([value]) for name, value in extra.items()}
    every = frozenset[str]().union(*(one.machines for one in known.values()))
    seen = known.get(call.dtype)
    beyond = [] if machine.name in every else ["machine"]
    if seen is None or (machine.name in every and machine.name not in seen.machines):
        beyond.append("type")
    ranges = seen.ranges if seen is not None else {}
    if any(not low <= sizes[name][0] <= high for name, (low, high) in ranges.items()):
        beyond.append("size")
    bounds = limits(machine, call.dtype, kernel.name)
    name = f"{kernel.name}-joint"
    return _answer(kernel, model, name, call, machine, bounds, sizes, tuple(beyond))


def _sizes(kernel: LearnedKernel, call: KernelCall) -> dict[str, np.ndarray]:
    wanted = {size: 1 if size in kernel.optional else None for size in kernel.sizes}
    return {size: np.array([float(call.size(size, wanted[size]))]) for size in wanted}


def _answer(
    kernel: LearnedKernel,
    model: LearnedModel,
    name: str,
    call: KernelCall,
    machine: Machine,
    bounds: Limits,
    sizes: Sizes,
    beyond: tuple[str, ...],
) -> Prediction:
    """The prediction of one launch; ``beyond`` says what the model has not seen of it."""
    width = _WIDTHS[call.dtype]
    time, base, roofline = (float(x[0]) for x in seconds(kernel, model, sizes, bounds, width))
    low, high = model.interval(base, "machine" in beyond or "type" in beyond)
    is_far = "size" in beyond or ("machine" in beyond and bounds.unit == OTHER_VENDOR)
    spread = FARTHER if is_far else 1.0
    group = kernel.group(sizes)
    flops, _ = kernel.work(sizes, width)
    harness = float(model.harness_of(group, bounds.floor)[0])
    bound = "compute" if flops[0] / bounds.peak >= roofline else "memory"
    if time < 1.1 * harness or harness == 0 and roofline < machine.get("launch_floor", 0.0):
        bound = "latency"
    return Prediction(
        time,
        time * low**spread,
        time * high**spread,
        bound,
        roofline,
        name,
        not beyond,
        harness,
        float(model.latency_of(group, bounds.floor)[0]),
        beyond,
    )
