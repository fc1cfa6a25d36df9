# SPDX-License-Identifier: Apache-2.0
"""Runs that can be changed and simulated again, and changes by their text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from schedules.cost.decisions import predict
from schedules.cost.elementwise import STREAMING
from schedules.cost.embedding import predict_lookups, tables_of
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Machine, known_machines, load_machine
from tvm_fusion.errors import PredictionError

from .collectives import Collectives, load_collectives
from .report import Answer, report
from .resharding import reshard
from .timeline import edits
from .timeline.edits import (
    Match,
    fuse,
    launch_graphs,
    map_kernels,
    named,
    parallelize,
    rebucket,
    remove,
    resize,
    retime,
)
from .timeline.execution_graph import Collective, ExecutionGraph, HostCosts, Kernel, Op
from .timeline.timelines import Timeline, simulate

_BAGS = {"embedding_bag", "embedding_bag_backward"}

_FIXED = ("all_reduce", "broadcast")
"""Collectives of parameters and gradients, whose message does not depend on the batch."""


@dataclass(frozen=True)
class ChangedRun:
    """Graphs after a change."""

    graphs: tuple[ExecutionGraph, ...]  # Graph of each rank.
    notes: tuple[str, ...] = ()  # What the new times rest on.


def change(graphs: Sequence[ExecutionGraph], text: str, device: str | Machine) -> ChangedRun:
    """Change the graphs of all ranks.

    Raises ``PredictionError`` if a change is unknown, its value is wrong, or it matches no operator
    or collective.

    Parameters
    ----------
    graphs : sequence of ExecutionGraph
        One a rank.
    text : str
        One change, or several joined by `` and ``:

        =========================== ========================================================
        ``machine=NAME|FILE``       kernels on another machine, at the ratio of the predictions
        ``batch=FACTOR``            so many times the batch
        ``link=FILE``               collectives as measured in a file of collectives
        ``ranks=N:FILE``            the same with N ranks
        ``bucket=MB:FILE``          all-reduces merged up to that size
        ``sharding=NAME[:FILE]``    embedding tables shared out by another sharder
        ``graph``                   one launch for each run of kernels, as a captured graph
        ``fuse=REGEX``              neighbouring operators in one kernel
        ``remove=REGEX``            without these operators
        ``resize=REGEX:FACTOR``     their kernels take so many times as long
        ``parallelize=REGEX``       neighbouring operators on streams of their own
        =========================== ========================================================
    device : str or Machine
        Device that the times are of; a name is as its driver gives it.
    """
    current = ChangedRun(tuple(graphs))
    for part in text.split(" and "):
        name, _, value = part.strip().partition("=")
        if name not in _CHANGES:
            raise PredictionError(f"unknown change {part!r}; expected {', '.join(_CHANGES)}")
        after = _CHANGES[name](current.graphs, value, device)
        notes = after.notes
        if after.graphs == current.graphs:
            notes = (*notes, f"{name} changes nothing here")
        current = ChangedRun(after.graphs, (*current.notes, *notes))
    return current


def _machine(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    old, new = device_machine(device), load_machine(value)
    models: Counter[str] = Counter()

    def seconds(kernel: Kernel) -> float:
        if kernel.collective is not None:
            return kernel.seconds
        return kernel.seconds * _ratio(kernel.call, new, kernel.call, old, models)

    moved = tuple(retime(graph, seconds) for graph in graphs)
    return ChangedRun(moved, (f"{new.name} over {old.name}: {_counted(models)}", *_notes(old)))


def _batch(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    factor = _number("batch", value)
    machine = device_machine(device)
    models: Counter[str] = Counter()

    def seconds(kernel: Kernel) -> float:
        part = kernel.collective
        if part is not None:
            return kernel.seconds * (1 if part.kind in _FIXED else max(factor, 1.0))
        larger = scaled(kernel.call, factor)
        return kernel.seconds * _ratio(larger, machine, kernel.call, machine, models, factor)

    def grown(kernel: Kernel, op: Op) -> Kernel:
        part = kernel.collective
        if part is None:
            return replace(kernel, call=scaled(kernel.call, factor))
        if part.kind in _FIXED:
            return kernel
        return replace(kernel, collective=replace(part, bytes=part.bytes * factor))

    found = tuple(map_kernels(retime(graph, seconds), grown) for graph in graphs)
    notes = (f"{factor:g} times the batch: {_counted(models)}", *_notes(machine))
    return ChangedRun(found, notes)


def scaled(call: KernelCall | None, factor: float) -> KernelCall | None:
    """Call with so many times the batch; of a matrix product the rows, of others their bytes."""
    if call is None:
        return None
    batches = ("L",) if call.op == "gather" else ("B",) if call.op == "bmm" else ("M", "B")
    name = next((name for name in batches if name in call.sizes), "B")
    sizes = dict(call.sizes)
    if name in sizes:
        sizes[name] = max(round(sizes[name] * factor), 1)
    return KernelCall(
        call.op,
        sizes,
        call.dtype,
        call.flops * factor,
        call.read_bytes * factor,
        call.written_bytes * factor,
        call.name,
    )


def _ratio(
    new: KernelCall | None,
    new_machine: Machine,
    old: KernelCall | None,
    old_machine: Machine,
    models: Counter[str],
    factor: float = 1.0,
) -> float:
    """Predicted new time over predicted old time; without a model that of the bandwidths."""
    if new is not None and old is not None:
        try:
            after, before = predict(new, new_machine), predict(old, old_machine)
            ratio = after.seconds / before.seconds
            models[after.model] += 1
            return ratio
        except (PredictionError, ZeroDivisionError):
            pass  # a machine without the figure, or a kernel without work
    models["bandwidth"] += 1
    return factor * old_machine["bandwidth.memory"] / new_machine["bandwidth.memory"]


def _notes(machine: Machine) -> tuple[str, ...]:
    return (machine.note,) if machine.note else ()


def _counted(models: Counter[str]) -> str:
    return ", ".join(f"{count} kernels by {name}" for name, count in models.most_common())


def device_machine(device: str | Machine) -> Machine:
    """Machine of a device by the name that its driver gives it, ``Tesla V100-SXM2-32GB``.

    A trace without a device is of a CPU, and taken as of this one.

    Raises ``PredictionError`` if it is none of the known machines.
    """
    if isinstance(device, Machine):
        return device
    if not device:  # A trace has no name of a CPU.
        from .machines import NATIVE, find_machine

        return find_machine(NATIVE)
    words = device.lower().replace("-", " ").split()
    for name in known_machines():
        model, _, memory = name.partition("-")
        sizes = [word for word in words if word.endswith("gb")]
        rest = set(memory.split("-")) - {"", "sxm", "40", "80"}  # such as of an RTX PRO 6000
        fits = not memory or not sizes or f"{memory}gb" in sizes
        if model in words and fits and rest <= set(words):
            return load_machine(name)
    known = ", ".join(known_machines())
    raise PredictionError(
        f"the traces' device {device!r} is not a known machine; known are {known}"
    )


def _known_machine(device: str | Machine) -> Machine | None:
    """The device's machine; None for one that is unknown, or for a CPU that has no name."""
    try:
        return device_machine(device) if device else None
    except PredictionError:
        return None


