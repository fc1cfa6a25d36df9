# SPDX-License-Identifier: Apache-2.0
"""Profile of a running model: the time of each kernel, and its distance from the machine's limit.

The limit of a kernel is the roofline: its FLOPs at the peak of the numbers that it multiplies, or
its bytes at the bandwidth of their cache level, whichever takes longer. Activations are in the
nearest cache that holds all that the kernel reads and writes of them; weights in the nearest one
that holds those of the whole model, since all are read before the same ones are read again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tvm
from rich.table import Table
from tvm import relax, tirx
from tvm.ir import Constant
from tvm.s_tir.analysis import estimate_tir_flops
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import Conv2DKernel, from_json

from ..codegen.linker import SharedLinker
from ..compiler import pipeline
from ..compiler.record_reader import choose_records
from ..compiler.targets import arch_of, is_gpu, required_features, resolve
from ..errors import InvalidModelError, TargetError
from ..machine.host import check_host, host_info
from ..onnx.frontend import import_onnx
from ..runtime.host_arrays import random_inputs, refuse_open_shapes
from ..runtime.thread_pool import Crew, choose_threads
from .kernel_work import count_work, parameter_bytes, reason
from .machine_limits import NUMBERS, MachineLimits, measure_limits

Progress = Callable[[str, int, int], None]

_FLOAT = "float32"
WARM_UP = 5
"""Untimed runs before the timed ones."""


@dataclass(frozen=True)
class KernelCost:
    """Least work of one kernel."""

    flops: float  # Floating-point operations, none counted twice.
    # Tensors that the model computes, and constants, each read or written once; of those whose rows
    # are chosen by indices, the rows.
    activation_bytes: int
    weight_bytes: int
    functions: int = 0  # Elements for which an elementary function such as ``exp`` is computed.
    # What is multiplied: ``float32`` or one of :data:`.machine_limits.NUMBERS`.
    numbers: str = "float32"
    rate: float = 1.0  # Operations a second, by those of the peak of such numbers.


@dataclass(frozen=True)
class Described:
    """A kernel before it is timed."""

    operator: str  # Its operation; for convolutions with channels and image size.
    cost: KernelCost  # Its least work.
    kernel: Conv2DKernel | None  # The workload; None where it is no convolution.


@dataclass(frozen=True)
class KernelProfile:
    """One call of a kernel in the running model.

    Parameters
    ----------
    position : int
        Its position among the calls of one run.
    kernel : str
        Name of the generated function.
    operator : str
        Its operation; for convolutions with channels and image size.
    seconds : float
        Median over the runs.
    cost : KernelCost
        Its least work.
    limit_seconds : float
        The roofline.
    bound : str
        Kind of the limit: ``compute``, or the level of the slower half of the bytes.
    reason : str
        Why it falls short of the limit; empty if it does not.
    """

    position: int
    kernel: str
    operator: str
    seconds: float
    cost: KernelCost
    limit_seconds: float
    bound: str
    reason: str = ""

    @property
    def fraction(self) -> float:
        """The share of the limit that is reached."""
        return self.limit_seconds / self.seconds

    @property
    def lost_seconds(self) -> float:
        """Time beyond that of a kernel at the limit."""
        return max(0.0, self.seconds - self.limit_seconds)


@dataclass(frozen=True)
class Profile:
    """All kernels of a model in the order of their calls.

    Parameters
    ----------
    kernels : tuple[KernelProfile, ...]
        The calls.
    seconds : float
        Median of a whole run without any instrument.
    limits : MachineLimits
        The roofs.
    machine : dict
        Processor and versions.
    """

    kernels: tuple[KernelProfile, ...]
    seconds: float
    limits: MachineLimits
    machine: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The profile as plain dictionaries and lists; memory has no capacity."""
        result = asdict(self)
        for record, kernel in zip(result["kernels"], self.kernels, strict=True):
            record |= {"fraction": kernel.fraction, "lost_seconds": kernel.lost_seconds}
        for level in result["limits"]["levels"]:
            level["capacity"] = None if math.isinf(level["capacity"]) else level["capacity"]
        return result


