# SPDX-License-Identifier: Apache-2.0
"""ONNX's own test cases of each operator, and what importing them shows of the importer."""

from __future__ import annotations

import importlib
import pkgutil
import re
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from tvm_fusion.errors import TVMFusionError
from tvm_fusion.onnx import frontend

FROM_DATA = "depends on data"
STRANGE_TYPE = re.compile(r"holds elements of|is (sequence|optional|map) type")


@dataclass(frozen=True)
class Case:
    """Test case of ONNX.

    Parameters
    ----------
    name : str
        Name of the case.
    model : onnx.ModelProto
        A model, most often of one node.
    inputs, outputs : list
        Values, arrays except for types that are no tensors.
    """

    name: str
    model: onnx.ModelProto
    inputs: list[Any]
    outputs: list[Any]

    @property
    def operator(self) -> str:
        """Operator of the only node; empty if there are more, or if it is not ONNX's own."""
        nodes = self.model.graph.node
        is_one = len(nodes) == 1 and nodes[0].domain == "" and "_expanded" not in self.name
        return nodes[0].op_type if is_one else ""

    def variant(self, constant: Sequence[str], kept: int) -> onnx.ModelProto:
        """The model with some inputs constant, and with its first outputs only."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph = model.graph
        for value, array in zip(self.model.graph.input, self.inputs, strict=True):
            if value.name in constant:
                graph.input.remove(value)
                graph.initializer.append(numpy_helper.from_array(array, value.name))
        if self.operator:
            cut = {value.name for value in graph.output[kept:]}
            names = ["" if name in cut else name for name in graph.node[0].output]
            while not names[-1]:
                names.pop()
            del graph.output[kept:]
            del graph.node[0].output[:]
            graph.node[0].output.extend(names)
        return model


def cases(every: bool = False, without: Sequence[str] = ()) -> Iterator[Case]:
    """Cases of one node of the default domain, or every case; not those of some files of ONNX."""
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(node.__path__):
            if module.name not in without:
                importlib.import_module(f"{node.__name__}.{module.name}")
        collected = node._NodeTestCases if without else node.collect_testcases(None)
    for case in list(collected):
        assert case.model is not None and case.data_sets, f"{case.name} has no model or no data"
        inputs, outputs = (list(map(_array, values)) for values in case.data_sets[0])
        found = Case(case.name, case.model, inputs, outputs)
        if every or found.operator:
            yield found


def _array(value: Any) -> Any:
    """A tensor as an array; other values as they are."""
    if isinstance(value, onnx.TensorProto):  # some cases have messages
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


@dataclass
class Operator:
    """Outcomes of the cases of an operator.

    Parameters
    ----------
    cases, imported : int
        Number of cases, and of those that can be imported.
    constant : Counter
        Inputs that had to be constants, and in how many of the imported cases.
    after : set of str
        Operators that it is rewritten to.
    refusals : Counter
        Reasons, and how often each was given.
    """

    cases: int = 0
    imported: int = 0
    constant: Counter[str] = field(default_factory=Counter)
    after: set[str] = field(default_factory=set)
    refusals: Counter[str] = field(default_factory=Counter)


def rows() -> list[list[str]]:
    """One row an operator: name, cases imported, constant inputs, what it becomes, why not."""
    found: dict[str, Operator] = defaultdict(Operator)
    for case in cases():
        _try(found[case.operator], case)
    return [
        [
            name,
            f"{operator.imported} of {operator.cases}" if operator.imported else "no",
            ", ".join(_share(*one, operator.imported) for one in sorted(operator.constant.items())),
            ", ".join(sorted(operator.after)),
            "; ".join(reason for reason, _ in operator.refusals.most_common(2)),
        ]
        for name, operator in sorted(found.items())
        if operator.cases
    ]


def element_types() -> list[str]:
    """The names of the types of which a model's inputs and outputs may be."""
    names = []
    for name, number in onnx.TensorProto.DataType.items():
        value = onnx.helper.make_tensor_value_info("x", number, [2])
        result = onnx.helper.make_tensor_value_info("y", number, [2])
        node = onnx.helper.make_node("Identity", ["x"], ["y"])
        graph = onnx.helper.make_graph([node], "types", [value], [result])
        if _refusal(onnx.helper.make_model(graph)) is None:
            names.append(name.lower())
    return names


def _try(operator: Operator, case: Case) -> None:
    """Import a case as it is, then with constants for inputs, then without its other outputs."""
    model = case.model
    reason = _refusal(model)
    if reason is not None and STRANGE_TYPE.search(reason):
        return
    operator.cases += 1
    names = [value.name for value in model.graph.input]
    is_tensors = all(isinstance(value, np.ndarray) for value in case.inputs)
    for kept in (len(model.graph.output), 1):
        for constant in ([], names[1:], names) if is_tensors else ([],):
            if constant and constant == names and FROM_DATA not in str(reason):
                continue
            changed = case.variant(constant, kept)
            reason = _refusal(changed)
            if reason is None:
                operator.imported += 1
                needed = _needed(case, constant, kept)
                operator.constant.update({_formal(model, name) for name in needed})
                operator.after.update(_after(changed))
                return
    operator.refusals[_short(str(reason))] += 1


def _share(name: str, count: int, total: int) -> str:
    """An input, with the number of cases in which it had to be constant if not in all."""
    return name if count == total else f"{name} ({count})"


def _needed(case: Case, constant: list[str], kept: int) -> list[str]:
    """Those of the constant inputs without which the case is refused."""
    needed = list(constant)
    for name in constant:
        fewer = [other for other in needed if other != name]
        if _refusal(case.variant(fewer, kept)) is None:
            needed = fewer
    return needed


def _formal(model: onnx.ModelProto, name: str) -> str:
    """Name of an input in ONNX's schema of the node."""
    (node,) = model.graph.node
    inputs = onnx.defs.get_schema(node.op_type, model.opset_import[0].version).inputs
    return inputs[min(list(node.input).index(name), len(inputs) - 1)].name


def _refusal(model: onnx.ModelProto) -> str | None:
    """Why the model is refused; None if it is imported."""
    try:
        frontend.import_onnx(model)
    except TVMFusionError as error:
        return str(error)
    return None


def _after(model: onnx.ModelProto) -> set[str]:
    """Operators, or changed attributes, that the importer gets instead; empty if none changed."""
    (before,) = model.graph.node
    nodes = frontend._prepare(model, None)[0].graph.node
    if not nodes:
        return {"a constant"}
    names = {node.op_type for node in nodes}
    if names != {before.op_type}:
        return names
    old, new = ({entry.name for entry in node.attribute} for node in (before, nodes[0]))
    return {"other attributes"} if len(nodes) > 1 or old != new else set()


def _short(reason: str) -> str:
    """A refusal without the name of the node."""
    line = reason.strip().splitlines()[-1]
    line = re.sub(r"^.*(opset \d+|cannot be imported): ", "", line)
    return textwrap.shorten(line.partition(": export")[0].partition(";")[0], 90, placeholder=" ...")
