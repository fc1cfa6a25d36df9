# SPDX-License-Identifier: Apache-2.0
"""Execution traces of PyTorch (``ExecutionTraceObserver``), schemas 1.0.1 to 1.1.1.

They tell what Kineto does not: which tensors an operator reads and writes, and the arguments of
collectives. Nodes are linked to the events of a Kineto trace of the same step.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import PredictionError
from .kineto import WITH_VALUES, HostEvent, KinetoTrace, ProcessGroup, json_items, process_groups

SCHEMAS = ("1.0.1", "1.0.2", "1.0.3", "1.0.4", "1.1.0", "1.1.1")
"""Schemas that are read; 1.0.2 and later may end in ``-chakra.0.0.4``."""

_STRUCTURE = re.compile(
    r"\[pytorch\|profiler\|execution_(graph|trace)\|(process|thread)\]|## process_group:init ##"
)
_GROUPS = "## process_group:init ##"
_TENSOR = 6
"""Entries of a tensor: id, storage, offset, elements, bytes of each, device."""

_LOOK_AHEAD = 16
"""Events of Kineto that may lie between two nodes of a thread."""

_COLLECTIVE_ATTRIBUTES = {
    "collective_name": "Collective name",
    "dtype": "dtype",
    "in_msg_nelems": "In msg nelems",
    "out_msg_nelems": "Out msg nelems",
    "pg_name": "Process Group Name",
    "pg_size": "Group size",
}


@dataclass(slots=True)
class Node:
    """Call of an operator."""

    id: int
    parent: int
    """``id`` and ``parent``: number in the order of the calls, and that of the caller."""
    name: str  # Operator or annotation.
    record_function: int  # Number that Kineto calls ``Record function id``.
    thread: int  # Number of the thread, from 1 on.
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    """``reads`` and ``writes``: storages of the tensors that go in and come out."""
    shapes: tuple = ()
    types: tuple = ()
    """``shapes`` and ``types``: dimensions and types of what goes in."""
    values: tuple = ()  # Operands that are no tensors, as in the events of Kineto.
    collective: Mapping[str, Any] | None = None
    """Arguments of a collective under the names that Kineto gives them."""


@dataclass
class ExecutionTrace:
    """Nodes of a trace in the order of their calls."""

    path: Path  # File.
    schema: str = ""  # Version of the format.
    nodes: list[Node] = field(default_factory=list)  # Nodes by id.
    groups: tuple[ProcessGroup, ...] = ()  # Process groups of the rank, of schema 1.0.3 and later.


def read_execution_trace(path: Path) -> ExecutionTrace:
    """Read an execution trace, plain or gzip.

    Raises ``PredictionError`` if the file is cut off or no execution trace, its schema is unknown,
    a node lacks a field, or nodes call each other in a cycle: the message names file and node.
    """
    trace = ExecutionTrace(path)
    for name, value in json_items(path, "nodes"):
        if name == "schema":
            trace.schema = str(value)
            if trace.schema.split("-")[0] not in SCHEMAS:
                known = ", ".join(SCHEMAS)
                raise PredictionError(f"{path}: schema {value!r} is unknown; expected {known}")
        elif name == "nodes":
            if not trace.schema:
                raise PredictionError(f"{path}: no schema before its nodes")
            trace.nodes.append(_node(path, value))
            if trace.nodes[-1].name == _GROUPS:
                trace.groups = _groups(value)
    if not trace.nodes:
        raise PredictionError(f"{path}: no nodes; expected an execution trace of PyTorch")
    trace.nodes.sort(key=lambda node: node.id)
    _refuse_cycles(trace)
    return trace


def link(execution: ExecutionTrace, trace: KinetoTrace) -> dict[int, HostEvent]:
    """Find the Kineto event of each node, by the node's id.

    By ``Record function id`` where Kineto has it; else by the names of a thread in their order,
    which an annotation around the step may precede. What was found is added to the events:
    shapes, types, storages and arguments of collectives. Others are counted as problems.
    """
    trace.groups = trace.groups or execution.groups
    events = _by_record_function(execution, trace) or _by_order(execution, trace)
    for node in execution.nodes:
        event = events.get(node.id)
        if event is None:
            if not _STRUCTURE.fullmatch(node.name):
                trace.count_problem(
                    f"nodes of {execution.path.name} without their event",
                    f"{node.name} (id {node.id})",
                )
            continue
        event.shapes = event.shapes or node.shapes
        event.types = event.types or node.types
        event.values = event.values or node.values
        event.collective = event.collective or node.collective
        event.reads, event.writes = node.reads, node.writes
    return events


def _by_record_function(execution: ExecutionTrace, trace: KinetoTrace) -> dict[int, HostEvent]:
    events = {e.record_function: e for e in trace.host if e.record_function > 0}
    return {
        node.id: event
        for node in execution.nodes
        if (event := events.get(node.record_function)) is not None and event.name == node.name
    }


def _by_order(execution: ExecutionTrace, trace: KinetoTrace) -> dict[int, HostEvent]:
    """Pair threads whose names agree in order; names that only Kineto has may lie between."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    for node in execution.nodes:
        if not _STRUCTURE.fullmatch(node.name):
            nodes[node.thread].append(node)
    events: dict[int, list[HostEvent]] = defaultdict(list)
    for event in sorted(trace.host, key=lambda event: event.external):
        if event.kind != "runtime" and event.external >= 0:
            events[event.thread].append(event)
    found: dict[int, HostEvent] = {}
    for own in nodes.values():
        pairs = max((_align(own, theirs) for theirs in events.values()), key=len, default={})
        found.update(pairs)
    return found


