# SPDX-License-Identifier: Apache-2.0
"""Binding of all dimensions of a model's inputs to sizes or names, and inference of all shapes."""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterable, Mapping, Sequence, Set

import onnx
from onnx import helper

from tvm_fusion.errors import InvalidModelError

from .graph_edits import is_default_domain

Shapes = Mapping[str, "int | str | Sequence[int | str]"]

MAX_ELEMENTS = 2**31 - 1
"""The compiled code counts elements in 32-bit integers."""

LIKE_INPUT = frozenset({"GroupNormalization"})
"""Operators whose result has the shape of their first input, which onnx does not infer."""


def bind_shapes(model: onnx.ModelProto, shapes: Shapes | None) -> None:
    """Write the sizes of ``shapes`` into the model's inputs; every dimension must get one.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place. Its inputs must not contain initialisers.
    shapes : mapping, optional
        Whole shape of each input, or size of each symbolic dimension, by its name. A string as a
        size keeps that dimension symbolic, under this name.
    """
    inputs = {value.name: value for value in model.graph.input}
    by_input, by_name = _sorted_by_kind(shapes or {})
    _check_names(inputs, by_input.keys(), by_name.keys())
    for name, shape in by_input.items():
        _bind_input(inputs[name], shape)
    for value in inputs.values():
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in by_name:
                _set_dim(dim, by_name[dim.dim_param], f"dimension {dim.dim_param!r}")
    kept = {size for shape in by_input.values() for size in shape if isinstance(size, str)}
    kept |= {size for size in by_name.values() if isinstance(size, str)}
    missing = [text for value in inputs.values() for text in _open_dimensions(value, kept)]
    if missing:
        raise InvalidModelError("; ".join(missing))
    _forget_inferred_shapes(model)


def _sorted_by_kind(
    shapes: Shapes,
) -> tuple[dict[str, Sequence[int | str]], dict[str, int | str]]:
    """Whole shapes of inputs, and sizes of symbolic dimensions."""
    by_input: dict[str, Sequence[int | str]] = {}
    by_name: dict[str, int | str] = {}
    if not isinstance(shapes, Mapping):
        raise InvalidModelError(
            f"shapes is {shapes!r:.80}; expected a mapping from names of inputs to shapes, or from "
            "names of dimensions to sizes"
        )
    for name, size in shapes.items():
        if isinstance(size, str | numbers.Integral):
            by_name[name] = size
        elif isinstance(size, Iterable):
            by_input[name] = tuple(size)
        else:
            raise InvalidModelError(
                f"shapes gives {name!r} the value {size!r}; expected a shape or a size"
            )
    return by_input, by_name


def _check_names(
    inputs: Mapping[str, onnx.ValueInfoProto], by_input: Set[str], by_name: Set[str]
) -> None:
    """Refuse names of inputs and of symbolic dimensions that the model does not have."""
    dims = [dim for value in inputs.values() for dim in value.type.tensor_type.shape.dim]
    unknown = sorted(by_input - inputs.keys())
    unknown += sorted(by_name - {dim.dim_param for dim in dims if dim.dim_param})
    if unknown:
        raise InvalidModelError(
            f"shapes names {', '.join(map(repr, unknown))}, which is neither an input with a whole "
            f"shape nor a symbolic dimension with a size; inputs: {_describe(inputs.values())}"
        )


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the shapes of all its tensors, refusing contradictions.

    Without data propagation, which takes time and memory for each element of a vector; folding
    constants finds the same shapes.
    """
    _check_sizes(model)
    inferred = _infer(model)
    if any(map(_is_like_input, model.graph.node)):  # their types have been checked by now
        shapeless = _stand_in(inferred.graph)
        inferred = _infer(inferred)
        for index, node in shapeless.items():
            inferred.graph.node[index].CopyFrom(node)
    _check_sizes(inferred)
    return inferred


def infer_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infer all shapes, without those that the model declares for its outputs if they are wrong."""
    try:
        return infer_shapes(model)
    except InvalidModelError:
        declared = onnx.ModelProto()
        declared.CopyFrom(model)
        try:
            return infer_shapes_anew(model)
        except InvalidModelError:
            model.CopyFrom(declared)
            return infer_shapes(model)


def _infer(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, IndexError, ValueError, RuntimeError) as error:
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise InvalidModelError(f"the model's shapes do not fit together: {text}") from error


def _is_like_input(node: onnx.NodeProto) -> bool:
    return node.op_type in LIKE_INPUT and is_default_domain(node)


def _stand_in(graph: onnx.GraphProto) -> dict[int, onnx.NodeProto]:
    """Replace each node of ``LIKE_INPUT`` by an Identity; return the nodes by their positions."""
    nodes = {}
    for index, node in enumerate(graph.node):
        if _is_like_input(node):
            nodes[index] = onnx.NodeProto()
            nodes[index].CopyFrom(node)
            node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, node.name))
    return nodes


