# SPDX-License-Identifier: Apache-2.0
"""Prediction of a whole ONNX model: nothing is compiled to code, and nothing runs.

Where no trace gives the host's overheads, those of our runtime and of PyTorch are estimated: T1 is
spent between two operators, T2 before an operator's first launch, T3 after its last, T4 in the
launch, T5 between two launches (dissertation, section 4.3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from schedules.cost.attention import has_fused_attention
from schedules.cost.decisions import predict
from schedules.cost.gpu_kernels import HIGH, LOW, REDUCE, has_latencies
from schedules.cost.kernel_call import KernelCall, Prediction, roofline
from schedules.cost.machine import Machine
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.record_reader import choose_records
from tvm_fusion.errors import PredictionError

from ..cluster import Cluster
from ..collectives import bus_factor, link_bandwidth, node_collectives
from ..machines import cpu_target, find_machine, gpu_target
from ..report import Answer
from ..timeline.execution_graph import HOST, ExecutionGraph, HostCosts, Kernel, Launch, Op, Wait
from ..timeline.timelines import simulate
from ..what_if import Scenario
from .compiled import lower_to_cpu_kernels, lower_to_gpu_kernels
from .layers import StaticModel
from .lowered import PRECISIONS, LoweredKernel, LoweredOp, bytes_share, in_precision

CALL_SECONDS = 0.2e-6
"""Our runtime's call of one kernel, where the machine has no figure ``overhead.call``."""
RUN_SECONDS = 2e-6
"""Our runtime's call of a model, where the machine has no figure ``overhead.run``."""
LAUNCH_SECONDS = 4.5e-6
"""A call of ``cudaLaunchKernel``, as in the traces below."""

EAGER_ORIGIN = (
    "host overheads of eager PyTorch are means of three inferences on an H100, profiler on "
    "(traces of AMD-AGI/TraceLens, MIT): other hosts differ; --overheads takes those of your own"
)

_EAGER: Mapping[str, tuple[float, float, float]] = {
    "aten::linear": (16.5e-6, 38e-6, 5e-6),
    "aten::conv2d": (40e-6, 36.5e-6, 3.6e-6),
    "aten::layer_norm": (22e-6, 15.8e-6, 5.4e-6),
    "aten::gelu": (11.3e-6, 7.2e-6, 1.1e-6),
    "aten::embedding": (23.9e-6, 28.8e-6, 3e-6),
    "aten::add": (6.8e-6, 5.5e-6, 1e-6),
    "aten::mul": (3.7e-6, 5.2e-6, 1e-6),
    "aten::contiguous": (10.1e-6, 9.5e-6, 1.6e-6),
    "aten::cat": (4.9e-6, 7.5e-6, 0.8e-6),
    "aten::mean": (3.8e-6, 7.6e-6, 1e-6),
    "aten::tanh": (14.8e-6, 6.6e-6, 1e-6),
}
_OTHER = (9.1e-6, 15.2e-6, 2.4e-6)
"""T1, T2 and T3 of all operators that launch, means weighted by their number."""


@dataclass(frozen=True)
class FixedCosts:
    """Overheads by operator; in seconds."""

    other: tuple[float, float, float]  # T1, T2 and T3 of operators that ``table`` does not have.
    launch: float
    between: float = 0.0
    view: float = 0.0
    """``launch``, ``between`` and ``view``: T4, T5, and an operator that launches nothing."""
    first: float = 0.0  # Seconds before the first operator, besides its T1.
    table: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """T1, T2 and T3 by operator."""

    def t1(self, previous: str, op: Op) -> float:
        """Time between two operators."""
        return self._of(op)[0] + (0.0 if previous else self.first)

    def t2(self, op: Op) -> float:
        """Time of an operator before its first runtime call."""
        return self._of(op)[1]

    def t3(self, op: Op) -> float:
        """Time of an operator after its last runtime call."""
        return self._of(op)[2]

    def t4(self, call: str) -> float:
        """Time of a runtime call."""
        return self.launch

    def t5(self, op: Op, step: int) -> float:
        """Time between two runtime calls of an operator."""
        return self.between

    def whole(self, op: Op) -> float:
        """Time of an operator that makes no runtime call."""
        return self.view

    def delay(self, call: str) -> float:
        """Half of T4, as the source has it."""
        return self.launch / 2

    def _of(self, op: Op) -> tuple[float, float, float]:
        return self.table.get(op.name, self.other)