def _link(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    return _on_link(graphs, load_collectives(Path(value)), len(graphs))


def _ranks(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    number, _, file = value.partition(":")
    if not number.isdecimal() or not int(number) or not file:
        raise PredictionError(f"ranks={value}: expected ranks=N:FILE")
    return _on_link(graphs, load_collectives(Path(file)), int(number), forced=True)


def _on_link(
    graphs: Sequence[ExecutionGraph], curves: Collectives, ranks: int, forced: bool = False
) -> ChangedRun:
    models: Counter[str] = Counter()
    messages: dict[tuple[str, int], float] = {}
    for part in (kernel.collective for graph in graphs for kernel in graph.kernels):
        if part is not None:
            key = part.group, part.sequence
            messages[key] = max(messages.get(key, 0.0), part.bytes)
    if not messages:
        raise PredictionError("link, ranks and bucket change collectives; this run has none")

    def seconds(kernel: Kernel) -> float:
        part = kernel.collective
        message = messages[part.group, part.sequence] if part is not None else 0.0
        if part is None or not message:
            return kernel.seconds
        size = ranks if forced else len(part.ranks) or ranks
        time = curves.predict(part.kind, size, message)
        models[time.model if time.in_range else f"{time.model} out of range"] += 1
        return time.seconds

    return ChangedRun(tuple(retime(g, seconds) for g in graphs), (f"link: {_counted(models)}",))


def _bucket(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    size, _, file = value.partition(":")
    if not file:
        raise PredictionError(f"bucket={value}: expected bucket=MB:FILE")
    curves = load_collectives(Path(file))

    def seconds(kernel: Kernel, message: float) -> float:
        part = kernel.collective
        assert isinstance(part, Collective), "only all-reduces are merged"
        return curves.predict(part.kind, len(part.ranks) or len(graphs), message).seconds

    return ChangedRun(tuple(rebucket(graphs, _number("bucket", size) * 1e6, seconds)))


def _sharding(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    sharder, _, file = value.partition(":")
    curves = load_collectives(Path(file)) if file else None
    return ChangedRun(*reshard(graphs, sharder, _known_machine(device), curves))


def _graph(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    return ChangedRun(tuple(map(launch_graphs, graphs)))


def _fuse(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    match, machine = matching(graphs, "fuse", value), _known_machine(device)
    models: Counter[str] = Counter()

    def total(kernels: Sequence[Kernel]) -> float:
        seconds = sum(kernel.seconds for kernel in kernels)
        share, model = _fused_share([kernel.call for kernel in kernels], machine)
        models[model] += 1
        return seconds * share

    fused = tuple(fuse(graph, match, total) for graph in graphs)
    return ChangedRun(fused, (f"fused: {_counted(models)}",) if models else ())


def _fused_share(calls: Sequence[KernelCall | None], machine: Machine | None) -> tuple[float, str]:
    """Predicted time of one kernel in place of several, over the sum of theirs, and the model.

    Tables of embedding bags are looked up in one launch, and what element-wise operators hand on
    to the next one stays in registers. Of others nothing is known: they take the sum.
    """
    known = [call for call in calls if call is not None]
    unknown = 1.0, "the sum of their parts"
    if machine is None or len(known) != len(calls):
        return unknown
    try:
        before = sum(predict(call, machine).device_seconds for call in known)
        if {call.op for call in known} <= _BAGS and len({call.op for call in known}) == 1:
            is_backward = known[0].op.endswith("backward")
            tables = [table for call in known for table in tables_of(call)]
            after = predict_lookups(tables, machine, is_backward)
        elif {call.op for call in known} <= STREAMING:
            after = predict(_joined(known), machine)
        else:
            return unknown
        return min(after.device_seconds / before, 1.0), after.model
    except (PredictionError, ZeroDivisionError):
        return unknown  # a machine without the figure, or kernels without work


def _joined(calls: Sequence[KernelCall]) -> KernelCall:
    """Element-wise operators as one, of which each reads what the one before it wrote."""
    handed = [
        min(one.written_bytes, other.read_bytes)
        for one, other in zip(calls, calls[1:], strict=False)
    ]
    return KernelCall(
        "elementwise",
        {},
        calls[-1].dtype,
        sum(call.flops for call in calls),
        sum(call.read_bytes for call in calls) - sum(handed),
        sum(call.written_bytes for call in calls) - sum(handed),
    )


def _remove(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    match = matching(graphs, "remove", value)
    return ChangedRun(tuple(remove(graph, match) for graph in graphs))


def _resize(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    pattern, _, factor = value.rpartition(":")
    match = matching(graphs, "resize", pattern)
    return ChangedRun(tuple(resize(g, match, _number("resize", factor)) for g in graphs))


def _parallelize(graphs: Sequence[ExecutionGraph], value: str, device: str | Machine) -> ChangedRun:
    match = matching(graphs, "parallelize", value)
    return ChangedRun(tuple(parallelize(graph, match) for graph in graphs))


def matching(graphs: Sequence[ExecutionGraph], name: str, pattern: str) -> Match:
    """Match operators by a regular expression, refused if it matches none."""
    match = named(pattern)
    if not pattern or not any(match(op) for graph in graphs for op in graph.ops):
        raise PredictionError(f"{name}={pattern}: matches no operator")
    return match


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise PredictionError(f"{name}: {text!r} is not a positive, finite number")
    return number


_CHANGES: dict[str, Callable[[Sequence[ExecutionGraph], str, str | Machine], ChangedRun]] = {
    "machine": _machine,
    "batch": _batch,
    "link": _link,
    "ranks": _ranks,
    "bucket": _bucket,
    "sharding": _sharding,
    "graph": _graph,
    "fuse": _fuse,
    "remove": _remove,
    "resize": _resize,
    "parallelize": _parallelize,
}


@dataclass(frozen=True)
class Scenario:
    """Graphs of all ranks and the costs of their hosts; each method returns a changed one."""

    graphs: tuple[ExecutionGraph, ...]  # Graph of each rank.
    costs: HostCosts  # Overheads of the host.
    device: str | Machine  # Device that the times are of; a name as the driver gives it.
    notes: tuple[str, ...] = ()  # What times rest on that were not measured.

    def change(self, text: str) -> Scenario:
        """Make the changes of a text, see :func:`tvm_fusion.prediction.what_if.change`.

        Raises ``PredictionError`` if a change is unknown, its value is wrong, or it matches no
        operator.
        """
        after = change(self.graphs, text, self.device)
        return replace(self, graphs=after.graphs, notes=(*self.notes, *after.notes))

    def insert(self, index: int, *ops: Op) -> Scenario:
        """Put operators before the one at an index, on all ranks; their kernels need new ids."""
        return self._each(lambda graph: edits.insert(graph, index, *ops))

    def remove(self, pattern: str) -> Scenario:
        """Leave out the operators whose names hold a regular expression."""
        match = matching(self.graphs, "remove", pattern)
        return self._each(lambda graph: edits.remove(graph, match))

    def replace(self, pattern: str, ops: Callable[[Op], Iterable[Op]]) -> Scenario:
        """Put others in place of operators; kernels that are waited for keep their ids."""
        match = matching(self.graphs, "replace", pattern)
        return self._each(lambda graph: edits.replace(graph, match, ops))

    def resize(self, pattern: str, factor: float) -> Scenario:
        """Multiply the times of the kernels of operators."""
        match = matching(self.graphs, "resize", pattern)
        return self._each(lambda graph: edits.resize(graph, match, factor))

    def parallelize(self, pattern: str) -> Scenario:
        """Give each of a run of neighbouring operators a stream of its own."""
        match = matching(self.graphs, "parallelize", pattern)
        return self._each(lambda graph: edits.parallelize(graph, match))

    def _each(self, edit: Callable[[ExecutionGraph], ExecutionGraph]) -> Scenario:
        return replace(self, graphs=tuple(map(edit, self.graphs)))

    def simulate(self) -> Timeline:
        """Simulate all ranks.

        Raises
        ------
        PredictionError
            If they do not meet in their collectives.
        """
        return simulate(self.graphs, self.costs)

    def answer(self, question: str, before: float) -> Answer:
        """Time of this run beside that of another one, in seconds, and what is critical."""
        after = report(question, self.simulate())
        return Answer(question, after.seconds, before - after.seconds, after.path[0], self.notes)
