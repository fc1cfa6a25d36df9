# SPDX-License-Identifier: Apache-2.0
"""Import of an ONNX model to a Relax module: load, check, bind shapes, rewrite, translate.

Operators that TVM's converters translate rightly are left to them. Their faults are corrected
before (``rewrite.py``) or after (the pass ``SimplifyInference``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import tvm
from tvm import relax

from ..errors import InvalidInputError, InvalidModelError, UnsupportedOperatorError
from ..runtime.host_arrays import TensorSpec
from .checks import check_nodes, check_operators
from .foreign import expand_foreign, is_classical
from .model.graph_edits import attribute, drop_unread_nodes, node_label, sort_nodes, used_names
from .model.loader import check_external_data, check_model, check_opset, parse_model, read_model
from .model.shapes import Shapes, bind_shapes
from .model.weights import Weights, detach_weights, drop_stand_ins
from .operators.classical.refusals import TEXT_ADVICE
from .operators.operator import ML_DOMAIN
from .opsets import admit_newer_operators, upgrade_opset
from .rewrite import drop_initializers_from_inputs, mend
from .translate import translate

ShapesOfGraph = Shapes | Callable[[onnx.GraphProto], Shapes]
"""Sizes of symbolic dimensions, or what gives them for a graph."""


_NUMBERS = frozenset(
    getattr(onnx.TensorProto, name)
    for name in (
        *("FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", "BOOL"),
        *("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
        *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"),
    )
)


@dataclass(frozen=True)
class ImportedModel:
    """A model as Relax.

    Parameters
    ----------
    mod : tvm.IRModule
        Its function ``main`` takes the inputs in order; the weights are constants in it.
    inputs, outputs : tuple of TensorSpec
        Tensors under the names that the ONNX model gives them.
    nodes : tuple of str
        Labels of the nodes that variables named by ``translate.NODE_VARIABLE`` stand for.
    """

    mod: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[str, ...] = ()


def import_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: ShapesOfGraph | None = None,
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
        name of a dimension to its size. A string as a size keeps the dimension symbolic. A
        function is called with the graph.
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
        If it holds operators that cannot be imported; the message lists all of them. Also if a
        translation fails, whatever the reason.
    InvalidInputError
        If ``outputs`` has a name that is no result, or one twice.
    """
    try:
        proto, stored = _prepare(model, shapes, weights, outputs)
        mod = translate(proto, stored)
    except UnicodeDecodeError as error:
        raise InvalidModelError(f"the model holds invalid text: {error}") from error
    nodes = tuple(f"{node_label(node)} ({node.op_type})" for node in proto.graph.node)
    return ImportedModel(mod, _input_specs(proto, mod), _output_specs(proto, mod), nodes)


def _prepare(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: ShapesOfGraph | None,
    constants: Mapping[str, np.ndarray] | None = None,
    outputs: Sequence[str] | None = None,
) -> tuple[onnx.ModelProto, Weights]:
    """Load, check, bind and rewrite; return the graph and the large weights, which it reads."""
    proto = parse_model(read_model(model))
    path = Path(model) if isinstance(model, str | os.PathLike) else None
    check_opset(proto)
    if outputs is not None:
        _choose_outputs(proto, outputs)
    check_operators(proto)
    check_external_data(proto, path)
    drop_initializers_from_inputs(proto)
    _check_interface(proto)
    bind_shapes(proto, shapes(proto.graph) if callable(shapes) else shapes)
    weights = detach_weights(proto) | dict(constants or {})
    sort_nodes(proto.graph)
    proto = admit_newer_operators(proto)
    if any(map(is_classical, proto.graph.node)):
        check_model(proto)
        check_nodes(proto)
        proto = upgrade_opset(proto)
    proto = expand_foreign(proto, weights)
    check_model(proto)
    proto = mend(proto, weights)
    drop_stand_ins(proto, weights)
    return proto, weights


def _check_interface(model: onnx.ModelProto) -> None:
    """Refuse inputs, outputs and weights that compiled code does not support."""
    graph = model.graph
    values = [("input", value) for value in graph.input]
    # The type of an output that declares none is inferred.
    values += [("output", value) for value in graph.output if value.HasField("type")]
    for role, value in values:
        kind = value.type.WhichOneof("value")
        if kind is None:
            raise InvalidModelError(f"{role} {value.name!r} has no type; expected a tensor")
        if kind != "tensor_type":
            raise UnsupportedOperatorError(
                f"{role} {value.name!r} is {kind.replace('_', ' ')}; expected a tensor: export the "
                "model with one for each tensor in it"
            )
        element = value.type.tensor_type.elem_type
        if element not in _NUMBERS:
            names = onnx.TensorProto.DataType.Name
            known = onnx.TensorProto.DataType.values()
            found = names(element) if element in known else f"unknown type {element}"
            advice = f"; {TEXT_ADVICE}" if element == onnx.TensorProto.STRING else ""
            refusal = UnsupportedOperatorError if element in known else InvalidModelError
            raise refusal(
                f"{role} {value.name!r} holds elements of {found}; expected one of "
                f"{', '.join(sorted(names(number) for number in _NUMBERS))}{advice}"
            )
    for sparse in graph.sparse_initializer:
        raise UnsupportedOperatorError(
            f"initialiser {sparse.values.name!r} is sparse; store it as a dense tensor"
        )


def _choose_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Let a model return the tensors of these names, in this order.

    Raises
    ------
    InvalidInputError
        If there are none, or one comes twice or is no tensor of the main graph.
    """
    graph = model.graph
    known = {value.name: value for value in graph.output}
    computed = {name for node in graph.node for name in node.output if name}
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise InvalidInputError(f"outputs is {names!r:.80}; expected a list of different names")
    for name in names:
        if name not in computed:
            raise InvalidInputError(
                f"outputs has {name!r:.80}, which no node computes; expected names of results, as "
                f"{', '.join(map(repr, known))}"
            )
    sort_nodes(graph)
    # The type of an output that declares none is inferred.
    values = [known.get(name) or onnx.ValueInfoProto(name=name) for name in names]
    del graph.output[:]
    graph.output.extend(values)
    drop_unread_nodes(model)
    _number_unread_labels(model)


def _number_unread_labels(model: onnx.ModelProto) -> None:
    """Replace labels that are text by their places in classifiers of which only scores are read."""
    read = used_names(model)
    for node in model.graph.node:
        labels = attribute(node, "classlabels_strings")
        if node.domain == ML_DOMAIN and labels and node.output[0] not in read:
            is_tree = node.op_type == "TreeEnsembleClassifier"
            numbers = "classlabels_int64s" if is_tree else "classlabels_ints"
            kept = [entry for entry in node.attribute if entry.name != "classlabels_strings"]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.append(onnx.helper.make_attribute(numbers, range(len(labels))))


def _input_specs(model: onnx.ModelProto, mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    types = [param.ty for param in mod["main"].params]
    return tuple(
        _spec(f"input {value.name!r}", value.name, ty)
        for value, ty in zip(model.graph.input, types, strict=True)
    )


def _output_specs(model: onnx.ModelProto, mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    # The type of the function itself knows no sizes that depend on data.
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
