# SPDX-License-Identifier: Apache-2.0
"""The nodes that take the place of one, and the branches that nodes are in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from .graph_edits import attribute
from .tensor_facts import GraphFacts

AXES_ARE_INPUTS = 18
"""First opset in which ReduceMean takes its axes as an input."""

HAS_CAST_LIKE = 15
"""First opset that has CastLike."""

HAS_LAYER_NORM = 17
"""First opset that has LayerNormalization."""

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALVES)

_CONV = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def conv_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a Conv that a node of another operator has."""
    found = {name: attribute(node, name) for name in _CONV}
    return {name: value for name, value in found.items() if value is not None}


class Expansion:
    """The nodes that take the place of one.

    Parameters
    ----------
    node : onnx.NodeProto
        The node that will be replaced.
    facts : GraphFacts
        Where constants are added.
    """

    def __init__(self, node: onnx.NodeProto, facts: GraphFacts) -> None:
        self.node, self.facts, self.opset = node, facts, facts.opset
        self.nodes: list[onnx.NodeProto] = []
        self._name = next((name for name in node.output if name), "")

    def emit(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return the name of its result."""
        return self.emit_many(op_type, 1, *inputs, **attributes)[0]

    def emit_many(self, op_type: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append a node of several results and return their names."""
        results = [self.facts.fresh(f"{self._name}/{op_type}") for _ in range(count)]
        name = self.node.name
        self.nodes.append(helper.make_node(op_type, inputs, results, name=name, **attributes))
        return results

    def constant(self, hint: str, value: np.ndarray) -> str:
        """Add a constant and return its name."""
        return self.facts.add_constant(f"{self._name}/{hint}", value)

    def number(self, value: float, dtype: int) -> str:
        """Add a constant number of an ONNX element type and return its name."""
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        return self.constant("number", np.asarray(value).astype(kind))

    def finish(self, *results: str) -> None:
        """Let the results be the node's outputs; an empty name is an output that nobody reads."""
        if len(results) == 1 and self.nodes and list(self.nodes[-1].output) == [*results]:
            self.nodes[-1].output[0] = self.node.output[0]
            return
        for result, output in zip(results, self.node.output, strict=False):
            if output and result:
                self.nodes.append(helper.make_node("Identity", [result], [output]))

    def input(self, position: int) -> str:
        """Name of an input; empty if it is not given."""
        return self.node.input[position] if position < len(self.node.input) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the node."""
        return attribute(self.node, name, default)

    def integers(self, value: Any) -> str:
        """Add a constant of int64."""
        return self.constant("integers", np.array(value, np.int64))

    def number_like(self, value: Any, like: str) -> str:
        """Append numbers of the type of another tensor."""
        if self.opset < HAS_CAST_LIKE:
            return self.constant("number", np.array(value, self._float_type()))
        return self.emit("CastLike", self.constant("number", np.array(value, np.float32)), like)

    def scaled(self, x: str, factor: float) -> str:
        """Multiply by a number."""
        return x if factor == 1 else self.emit("Mul", x, self.number_like(factor, x))

    def reshape(self, x: str, *shape: int) -> str:
        """Reshape; 0 keeps a size."""
        return self.emit("Reshape", x, self.integers(shape))

    def reduced(self, op_type: str, x: str, axes: Sequence[int] = (-1,)) -> str:
        """Reduce axes, which are kept."""
        if self.opset < AXES_ARE_INPUTS:
            return self.emit(op_type, x, axes=list(axes))
        return self.emit(op_type, x, self.integers(axes))

    def layer_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Normalise the last axis."""
        if self.opset >= HAS_LAYER_NORM:
            inputs = [x, scale, bias] if bias else [x, scale]
            return self.emit("LayerNormalization", *inputs, epsilon=epsilon, axis=-1)
        centred = self.emit("Sub", x, self.reduced("ReduceMean", x))
        return self.rms_norm(centred, scale, bias, epsilon)

    def rms_norm(self, x: str, scale: str, bias: str, epsilon: float) -> str:
        """Divide the last axis by the root of its mean square, in float32 if it has 16 bits."""
        if self._is_narrow():
            x, scale, bias = (name and self._cast(name, np.float32) for name in (x, scale, bias))
        square = self.emit(
            "Add", self.reduced("ReduceMean", self.emit("Mul", x, x)), self.number_like(epsilon, x)
        )
        result = self.emit("Mul", self.emit("Div", x, self.emit("Sqrt", square)), scale)
        result = self.emit("Add", result, bias) if bias else result
        return self._cast(result, self._float_type()) if self._is_narrow() else result

    def _cast(self, x: str, kind: npt.DTypeLike) -> str:
        return self.emit("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))

    def gelu(self, x: str) -> str:
        """Gaussian error linear unit."""
        inner = self.emit("Erf", self.scaled(x, 1 / math.sqrt(2)))
        return self.emit(
            "Mul", self.scaled(x, 0.5), self.emit("Add", inner, self.number_like(1, x))
        )

    def tanh_gelu(self, x: str) -> str:
        """Gelu by a hyperbolic tangent."""
        cube = self.emit("Mul", x, self.emit("Mul", x, x))
        inner = self.emit("Add", x, self.scaled(cube, 0.044715))
        tanh = self.emit("Tanh", self.scaled(inner, math.sqrt(2 / math.pi)))
        return self.emit("Mul", self.scaled(x, 0.5), self.emit("Add", tanh, self.number_like(1, x)))

    def missing(self, count: int) -> list[str]:
        """Outputs that are asked for beyond the first ``count``."""
        return [name for name in self.node.output[count:] if name]

    def _float_kinds(self) -> list[int]:
        kinds = [self.facts.dtype(name) for name in self.node.input if name]
        return [kind for kind in kinds if kind in FLOATS] or [TensorProto.FLOAT]

    def _is_narrow(self) -> bool:
        return self._float_kinds()[0] in HALVES

    def _float_type(self) -> np.dtype:
        return helper.tensor_dtype_to_np_dtype(self._float_kinds()[0])


def sizes(parts: Expansion, name: str, axes: Sequence[int]) -> list[int] | None:
    """Sizes of some axes; None if one is not known."""
    dims = parts.facts.dims(name)
    if dims is None or any(not -len(dims) <= axis < len(dims) for axis in axes):
        return None
    found = [dims[axis] for axis in axes]
    return None if None in found else found  # type: ignore[return-value]


_TAKEN = "tvm_fusion.taken"


def taken_if(node: onnx.NodeProto, facts: GraphFacts) -> tuple[list[onnx.NodeProto], str]:
    """A value that tells whether the branch that a node comes from is taken.

    A node of a branch that is not taken must not raise errors.

    Returns
    -------
    list of onnx.NodeProto
        The nodes that compute it.
    str
        Its name, a bool of one element; empty if the node is always taken.
    """
    nodes: list[onnx.NodeProto] = []
    taken = ""
    for condition in _conditions(node):
        name = condition[1:]
        if condition[0] == "-":
            nodes.append(helper.make_node("Not", [name], [facts.fresh(f"{name}/not")]))
            name = nodes[-1].output[0]
        if taken:
            nodes.append(helper.make_node("And", [taken, name], [facts.fresh(f"{name}/and")]))
            name = nodes[-1].output[0]
        taken = name
    return nodes, taken


def inherit_conditions(node: onnx.NodeProto, parts: Iterable[onnx.NodeProto]) -> None:
    """Let the nodes that take the place of one be in the same branch."""
    conditions = _conditions(node)
    for part in parts:
        if conditions and part is not node:
            part.metadata_props.add(key=_TAKEN, value="\n".join(conditions))


def mark_taken(nodes: Iterable[onnx.NodeProto], choice: onnx.NodeProto, condition: str) -> None:
    """Let nodes say that they belong to a branch of ``choice``, taken by a condition.

    The condition is the name of a bool after ``+``, or after ``-`` where it must be false.
    """
    for node in nodes:
        node.metadata_props.add(key=_TAKEN, value="\n".join([*_conditions(choice), condition]))


def _conditions(node: onnx.NodeProto) -> list[str]:
    """Names of the conditions around a node, each after ``+``, or ``-`` where it must be false."""
    found = [entry.value for entry in node.metadata_props if entry.key == _TAKEN]
    return found[-1].split("\n") if found else []
