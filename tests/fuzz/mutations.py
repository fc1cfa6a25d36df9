# SPDX-License-Identifier: Apache-2.0
"""Damaged variants of ONNX models: of their bytes, and of their graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import onnx
from onnx import helper

INTEGERS = (-(2**63), -(2**31), -7, -2, -1, 0, 1, 2, 3, 5, 17, 2**16, 2**31, 2**62, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-40, 3e38)
DTYPES = tuple(onnx.TensorProto.DataType.values())
OPERATORS = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))

Mutation = Callable[[onnx.ModelProto, random.Random], None]


def damaged(model: onnx.ModelProto, seed: int) -> bytes:
    """Return a serialised variant with one or two damages, the same ones for the same seed."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return _flip_bits(model.SerializeToString(), rng)
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for _ in range(rng.randint(1, 2)):
        try:
            rng.choice(MUTATIONS)(changed, rng)
        except (LookupError, ValueError, TypeError):  # nothing of that kind, or no such value
            continue
    return changed.SerializeToString()


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)


def _names(graph: onnx.GraphProto) -> list[str]:
    values = [value.name for value in [*graph.input, *graph.initializer]]
    return ["", *values, *(name for node in graph.node for name in node.output)]


def _drop_node(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.node.remove(rng.choice(model.graph.node))


def _repeat_node(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.node.insert(rng.randrange(9), rng.choice(model.graph.node))


def _rewire(model: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    node.input[rng.randrange(len(node.input))] = rng.choice(_names(model.graph))


def _drop_or_add_input(model: onnx.ModelProto, rng: random.Random) -> None:
    inputs = rng.choice(model.graph.node).input
    if rng.random() < 0.5:
        del inputs[-1]
    else:
        inputs.append(rng.choice(_names(model.graph)))


def _rename_output(model: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    node.output[rng.randrange(len(node.output))] = rng.choice(_names(model.graph))


def _another_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    rng.choice(model.graph.node).op_type = rng.choice(OPERATORS)


def _change_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    attribute = rng.choice(rng.choice(model.graph.node).attribute)
    kind = onnx.AttributeProto
    if attribute.type == kind.INT:
        attribute.i = rng.choice(INTEGERS)
    elif attribute.type == kind.FLOAT:
        attribute.f = rng.choice(FLOATS)
    elif attribute.type == kind.INTS and rng.random() < 0.7:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTEGERS)
    elif attribute.type == kind.INTS:
        attribute.ints.append(rng.choice(INTEGERS))
    elif attribute.type == kind.STRING:
        attribute.s = rng.choice([b"", b"?", b"VALID", b"\xff\xfe", attribute.s * 2])
    else:
        attribute.type = rng.choice(list(kind.AttributeType.values()))


def _drop_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    del rng.choice(model.graph.node).attribute[-1]


def _add_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    name = rng.choice(["axis", "axes", "group", "strides", "pads", "perm", "to", "mode", "alpha"])
    value = rng.choice([*INTEGERS, *FLOATS, "text", [1, 2], [0.5], [-1]])
    rng.choice(model.graph.node).attribute.append(helper.make_attribute(name, value))


def _change_input_shape(model: onnx.ModelProto, rng: random.Random) -> None:
    tensor = rng.choice([*model.graph.input, *model.graph.output]).type.tensor_type
    if rng.random() < 0.2:
        tensor.shape.dim.add().dim_value = rng.choice([1, 2, 3])
    elif rng.random() < 0.2:
        del tensor.shape.dim[-1]
    else:
        rng.choice(tensor.shape.dim).dim_value = rng.choice(INTEGERS)


def _change_input_type(model: onnx.ModelProto, rng: random.Random) -> None:
    rng.choice(model.graph.input).type.tensor_type.elem_type = rng.choice(DTYPES)


def _change_initializer(model: onnx.ModelProto, rng: random.Random) -> None:
    tensor = rng.choice(model.graph.initializer)
    choice = rng.randrange(4)
    if choice == 0:
        tensor.data_type = rng.choice(DTYPES)
    elif choice == 1:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(INTEGERS)
    elif choice == 2:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data))]
    else:
        tensor.ClearField("dims")


def _input_as_constant(model: onnx.ModelProto, rng: random.Random) -> None:
    value = rng.choice(model.graph.input)
    dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if all(0 <= dim <= 16 for dim in dims) and len(dims) < 5:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        size = 1
        for dim in dims:
            size *= dim
        data = rng.randbytes(size * kind.itemsize)
        elem_type = value.type.tensor_type.elem_type
        tensor = helper.make_tensor(value.name, elem_type, dims, data, raw=True)
        model.graph.initializer.append(tensor)
        if rng.random() < 0.8:
            model.graph.input.remove(value)


def _change_opset(model: onnx.ModelProto, rng: random.Random) -> None:
    rng.choice(model.opset_import).version = rng.choice([0, 1, 6, 7, 9, 11, 13, 17, 21, 999, -1])


MUTATIONS: tuple[Mutation, ...] = (
    _drop_node,
    _repeat_node,
    _rewire,
    _drop_or_add_input,
    _rename_output,
    _another_operator,
    _change_attribute,
    _change_attribute,
    _change_attribute,
    _drop_attribute,
    _add_attribute,
    _change_input_shape,
    _change_input_shape,
    _change_input_type,
    _change_initializer,
    _input_as_constant,
    _input_as_constant,
    _change_opset,
)