def host_costs(machine: Machine, engine: str) -> tuple[FixedCosts, tuple[str, ...]]:
    """Overheads of an engine on a machine, and where they come from."""
    if engine == "pytorch" and "overhead.eager" in machine.figures:
        return FixedCosts((machine["overhead.eager"], 0.0, 0.0), 0.0), ()
    if engine == "pytorch":
        return FixedCosts(_OTHER, LAUNCH_SECONDS, 2e-6, 1.6e-6, table=_EAGER), (EAGER_ORIGIN,)
    call = machine.get("overhead.call", CALL_SECONDS)
    first = machine.get("overhead.run", RUN_SECONDS)
    launch = LAUNCH_SECONDS if machine.kind == "gpu" else 0.0
    notes: tuple[str, ...] = ()
    if "overhead.call" not in machine.figures:
        notes = ("host overheads of our runtime were measured on another machine, a Zen 4",)
    return FixedCosts((call, 0.0, 0.0), launch, first=first), notes


ENGINES = ("tvm_fusion", "pytorch")

_ON_CPUS = {"tvm_fusion": ("fp32", "bf16"), "pytorch": ("fp32",)}
"""Precisions that predictions of CPUs know, by engine."""
SESSIONS = 1.31
"""Ratio by which runs of library kernels on GPUs differ from the times of these kernels, which were
measured another day; ``examples/benchmarks/predict.py`` finds it in whole language models."""


@dataclass(frozen=True)
class KernelRow:
    """Prediction of one launch in a model; times in seconds."""

    position: int  # Its position in the run.
    kernel: str
    operator: str
    op: str
    """``kernel``, ``operator`` and ``op``: name of the function, what it computes, and the operator
    of its model."""
    seconds: float
    low: float
    high: float
    """``seconds``, ``low`` and ``high``: most likely time, and the interval of four of five
    measured ones."""
    bound: str  # ``compute``, ``memory``, ``latency`` or ``network``.
    roofline_seconds: float
    roofline_share: float
    """``roofline_seconds`` and ``roofline_share``: least time by peak and bandwidth, and the share
    of it that is reached."""
    model: str  # What said so.
    in_range: bool  # Whether the sizes lie in the range that the model was fitted to.
    extrapolated: tuple[str, ...] = ()
    """Those of ``machine``, ``type``, ``size`` and ``mask`` that it was not fitted to, if it says
    so."""


@dataclass(frozen=True)
class ModelPrediction:
    """Prediction of one run of a model on one machine; times in seconds."""

    machine: str
    title: str
    engine: str
    """``machine``, ``title`` and ``engine``: name and full name of the machine; ``tvm_fusion`` or
    ``pytorch``."""
    kernels: tuple[KernelRow, ...]  # Kernels in the order of the run.
    seconds: float
    low: float
    high: float
    """``seconds``, ``low`` and ``high``: the whole run, and its interval."""
    kernel_seconds: float
    host_seconds: float
    """``kernel_seconds`` and ``host_seconds``: sum over the kernels, and what the host adds to it:
    overheads that no kernel hides."""
    figures: dict[str, dict[str, Any]]
    """Figures of the machine that were used, each with ``value`` and ``origin``."""
    notes: tuple[str, ...]  # What to know about the figures.
    scenario: Scenario = field(repr=False, compare=False)
    """The run as a graph, to be changed and simulated."""
    answers: tuple[Answer, ...] = ()  # One for each change that was asked for.
    memory_bytes: float | None = None
    """Peak of weights, inputs and results of a rank; None where it is not known."""
    fits: bool | None = None  # Whether the machine has as much.

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain dictionaries and lists, without the scenario."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        return {
            **plain,
            **{name: list(map(asdict, plain[name])) for name in ("kernels", "answers")},
        }