def _align(nodes: list[Node], events: list[HostEvent]) -> dict[int, HostEvent]:
    pairs: dict[int, HostEvent] = {}
    position = 0
    for node in nodes:
        near = range(position, min(position + _LOOK_AHEAD, len(events)))
        ahead = next((index for index in near if events[index].name == node.name), None)
        if ahead is not None:
            pairs[node.id] = events[ahead]
            position = ahead + 1
    return pairs


def _node(path: Path, value: Any) -> Node:
    if not isinstance(value, dict):
        raise PredictionError(f"{path}: a node is {value!r}; expected an object")
    attributes = value
    if isinstance(value.get("attrs"), list):
        attributes = {
            entry["name"]: entry.get("value")
            for entry in value["attrs"]
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
    parent = value.get("ctrl_deps", value.get("parent"))
    numbers = {
        "id": value.get("id"),
        "parent": parent,
        "rf_id": attributes.get("rf_id", 0),
        "tid": attributes.get("tid"),
    }
    for name, number in numbers.items():
        if type(number) is not int:
            raise PredictionError(
                f"{path}: node {value.get('id')} ({value.get('name')}): {name} is {number!r}; "
                "expected an integer"
            )
    inputs, shapes, types = _operands(value, "input")
    outputs, _, _ = _operands(value, "output")
    name = str(value.get("name", ""))
    if name.startswith("c10d::") and name != "c10d::send" and isinstance(inputs, list):
        outputs = inputs[:1]  # it returns its work, and writes its first operand
    return Node(
        value["id"],
        numbers["parent"],
        name,
        numbers["rf_id"],
        numbers["tid"],
        tuple(_storages(inputs)),
        tuple(_storages(outputs)),
        _frozen(shapes),
        _frozen(types),
        _numbers(inputs) if name.startswith(WITH_VALUES) else (),
        _collective(name, attributes, inputs),
    )


def _operands(value: dict, side: str) -> tuple[Any, Any, Any]:
    """Values, shapes and types of inputs or outputs, in either form of the format."""
    entry = value.get(f"{side}s", [])
    if isinstance(entry, dict):
        return entry.get("values", []), entry.get("shapes", []), entry.get("types", [])
    return entry, value.get(f"{side}_shapes", []), value.get(f"{side}_types", [])


def _numbers(values: Any) -> tuple:
    """Operands as text, empty where they are no numbers or lists of them."""
    each = values if isinstance(values, list) else ()
    return tuple(
        str(value) if isinstance(value, int | float) or _is_numbers(value) else "" for value in each
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _storages(values: Any) -> Iterator[int]:
    """Storages of the tensors among values; lists of tensors are walked."""
    if not isinstance(values, list):
        return
    numbers = len(values) == _TENSOR and all(isinstance(entry, int) for entry in values[:5])
    if numbers and isinstance(values[5], str):
        yield values[1]
        return
    for entry in values:
        yield from _storages(entry)


def _collective(name: str, attributes: dict, inputs: Any) -> Mapping[str, Any] | None:
    """Arguments of a collective: attributes since 1.1.0, before that the inputs of the call."""
    if name != "record_param_comms":
        return None
    pairs = _COLLECTIVE_ATTRIBUTES.items()
    known = {kineto: attributes[own] for own, kineto in pairs if own in attributes}
    if not known and isinstance(inputs, list):
        names = [entry for entry in inputs if isinstance(entry, str) and entry.isidentifier()]
        known = {"Collective name": names[0]} if names else {}
        groups = [entry for entry in inputs if _is_group(entry)]
        known |= {"Process Group Name": groups[0][0]} if names and groups else {}
    return known if known.get("Collective name") not in (None, "wait", "") else None


def _is_group(entry: Any) -> bool:
    """True for the name and the description of a process group, which schemas before 1.1.0 have."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)


def _groups(value: Any) -> tuple[ProcessGroup, ...]:
    """Process groups of a rank, which a node tells as JSON."""
    inputs, _, _ = _operands(value, "input")
    try:
        return process_groups(json.loads(inputs[0]))
    except (ValueError, TypeError, IndexError, KeyError):
        return ()


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _refuse_cycles(trace: ExecutionTrace) -> None:
    parents = {node.id: node.parent for node in trace.nodes}
    checked: set[int] = set()
    for node in trace.nodes:
        path: set[int] = set()
        ancestor = node.id
        while ancestor in parents and ancestor not in checked and parents[ancestor] != ancestor:
            if ancestor in path:
                raise PredictionError(
                    f"{trace.path}: node {ancestor} ({node.name}) calls itself through its parents"
                )
            path.add(ancestor)
            ancestor = parents[ancestor]
        checked |= path
