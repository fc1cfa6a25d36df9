# SPDX-License-Identifier: Apache-2.0
"""Learned models of kernels: trees that correct a roofline, with intervals from held-out errors.

The features, which say how a launch of tiled work fills a GPU, are known for a machine that was
never measured. Their arguments are vectors, one entry a launch.

``models/KERNEL-DTYPE-KIND.npz`` holds one model; the report beside it (``.json``) says what it was
trained on and how far off it is. KIND is the GPU, or ``unseen``: trained on all of them, for those
that were never measured. ``models/KERNEL-joint.npz`` is trained on all GPUs, types and harnesses at
once, and serves all types of 16 bits; its report says which sizes of which type it has seen on
which GPU. ``models/KERNEL-far.npz`` beside it says how far off new GPUs may be, and where it has
trees, predicts them. Times were taken launch by launch, so that none is below the host's share (the
*harness*); the models predict such times, t = base * exp(trees) with base = max(harness, latency +
law), where the law of a model without constants of its own is the roofline. Some trees
correct the law alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from schedules.errors import PredictionError

from .kernel_call import KernelCall, Prediction, element_bytes
from .machine import Machine, load_machine, read_json
from .trees import Trees, read_arrays, trees_from_arrays

TILES = ((32, 32), (64, 32), (32, 128), (64, 64), (128, 64), (128, 128), (256, 128))
"""Rows and columns of the output tiles that libraries' matrix products use."""


