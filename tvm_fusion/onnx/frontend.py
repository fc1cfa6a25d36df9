# SPDX-License-Identifier: Apache-2.0
"""Import of an ONNX model to a Relax module: load, check, bind shapes, rewrite, import.

TVM's own importer does the translation. Its faults are corrected before it (``rewrite.py``) or
after it (the pass ``SimplifyInference``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from schedules.errors import reason

from ..errors import InvalidModelError, UnsupportedOperatorError
from ..runtime.host_arrays import ALIGNMENT
from ..runtime.tensor_spec import TensorSpec
from ..warning_filters import warnings_ignored
from .interface_checks import check_interface, choose_outputs
from .model.graph_edits import default_opset, node_label
from .model.loader import check_external_data, check_model, check_opset, parse_model, read_model
from .model.narrow_weight import NarrowWeight
from .model.node_order import sort_nodes
from .model.shapes import Shapes, bind_shapes
from .model.weights import Weights, detach_weights, drop_stand_ins
from .node_checks import check_nodes
from .operator_checks import check_operators
from .opsets import admit_newer_operators, upgrade_opset
from .rewrite import drop_initializers_from_inputs, mend
from .rewrites.contrib.expand import expand_contrib, is_classical
from .rewrites.indexing.gather import translate_gather
from .rewrites.own_ops import OWN_OPS
from .rewrites.recurrent import RECURRENCE, translate_recurrence
from .rewrites.size_arithmetic import TAKES_SHAPES, as_tensor, as_tensors, translate_sizes

NODE_VARIABLE = "node{}_"
"""Name of the variable of a node by its number."""


@dataclass(frozen=True)
class ImportedModel:
    """A model as Relax.

    Parameters
    ----------
    mod : tvm.IRModule
        Its function ``main`` takes the inputs in order; the weights are constants in it.
    inputs, outputs : tuple of TensorSpec
        Under the names that the ONNX model gives them.
    nodes : tuple of str
        Labels of the nodes that variables named by ``NODE_VARIABLE`` stand for.
    """

    mod: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[str, ...] = ()


def import_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: Shapes | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] | None = None,
) -> ImportedModel:
    """Import an ONNX model.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        Only a path may have external data, and only inside the folder of its file, or
        of the file that this is a link to.
    shapes : mapping, optional
        Sizes of symbolic dimensions: from the name of an input to its whole shape, or from the
        name of a dimension to its size. A string as a size keeps the dimension symbolic.
    weights : mapping, optional
        Values of inputs that are not inputs of the result, but weights. They are used in place, not
        copied, where they are contiguous, writable and aligned.
    outputs : sequence of str, optional
        Names of results of nodes that are returned instead of the model's own outputs.

    Returns
    -------
    ImportedModel

    Raises
    ------
    InvalidModelError
        If it is no ONNX model, is damaged or inconsistent, or if a dimension has no size.
    UnsupportedOperatorError
        If it holds operators that cannot be imported; the message lists all of them. Also if TVM's
        importer fails, whatever the reason.
    InvalidInputError
        If ``outputs`` has a name that is no result, or one twice.
    """
    try:
        proto, stored = _prepare(model, shapes, weights, outputs)
        mod = _translate(proto, stored)
    except UnicodeDecodeError as error:
        raise InvalidModelError(f"the model holds invalid text: {error}") from error
    nodes = tuple(f"{node_label(node)} ({node.op_type})" for node in proto.graph.node)
    return ImportedModel(mod, _input_specs(proto, mod), _output_specs(proto, mod), nodes)


def _prepare(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: Shapes | None,
    given: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[onnx.ModelProto, Weights]:
    """Load, check, bind and rewrite; return the graph and the large weights, which it reads."""
    proto = parse_model(read_model(model))
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    check_opset(proto)
    if outputs is not None:
        choose_outputs(proto, outputs)
    check_operators(proto)
    check_external_data(proto, path)
    drop_initializers_from_inputs(proto)
    check_interface(proto)
    bind_shapes(proto, shapes)
    weights = detach_weights(proto) | dict(given or {})
    sort_nodes(proto.graph)
    proto = admit_newer_operators(proto)
    if any(map(is_classical, proto.graph.node)):
        check_model(proto)
        check_nodes(proto)
        proto = upgrade_opset(proto)
    proto = expand_contrib(proto, weights)
    check_model(proto)
    proto = mend(proto, weights)
    drop_stand_ins(proto, weights)
    return proto, weights


class _Importer(ONNXGraphImporter):
    """TVM's importer, with weights that are not part of the graph, and our own Gather."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(None, "float32", keep_params_in_input=False)
        self._weights = weights

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        super()._parse_graph_initializers(graph)
        for name, value in list(self._weights.items()):
            # Popped, so that not all weights are in memory twice.
            if not isinstance(value, NarrowWeight):
                self._nodes[name] = _constant(value)
                del self._weights[name]

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for name, value in self._weights.items():  # an expression belongs to a function
            assert isinstance(value, NarrowWeight), "others became constants"
            self._nodes[name] = self.bb.emit(value.expression())
        self._weights.clear()
        for node in graph.node:
            self._construct_node(node)
        for value in graph.output:
            self._nodes[value.name] = as_tensor(self.bb, self._nodes[value.name])

    def _construct_node(self, node: onnx.NodeProto) -> None:
        """Translate one node, also if it has shapes as inputs where TVM refuses them."""
        inputs = [self._nodes.get(name) for name in node.input]
        shapes = {
            name: value
            for name, value in zip(node.input, inputs, strict=True)
            if isinstance(value, relax.ShapeExpr) and node.op_type not in TAKES_SHAPES
        }
        if shapes:
            attributes = self._parse_attr(node.attribute)
            sizes = translate_sizes(self.bb, node.op_type, inputs, attributes)
            if sizes is not None:
                self._nodes[node.output[0]] = self.bb.normalize(sizes)
                return
        self._nodes.update({name: as_tensor(self.bb, value) for name, value in shapes.items()})
        super()._construct_nodes(onnx.GraphProto(node=[node]))
        self._nodes.update(shapes)

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Accept all: ``check_operators`` has looked at the model, and rewrites add our own."""

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict, opset: int
    ) -> relax.Expr:
        try:
            sizes = translate_sizes(self.bb, op_name, inputs, attrs)
            if sizes is not None:
                return self.bb.normalize(sizes)
            inputs[:] = as_tensors(self.bb, op_name, inputs)
            if op_name == "Gather":
                found = translate_gather(self.bb, inputs, attrs.get("axis", 0))
                if found is not None:
                    return self.bb.normalize(found)
            if op_name == RECURRENCE:
                return self.bb.emit(translate_recurrence(inputs, attrs))
            if op_name in OWN_OPS:
                return self.bb.normalize(OWN_OPS[op_name](self.bb, inputs, attrs))
            return super()._convert_operator(op_name, inputs, attrs, opset)
        except Exception as error:
            raise _ConversionError(error) from error

    def end_blocks(self) -> None:
        """End the blocks that an error left open; TVM warns of them on standard error."""
        with contextlib.suppress(tvm.error.InternalError):  # of none being open
            while True:
                self.bb._end_block()


class _ConversionError(BaseException):
    """Carrier of an exception past TVM's ``except Exception``, which prints all inputs."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _constant(array: np.ndarray) -> relax.Expr:
    """A constant in the memory of ``array``, which it keeps alive, if kernels can read it there."""
    is_usable = array.flags.carray and array.ctypes.data % ALIGNMENT == 0
    if is_usable and array.size and array.dtype.isbuiltin == 1:
        return relax.const(tvm.runtime.from_dlpack(array))
    return relax.const(tvm.runtime.tensor(array))  # numpy's own would become 32 bits


