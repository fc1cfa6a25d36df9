# SPDX-License-Identifier: Apache-2.0
"""Edits of execution graphs: what would be, if. Each returns a new graph.

After section 4.5.1 of the dissertation: insert, remove, replace, resize, parallelize and fuse; and
new times of kernels, buckets of collectives, and one launch for many kernels.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as changed

from ...errors import PredictionError
from .execution_graph import HOST, ExecutionGraph, Kernel, Launch, Op, Wait

Match = Callable[[Op], bool]


def named(pattern: str) -> Match:
    """Match operators whose name holds a regular expression.

    Raises ``PredictionError`` if it is none.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise PredictionError(f"{pattern!r} is not a regular expression: {error}") from None
    return lambda op: compiled.search(op.name) is not None


def insert(graph: ExecutionGraph, index: int, *ops: Op) -> ExecutionGraph:
    """Put operators before the one at an index; their kernels need ids of their own."""
    if not 0 <= index <= len(graph.ops):
        raise PredictionError(f"no place {index} among {len(graph.ops)} operators")
    return changed(graph, ops=(*graph.ops[:index], *ops, *graph.ops[index:]))


def remove(graph: ExecutionGraph, match: Match) -> ExecutionGraph:
    """Leave out operators; what waited for their kernels waits for what those waited for."""
    gone = {kernel.id: kernel.after for op in graph.ops if match(op) for kernel in op.kernels}
    kept = tuple(op for op in graph.ops if not match(op))
    return _redirected(changed(graph, ops=kept), gone)


def replace(
    graph: ExecutionGraph, match: Match, ops: Callable[[Op], Iterable[Op]]
) -> ExecutionGraph:
    """Put others in place of operators; kernels that are waited for keep their ids."""
    return changed(
        graph,
        ops=tuple(new for op in graph.ops for new in (ops(op) if match(op) else (op,))),
    )


def retime(graph: ExecutionGraph, seconds: Callable[[Kernel], float]) -> ExecutionGraph:
    """Give every kernel of a device or a collective a new time: of another machine or batch.

    Of the host's, operators of a CPU have one, other work has not.
    """
    return map_kernels(
        graph,
        lambda kernel, _: (
            kernel
            if kernel.stream == HOST and kernel.collective is None and kernel.call is None
            else changed(kernel, seconds=seconds(kernel))
        ),
    )


def resize(graph: ExecutionGraph, match: Match, factor: float) -> ExecutionGraph:
    """Multiply the times of the kernels of operators."""
    if not 0 <= factor < float("inf"):
        raise PredictionError(f"factor {factor}; expected a finite number of 0 or more")

    def resized(kernel: Kernel, op: Op) -> Kernel:
        return changed(kernel, seconds=kernel.seconds * factor) if match(op) else kernel

    return map_kernels(graph, resized)


def fuse(
    graph: ExecutionGraph,  # What to change.
    match: Match,  # Operators to fuse.
    # Time of the kernel that takes the place of several.
    seconds: Callable[[Sequence[Kernel]], float],
) -> ExecutionGraph:
    """Make each run of neighbouring operators one operator with one kernel.

    A run ends at a wait, a collective, another thread, or an operator that does not match.
    """
    ops: list[Op] = []
    twins: dict[int, tuple[int, ...]] = {}

    def kind(op: Op) -> tuple[bool, int]:
        return match(op) and _is_plain(op), op.thread

    for (fits, _), group in itertools.groupby(graph.ops, kind):
        run = list(group)
        kernels = [kernel for op in run for kernel in op.kernels]
        if not fits or len(kernels) < 2:
            ops += run
            continue
        first = next(step for op in run for step in op.steps if isinstance(step, Launch))
        own = {kernel.id for kernel in kernels}
        after = dict.fromkeys(id_ for kernel in kernels for id_ in kernel.after if id_ not in own)
        kernel = changed(kernels[-1], seconds=seconds(kernels), after=tuple(after))
        ops.append(changed(run[0], steps=(changed(first, kernel=kernel),), events=()))
        twins |= {id_: (kernel.id,) for id_ in own - {kernel.id}}
    return _redirected(changed(graph, ops=tuple(ops)), twins)


def parallelize(graph: ExecutionGraph, match: Match) -> ExecutionGraph:
    """Give each of a run of neighbouring operators a stream of its own.

    Their first kernels wait for what came before the run, and the next kernel waits for all.
    """
    highest = max((kernel.stream for kernel in graph.kernels), default=0)
    ops: list[Op] = []
    last: int | None = None
    joined: tuple[int, ...] = ()
    for fits, group in itertools.groupby(graph.ops, lambda op: match(op) and _is_plain(op)):
        fork, ends = last, list[int]()
        for branch, op in enumerate(group):
            steps = []
            for step in op.steps:
                if isinstance(step, Launch) and step.kernel.stream != HOST:
                    kernel = step.kernel
                    if fits and branch:
                        before = () if fork is None else (fork,)
                        kernel = changed(
                            kernel, stream=highest + branch, after=(*kernel.after, *before)
                        )
                    elif joined:
                        kernel = changed(kernel, after=(*kernel.after, *joined))
                        joined = ()
                    step = changed(step, kernel=kernel)
                    last = kernel.id
                    ends = [*ends, kernel.id] if fits else []
                steps.append(step)
            ops.append(changed(op, steps=tuple(steps)))
        joined = tuple(ends) if fits else joined
    return changed(graph, ops=tuple(ops))


