# SPDX-License-Identifier: Apache-2.0
"""Translation of a checked and rewritten ONNX graph to a Relax function, node by node."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.supply import UniqueNameSupply
from tvm.relax.frontend.onnx import onnx_frontend

from schedules.errors import reason

from ..errors import UnsupportedOperatorError
from ..runtime.host_arrays import ALIGNMENT
from ..warning_filters import warnings_ignored
from .graph.size_arithmetic import as_tensor, as_tensors, translate_sizes
from .model.graph_edits import default_opset, node_label
from .model.narrow_weight import NarrowWeight
from .model.weights import Weights, to_array
from .operators.table import find

NODE_VARIABLE = "node{}_"
"""Name of the variable of a node by its number."""


def translate(model: onnx.ModelProto, weights: Weights) -> tvm.IRModule:
    """Translate the main graph of a model.

    Parameters
    ----------
    model : onnx.ModelProto
        Its graph has all operators in a form that they can be translated from.
    weights : Weights
        Tensors that it reads and does not hold. They are popped, so that not all of them are in
        memory twice.

    Returns
    -------
    tvm.IRModule
        Its ``main`` names variables by the nodes that they come from, see ``NODE_VARIABLE``.

    Raises
    ------
    UnsupportedOperatorError
        If a node cannot be translated, whatever the reason; the message names it.
    """
    translation = _Translation(model)
    try:
        with warnings_ignored():
            mod = translation.run(weights)
        return _name_variables(mod, model.graph, translation.values)
    except Exception as error:  # converters raise anything from AssertionError to tvm.error
        translation.end_blocks()
        node = translation.node
        where = "the model" if node is None else f"{node_label(node)} ({node.op_type})"
        text = f"{where} cannot be imported: {reason(error)}{_advice(model)}"
        raise UnsupportedOperatorError(text) from error


class _Translation:
    """A graph, the Relax expressions of its tensors, and the node that is being translated."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._opset = default_opset(model) or 1
        self._builder = relax.BlockBuilder()
        self._converters = onnx_frontend._get_convert_map()
        self.values: dict[str, Any] = {}
        self.node: onnx.NodeProto | None = None

    def run(self, weights: Weights) -> tvm.IRModule:
        """Build the function ``main`` of the graph."""
        builder = self._builder
        for tensor in self._graph.initializer:
            self.values[tensor.name] = _constant(to_array(tensor))
        inputs = self._inputs()
        with builder.function("main", inputs):
            with builder.dataflow():
                for name in list(weights):
                    self.values[name] = self._weight(weights.pop(name))
                for node in self._graph.node:
                    self.node = node
                    self._translate(node)
                self.node = None
                results = [self._result(value.name) for value in self._graph.output]
                result = builder.emit_output(
                    results[0] if len(results) == 1 else relax.Tuple(results)
                )
            builder.emit_func_output(result)
        mod = builder.get()
        mod["main"] = mod["main"].with_attr("num_input", len(inputs))
        return mod

    def _inputs(self) -> list[relax.Var]:
        """The parameters of the function; sizes of the same name are one variable."""
        names = UniqueNameSupply()
        sizes: dict[str, tvm.tirx.Var] = {}
        for value in self._graph.input:
            _, shape, dtype, _, sizes = onnx_frontend.get_info(value, sizes)
            name = value.name.replace(".", "_")
            name = name if name[0].isalpha() or name[0] == "_" else f"input_{name}"
            ty = relax.TensorType(shape=shape, dtype=dtype)
            self.values[value.name] = relax.Var(names.fresh_name(name), ty)
        return [self.values[value.name] for value in self._graph.input]

    def _weight(self, value: np.ndarray | NarrowWeight) -> relax.Expr:
        if isinstance(value, NarrowWeight):
            return self._builder.emit(value.expression())
        return _constant(value)

    def _result(self, name: str) -> relax.Expr:
        self.values[name] = as_tensor(self._builder, self.values[name])
        return self.values[name]

    def _translate(self, node: onnx.NodeProto) -> None:
        """Translate a node, of whose inputs those that are not there are None."""
        inputs = onnx_frontend.onnx_input(
            self.values[name] if name else None for name in node.input
        )
        attributes = {entry.name: _attribute_value(entry) for entry in node.attribute}
        result = translate_sizes(self._builder, node.op_type, inputs, attributes)
        if result is None:
            inputs[:] = as_tensors(self._builder, node.op_type, inputs)
            result = self._of_tensors(node, inputs, attributes)
        if isinstance(result, relax.Expr):
            result = self._builder.normalize(result)
        results = self._parts(result)
        if len(results) < len(node.output):
            raise ValueError(f"it has {len(node.output)} outputs; expected {len(results)}")
        self.values.update(zip(node.output, results, strict=False))

    def _of_tensors(self, node: onnx.NodeProto, inputs: Any, attributes: dict[str, Any]) -> Any:
        """Translate a node by our function, or by TVM's where there is none or it returns None."""
        operator = find(node)
        own = operator.translate if operator else None
        result = own and own(self._builder, inputs, attributes)
        if result is not None:
            return result
        convert = self._converters[node.op_type].get_converter(self._opset)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        return convert(self._builder, inputs, attributes, [self.values, {}])

    def _parts(self, result: Any) -> list[Any]:
        """The results of a node."""
        if isinstance(result, relax.Tuple):
            return list(result.fields)
        if isinstance(result.ty, relax.TupleType):
            count = len(result.ty.fields)
            return [self._builder.emit(relax.TupleGetItem(result, i)) for i in range(count)]
        return [result]

    def end_blocks(self) -> None:
        """End the blocks that an error left open; TVM warns of them on standard error."""
        with contextlib.suppress(tvm.error.InternalError):  # It raises if none is open.
            while True:
                self._builder._end_block()


