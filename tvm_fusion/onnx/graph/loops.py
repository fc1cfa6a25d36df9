# SPDX-License-Identifier: Apache-2.0
"""Scan and Loop: their number of steps, and one copy of the body for each step.

A Loop may compute its condition from counters::

    Loop(condition, i = 0, state):  i_1 = i + 1;  state_1 = f(state, x[i]);  condition = i_1 < 7

Exporters write the layers of TensorFlow and Keras in this way. What the condition needs of the body
is run here until it is false.

A step's outputs are stacked at the end::

    y = Scan(s, x, body={ t, u = f(s, x) })

becomes, with two steps::

    s_1, u_0 = f(s, x[0]);    s_2, u_1 = f(s_1, x[1]);    y = s_2, Concat(u_0, u_1)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ..model.expansion import Expansion, inherit_conditions
from ..model.graph_edits import attribute, is_default_domain, replace_nodes
from ..model.tensor_facts import GraphFacts
from ..model.weights import to_array
from .branches import Body
from .independent_steps import steps_at_once

_ARITHMETIC = frozenset(
    """Add And Cast Constant Equal Greater GreaterOrEqual Identity Less LessOrEqual Mul Not Or
    Sub""".split()
)
"""Operators of counters; the same in all versions from 13 to 17."""

_OPSET = 17

_MOST_ELEMENTS = 16
"""A state of more elements is no counter."""


def counted_steps(node: onnx.NodeProto, facts: GraphFacts, most: int) -> int | None:
    """Number of steps of a Loop that begins, at most ``most``; None if it depends on data."""
    body: onnx.GraphProto = attribute(node, "body")
    states = [value.name for value in body.input[2:]]
    results = [value.name for value in body.output[1 : 1 + len(states)]]
    needed, nodes = _needed(body, dict(zip(states, results, strict=True)))
    values = {tensor.name: to_array(tensor) for tensor in body.initializer}
    values = {name: value for name, value in values.items() if name in needed}
    starts = dict(zip(states, node.input[2:], strict=True))
    made = {name for inner in nodes for name in inner.output}
    for name in needed - made - values.keys() - {value.name for value in body.input[:2]}:
        value = facts.constant(starts.get(name, name))
        if value is None or value.size > _MOST_ELEMENTS:
            return None
        values[name] = value
    if not all(is_default_domain(inner) and inner.op_type in _ARITHMETIC for inner in nodes):
        return None
    return _run(body, nodes, values, dict(zip(states, results, strict=True)), most)


def _needed(body: onnx.GraphProto, states: dict[str, str]) -> tuple[set[str], list[onnx.NodeProto]]:
    """Names that the condition needs in any step, and the nodes that compute them."""
    producers = {name: inner for inner in body.node for name in inner.output}
    needed: set[str] = set()
    waiting = [body.output[0].name]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in producers:
            waiting += [each for each in producers[name].input if each]
        elif name in states:
            waiting.append(states[name])
    return needed, [inner for inner in body.node if needed.intersection(inner.output)]


def _run(
    body: onnx.GraphProto,
    nodes: list[onnx.NodeProto],
    values: dict[str, np.ndarray],
    states: dict[str, str],
    most: int,
) -> int | None:
    """Count the steps until the condition is false."""
    number, condition = body.input[0].name, body.input[1].name
    values |= {number: np.array(0, np.int64), condition: np.array(True)}
    kept = {state: result for state, result in states.items() if state in values}
    names = sorted({body.output[0].name, *kept.values()} - values.keys())
    opsets = [helper.make_opsetid("", _OPSET)]
    function = helper.make_function("count", "count", list(values), names, nodes, opsets)
    evaluator = ReferenceEvaluator(function)
    for step in range(most):
        values[number] = np.array(step, np.int64)
        found = values | dict(zip(names, evaluator.run(None, values, attributes={}), strict=True))
        values |= {state: found[result] for state, result in kept.items()}
        values[condition] = np.asarray(found[body.output[0].name])
        if not values[condition].all():
            return step + 1
    return most


MAX_UNROLLED = 4000
"""Most nodes that the steps of one loop may become; each takes time to compile."""

GROUP = 16
"""Most tensors that one Concat joins; TVM compiles long ones slowly."""


def unroll_loops(model: onnx.ModelProto, facts: GraphFacts) -> bool:
    """Replace each Scan and Loop that :func:`loop_problem` accepts; return if there was one.

    The steps of a Scan that do not depend on each other are computed at once.
    """
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        is_loop = is_default_domain(node) and node.op_type in ("Scan", "Loop")
        is_scan = is_loop and node.op_type == "Scan"
        together = steps_at_once(model.graph, node, facts) if is_scan else None
        if together is not None:
            changed = True
            inherit_conditions(node, together)
            nodes += together
        elif is_loop and loop_problem(node, facts) is None:
            changed = True
            unrolled = _Unrolled(model.graph, node, facts)
            (unrolled.scan if is_scan else unrolled.loop)()
            inherit_conditions(node, unrolled.nodes)
            nodes += unrolled.nodes
        else:
            nodes.append(node)
    if changed:
        replace_nodes(model.graph, nodes)
    return changed


def loop_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a Scan or a Loop cannot be unrolled, if any."""
    steps = _scan_steps(node, facts) if node.op_type == "Scan" else _loop_steps(node, facts)
    if isinstance(steps, str):
        return steps
    count = steps * max(1, len(attribute(node, "body").node))
    if count > MAX_UNROLLED:
        return (
            f"its {steps} steps become {count} nodes, more than {MAX_UNROLLED}; expected fewer "
            "steps, or an operator such as LSTM"
        )
    if steps == 0:
        return "it has no steps, so its outputs may have no size"
    return None


