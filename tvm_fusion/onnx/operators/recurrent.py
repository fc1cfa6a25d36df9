# SPDX-License-Identifier: Apache-2.0
"""Write LSTM, GRU and RNN as the products of all inputs, then one :data:`RECURRENCE` a direction.

::

    products = MatMul(x, W) + bias                 # all steps and gates at once
    y, y_h, y_c = Recurrence(products, R, h_0, c_0, ...)

Weights get the layout ``[block][gate][k][lane]`` of the kernel; constant ones get it here. Other
types than float32 and float64 are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from tvm import relax

from relay_passes.op import recurrence
from schedules.cpu.loops.recurrent_cells import ACTIVATIONS, GATES, LANES, RecurrentCell

from ..model.expansion import Expansion
from ..model.graph_edits import attribute
from ..model.tensor_facts import GraphFacts
from .operator import Operator, operators

RECURRENCE = "tvm_fusion.Recurrence"
"""Operator that :func:`translate_recurrence` translates; its attributes are a cell's."""

DEFAULTS = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}

PARAMETERS: dict[str, tuple[float, float]] = {
    "Affine": (1.0, 0.0),
    "Elu": (1.0, 0.0),
    "HardSigmoid": (0.2, 0.5),
    "LeakyRelu": (0.01, 0.0),
    "ScaledTanh": (1.0, 1.0),
    "ThresholdedRelu": (1.0, 0.0),
}
"""Default alpha and beta, of which an activation takes the first few."""

TAKEN = {"Affine": 2, "HardSigmoid": 2, "ScaledTanh": 2, "Elu": 1, "LeakyRelu": 1}
TAKEN["ThresholdedRelu"] = 1

PEEPHOLES = 7
"""Position of the LSTM's input that holds the peepholes."""


def expand_recurrent(expansion: Expansion) -> None:
    """Replace an LSTM, a GRU or an RNN that :func:`recurrent_problem` accepts."""
    if recurrent_problem(expansion.node, expansion.facts) is None:
        _Layer(expansion.node, expansion).expand()