def predict_on(
    model: StaticModel,
    machine: Any,
    engine: str,
    *,
    fuse: Any = "auto",
    winograd: str = "auto",
    records: Any = None,
    threads: int | None = None,
    overheads: HostCosts | None = None,
    precision: str = "fp32",
    ranks: int = 1,
    cluster: Cluster | None = None,
) -> ModelPrediction:
    """Predict a model, which can serve several machines; see :func:`.ask.predict`."""
    if engine not in ENGINES:
        raise PredictionError(f"engine is {engine!r}; expected one of {', '.join(ENGINES)}")
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise PredictionError(f"precision is {precision!r}; expected one of {known}")
    if cluster is not None:
        machine = cluster.machine
    described = machine if isinstance(machine, Machine) else find_machine(machine, threads)
    if precision not in _ON_CPUS[engine] and described.kind != "gpu":
        raise PredictionError(
            f"precision {precision} is for GPUs; {described.name!r} is a CPU, for which engine "
            f"{engine!r} is predicted in {' and '.join(_ON_CPUS[engine])}: predict a model that is "
            "stored in this type"
        )
    if ranks != 1 and (engine != "pytorch" or described.kind != "gpu" or ranks < 1):
        raise PredictionError(
            f"ranks is {ranks!r}: tensor parallelism is predicted for engine 'pytorch' on GPUs"
        )
    memory = None
    if engine == "pytorch":
        run = model.lower(described.kind, ranks, _fused_types(described, precision))
        ops, memory = run.ops, run.weight_bytes + run.activation_bytes
    elif described.kind == "gpu":
        target = gpu_target(described)
        decides = described if has_latencies(described) else None
        chosen = choose_records(records, target)
        options = pipeline.Options(fuse=fuse, records=chosen, machine=decides)
        ops = lower_to_gpu_kernels(model.whole.mod, target, options)
    else:
        target = cpu_target(described)
        chosen = choose_records(records, target)
        options = pipeline.Options(
            fuse=fuse, winograd=winograd, records=chosen, precision=precision
        )
        ops = lower_to_cpu_kernels(model.whole.mod, target, described, options)
    if described.kind == "gpu":
        ops = in_precision(ops, precision)
    whole = _assemble(ops, described, engine, overheads, cluster)
    if memory is None or "capacity.memory" not in described.figures:
        return whole
    return _with_memory(whole, memory * bytes_share(precision), described["capacity.memory"], ranks)


def _fused_types(machine: Machine, precision: str) -> list[str]:
    """Types of a model's tensors whose attention the library computes in one kernel."""
    types = {name: name for name in PRECISIONS.values()} | {"float32": PRECISIONS[precision]}
    return [own for own, dtype in types.items() if has_fused_attention(machine, dtype)]


def _with_memory(
    prediction: ModelPrediction, needed: float, capacity: float, ranks: int
) -> ModelPrediction:
    """Add the memory of a rank, and whether it fits."""
    fits, notes = needed <= capacity, prediction.notes
    if not fits:
        rank = "each of its ranks" if ranks > 1 else "it"
        notes = (
            f"does not fit: {rank} needs {needed / 1e9:.1f} GB for weights, inputs and "
            f"intermediate results, the machine has {capacity / 1e9:.1f} GB",
            *notes,
        )
    return replace(prediction, memory_bytes=needed, fits=fits, notes=notes)


def _assemble(
    ops: Sequence[LoweredOp],
    machine: Machine,
    engine: str,
    overheads: HostCosts | None,
    cluster: Cluster | None,
) -> ModelPrediction:
    kernels = [kernel for op in ops for kernel in op.kernels]
    alike = {(kernel.call, kernel.like): kernel for kernel in kernels}
    by_call = {key: _predict(kernel, machine, cluster) for key, kernel in alike.items()}
    predictions = [by_call[kernel.call, kernel.like] for kernel in kernels]
    rows = tuple(
        _row(position, kernel, found, machine.launch_floor)
        for position, (kernel, found) in enumerate(zip(kernels, predictions, strict=True))
    )
    known, notes = host_costs(machine, engine)
    costs: HostCosts = known
    if overheads is not None:
        costs, notes = overheads, ("host overheads as given",)
    if machine.note:
        notes = (machine.note, *notes)
    graph, *ends = (
        _graph(ops, [getattr(row, bound) for row in rows], machine)
        for bound in ("seconds", "low", "high")
    )
    seconds, low, high = (simulate([each], costs).seconds for each in (graph, *ends))
    if engine == "pytorch" and machine.kind == "gpu":
        low, high = low / SESSIONS, high * SESSIONS
    total = sum(row.seconds for row in rows)
    if any("roofline" == row.model for row in rows):
        notes += ("kernels without a model take at least the time of the roofline",)
    if any(row.model.startswith("estimate") for row in rows):
        notes += ("times of our GPU kernels are estimates: they have not been measured",)
    return ModelPrediction(
        machine.name,
        machine.title,
        engine,
        rows,
        seconds,
        low,
        high,
        total,
        max(0.0, seconds - total),
        machine.to_json()["figures"],
        notes,
        Scenario((graph,), costs, machine),
    )