def profile(
    model: Any,
    target: Any = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: Any = "auto",
    winograd: str = "auto",
    threads: int | None = None,
    records: Any = None,
    precision: str = "fp32",
    runs: int = 30,
    rounds: int = 1,
    limits: MachineLimits | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Compile a model, time each kernel while it runs, and compare with the machine's limits.

    Parameters
    ----------
    model, target, shapes, fuse, winograd, threads, records, precision
        As for ``compile``.
    runs : int
        Timed runs.
    rounds : int
        Times that all runs are repeated, a second after one another; the fastest count.
    limits : MachineLimits, optional
        The roofs; if None they are measured, before and after, and the mean is taken: the clock of
        a processor varies with time and with its other work.
    progress : callable, optional
        Called as ``progress(text, done, total)``.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError
        As for ``compile``, or if the shape of an input is incomplete.
    CompilationError
        If TVM fails.
    TargetError
        If the code cannot run on this machine, or the target is a GPU.
    """
    count = choose_threads(threads)
    resolved = _this_cpu(target, threads)
    tell = progress or (lambda text, done, total: None)
    tell("compiling", 0, 2)
    imported = import_onnx(model, shapes)
    remedy = "a profile needs sizes: give them in shapes (--shape)"
    refuse_open_shapes(imported.inputs, InvalidModelError, remedy)
    found = choose_records(records, resolved)
    choices = {"fuse": fuse, "winograd": winograd, "precision": precision}
    options = pipeline.Options(**choices, records=found)
    mod, costs = _optimize(imported.mod, resolved, options)
    linker = SharedLinker(str(resolved.attrs["mtriple"]))
    library = pipeline.build(mod, resolved).jit(fcompile=linker)
    machine = relax.VirtualMachine(library, tvm.cpu())
    arrays = random_inputs(imported.inputs, 0, normal=True)
    feed = [tvm.runtime.tensor(array) for array in arrays.values()]
    tell("measuring", 1, 2)
    before = limits or measure_limits(resolved, count)
    seconds, calls = _fastest(Crew(count, library), rounds, machine, feed, runs)
    limits = limits or before.mean(measure_limits(resolved, count))
    tell("done", 2, 2)
    calls = [(name, median) for name, median in calls if name in costs]
    weights = sum(costs[name].cost.weight_bytes for name, _ in calls)
    cpu = CPUInfo.from_target(resolved)
    kernels = [
        _against_limits(position, name, costs[name], median, weights, limits, cpu)
        for position, (name, median) in enumerate(calls)
    ]
    return Profile(tuple(kernels), seconds, limits, host_info())


def _this_cpu(target: Any, threads: int | None) -> Target:
    """Resolve a target whose kernels can run here."""
    resolved = resolve(target, cores=threads)
    if is_gpu(resolved):
        raise TargetError(
            f"kernels are profiled on CPUs only; got a target of kind {resolved.kind.name!r}; "
            "`tvm-fusion explain` lists those of a GPU"
        )
    check_host(required_features(resolved), arch_of(resolved))
    return resolved


def _optimize(
    mod: tvm.IRModule, target: Target, options: pipeline.Options
) -> tuple[tvm.IRModule, dict[str, Described]]:
    """Run all phases, and count the work of the kernels by name."""
    plan = pipeline.phases(target, options)
    schedule = {"schedule": plan.pop("schedule")}
    mod = pipeline.run_phases(mod, target, plan)
    costs = kernel_costs(mod)  # now: the work of scheduled functions cannot be counted
    return pipeline.run_phases(mod, target, schedule), costs


def _fastest(
    crew: Crew,
    rounds: int,
    machine: relax.VirtualMachine,
    feed: Sequence[tvm.runtime.Tensor],
    runs: int,
) -> tuple[float, list[tuple[str, float]]]:
    """Result of :func:`_time` in the round with the fastest run."""
    results = []
    for number in range(rounds):
        if number:
            time.sleep(1)
            machine.set_instrument(None)
        results.append(crew.run(_time, machine, feed, runs))
    return min(results, key=lambda one: one[0])


def _time(
    machine: relax.VirtualMachine, feed: Sequence[tvm.runtime.Tensor], runs: int
) -> tuple[float, list[tuple[str, float]]]:
    """Median seconds of a run, and the calls of a run with theirs."""
    main, clock = machine["main"], time.perf_counter
    totals, records, begun = [], [], [0.0]
    for _ in range(WARM_UP):
        main(*feed)
    for _ in range(runs):
        begin = clock()
        main(*feed)
        totals.append(clock() - begin)

    def note(_: Any, name: str, before: bool, *__: Any) -> int:
        if before:
            begun[0] = clock()
        else:
            records.append((str(name), clock() - begun[0]))
        return 0

    machine.set_instrument(note)
    for _ in range(runs):
        main(*feed)
    calls = len(records) // runs
    names = [name for name, _ in records[:calls]]
    times = np.array([seconds for _, seconds in records]).reshape(runs, calls)
    return float(np.median(totals)), list(zip(names, np.median(times, axis=0), strict=True))


def kernel_costs(mod: tvm.IRModule) -> dict[str, Described]:
    """Least work of each kernel of known shapes that ``main`` calls, by its name."""
    costs: dict[str, Described] = {}
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if not isinstance(call, relax.Call) or not call.args:
                continue
            func = mod[call.args[0]] if isinstance(call.args[0], tvm.ir.GlobalVar) else None
            if isinstance(func, tirx.PrimFunc) and _is_static(func):
                costs[call.args[0].name_hint] = _cost(call, func)
    return costs


def _is_static(func: tirx.PrimFunc) -> bool:
    return all(
        hasattr(param, "shape") and all(isinstance(extent, tirx.IntImm) for extent in param.shape)
        for param in func.params
    )


def _cost(call: relax.Call, func: tirx.PrimFunc) -> Described:
    work = count_work(func)
    sizes = [
        work.gathered_bytes.get(position, parameter_bytes(buffer))
        for position, buffer in enumerate(func.params)
    ]
    constant = [isinstance(argument, Constant) for argument in call.args[1].fields]
    constant += [False] * (len(sizes) - len(constant))
    weights = sum(size for size, fixed in zip(sizes, constant, strict=True) if fixed)
    attrs = func.attrs or {}
    text = attrs.get(attributes.WORKLOAD)
    kernel = None if text is None else from_json(str(text))
    numbers, rate = _FLOAT if kernel is None else multiplied(kernel), 1.0
    if attributes.OPERATIONS in attrs:
        operator = str(attrs[attributes.TITLE])
        flops, rate = float(attrs[attributes.OPERATIONS]), float(attrs[attributes.RATE]) or 1.0
        default = "uint8" if float(attrs[attributes.RATE]) else _FLOAT
        numbers = str(attrs.get(attributes.NUMBERS, default))
    elif kernel is None:
        operator, flops = str(call.args[0].name_hint), _flops(func)
    else:
        height, width = int(kernel.height or 1), int(kernel.width or 1)
        operator = " + ".join(map(str, kernel.layers)) + f" on {height}x{width}"
        operator += f" by Winograd {kernel.winograd}x{kernel.winograd}" if kernel.winograd else ""
        flops = float(kernel.flops())
    cost = KernelCost(flops, sum(sizes) - weights, weights, work.functions, numbers, rate)
    return Described(operator, cost, kernel)


def multiplied(kernel: Conv2DKernel) -> str:
    """Type of the numbers that a convolution multiplies; depthwise ones widen bfloat16."""
    if kernel.is_quantized:
        return "uint8"
    return "bfloat16" if kernel.has_words else _FLOAT


def _flops(func: tirx.PrimFunc) -> float:
    """FLOPs as TVM counts them; 0 where it cannot, as in sorts and other extern functions."""
    try:
        return estimate_tir_flops(tvm.IRModule({"main": func}))
    except tvm.error.InternalError:
        return 0.0


def _against_limits(
    position: int,
    name: str,
    described: Described,
    seconds: float,
    model_weights: int,
    limits: MachineLimits,
    cpu: CPUInfo,
) -> KernelProfile:
    cost = described.cost
    near = limits.level_of(cost.activation_bytes)
    far = limits.level_of(model_weights + cost.activation_bytes)
    moving = cost.activation_bytes / near.bandwidth + cost.weight_bytes / far.bandwidth
    computing = cost.flops / limits.peak(cost.numbers) / cost.rate
    bound = "compute"
    if moving > computing:
        bound = near.name if cost.activation_bytes / near.bandwidth > moving / 2 else far.name
    limit = max(moving, computing)
    moved = cost.activation_bytes + cost.weight_bytes
    why = reason(described.kernel, moved, seconds, limit / seconds, limits, cpu)
    return KernelProfile(position, name, described.operator, seconds, cost, limit, bound, why)


def profile_table(profile: Profile, title: str = "") -> Table:
    """The profile as a table, the kernel with the largest lost time first."""
    limits = profile.limits
    levels = ", ".join(f"{lvl.name} {lvl.bandwidth / 1e9:.0f} GB/s" for lvl in limits.levels)
    others = "".join(
        f"{rate / 1e9:.0f} of {NUMBERS[numbers]}, " for numbers, rate in limits.peaks.items()
    )
    total, limit = (
        sum(getattr(kernel, field) for kernel in profile.kernels)
        for field in ("seconds", "limit_seconds")
    )
    table = Table(
        title=f"{title}, {limits.threads} threads, {profile.machine['cpu']}",
        caption=(
            f"A run takes {profile.seconds * 1e3:.3f} ms, its kernels {total * 1e3:.3f} ms, at the "
            f"machine's limit {limit * 1e3:.3f} ms ({limit / total:.0%}). Measured limits: "
            f"{limits.peak_flops / 1e9:.0f} GFLOP/s, {others}{levels}."
        ),
    )
    table.add_column("call", justify="right")
    table.add_column("kernel")
    for heading in ("us", "% of run", "GFLOP/s", "GB/s", "limit us", "of limit", "lost us"):
        table.add_column(heading, justify="right")
    for heading in ("bound by", "short of the limit because"):
        table.add_column(heading)
    for kernel in sorted(profile.kernels, key=lambda kernel: -kernel.lost_seconds):
        moved = kernel.cost.activation_bytes + kernel.cost.weight_bytes
        table.add_row(
            str(kernel.position),
            kernel.operator,
            f"{kernel.seconds * 1e6:.1f}",
            f"{kernel.seconds / total:.1%}",
            f"{kernel.cost.flops / kernel.seconds / 1e9:.1f}" if kernel.cost.flops else "-",
            f"{moved / kernel.seconds / 1e9:.1f}",
            f"{kernel.limit_seconds * 1e6:.1f}",
            f"{kernel.fraction:.0%}",
            f"{kernel.lost_seconds * 1e6:.1f}",
            kernel.bound,
            kernel.reason,
        )
    return table