@dataclass(frozen=True)
class Limits:
    """Limits of a machine for one dtype, as scalars or vectors."""

    multiprocessors: np.ndarray  # Count.
    peak: np.ndarray  # FLOP/s.
    bandwidth: np.ndarray  # Bytes/s of the memory.
    cache: np.ndarray  # Bytes of L2.
    clock: np.ndarray = field(default_factory=lambda: np.float64(1.0))  # Hz.
    unit: np.ndarray = field(default_factory=lambda: np.float64(0.0))
    """Unit that multiplies matrices, see :func:`matrix_unit`."""
    floor: np.ndarray = field(default_factory=lambda: np.float64(0.0))
    """Least seconds of a launch that the harness of a kernel's data shows, 0 if not known."""

    def roofline(self, flops: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """Least seconds of some floating-point operations and bytes."""
        return np.maximum(flops / self.peak, moved / self.bandwidth)

    def place(self) -> np.ndarray:
        """Logarithms to base 2 of the figures, between which distances are taken."""
        figures = (self.multiprocessors, self.peak, self.bandwidth, self.cache, self.clock)
        return np.log2(np.stack(np.broadcast_arrays(*figures), axis=-1))

    def features(self, count: int) -> list[np.ndarray]:
        """Logarithms of multiprocessors, and of peak and bandwidth of one."""
        figures = (
            self.multiprocessors,
            self.peak / self.multiprocessors,
            self.bandwidth / self.multiprocessors,
        )
        return [np.broadcast_to(np.log(figure), (count,)) for figure in figures]

    def chip(self, count: int) -> list[np.ndarray]:
        """Clock, FLOP a cycle of a multiprocessor (logarithms), and what multiplies matrices."""
        each = self.peak / self.multiprocessors / self.clock
        figures = (np.log(self.clock), np.log(each), self.unit)
        return [np.broadcast_to(figure, (count,)) for figure in figures]


UNITS = {7: 1, 8: 1, 9: 2, 10: 3, 11: 3, 12: 1}
"""Generation of the matrix unit by compute capability: fed by a warp, by a group of warps from
shared memory, and with accumulators in a memory of its own."""

OTHER_VENDOR = 4.0


def matrix_unit(machine: Machine, dtype: str) -> float:
    """Unit that multiplies matrices: 0 the lanes, 1 to 3 one of ``UNITS``, or ``OTHER_VENDOR``."""
    if "compute_capability" not in machine.figures:
        return OTHER_VENDOR
    return float(UNITS.get(int(machine["compute_capability"]), 0)) if dtype != "float32" else 0.0


def limits(machine: Machine, dtype: str, kernel: str = "") -> Limits:
    """Limits of a machine, and the floor of a kernel's launches by its figure of the harness.

    Raises ``PredictionError`` if it has no such figure.
    """
    names = ("multiprocessors", f"peak_flops.{dtype}", "bandwidth.memory", "capacity.L2", "clock")
    figures = [machine[name] for name in names]
    floor = machine.get(f"time.{kernel}.harness", 0.0) if element_bytes(dtype) == 2 else 0.0
    return Limits(*map(np.float64, (*figures, matrix_unit(machine, dtype), floor)))


def waves(blocks: np.ndarray, block_flops: np.ndarray, seconds: np.ndarray, machine: Limits):
    """Waves of thread blocks (log), how full they are, and their time over ``seconds`` (log)."""
    rounds = blocks / machine.multiprocessors
    whole = np.ceil(rounds)
    busy = whole * machine.multiprocessors * block_flops / machine.peak
    return [np.log(rounds), rounds / whole, np.log(busy / seconds)]


def tile_features(b, m, n, k, seconds: np.ndarray, machine: Limits) -> list[np.ndarray]:
    """Waves and useful share of the padded tiles of B products M x K x N, for each of ``TILES``."""
    found = []
    for rows, columns in TILES:
        down, across = np.ceil(m / rows), np.ceil(n / columns)
        found += waves(b * down * across, 2.0 * rows * columns * k, seconds, machine)
        found.append(m * n / (down * rows * across * columns))
    return found


def divisibility(size: np.ndarray) -> np.ndarray:
    """Count of the powers of two up to 32, without 1, that divide a size."""
    return sum((size % power == 0).astype(np.float64) for power in (2, 4, 8, 16, 32))


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
    """View of a kernel by its learned models."""

    name: str  # Kernel of the model files.
    sizes: tuple[str, ...]  # Sizes that a call must have, in the order of the models' ranges.
    work: Callable[[Sizes, int], tuple[np.ndarray, np.ndarray]]
    """Floating-point operations and bytes, from sizes and bytes an element."""
    features: Callable[[Sizes, Limits, np.ndarray, int], np.ndarray]
    """(launches, features) from sizes, limits, least seconds and bytes an element."""
    group: Callable[[Sizes], np.ndarray]  # Which of the model's harnesses a launch has, from sizes.
    optional: tuple[str, ...] = ()  # Sizes that a call may lack and that are 1 then.
    law: Callable[[Sizes, Limits, int, np.ndarray], np.ndarray] | None = None
    """Seconds without harness, from sizes, limits, bytes an element and a model's constants."""
    start: tuple[float, ...] = ()  # Constants that a fit of the law begins with.
    of_new_machines: int = 0
    """Features, the first ones, by which trees correct the law on machines that they were not
    taught; 0 if they do as on those that they were."""
    harness_share: float = 0.9
    """Share of the harness that launches longer than it hold, too, beside the law's time."""
    is_inner: bool = False
    """Whether trees correct the law's time alone, rather than that with the harness."""
    far: LearnedKernel | None = None
    """View by which machines that were not taught are predicted, if it is another."""

    def unhindered(
        self, sizes: Sizes, machine: Limits, width: int, constants: np.ndarray
    ) -> np.ndarray:
        """Seconds without harness: by the law, or the roofline where there are no constants."""
        if self.law is None or not len(constants):
            return machine.roofline(*self.work(sizes, width))
        return self.law(sizes, machine, width, constants)


@dataclass(frozen=True)
class LearnedModel:
    """One trained model."""

    trees: Trees  # Logarithm of time over base.
    harness: np.ndarray
    latency: np.ndarray
    """``harness`` and ``latency``: seconds by group of launches: least time, and what is added to
    the law."""
    low: np.ndarray
    high: np.ndarray
    """``low`` and ``high``: (sizes,): trained range."""
    edges: np.ndarray
    """(bins - 1,) seconds of the base where one bin of the interval ends and the next begins."""
    below: np.ndarray
    above: np.ndarray
    """``below`` and ``above``: (bins,): ends of the interval, as factors of the predicted time."""
    law: np.ndarray  # Constants of the kernel's law; empty where the roofline stands for it.

    def base(
        self, unhindered: np.ndarray, group: np.ndarray, floor: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Seconds that the trees correct."""
        return np.maximum(self.harness_of(group, floor), self.latency_of(group, floor) + unhindered)

    def harness_of(self, group: np.ndarray, floor: np.ndarray | float = 0.0) -> np.ndarray:
        """Harness of a group: the machine's own floor, if it is known."""
        usual = self.harness[np.minimum(group, len(self.harness) - 1)]
        return np.where((np.asarray(floor) > 0) & (usual > 0), floor, usual)

    def latency_of(self, group: np.ndarray, floor: np.ndarray | float = 0.0) -> np.ndarray:
        """Latency of a group, half of the machine's own floor, if that is known."""
        usual = self.latency[np.minimum(group, len(self.latency) - 1)]
        harness = self.harness[np.minimum(group, len(self.harness) - 1)]
        return np.where((np.asarray(floor) > 0) & (harness > 0), np.asarray(floor) / 2, usual)

    def interval(self, base: float) -> tuple[float, float]:
        """Factors of the predicted time between which four of five measured ones lie."""
        at = int(np.searchsorted(self.edges, base))
        return float(self.below[at]), float(self.above[at])


def model_from_arrays(arrays: Mapping[str, np.ndarray]) -> LearnedModel:
    """Check the arrays of a model file.

    Raises ``PredictionError`` if one is missing, of another length, or holds what cannot be.
    """
    names = ("harness", "latency", "low", "high", "edges", "below", "above", "law")
    constants = []
    for name in names:
        array = arrays.get(name, np.zeros(0) if name == "law" else None)
        if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
            raise PredictionError(f"no vector {name!r} of numbers")
        if not np.isfinite(array).all() or (array < 0).any():
            raise PredictionError(f"{name!r} holds what is no positive finite number")
        constants.append(array.astype(np.float64))
    harness, latency, low, high, edges, below, above, _ = constants
    lengths = len(below) == len(above) == len(edges) + 1 and len(low) == len(high)
    if not lengths or len(harness) != len(latency) or not len(harness):
        raise PredictionError(f"two of the vectors {', '.join(names)} do not match in length")
    if (below > 1).any() or (above < 1).any() or (below == 0).any():
        raise PredictionError("'below' and 'above' do not enclose 1")
    return LearnedModel(trees_from_arrays(arrays), *constants)


@lru_cache(maxsize=64)
def load_model(path: Path) -> LearnedModel | None:
    """Read a model, or None where there is no such file.

    Raises ``PredictionError`` if the file is damaged; the message names it.
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


def seconds(
    kernel: LearnedKernel,  # How to see the launches.
    model: LearnedModel,
    sizes: Sizes,  # (launches,) each.
    machine: Limits,  # Limits of one machine, or (launches,) each.
    width: int,  # Bytes of an element.
):
    """Times, bases and rooflines of many launches.

    Returns (launches,) seconds each.
    """
    roofline = machine.roofline(*kernel.work(sizes, width))
    unhindered = kernel.unhindered(sizes, machine, width, model.law)
    group = kernel.group(sizes)
    base = model.base(unhindered, group, machine.floor)
    rows = kernel.features(sizes, machine, roofline, width)
    factor = np.exp(model.trees(rows[:, : model.trees.features]))
    if kernel.is_inner:
        return model.base(unhindered * factor, group, machine.floor), base, roofline
    return base * factor, base, roofline


@dataclass(frozen=True)
class Taught:
    """Types and sizes of one dtype that a joint model was taught."""

    machines: dict[str, float]
    """Width of the intervals, on a logarithmic scale, by the name of the GPU."""
    ranges: dict[str, tuple[float, float]]  # Least and largest of each size.


@dataclass(frozen=True)
class Joint:
    """Joint model of a kernel."""

    near: LearnedModel
    far: LearnedModel
    """``near`` and ``far``: for machines that it was taught, and for all others."""
    taught: dict[str, Taught]  # Machines and sizes by type.

    @property
    def machines(self) -> frozenset[str]:
        """Names of all GPUs that it has seen, in whatever type."""
        return frozenset[str]().union(*(one.machines for one in self.taught.values()))

    @cached_property
    def limits(self) -> list[Limits]:
        """Those of the GPUs, for the types that each was seen in."""
        seen = [(name, dtype) for dtype, one in self.taught.items() for name in one.machines]
        return [limits(load_machine(name), dtype) for name, dtype in seen]


@lru_cache(maxsize=64)
def find_joint(kernel: str) -> Joint | None:
    """Joint model of a kernel; None where there is none.

    Raises ``PredictionError`` if model or report is damaged; the message names the file.
    """
    path = FOLDER / f"{kernel}-joint.npz"
    near, far = load_model(path), load_model(FOLDER / f"{kernel}-far.npz")
    if near is None or far is None:
        return None
    report = read_json(path.with_suffix(".json"), 1 << 20, "report")
    try:
        taught = {
            str(dtype): Taught(
                {str(name): float(spread) for name, spread in seen["machines"].items()},
                {str(name): (float(a), float(b)) for name, (a, b) in seen["ranges"].items()},
            )
            for dtype, seen in report["taught"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PredictionError(f"{path.stem}.json: 'taught' is damaged: {error}") from None
    return Joint(near, far, taught)


_WIDTHS = {"float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2}
FARTHER = 2.0
"""Width of the interval, on a logarithmic scale, outside the trained range, or for a machine of a
vendor that no other one stands for."""

APART = 2.0
"""Doublings of a machine's figures between families of GPUs, from which intervals widen."""


def apart(machine: Limits, others: Sequence[Limits]) -> float:
    """Least distance of a machine's figures from others', in doublings."""
    return min(float(np.linalg.norm(machine.place() - other.place())) for other in others)


def predict_learned(kernel: LearnedKernel, call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a launch by the learned model, or None where there is none for dtype or machine.

    Raises ``PredictionError`` if the call lacks a size, or one is not positive.
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
    floor = machine.launch_floor
    return _answer(kernel, model, name, call, bounds, sizes, beyond, floor, model.interval)


def predict_jointly(
    kernel: LearnedKernel,  # How to see the launch.
    call: KernelCall,
    machine: Machine,
    **extra: float,  # What the features need beside the sizes, such as the harness.
) -> Prediction | None:
    """Predict a launch by the joint model, or None where there is none for it.

    Raises ``PredictionError`` if the call lacks a size, or one is not positive.
    """
    figure = f"peak_flops.{call.dtype}"
    if machine.kind != "gpu" or call.dtype not in _WIDTHS or figure not in machine.figures:
        return None
    joint = find_joint(kernel.name)
    if joint is None:
        return None
    sizes = _sizes(kernel, call) | {name: np.array([value]) for name, value in extra.items()}
    seen = joint.taught.get(call.dtype)
    is_known = machine.name in joint.machines
    beyond = [] if is_known else ["machine"]
    if seen is None or (is_known and machine.name not in seen.machines):
        beyond.append("type")
    ranges = seen.ranges if seen is not None else {}
    if any(not low <= sizes[name][0] <= high for name, (low, high) in ranges.items()):
        beyond.append("size")
    bounds = limits(machine, call.dtype, kernel.name)
    # A far model without trees has the intervals only.
    is_far = not is_known and len(joint.far.trees.roots) > 1
    model, name = (joint.far, "far") if is_far else (joint.near, "joint")
    name, seen_as = f"{kernel.name}-{name}", (kernel.far or kernel) if is_far else kernel

    def ends(base: float) -> tuple[float, float]:
        doubted = joint.far if {"machine", "type"} & set(beyond) else joint.near
        low, high = doubted.interval(base)
        spread = max(1.0, apart(bounds, joint.limits) / APART)
        if seen is not None and machine.name in seen.machines:
            spread = seen.machines[machine.name]
        return low**spread, high**spread

    floor = machine.launch_floor
    return _answer(seen_as, model, name, call, bounds, sizes, tuple(beyond), floor, ends)


def _sizes(kernel: LearnedKernel, call: KernelCall) -> dict[str, np.ndarray]:
    wanted = {size: 1 if size in kernel.optional else None for size in kernel.sizes}
    return {size: np.array([float(call.size(size, wanted[size]))]) for size in wanted}


def _answer(
    kernel: LearnedKernel,
    model: LearnedModel,
    name: str,
    call: KernelCall,
    bounds: Limits,
    sizes: Sizes,
    beyond: tuple[str, ...],
    launch_floor: float,
    ends: Callable[[float], tuple[float, float]],
) -> Prediction:
    """The prediction of one launch; ``beyond`` says what the model has not seen of it."""
    width = _WIDTHS[call.dtype]
    time, base, roofline = (float(x[0]) for x in seconds(kernel, model, sizes, bounds, width))
    low, high = ends(base)
    is_far = "size" in beyond or ("machine" in beyond and bounds.unit == OTHER_VENDOR)
    spread = FARTHER if is_far else 1.0
    group = kernel.group(sizes)
    flops, _ = kernel.work(sizes, width)
    harness = float(model.harness_of(group, bounds.floor)[0])
    bound = "compute" if flops[0] / bounds.peak >= roofline else "memory"
    if time < 1.1 * harness or harness == 0 and roofline < launch_floor:
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
