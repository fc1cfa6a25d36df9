# SPDX-License-Identifier: Apache-2.0
"""Import of a ``torch.export.ExportedProgram``: PyTorch's own ONNX exporter, then our importer.

The weights do not pass through the ONNX model: they stay in PyTorch's memory, and constants of the
Relax module use them there.

Ops that PyTorch's exporter to ONNX writes by formulas with other numbers are written out exactly::

    atan2:        the exporter ignores the sign of a zero, and loses infinities and NaN
    remainder:    the exporter rounds the quotient: 2.1 % 0.7 = -6e-8 instead of 0.7
    a // b:       likewise: 2.1 // 0.7 = 3 instead of 2
    bucketize:    NaN lies behind all boundaries; and searchsorted, which the exporter lacks
    1.0 - i:      the exporter cannot subtract integers from a float
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnxscript.optimizer import fold_constants
from torch import Tensor, fx
from torch.export import ExportedProgram

from ..errors import InvalidModelError, UnsupportedOperatorError
from ..onnx.frontend import ImportedModel, import_onnx
from ..onnx.model.weights import SMALL_ELEMENTS
from ..warning_filters import warnings_ignored
from .fast_paths import FAST_PATHS
from .lost_arguments import FORMS, decomposition, lost_arguments

_ATEN = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Angles of points, from -pi to pi, by the one of the first quadrant."""
    result = torch.result_type(y, x)
    result = result if result.is_floating_point else torch.get_default_dtype()
    work = torch.float32 if result in _HALVES else result
    y, x = torch.broadcast_tensors(y.to(work), x.to(work))
    height, width = y.abs(), x.abs()
    equal = torch.where(height == 0, 0.0, 1.0).to(work)  # Result of two zeros, or two infinities.
    angle = torch.atan(torch.where(height == width, equal, height / width))
    angle = torch.where(_is_negative(x), math.pi - angle, angle)
    return torch.where(_is_negative(y), -angle, angle).to(result)


def _is_negative(x: Tensor) -> Tensor:
    """Whether the sign is set, also that of a zero."""
    return (x < 0) | ((x == 0) & (1 / x < 0))


def _of_floats(
    compute: Callable[[Tensor, Tensor], Tensor], *, rounds_numbers: bool = False
) -> Callable[..., Any]:
    """Decomposition of a division of floats, one of them maybe a number; of integers it is none.

    A number is rounded to 16 bits, as the tensors are, where eager mode does so.
    """

    def decompose(a: Any, b: Any, *, rounding_mode: str | None = "floor") -> Any:
        result = torch.result_type(a, b)
        if not result.is_floating_point or rounding_mode != "floor":
            return NotImplemented
        work = torch.float32 if result in _HALVES else result
        kind = result if rounds_numbers else work
        a, b = (
            (x if isinstance(x, Tensor) else torch.full((), x, dtype=kind)).to(work) for x in (a, b)
        )
        return compute(a, b).to(result)

    return decompose


def _remainder(a: Tensor, b: Tensor) -> Tensor:
    """Remainder of an exact division, with the sign of the divisor."""
    rest = torch.fmod(a, b)
    return torch.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    """The whole quotient below the exact one; a zero has the sign of the rounded one."""
    rest = torch.fmod(a, b)
    whole = (a - rest) / b
    whole = torch.where((rest != 0) & ((b < 0) != (rest < 0)), whole - 1, whole)
    low = torch.floor(whole)
    low = torch.where(whole - low > 0.5, low + 1, low)
    quotient = a / b
    return torch.where(b == 0, quotient, torch.where(whole == 0, quotient * 0, low))