def infer_shapes_anew(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with all shapes inferred again, ignoring declared ones."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return infer_shapes(model)


def static_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    """Return the shape of a tensor if all its sizes are known."""
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    if not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)


def check_size(name: str, shape: Sequence[int]) -> None:
    """Refuse a tensor with a negative dimension or with more elements than an index can count."""
    count = 1
    for size in shape:
        if size < 0:
            raise InvalidModelError(f"tensor {name!r} has the shape {tuple(shape)}")
        count *= size
    if count > MAX_ELEMENTS:
        raise InvalidModelError(
            f"tensor {name!r} of shape {tuple(shape)} has {count} elements; "
            f"at most {MAX_ELEMENTS} can be compiled: use smaller inputs"
        )


def _check_sizes(model: onnx.ModelProto) -> None:
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        check_size(value.name, static_shape(value) or ())


def _bind_input(value: onnx.ValueInfoProto, shape: Sequence[int | str]) -> None:
    """Bind the whole shape of one input."""
    shape = tuple(shape)
    tensor = value.type.tensor_type
    declared = tensor.shape.dim
    if tensor.HasField("shape") and len(declared) != len(shape):
        raise InvalidModelError(
            f"shapes gives input {value.name!r} the shape {shape} of {len(shape)} dimensions; "
            f"the model declares {_describe([value])}"
        )
    if not tensor.HasField("shape"):
        tensor.shape.SetInParent()
        for _ in shape:
            tensor.shape.dim.add()
    for index, (dim, size) in enumerate(zip(tensor.shape.dim, shape, strict=True)):
        if _is_fixed(dim) and dim.dim_value and dim.dim_value != size:
            raise InvalidModelError(
                f"shapes gives dimension {index} of input {value.name!r} the size {size!r}; the "
                f"model fixes it at {dim.dim_value}: export it with a symbolic dimension"
            )
        _set_dim(dim, size, f"dimension {index} of input {value.name!r}")


def _open_dimensions(value: onnx.ValueInfoProto, kept: set[str]) -> list[str]:
    """Return a message with the missing argument if the input has dimensions without a size."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return [
            f"input {value.name!r} has no shape; pass shapes={{{value.name!r}: (...)}} with a size "
            "for each dimension"
        ]
    dims = list(tensor.shape.dim)
    is_open = [not _is_fixed(dim) and dim.dim_param not in kept for dim in dims]
    if not any(is_open):
        return []
    example = tuple(dim.dim_value if _is_fixed(dim) else 1 for dim in dims)
    hint = f"shapes={{{value.name!r}: {example}}}"
    unnamed = [
        f"{index} ({dim.dim_param!r})" if dim.dim_param else str(index)
        for index, dim in enumerate(dims)
        if is_open[index]
    ]
    names = {dim.dim_param: 1 for dim, missing in zip(dims, is_open, strict=True) if missing}
    if "" not in names:
        options = " ".join(f"--shape {name}=1" for name in names)
        hint += f" or shapes={names} ({options})"
    return [
        f"input {value.name!r} has no size for dimension{_plural(unnamed)} {', '.join(unnamed)}; "
        f"pass for example {hint}"
    ]


def _is_fixed(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return whether a dimension has a size, which may be 0."""
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _plural(items: Sequence[str]) -> str:
    return "s" if len(items) > 1 else ""


def _set_dim(dim: onnx.TensorShapeProto.Dimension, size: int | str, what: str) -> None:
    if isinstance(size, str):
        # TVM parses "+", "-", "*" and "/" in a name as arithmetic.
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", size):
            raise InvalidModelError(
                f"shapes gives {what} the name {size!r}; expected letters, digits and underscores"
            )
        dim.dim_param = size
    elif isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise InvalidModelError(
            f"shapes gives {what} the size {size!r}; expected a whole number of 1 or more"
        )
    elif size > MAX_ELEMENTS:
        raise InvalidModelError(
            f"shapes gives {what} the size {size}; tensors have up to {MAX_ELEMENTS} elements"
        )
    else:
        dim.dim_value = int(size)


def _forget_inferred_shapes(model: onnx.ModelProto) -> None:
    """Drop the known shapes of all other tensors after the inputs' shapes changed."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            if not _is_fixed(dim):
                dim.Clear()


def _describe(values: Iterable[onnx.ValueInfoProto]) -> str:
    texts = []
    for value in values:
        dims = value.type.tensor_type.shape.dim
        sizes = ", ".join(d.dim_param or (str(d.dim_value) if d.dim_value else "?") for d in dims)
        texts.append(f"{value.name!r} ({sizes})")
    return ", ".join(texts)