def _predict(kernel: LoweredKernel, machine: Machine, cluster: Cluster | None) -> Prediction:
    if "ranks" in kernel.call.sizes:
        return _collective(kernel.call, machine, cluster)
    if kernel.like is not None:
        return estimate(kernel.call, kernel.like, machine)
    return predict(kernel.call, machine)


def _collective(call: KernelCall, machine: Machine, cluster: Cluster | None) -> Prediction:
    """A collective of the first ranks of a cluster, or within a node, by the curves of NCCL."""
    ranks, message, note = call.size("ranks"), call.read_bytes, ""
    if cluster is None:
        curves, note = node_collectives(machine)
        predicted = curves.predict(call.op, ranks, message)
    else:
        predicted = cluster.predict(call.op, range(ranks), message)
    least = message * bus_factor(call.op, ranks) / link_bandwidth(machine)
    beyond = ("machine",) * bool(note) + ("size",) * (not predicted.in_range)
    ends, model = (predicted.low, predicted.high), f"nccl, {predicted.model}"
    return Prediction(
        predicted.seconds, *ends, "network", least, model, not beyond, extrapolated=beyond
    )


def _row(position: int, kernel: LoweredKernel, prediction: Prediction, floor: float) -> KernelRow:
    call, seconds = kernel.call, max(floor, prediction.device_seconds)
    share = seconds / prediction.seconds
    return KernelRow(
        position,
        call.name,
        kernel.label,
        call.op,
        seconds,
        prediction.low * share,
        prediction.high * share,
        prediction.bound,
        prediction.roofline_seconds,
        prediction.roofline_seconds / seconds,
        prediction.model,
        prediction.in_range,
        prediction.extrapolated,
    )


def _graph(ops: Sequence[LoweredOp], seconds: Sequence[float], machine: Machine) -> ExecutionGraph:
    """The run on one stream, which the host waits for, or on the host itself."""
    stream = HOST if machine.kind == "cpu" else 0
    times, steps, number = iter(seconds), [], 0
    for op in ops:
        launches = []
        for kernel in op.kernels:
            run = Kernel(number, kernel.call.name, next(times), stream, call=kernel.call)
            launches.append(Launch(run))
            number += 1
        steps.append(Op(op.name, tuple(launches)))
    if stream != HOST:
        steps.append(Op("synchronize", (Wait(),), gap=0.0))
    return ExecutionGraph(tuple(steps), name=machine.name)


def estimate(
    call: KernelCall,  # Its own FLOPs and bytes.
    like: KernelCall,  # The library's kernel.
    machine: Machine,
) -> Prediction:
    """Estimate the time of one of our GPU kernels, which have not been measured.

    Reductions in one pass have a model of their own, :mod:`schedules.cost.gpu_kernels`.
    Any other kernel is assumed to reach the share of its roofline that the library's kernel for
    the same operator and sizes reaches of its own.

    Raises ``PredictionError`` if the machine lacks a figure.
    """
    if call.op == REDUCE and has_latencies(machine):
        return predict(call, machine)
    library = predict(like, machine)
    least, bound = roofline(call, machine)
    taken = library.device_seconds
    # What the library's kernel takes beyond its roofline is, for a small kernel, a constant.
    beyond = max(0.0, taken - library.roofline_seconds)
    scaled = least * taken / library.roofline_seconds if library.roofline_seconds else beyond
    seconds = max(machine.launch_floor, least, min(scaled, least + beyond))
    model = f"estimate, as {like.op} by {library.model}"
    return Prediction(seconds, LOW * seconds, HIGH * seconds, bound, least, model, False)