def bucketize(
    x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Number of the boundaries before each element: below it or, to the ``right``, not above."""
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


def searchsorted(
    sequence: Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Number of the elements of each row before the values of that row."""
    if sorter is not None:
        sequence = sequence.gather(-1, sorter)
    if not isinstance(values, Tensor):
        values = torch.full((), values)
    rows = sequence.unsqueeze(-2) if sequence.dim() > 1 else sequence
    columns = values.unsqueeze(-1)
    is_behind = rows > columns if right or side == "right" else rows >= columns
    return (~is_behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _subtract_from(x: Tensor, number: Any, alpha: Any = 1) -> Any:
    """A number of a wider kind than the tensor, less the tensor."""
    result = torch.result_type(x, number)
    if result == x.dtype:
        return NotImplemented
    return torch.full((), number, dtype=result) - alpha * x.to(result)


EXACT_OPS: dict[Any, Callable[..., Any]] = {
    _ATEN.atan2.default: atan2,
    _ATEN.rsub.Scalar: _subtract_from,
    **dict.fromkeys((_ATEN.bucketize.Tensor, _ATEN.bucketize.Scalar), bucketize),
    **dict.fromkeys((_ATEN.searchsorted.Tensor, _ATEN.searchsorted.Scalar), searchsorted),
    **dict.fromkeys(
        (_ATEN.floor_divide.default, _ATEN.div.Tensor_mode, _ATEN.div.Scalar_mode),
        _of_floats(_floor_divide),
    ),
    **dict.fromkeys(
        (_ATEN.remainder.Tensor, _ATEN.remainder.Scalar, _ATEN.remainder.Scalar_Tensor),
        _of_floats(_remainder, rounds_numbers=True),
    ),
}
"""Ops, and functions of their arguments that compute the same by others."""


FX_NODE = "pkg.torch.onnx.fx_node"
"""Key under which PyTorch's exporter stores the FX node that an ONNX node comes from."""

_WRITTEN_OUT = {
    **EXACT_OPS,
    **FAST_PATHS,
    torch.ops.aten._assert_tensor_metadata.default: lambda *arguments, **options: None,
}
"""Ops, and what computes the same, whatever the arguments."""

_DECOMPOSITIONS = _WRITTEN_OUT | {op: decomposition(op, form) for op, form in FORMS.items()}

_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")
"""Loggers of PyTorch's exporter and of the libraries that it calls."""

_FLOAT, _BFLOAT16 = onnx_ir.DataType.FLOAT, onnx_ir.DataType.BFLOAT16

_SHORT = {torch.float16: onnx_ir.DataType.FLOAT16, torch.bfloat16: _BFLOAT16}
"""Types of 16 bits, of PyTorch and of ONNX."""

_NORMS = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)


class UnsupportedTorchOpError(UnsupportedOperatorError):
    """An exported program with ops that cannot be imported.

    Parameters
    ----------
    message : str
        The text.
    ops : frozenset of str
        Names of the ops, such as ``"aten.nonzero.default"``; empty where they are not known.
    """

    def __init__(self, message: str, ops: frozenset[str]) -> None:
        super().__init__(message)
        self.ops = ops


def import_exported_program(
    program: ExportedProgram, shapes: Mapping[str, Any] | None = None
) -> ImportedModel:
    """Import an exported program.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        Its inputs and outputs keep the names of their FX nodes.
    shapes : mapping, optional
        As for :func:`tvm_fusion.compile`; dimensions that are not named in it stay symbolic.

    Returns
    -------
    ImportedModel

    Raises
    ------
    UnsupportedTorchOpError
        If it holds ops that cannot be imported.
    UnsupportedOperatorError
        If it changes buffers or inputs in place.
    InvalidModelError
        If it is inconsistent, or does not fit ``shapes``.
    """
    program = functional(program)
    changed = changed_in_place(program)
    if changed:
        raise UnsupportedOperatorError(
            f"the exported program changes {', '.join(map(repr, changed))} in place; return the "
            "new values as outputs, or use torch.compile(model, backend='tvm_fusion')"
        )
    model, weights = _to_onnx(program)
    try:
        return import_onnx(model, _open_dimensions(model, shapes or {}), weights)
    except (InvalidModelError, UnsupportedOperatorError) as error:
        ops = frozenset(_ops_in_message(model, str(error)))
        if not ops:
            raise
        raise UnsupportedTorchOpError(f"{', '.join(sorted(ops))}: {error}", ops) from error


def digest(program: ExportedProgram) -> str:
    """Digest of a program: its text, and the values of its tensors.

    Raises
    ------
    TypeError
        If it holds constants other than tensors.
    """
    hashed = hashlib.sha256(str(program).encode())
    for name, value in sorted({**program.state_dict, **program.constants}.items()):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}")
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hashed.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def as_onnx(program: ExportedProgram) -> onnx.ModelProto:
    """An exported program as an ONNX model that holds its weights.

    Raises
    ------
    UnsupportedTorchOpError
        If PyTorch cannot export it.
    """
    return onnx_ir.to_proto(_exported(functional(program)))


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program with changes in place as additional outputs, which its signature lists.

    Ops that the exporter cannot or would not translate in full are written out, and what the
    tracer asserts of types is left out.
    """
    if not any(map(_needs_decomposition, _nodes(program))):
        return program
    with warnings_ignored():
        return program.run_decompositions(dict(_DECOMPOSITIONS))


def _nodes(program: ExportedProgram) -> Iterator[fx.Node]:
    """The nodes of a program, and of the branches and bodies in it."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _needs_decomposition(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        # Within an autocast, the types of values that the tracer notes may be those without it.
        return node.target is torch.ops.higher_order.wrap_with_autocast
    if node.target in _WRITTEN_OUT or lost_arguments(node):
        return True
    # Normalisation in training mode updates its running statistics; its schema conceals that.
    is_training = node.target in _NORMS and len(node.args) > 5 and node.args[5] is True
    return is_training or node.target._schema.is_mutable