def _attribute_value(entry: onnx.AttributeProto) -> Any:
    """The value of an attribute as TVM's converters take it: text as bytes, lists as tuples."""
    value = onnx.helper.get_attribute_value(entry)
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError(f"its attribute {entry.name} is empty")
    return tuple(value)


def _constant(array: np.ndarray) -> relax.Expr:
    """A constant in the memory of ``array``, which it keeps alive, if kernels can read it there."""
    is_usable = array.flags.carray and array.ctypes.data % ALIGNMENT == 0
    if is_usable and array.size and array.dtype.isbuiltin == 1:
        return relax.const(tvm.runtime.from_dlpack(array))
    return relax.const(tvm.runtime.tensor(array))  # numpy's own would become 32 bits


def _name_variables(
    mod: tvm.IRModule, graph: onnx.GraphProto, results: Mapping[str, relax.Expr]
) -> tvm.IRModule:
    """Name the variables of a program by the nodes that they are results of, or parts of."""
    numbers = {
        results[name]: number
        for number, node in reversed(list(enumerate(graph.node)))
        for name in node.output
        if name in results
    }
    names: dict[relax.Var, relax.Var] = {}
    number = None
    for block in reversed(mod["main"].body.blocks):
        for binding in reversed(block.bindings):  # parts come before the result
            value = getattr(binding, "value", binding.var)
            number = numbers.get(value, numbers.get(binding.var, number))
            if number is not None:
                kind = type(binding.var)
                names[binding.var] = kind(NODE_VARIABLE.format(number), binding.var.ty)
    renamed = tvm_ffi.structural_map(mod["main"], (relax.Var, lambda var: names.get(var, var)))
    result = mod.clone()
    result.update_func(mod.get_global_var("main"), renamed)
    return result


def _advice(model: onnx.ModelProto) -> str:
    """Advice for an error that open sizes may cause."""
    dims = [dim for value in model.graph.input for dim in value.type.tensor_type.shape.dim]
    names = list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))
    if not names:
        return ""
    return (
        f"; the sizes {', '.join(names)} are open: bind them by shapes=, or let "
        "tvm_fusion.specialize compile a variant for each size"
    )
