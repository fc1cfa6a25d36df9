# SPDX-License-Identifier: Apache-2.0
"""Scans whose steps do not depend on each other: one computation of all steps.

Exporters write distances between the rows of two matrices, and other maps over rows, as a Scan
whose states only pass through::

    y = Scan(a, b, body={ s = a; u = ReduceSum(Sub(a, b), axes=1) })

becomes element-wise operators and reductions of tensors with one more axis, the first::

    y = ReduceSum(Sub(a, Unsqueeze(b, 1)), axes=-1)

So the number of steps may be large, or open.
"""

from __future__ import annotations

import onnx

from ..model.expansion import Expansion
from ..model.graph_edits import attribute, is_default_domain, set_attributes
from ..model.tensor_facts import GraphFacts
from ..model.weights import to_array
from .branches import Body
from .fold import BROADCASTING

_ELEMENT_WISE = BROADCASTING | frozenset(
    """Abs Cast Ceil Cos Erf Exp Floor Identity IsNaN Log Neg Not Reciprocal Relu Round Sigmoid Sign
    Sin Sqrt Tanh""".split()
)

_REDUCTIONS = frozenset(
    """ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum ReduceSumSquare""".split()
)

_ORDERS = (
    "scan_input_axes",
    "scan_input_directions",
    "scan_output_axes",
    "scan_output_directions",
)


def steps_at_once(
    graph: onnx.GraphProto, node: onnx.NodeProto, facts: GraphFacts
) -> list[onnx.NodeProto] | None:
    """The nodes that compute all steps of a Scan at once; None if this cannot.

    Parameters
    ----------
    graph : onnx.GraphProto
        The graph of the Scan, which gets the initialisers of its body.
    node : onnx.NodeProto
        The Scan.
    facts : GraphFacts
        Facts of the model.
    """
    if any(any(attribute(node, name, [])) for name in _ORDERS):
        return None
    body: onnx.GraphProto = attribute(node, "body")
    operators = _ELEMENT_WISE | _REDUCTIONS | {"Constant"}
    if not all(is_default_domain(each) and each.op_type in operators for each in body.node):
        return None
    together = _Together(graph, node, facts)
    return together.nodes if together.write() else None


class _Together(Expansion):
    """Writer of all steps; those values that differ between steps have an axis of steps first."""

    def __init__(self, graph: onnx.GraphProto, node: onnx.NodeProto, facts: GraphFacts) -> None:
        super().__init__(node, facts)
        body: onnx.GraphProto = attribute(node, "body")
        self._inputs = [value.name for value in body.input]
        self._body = Body(graph, body, facts)
        self._tensors = {tensor.name: tensor for tensor in graph.initializer}
        self._ranks: dict[str, int] = {}
        self._differing: set[str] = set()

    def write(self) -> bool:
        """Write the nodes; return whether all steps can be computed at once."""
        count = attribute(self.node, "num_scan_inputs", 1)
        states = list(self.node.input[:-count])
        slices = []
        for sequence in self.node.input[-count:]:
            dims = self.facts.dims(sequence)
            if not dims or dims[0] == 0:
                return False
            slices.append(self.emit("Identity", sequence))
            self._differing.add(slices[-1])
            self._ranks[slices[-1]] = len(dims) - 1
        nodes, results = self._body.splice(dict(zip(self._inputs, states + slices, strict=True)))
        passed = {name: name for name in states}
        for inner in nodes:
            if inner.op_type == "Identity":
                passed[inner.output[0]] = passed.get(inner.input[0], inner.output[0])
            if not self._append(inner):
                return False
        ends, stacked = results[: len(states)], results[len(states) :]
        if [passed.get(name) for name in ends] != states or not self._differing.issuperset(stacked):
            return False
        self.finish(*states, *stacked)
        return True

    def _append(self, inner: onnx.NodeProto) -> bool:
        """Append a node of the body, for all steps; return whether that can be."""
        self.nodes.append(inner)
        if inner.op_type == "Constant":
            self._tensors[inner.output[0]] = value = attribute(inner, "value")
            return value is not None
        ranks = [self._rank(name) for name in inner.input]
        known = [rank for rank in ranks if rank is not None]
        if len(known) < len(ranks):
            return False
        if inner.op_type in _REDUCTIONS:
            return self._reduce(inner, known[0])
        self._ranks[inner.output[0]] = highest = max(known)
        self.nodes.pop()
        for place, (name, rank) in enumerate(zip(inner.input, known, strict=True)):
            if name in self._differing and rank < highest:
                axes = self.integers(range(1, highest - rank + 1))
                inner.input[place] = self.emit("Unsqueeze", name, axes)
            if name in self._differing:
                self._differing.add(inner.output[0])
        self.nodes.append(inner)
        return True

    def _reduce(self, inner: onnx.NodeProto, rank: int) -> bool:
        """Count the axes of a reduction from the last one; return whether they are known."""
        axes = attribute(inner, "axes")
        if len(inner.input) > 1 and inner.input[1] not in self._differing:
            tensor = self._tensors.get(inner.input[1])
            axes = None if tensor is None else to_array(tensor).tolist()
        if not axes:
            return False
        axes = [axis - rank if axis >= 0 else axis for axis in axes]
        if len(inner.input) > 1:
            inner.input[1] = self.integers(axes)
        else:
            set_attributes(inner, axes=axes)
        self._ranks[inner.output[0]] = rank - len(axes) * (not attribute(inner, "keepdims", 1))
        if inner.input[0] in self._differing:
            self._differing.add(inner.output[0])
        return True

    def _rank(self, name: str) -> int | None:
        """Axes of a value, without that of steps."""
        if name in self._ranks:
            return self._ranks[name]
        if name in self._tensors:
            return len(self._tensors[name].dims)
        dims = self.facts.dims(name)
        return None if dims is None else len(dims)