def changed_in_place(program: ExportedProgram) -> list[str]:
    """Names of the buffers and inputs that a functional program is to change in place."""
    signature = program.graph_signature
    return [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]


def _to_onnx(program: ExportedProgram) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The program as ONNX, and its large weights, for which it has inputs of their names."""
    model = _exported(program)
    weights = _detach_weights(model)
    return onnx_ir.to_proto(model), weights


def _exported(program: ExportedProgram) -> onnx_ir.Model:
    """The program as ONNX, by PyTorch's exporter."""
    values = [node.meta.get("val") for node in _nodes(program)]
    is_short = any(getattr(value, "dtype", None) in _SHORT for value in values)
    exported = _export(program, is_short)
    # The exporter's own decompositions may have made ops with arguments that it loses.
    while any(map(lost_arguments, _nodes(exported.exported_program))):
        exported = _export(functional(exported.exported_program), is_short)
    if is_short:
        _restore_outputs(exported.model, program)
        with _quiet():
            fold_constants(exported.model)
        for node in list(onnx_ir.traversal.RecursiveGraphIterator(exported.model.graph)):
            _settle_types(node, exported.model.opset_imports[""])
    return exported.model


def _export(program: ExportedProgram, is_short: bool) -> torch.onnx.ONNXProgram:
    """The exporter's result, of the first opset with pools and norms of bfloat16 if need be.

    The exporter's optimizer folds norms into convolutions of 16-bit types in that type, or in
    another one.
    """
    try:
        with _quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=not is_short,
                opset_version=22 if is_short else None,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        texts = [str(part) for part in _chain(error)]
        ops = frozenset(op for text in texts for op in _targets(text))
        reason = " ".join(texts[-1].split())[:300]
        named = f" at {', '.join(sorted(ops))}" if ops else ""
        raise UnsupportedTorchOpError(
            f"PyTorch cannot export the program to ONNX{named}: {reason}", ops
        ) from error
    assert exported is not None, "an exporter without a file returns its result"
    return exported


def _restore_outputs(model: onnx_ir.Model, program: ExportedProgram) -> None:
    """Give the outputs their 16-bit types: the exporter leaves sums of such in float32."""
    nodes = [value for value in program.graph.output_node().args[0] if isinstance(value, fx.Node)]
    for node, output in zip(nodes, list(model.graph.outputs), strict=True):
        kind = _SHORT.get(getattr(node.meta["val"], "dtype", None))
        if kind is not None and output.dtype == _FLOAT:
            _narrow(output, kind)