def launch_graphs(graph: ExecutionGraph) -> ExecutionGraph:
    """Launch each run of neighbouring operators by one call, as a captured graph.

    A run ends at a wait, a blocking copy, a collective, host work, or another thread. Operators
    without kernels in it cost nothing any more.
    """
    ops: list[Op] = []
    for (fits, _), group in itertools.groupby(graph.ops, lambda op: (_is_plain(op), op.thread)):
        run = list(group)
        steps = tuple(step for op in run for step in op.steps)
        if fits and len(steps) > 1:
            ops.append(Op("graph launch", steps, run[0].thread, run[0].follows, graph=True))
        else:
            ops += run
    return changed(graph, ops=tuple(ops))


def rebucket(
    graphs: Sequence[ExecutionGraph],
    bucket: float,  # Most bytes of a merged message.
    # Time of an all-reduce, given as one of its kernels, of so many bytes.
    seconds: Callable[[Kernel, float], float],
) -> list[ExecutionGraph]:
    """Merge neighbouring all-reduces of a group, as long as they fit into a bucket.

    The merged one takes the place of the last. The same ones are merged on all ranks.
    """
    return [_rebucketed(graph, bucket, seconds) for graph in graphs]


def _rebucketed(
    graph: ExecutionGraph, bucket: float, seconds: Callable[[Kernel, float], float]
) -> ExecutionGraph:
    groups: dict[str, list[list[Kernel]]] = {}
    for kernel in graph.kernels:
        part = kernel.collective
        if part is None:
            continue
        buckets = groups.setdefault(part.group, [])
        reduces = part.kind == "all_reduce"
        size = (
            sum(member.collective.bytes for member in buckets[-1] if member.collective)
            if buckets
            else 0
        )
        if buckets and buckets[-1] and reduces and size + part.bytes <= bucket:
            buckets[-1].append(kernel)
        else:
            buckets.append([kernel] if reduces else [])
    merged: dict[int, tuple[Kernel, float]] = {}
    gone: dict[int, tuple[int, ...]] = {}
    for members in (members for buckets in groups.values() for members in buckets):
        if len(members) < 2:
            continue
        total = sum(member.collective.bytes for member in members if member.collective)
        last = members[-1]
        merged[last.id] = last, total
        gone |= {member.id: (last.id,) for member in members[:-1]}

    def kept(op: Op) -> Op:
        steps = tuple(
            step for step in op.steps if isinstance(step, Wait) or step.kernel.id not in gone
        )
        return op if len(steps) == len(op.steps) else changed(op, steps=steps, events=())

    def grown(kernel: Kernel, _: Op) -> Kernel:
        if kernel.id not in merged or kernel.collective is None:
            return kernel
        total = merged[kernel.id][1]
        part = changed(kernel.collective, bytes=total)
        return changed(kernel, collective=part, seconds=seconds(kernel, total))

    shorter = _redirected(changed(graph, ops=tuple(map(kept, graph.ops))), gone, late=True)
    return map_kernels(shorter, grown)


def _is_plain(op: Op) -> bool:
    """True if an operator only launches kernels of the device."""
    return not (op.graph or op.after) and all(
        isinstance(step, Launch)
        and not step.blocking
        and step.kernel.stream != HOST
        and step.kernel.collective is None
        for step in op.steps
    )


def map_kernels(graph: ExecutionGraph, change: Callable[[Kernel, Op], Kernel]) -> ExecutionGraph:
    """Change every kernel, given with its operator; the id stays."""

    def renewed(op: Op, step: Launch | Wait) -> Launch | Wait:
        if isinstance(step, Wait):
            return step
        return changed(step, kernel=change(step.kernel, op))

    ops = (changed(op, steps=tuple(renewed(op, step) for step in op.steps)) for op in graph.ops)
    return changed(graph, ops=tuple(ops))


def _redirected(
    graph: ExecutionGraph, others: Mapping[int, tuple[int, ...]], late: bool = False
) -> ExecutionGraph:
    """Wait for others in place of kernels that are gone.

    With ``late`` a kernel that comes before the other one waits for neither: it could not.
    """
    if not others:
        return graph
    seen = {kernel.id for kernel in graph.queued}

    def awaited(ids: tuple[int, ...]) -> tuple[int, ...]:
        targets: dict[int, None] = {}
        todo = list(ids)
        while todo:
            id_ = todo.pop(0)
            if id_ in others:
                todo += others[id_]
            elif id_ in seen or not late:
                targets[id_] = None
        return tuple(targets)

    ops = []
    for op in graph.ops:
        first = awaited(op.after)
        steps: list[Launch | Wait] = []
        for step in op.steps:
            if isinstance(step, Launch):
                kernel = changed(step.kernel, after=awaited(step.kernel.after))
                steps.append(changed(step, kernel=kernel))
                seen.add(kernel.id)
            else:
                after = None if step.after is None else awaited(step.after)
                steps.append(changed(step, after=after))
        ops.append(changed(op, steps=tuple(steps), after=first))
    return changed(graph, ops=tuple(ops))
