# SPDX-License-Identifier: Apache-2.0
"""Number of steps of a Loop whose condition is computed from counters.

::

    Loop(condition, i = 0, state):  i_1 = i + 1;  state_1 = f(state, x[i]);  condition = i_1 < 7

Exporters write the layers of TensorFlow and Keras in this way. What the condition needs of the body
is run here until it is false.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from ...model.graph_edits import attribute, is_default_domain
from ...model.tensor_facts import GraphFacts
from ...model.weights import to_array

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
    wanted = sorted({body.output[0].name, *kept.values()} - values.keys())
    opsets = [helper.make_opsetid("", _OPSET)]
    function = helper.make_function("count", "count", list(values), wanted, nodes, opsets)
    evaluator = ReferenceEvaluator(function)
    for step in range(most):
        values[number] = np.array(step, np.int64)
        found = values | dict(zip(wanted, evaluator.run(None, values, attributes={}), strict=True))
        values |= {state: found[result] for state, result in kept.items()}
        values[condition] = np.asarray(found[body.output[0].name])
        if not values[condition].all():
            return step + 1
    return most