def _scan_steps(node: onnx.NodeProto, facts: GraphFacts) -> int | str:
    count = attribute(node, "num_scan_inputs", 1)
    axes = attribute(node, "scan_input_axes", [0] * count)
    name = node.input[len(node.input) - count]
    shape = facts.dims(name)
    size = None if shape is None or not -len(shape) <= axes[0] < len(shape) else shape[axes[0]]
    return f"the size of {name!r} is only known at run time" if size is None else size


def _loop_steps(node: onnx.NodeProto, facts: GraphFacts) -> int | str:
    count = facts.constant(node.input[0]) if node.input[0] else None
    if node.input[0] and (count is None or count.size != 1):
        return "its number of steps depends on data; expected a constant"
    start = node.input[1] if len(node.input) > 1 else ""
    if start:
        condition = facts.constant(start)
        if condition is None:
            return "its condition depends on data; expected a constant"
        if not condition.all():
            return 0
    most = MAX_UNROLLED if count is None else max(0, int(count.item()))
    if _goes_on(attribute(node, "body")):
        return most if count is not None else "it never ends; expected a number of steps"
    steps = counted_steps(node, facts, min(most, MAX_UNROLLED))
    if steps is None:
        return "its condition to go on depends on data; expected a constant number of steps"
    return steps


def _goes_on(body: onnx.GraphProto) -> bool:
    """Return whether a loop's body passes its condition on, or always returns true."""
    name = body.output[0].name
    producers = {output: inner for inner in body.node for output in inner.output}
    while name in producers and producers[name].op_type in ("Identity", "Cast"):
        name = producers[name].input[0]
    if name == body.input[1].name:
        return True
    values = {tensor.name: tensor for tensor in body.initializer}
    if name in producers and producers[name].op_type == "Constant":
        values[name] = attribute(producers[name], "value") or onnx.TensorProto()
    tensor = values.get(name)
    return tensor is not None and bool(onnx.numpy_helper.to_array(tensor).all())


class _Unrolled(Expansion):
    """The nodes that take the place of a loop."""

    def __init__(self, graph: onnx.GraphProto, node: onnx.NodeProto, facts: GraphFacts) -> None:
        super().__init__(node, facts)
        self._graph: onnx.GraphProto = attribute(node, "body")
        self._body = Body(graph, self._graph, facts)
        self._inputs = [value.name for value in self._graph.input]

    def scan(self) -> None:
        """Unroll a Scan."""
        node, facts = self.node, self.facts
        count = attribute(node, "num_scan_inputs", 1)
        states, sequences = list(node.input[:-count]), list(node.input[-count:])
        axes = attribute(node, "scan_input_axes", [0] * count)
        backwards = attribute(node, "scan_input_directions", [0] * count)
        steps = facts.dims(sequences[0])[axes[0]]  # type: ignore[index]
        outputs: list[list[str]] = []
        for step in range(steps):
            slices = [
                self._take(name, steps - 1 - step if back else step, axis)
                for name, axis, back in zip(sequences, axes, backwards, strict=True)
            ]
            results = self._step([*states, *slices])
            states = results[: len(states)]
            outputs.append(results[len(states) :])
        parts = list(map(list, zip(*outputs, strict=True)))
        for part, back in zip(
            parts, attribute(node, "scan_output_directions", [0] * len(parts)), strict=True
        ):
            if back:
                part.reverse()
        self._finish(states, parts, attribute(node, "scan_output_axes", [0] * len(parts)))

    def loop(self) -> None:
        """Unroll a Loop."""
        node, facts = self.node, self.facts
        steps = _loop_steps(node, facts)
        assert isinstance(steps, int), "a loop of unknown length was refused"
        true = self.constant("condition", np.array(True))
        states = list(node.input[2:])
        outputs: list[list[str]] = []
        for step in range(steps):
            number = self.constant("step", np.array(step, np.int64))
            results = self._step([number, true, *states])[1:]
            states = results[: len(states)]
            outputs.append(results[len(states) :])
        parts = list(map(list, zip(*outputs, strict=True)))
        self._finish(states, parts, [0] * len(parts))

    def _step(self, inputs: Sequence[str]) -> list[str]:
        nodes, results = self._body.splice(dict(zip(self._inputs, inputs, strict=True)))
        self.nodes += nodes
        return results

    def _take(self, name: str, index: int, axis: int) -> str:
        place = self.constant("step", np.array(index, np.int64))
        return self.emit("Gather", name, place, axis=axis)

    def _finish(self, states: list[str], parts: list[list[str]], axes: Sequence[int]) -> None:
        """Name the last states and the stacked outputs as the loop named its own."""
        stacked = [
            self._stack(part, axis) if output else ""
            for part, axis, output in zip(parts, axes, self.node.output[len(states) :], strict=True)
        ]
        self.finish(*states, *stacked)

    def _stack(self, parts: list[str], axis: int) -> str:
        place = self.constant("axis", np.array([axis], np.int64))
        parts = [self.emit("Unsqueeze", part, place) for part in parts]
        while len(parts) > 1:
            groups = [parts[start : start + GROUP] for start in range(0, len(parts), GROUP)]
            parts = [self.emit("Concat", *group, axis=axis) for group in groups]
        return parts[0]