def _translate(model: onnx.ModelProto, weights: Weights) -> tvm.IRModule:
    """Run TVM's importer; errors name the node that it was translating."""
    importer = _Importer(weights)
    try:
        with warnings_ignored():
            mod = importer.from_onnx(model.graph, default_opset(model))
        return _name_variables(mod, model.graph, importer._nodes)
    except (Exception, _ConversionError) as raised:
        # The importer raises anything from AssertionError to tvm.error.
        importer.end_blocks()
        error = raised.error if isinstance(raised, _ConversionError) else raised
        node = _node_in_traceback(raised)
        where = "the model" if node is None else f"{node_label(node)} ({node.op_type})"
        text = f"{where} cannot be imported: {reason(error)}{_advice(model)}"
        raise UnsupportedOperatorError(text) from error


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


def _node_in_traceback(error: BaseException) -> onnx.NodeProto | None:
    """Return the node that the importer was translating when it raised the error."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        found = node if isinstance(node, onnx.NodeProto) else found
        trace = trace.tb_next
    return found


def _input_specs(model: onnx.ModelProto, mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    types = [param.ty for param in mod["main"].params]
    return tuple(
        _spec(f"input {value.name!r}", value.name, ty)
        for value, ty in zip(model.graph.input, types, strict=True)
    )


def _output_specs(model: onnx.ModelProto, mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    # That of the function itself knows no sizes that depend on data.
    result = mod["main"].body.body.ty
    types = [result] if len(model.graph.output) == 1 else list(result.fields)
    specs = []
    for value, ty in zip(model.graph.output, types, strict=True):
        specs.append(_spec(f"output {value.name!r}", value.name, ty))
        _check_output(value, specs[-1])
    return tuple(specs)


def _check_output(value: onnx.ValueInfoProto, spec: TensorSpec) -> None:
    """Refuse an output whose imported type or shape differs from ONNX's."""
    tensor = value.type.tensor_type
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = spec.shape
    if tensor.HasField("shape"):
        dims = tensor.shape.dim
        shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims)
    if 0 in spec.shape:
        raise UnsupportedOperatorError(
            f"output {value.name!r} of shape {spec.shape} is empty; empty tensors cannot be "
            "compiled: remove this output from the model"
        )
    if dtype != spec.dtype or not _fits(shape, spec.shape):
        raise UnsupportedOperatorError(
            f"output {value.name!r} is imported as {spec.dtype} of shape {spec.shape}; ONNX infers "
            f"{dtype} of shape {shape}: export the model with other operators"
        )


def _fits(shape: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    """Return whether two shapes can be the same; symbolic sizes can be anything."""
    if len(shape) != len(other):
        return False
    pairs = zip(shape, other, strict=True)
    return all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in pairs)


def _spec(what: str, name: str, ty: relax.Type) -> TensorSpec:
    if not isinstance(ty, relax.TensorType) or ty.shape is None:
        raise UnsupportedOperatorError(
            f"{what} is imported as {ty}; expected a tensor whose rank and sizes are known"
        )
    shape = tuple(int(dim) if isinstance(dim, tvm.tirx.IntImm) else str(dim) for dim in ty.shape)
    return TensorSpec(name, shape, str(ty.dtype))