def recurrent_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a recurrent layer cannot be compiled, if any."""
    for name in (*node.input[:3], *node.input[5:6]):
        if name and facts.shape(name) is None:
            return f"the shape of {name!r} is only known at run time"
    direction = attribute(node, "direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        return f"its direction is {direction!r}"
    names = _activation_names(node)
    unknown = [name for name in names if name not in _BY_LOWER_NAME]
    if unknown:
        return f"its activation is {unknown[0]!r}; expected one of {', '.join(ACTIVATIONS)}"
    wanted = len(DEFAULTS[node.op_type]) * (2 if direction == "bidirectional" else 1)
    if len(names) != wanted:
        return f"it has {len(names)} activations; expected {wanted}"
    hidden = (facts.shape(node.input[2]) or (0, 0, 0))[2]
    if attribute(node, "hidden_size", hidden) != hidden:
        return f"its hidden_size is {attribute(node, 'hidden_size')}, its weights are of {hidden}"
    return None


_BY_LOWER_NAME = {name.lower(): name for name in ACTIVATIONS}
"""ONNX compares the names of activations without case."""


def _activation_names(node: onnx.NodeProto) -> list[str]:
    twice = 2 if attribute(node, "direction", "forward") == "bidirectional" else 1
    given = attribute(node, "activations")
    names = [name.decode() for name in given] if given else list(DEFAULTS[node.op_type]) * twice
    return [name.lower() for name in names]


def _activations(node: onnx.NodeProto) -> list[tuple[str, float, float]]:
    """Names, alphas and betas; the lists of parameters hold those of activations that take any."""
    alphas, betas = (list(attribute(node, f"activation_{n}", [])) for n in ("alpha", "beta"))
    activations = []
    for lower in _activation_names(node):
        name = _BY_LOWER_NAME[lower]
        alpha, beta = PARAMETERS.get(name, (0.0, 0.0))
        taken = TAKEN.get(name, 0)
        alpha = alphas.pop(0) if taken > 0 and alphas else alpha
        beta = betas.pop(0) if taken > 1 and betas else beta
        activations.append((name, alpha, beta))
    return activations


class _Layer:
    """One node, and the nodes that take its place."""

    def __init__(self, node: onnx.NodeProto, expansion: Expansion) -> None:
        self.node, self.to = node, expansion
        facts = expansion.facts
        self.gates = GATES[node.op_type]
        self.batch_first = bool(attribute(node, "layout", 0))
        shape = facts.shape(node.input[0]) or ()
        self.steps, self.batch = (shape[1], shape[0]) if self.batch_first else shape[:2]
        self.features = shape[2]
        self.hidden = (facts.shape(node.input[2]) or ())[2]
        self.padded = -(-self.hidden // LANES) * LANES
        kind = facts.dtype(node.input[0])
        self.kind = kind if kind == TensorProto.DOUBLE else TensorProto.FLOAT
        self.dtype = np.float64 if kind == TensorProto.DOUBLE else np.float32
        self.own_kind = kind

    def expand(self) -> None:
        """Emit the nodes of all directions, and stack their results."""
        node = self.node
        data = self._typed(node.input[0])
        if self.batch_first:
            data = self.to.emit("Transpose", data, perm=[1, 0, 2])
        rows = self._ints("rows", self.steps * self.batch, self.features)
        data = self.to.emit("Reshape", data, rows)
        direction = attribute(node, "direction", "forward")
        ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
        backwards = ways[direction]
        activations = _activations(node)
        share = len(activations) // len(backwards)
        results = [
            self._direction(data, number, is_back, activations[number * share :][:share])
            for number, is_back in enumerate(backwards)
        ]
        for position, name in enumerate(node.output):
            if name:
                self._finish(name, position, [result[position] for result in results])

    def _finish(self, name: str, position: int, parts: list[str]) -> None:
        """Stack the directions of an output, in the layout of the node."""
        # All states are [steps, batch, hidden]; the last ones [batch, hidden].
        axis = 1 if position == 0 else 0
        if self.batch_first:
            axis = 2 if position == 0 else 1
            if position == 0:
                parts = [self.to.emit("Transpose", part, perm=[1, 0, 2]) for part in parts]
        place = self._ints("axis", axis)
        parts = [self.to.emit("Unsqueeze", part, place) for part in parts]
        whole = self.to.emit("Concat", *parts, axis=axis) if len(parts) > 1 else parts[0]
        if self.own_kind != self.kind:
            whole = self.to.emit("Cast", whole, to=self.own_kind)
        self.to.nodes[-1].output[0] = name

    def _direction(
        self, data: str, number: int, reverse: bool, activations: Sequence[tuple[str, float, float]]
    ) -> list[str]:
        node, to = self.node, self.to
        bias, rest = self._biases(number)
        weights = self._lay_out(node.input[1], number, self._by_rows)
        products = to.emit("Add", to.emit("MatMul", data, weights), bias)
        width = self.padded * self.gates
        products = to.emit("Reshape", products, self._ints("shape", self.steps, self.batch, width))
        lengths = self._input(4)
        inputs = [
            products,
            self._lay_out(node.input[2], number, self._by_blocks),
            self._initial(5, number, False),
            self._initial(6 if node.op_type == "LSTM" else 99, number, True),
            to.emit("Cast", lengths, to=TensorProto.INT32)
            if lengths
            else to.constant("lengths", np.full(self.batch, self.steps, np.int32)),
            self._peepholes(number),
            rest,
        ]
        names = [self.to.facts.fresh(f"{node.output[0]}/{part}") for part in ("y", "h", "c")]
        attributes: dict[str, Any] = {
            "activations": [name for name, _, _ in activations],
            "alphas": [float(alpha) for _, alpha, _ in activations],
            "betas": [float(beta) for _, _, beta in activations],
            "clip": float(attribute(node, "clip", 0.0)),
            "cell": node.op_type,
            "hidden": self.hidden,
            "reverse": int(reverse),
            "has_lengths": int(bool(lengths)),
            "has_peepholes": int(node.op_type == "LSTM" and bool(self._input(PEEPHOLES))),
            "coupled": attribute(node, "input_forget", 0),
            "reset_after": attribute(node, "linear_before_reset", 0),
        }
        to.nodes.append(onnx.helper.make_node(RECURRENCE, inputs, names, node.name, **attributes))
        if self.padded == self.hidden:
            return names
        ends = [self._ints(hint, value) for hint, value in (("start", 0), ("end", self.hidden))]
        return [to.emit("Slice", name, *ends, self._ints("last", -1)) for name in names]

    def _input(self, position: int) -> str:
        return self.node.input[position] if position < len(self.node.input) else ""

    def _ints(self, hint: str, *values: int) -> str:
        return self.to.constant(hint, np.array(values, np.int64))

    def _typed(self, name: str) -> str:
        is_same = self.to.facts.dtype(name) == self.kind
        return name if is_same else self.to.emit("Cast", name, to=self.kind)

    def _row(self, name: str, number: int, axis: int = 0) -> str:
        """Slice of a tensor for one direction."""
        value = self.to.facts.constant(name)
        if value is not None:
            row = np.take(value, number, axis).astype(self.dtype)
            return self.to.constant(f"direction_{number}", np.ascontiguousarray(row))
        place = self.to.constant("direction", np.array(number, np.int64))
        return self._typed(self.to.emit("Gather", name, place, axis=axis))

    def _initial(self, position: int, number: int, padded: bool) -> str:
        """The initial state or memory of one direction; zeros if it is not given."""
        name = self._input(position)
        width = self.padded if padded else self.hidden
        if not name:
            return self.to.constant("zeros", np.zeros((self.batch, width), self.dtype))
        row = self._row(name, number, 1 if self.batch_first else 0)
        return self._pad(row, 1, 2) if padded else row

    def _pad(self, name: str, axis: int, rank: int) -> str:
        """Fill the last block of hidden units with zeros."""
        missing = self.padded - self.hidden
        if not missing:
            return name
        pads = np.zeros((2, rank), np.int64)
        pads[1, axis] = missing
        value = self.to.facts.constant(name)
        if value is not None:
            return self.to.constant("padded", np.pad(value, pads.T))
        return self.to.emit("Pad", name, self.to.constant("pads", pads.ravel()))

    def _reshape(self, name: str, *shape: int) -> str:
        value = self.to.facts.constant(name)
        if value is not None:
            return self.to.constant("shaped", value.reshape(shape))
        return self.to.emit("Reshape", name, self._ints("shape", *shape))

    def _transpose(self, name: str, *perm: int) -> str:
        value = self.to.facts.constant(name)
        if value is not None:
            return self.to.constant("moved", np.ascontiguousarray(value.transpose(perm)))
        return self.to.emit("Transpose", name, perm=list(perm))

    def _lay_out(self, name: str, number: int, order: Callable[[str, int], str]) -> str:
        """Weights of one direction, [gates * hidden, k], in the kernel's layout."""
        extent = (self.to.facts.shape(name) or ())[2]
        row = self._reshape(self._row(name, number), self.gates, self.hidden, extent)
        row = self._pad(row, 1, 3)
        return order(self._reshape(row, self.gates, -1, LANES, extent), extent)

    def _by_rows(self, name: str, extent: int) -> str:
        return self._reshape(self._transpose(name, 3, 1, 0, 2), extent, self.padded * self.gates)

    def _by_blocks(self, name: str, extent: int) -> str:
        return self._transpose(name, 1, 0, 3, 2)

    def _vector(self, name: str, parts: int) -> str:
        """A vector of some gates, [gates * hidden], as [blocks * gates * lanes]."""
        row = self._pad(self._reshape(name, parts, self.hidden), 1, 2)
        moved = self._transpose(self._reshape(row, parts, -1, LANES), 1, 0, 2)
        return self._reshape(moved, self.padded * parts)

    def _biases(self, number: int) -> tuple[str, str]:
        """Biases of the products, and that of a GRU's last gate alone."""
        zeros = np.zeros(self.padded, self.dtype)
        name = self._input(3)
        if not name:
            bias = self.to.constant("bias", np.zeros(self.padded * self.gates, self.dtype))
            return bias, self.to.constant("rest", zeros)
        size = self.gates * self.hidden
        halves = [self._part(self._row(name, number), start, size) for start in (0, size)]
        rest = self.to.constant("rest", zeros)
        if self.node.op_type == "GRU" and attribute(self.node, "linear_before_reset", 0):
            last = self._part(halves[1], 2 * self.hidden, self.hidden)
            rest = self._vector(last, 1)
            mask = np.repeat([1, 1, 0], self.hidden).astype(self.dtype)
            halves[1] = self._combine("Mul", halves[1], self.to.constant("gates", mask))
        return self._vector(self._combine("Add", *halves), self.gates), rest

    def _part(self, name: str, start: int, size: int) -> str:
        value = self.to.facts.constant(name)
        if value is not None:
            return self.to.constant("part", value[start : start + size])
        ends = [self._ints(hint, at) for hint, at in (("start", start), ("end", start + size))]
        return self.to.emit("Slice", name, *ends)

    def _combine(self, op_type: str, left: str, right: str) -> str:
        values = [self.to.facts.constant(name) for name in (left, right)]
        if values[0] is not None and values[1] is not None:
            combined = values[0] + values[1] if op_type == "Add" else values[0] * values[1]
            return self.to.constant("combined", combined)
        return self.to.emit(op_type, left, right)

    def _peepholes(self, number: int) -> str:
        name = self._input(PEEPHOLES) if self.node.op_type == "LSTM" else ""
        blocks = self.padded // LANES
        if not name:
            return self.to.constant("peepholes", np.zeros((blocks, 3 * LANES), self.dtype))
        # Stored as i, o, f, which is the kernel's order, too.
        return self._reshape(self._vector(self._row(name, number), 3), blocks, 3 * LANES)


def translate_recurrence(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """The op of a :data:`RECURRENCE`."""
    steps, batch, _ = (int(extent) for extent in inputs[0].ty.shape)
    names = [name.decode() for name in attributes["activations"]]
    parameters = (attributes["alphas"], attributes["betas"])
    flags = ("reverse", "has_lengths", "has_peepholes", "coupled", "reset_after")
    cell = RecurrentCell(
        attributes["cell"].decode(),
        steps,
        batch,
        attributes["hidden"],
        tuple(zip(names, *parameters, strict=True)),
        attributes["clip"],
        **{flag: bool(attributes[flag]) for flag in flags},
        dtype=str(inputs[0].ty.dtype),
    )
    return builder.emit(recurrence(list(inputs), cell))


OPERATORS = (
    *operators(" ".join(DEFAULTS), expand=expand_recurrent, check=recurrent_problem),
    Operator(RECURRENCE, translate=translate_recurrence),
)