def _settle_types(node: onnx_ir.Node, opset: int) -> None:
    """Compute in float32 what mixes types, as PyTorch may, or has bfloat16 where ONNX lacks it."""
    if node.domain or not onnx.defs.has(node.op_type):
        return
    graph = node.graph
    assert graph is not None, "it is a node of a model"
    schema = onnx.defs.get_schema(node.op_type, opset)
    places = [min(i, len(schema.inputs) - 1) for i in range(len(node.inputs))]
    takers = [schema.inputs[place] for place in places]
    for kind in {taker.type_str for taker in takers if taker.is_homogeneous}:
        allowed = next(taker.types for taker in takers if taker.type_str == kind)
        known = {
            i: value
            for i, value in enumerate(node.inputs)
            if value is not None and takers[i].type_str == kind
        }
        found = {value.dtype for value in known.values()}
        is_lacking = found == {_BFLOAT16} and "tensor(bfloat16)" not in allowed
        if not is_lacking and (len(found) < 2 or not found <= {_FLOAT, *_SHORT.values()}):
            continue
        for i, value in known.items():
            if value.dtype != _FLOAT:
                cast = onnx_ir.node("Cast", [value], {"to": _FLOAT})
                cast.outputs[0].dtype, cast.outputs[0].shape = _FLOAT, value.shape
                graph.insert_before(node, cast)
                node.replace_input_with(i, cast.outputs[0])
        for value, giver in zip(node.outputs, schema.outputs, strict=False):
            if giver.type_str == kind and value.dtype in _SHORT.values():
                _narrow(value, value.dtype)


def _narrow(value: onnx_ir.Value, kind: onnx_ir.DataType) -> None:
    """Let a node compute a value in float32, and a cast make it what it was."""
    node = value.producer()
    assert node is not None and node.graph is not None, "it is a node of a model"
    cast = onnx_ir.node("Cast", [value], {"to": kind})
    value.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    cast.outputs[0].dtype, cast.outputs[0].shape = kind, value.shape
    cast.outputs[0].name, value.name, value.dtype = value.name, f"{value.name}/wide", _FLOAT
    node.graph.insert_after(node, cast)


def _detach_weights(model: onnx_ir.Model) -> dict[str, np.ndarray]:
    """Replace the large weights by inputs; the arrays are in the memory of PyTorch's tensors."""
    graph = model.graph
    weights = {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.size > SMALL_ELEMENTS:
            weights[name] = np.asarray(tensor.numpy(), order="C")
            del graph.initializers[name]
            graph.inputs.append(value)
    return weights


def _open_dimensions(model: onnx.ModelProto, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """``shapes``, and every symbolic dimension that it does not bind under its own name.

    The exporter writes a symbol that was found to be a number as the text of that.
    """
    names = {
        dim.dim_param
        for value in model.graph.input
        if value.name not in shapes
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param
    }
    sizes = {name: int(name) if name.isdecimal() else name for name in sorted(names)}
    return sizes | dict(shapes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Context without the exporter's warnings, which are about its own inner workings."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with warnings_ignored():  # one thread at a time
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _targets(text: str) -> list[str]:
    """Names of the ops in FX nodes, such as ``call_function[target=torch.ops.aten.add.Tensor]``."""
    return re.findall(r"target=torch\.ops\.([\w.]+)", text)


def _ops_in_message(model: onnx.ModelProto, message: str) -> Iterator[str]:
    """Names of the ops whose ONNX nodes an error message names."""
    named = {name for pair in re.findall(r"'([^']+)'|node name: (\w+)\)", message) for name in pair}
    for node in model.graph.node:
        if node.name in named:
            for prop in node.metadata_props:
                if prop.key == FX_NODE:
                    yield from _targets(prop.value)
