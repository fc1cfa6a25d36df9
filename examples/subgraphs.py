# SPDX-License-Identifier: Apache-2.0
"""Sub-graphs of the Panamera paper (the twelve of Table 2), as Relax modules and as ONNX models.

    python examples/subgraphs.py                       # all, and the kernels that each becomes
    python examples/subgraphs.py 8 -o subgraph8.onnx   # one as a file

The table is in :mod:`examples.subgraph_table`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The checkout itself holds the module beside this one.
from examples.coalesced_reduction import CUDA, lower  # noqa: E402
from examples.subgraph_table import ROWS, Branch, Row  # noqa: E402

OPSET = 17
IR_VERSION = 8
ONNX_TYPES = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}


@dataclass(frozen=True)
class SubGraph(Row):
    """A row of the table as a computation."""

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and type of each output: ``y0``, ``y1`` and so on."""
        return [_kind_of(branch, self.shape, self.dtype) for branch in self.branches]

    @property
    def bytes(self) -> int:
        """Compulsory bytes: every input read once, every output written once."""
        moved = self.inputs * math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return moved + sum(math.prod(s) * np.dtype(dtype).itemsize for s, dtype in self.outputs)

    def random_inputs(self, generator: np.random.Generator) -> list[NDArray[Any]]:
        """Standard normal numbers."""
        return [
            generator.standard_normal(self.shape, dtype=np.float32).astype(self.dtype)
            for _ in range(self.inputs)
        ]

    def relax_module(self) -> tvm.IRModule:
        """The function ``main``: a tensor for each input, a tuple of all outputs."""
        inputs = [
            relax.Var(f"x{number}", relax.TensorType(self.shape, self.dtype))
            for number in range(self.inputs)
        ]
        builder, operands = relax.BlockBuilder(), iter(inputs)
        with builder.function("main", inputs):
            with builder.dataflow():
                sums = []
                for branch in self.branches:
                    value: relax.Expr = next(operands)
                    for step in branch.steps:
                        value = builder.emit(_relax_step(step, value, operands))
                    sums.append(builder.emit(relax.op.sum(value, list(branch.axes))))
                output = builder.emit_output(relax.Tuple(sums))
            builder.emit_func_output(output)
        return builder.get()

    def onnx_model(self) -> onnx.ModelProto:
        """The same as an ONNX model."""
        graph = _Nodes()
        names = [f"x{number}" for number in range(self.inputs)]
        operands = iter(names)
        for number, branch in enumerate(self.branches):
            value = next(operands)
            for step in branch.steps:
                value = graph.step(step, value, operands)
            graph.sum(value, branch.axes, f"y{number}")
        made = helper.make_graph(
            graph.nodes,
            f"panamera_{self.number}",
            [_value_info(name, self.shape, self.dtype) for name in names],
            [_value_info(f"y{i}", *kind) for i, kind in enumerate(self.outputs)],
            graph.constants,
        )
        opsets = [helper.make_operatorsetid("", OPSET)]
        model = helper.make_model(made, opset_imports=opsets, ir_version=IR_VERSION)
        onnx.checker.check_model(model, full_check=True)
        return model

    def terms(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[np.float64]]:
        """Terms of each branch's sum, in float64; only casts to float16 round."""
        operands = iter(inputs)
        values = []
        for branch in self.branches:
            value = next(operands).astype("float64")
            for step in branch.steps:
                value = _numpy_step(step, value, operands)
            values.append(value)
        return values

    def reference(self, inputs: Sequence[NDArray[Any]]) -> list[NDArray[np.float64]]:
        """All outputs in float64."""
        return [
            terms.sum(axis=branch.axes)
            for terms, branch in zip(self.terms(inputs), self.branches, strict=True)
        ]


SUB_GRAPHS = tuple(SubGraph(row.number, row.shape, row.dtype, row.branches) for row in ROWS)
"""All twelve sub-graphs, in the order of the table."""


class _Nodes:
    """Nodes and constants of an ONNX graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def step(self, step: str, value: str, operands: Any) -> str:
        word, *numbers = step.split()
        if word == "cast":
            return self._node("Cast", [value], to=ONNX_TYPES[numbers[0]])
        if word == "reshape":
            return self._node("Reshape", [value, self._integers(numbers)])
        operator = {"neg": "Neg", "add": "Add", "mul": "Mul"}[word]
        return self._node(operator, [value] if word == "neg" else [value, next(operands)])

    def sum(self, value: str, axes: Sequence[int], output: str) -> None:
        self._node("ReduceSum", [value, self._integers(axes)], output, keepdims=0)

    def _node(self, operator: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def _integers(self, values: Sequence[Any]) -> str:
        name = f"integers_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name


def _relax_step(step: str, value: relax.Expr, operands: Any) -> relax.Expr:
    word, *numbers = step.split()
    if word == "cast":
        return relax.op.astype(value, numbers[0])
    if word == "reshape":
        return relax.op.reshape(value, [int(number) for number in numbers])
    if word == "neg":
        return relax.op.negative(value)
    function: Callable[..., relax.Expr] = relax.op.add if word == "add" else relax.op.multiply
    return function(value, next(operands))


def _numpy_step(step: str, value: NDArray[Any], operands: Any) -> NDArray[np.float64]:
    word, *numbers = step.split()
    if word == "cast":
        return value.astype(numbers[0]).astype("float64")
    if word == "reshape":
        return value.reshape([int(number) for number in numbers])
    if word == "neg":
        return -value
    other = next(operands).astype("float64")
    return value + other if word == "add" else value * other


def _kind_of(branch: Branch, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
    """Shape and type of a branch's result."""
    for step in branch.steps:
        word, *numbers = step.split()
        if word == "reshape":
            shape = tuple(int(number) for number in numbers)
        elif word == "cast":
            dtype = numbers[0]
    return tuple(size for axis, size in enumerate(shape) if axis not in branch.axes), dtype


def _value_info(name: str, shape: Sequence[int], dtype: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPES[dtype], list(shape))


def kernels(graph: SubGraph) -> list[str]:
    """The CUDA kernels that a call of a sub-graph launches; each is a function of one name."""
    called: list[str] = []

    def note(call: relax.Call) -> None:
        if call.op == tvm.ir.Op.get("relax.call_tir"):
            called.append(str(call.args[0].name_hint))

    tvm_ffi.structural_walk(lower(graph.relax_module(), CUDA)["main"].body, (relax.Call, note))
    return called


def main(arguments: Sequence[str] | None = None) -> int:
    """Save one as ONNX, or list all."""
    options = argparse.ArgumentParser(description="The sub-graphs of Panamera's Table 2.")
    options.add_argument("number", nargs="?", type=int, choices=range(1, len(SUB_GRAPHS) + 1))
    options.add_argument("-o", "--output", type=Path, metavar="FILE", help="an ONNX file to write")
    given = options.parse_args(arguments)
    if given.output is not None and given.number is None:
        options.error("--output needs the number of a sub-graph")
    chosen = [graph for graph in SUB_GRAPHS if given.number in (None, graph.number)]
    if given.output is not None:
        onnx.save(chosen[0].onnx_model(), given.output)
        return 0
    for graph in chosen:
        branches = " | ".join(
            ", ".join([*branch.steps, f"sum over {list(branch.axes)}"]) for branch in graph.branches
        )
        size = f"{graph.inputs} x {graph.dtype}{list(graph.shape)}, {graph.bytes / 1e6:.4g} MB"
        print(f"{graph.number:2}  {size}: {branches}\n    -> {', '.join(kernels(graph))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
