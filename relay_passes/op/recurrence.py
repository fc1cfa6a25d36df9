# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.recurrence``: all steps of an LSTM, a GRU or an RNN in one direction.

Shapes and layouts are those of :func:`schedules.cpu.loops.recurrent_cells.recurrent_cell`. For CPUs
only: a step depends on the one before, and a GPU cannot wait for all its blocks in a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.recurrent_cells import GATES, LANES, RecurrentCell, recurrent_cell
from schedules.errors import OpError

from .register import is_typed, register_op

OP = "relax.tvm_fusion.recurrence"

_NUMBERS = ("steps", "batch", "hidden")
_FLAGS = ("reverse", "has_lengths", "has_peepholes", "coupled", "reset_after")


def recurrence(arguments: Sequence[relax.Expr], cell: RecurrentCell) -> relax.Call:
    """Compute a recurrent layer.

    Parameters
    ----------
    arguments : Sequence[relax.Expr]
        Products of the inputs, weights, state, memory, lengths, peepholes and bias.
    cell : RecurrentCell
        The layer.

    Returns
    -------
    relax.Call
        A tuple: all states, the last one, the last memory.

    Raises
    ------
    OpError
        If an argument has another shape or type than the layer needs.
    """
    numbers = (*_NUMBERS, *_FLAGS)
    attributes: dict[str, object] = {name: int(getattr(cell, name)) for name in numbers}
    attributes |= {"kind": cell.kind, "dtype": cell.dtype, "clip": tirx.const(cell.clip, "float64")}
    attributes["activations"] = [name for name, _, _ in cell.activations]
    for position, name in enumerate(("alphas", "betas"), start=1):
        attributes[name] = [tirx.const(one[position], "float64") for one in cell.activations]
    call = relax.Call(_RECURRENCE, list(arguments), attributes)
    if is_typed(*arguments):
        _infer_type(call, None)
    return call


def _cell(call: relax.Call) -> RecurrentCell:
    attrs = call.attrs
    names = [str(name) for name in attrs["activations"]]
    alphas, betas = ([float(value) for value in attrs[name]] for name in ("alphas", "betas"))
    numbers: dict[str, Any] = {name: int(attrs[name]) for name in _NUMBERS}
    flags: dict[str, Any] = {name: bool(attrs[name]) for name in _FLAGS}
    return RecurrentCell(
        kind=str(attrs["kind"]),
        activations=tuple(zip(names, alphas, betas, strict=True)),
        clip=float(attrs["clip"]),
        dtype=str(attrs["dtype"]),
        **numbers,
        **flags,
    )


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TupleType:
    cell = _cell(call)
    width = GATES[cell.kind] * LANES
    expected = (
        (cell.steps, cell.batch, cell.blocks * width),
        (cell.blocks, cell.gates, cell.hidden, LANES),
        (cell.batch, cell.hidden),
        (cell.batch, cell.padded),
        (cell.batch,),
        (cell.blocks, 3 * LANES),
        (cell.padded,),
    )
    if len(call.args) != len(expected):
        raise OpError(f"{OP}: {len(call.args)} arguments; expected {len(expected)}")
    for number, (argument, shape) in enumerate(zip(call.args, expected, strict=True)):
        dtype = "int32" if number == 4 else cell.dtype
        ty = argument.ty
        is_tensor = isinstance(ty, relax.TensorType) and ty.shape is not None
        if not is_tensor or str(ty.dtype) != dtype or _extents(ty) != shape:
            raise OpError(f"{OP}: argument {number} is {ty}; expected {dtype} of shape {shape}")
    last = (cell.batch, cell.padded)
    shapes = ((cell.steps, *last), last, last)
    return relax.TupleType([relax.TensorType(shape, cell.dtype) for shape in shapes])


def _extents(ty: relax.TensorType) -> tuple[int, ...]:
    """Shape of a tensor, with -1 for symbolic extents."""
    return tuple(int(dim) if isinstance(dim, tirx.IntImm) else -1 for dim in ty.shape)


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    target = Target.current(allow_none=True) or Target("llvm")
    if target.kind.name != "llvm":
        raise OpError(
            f"{OP}: the target is {target.kind.name!r}; recurrent layers are compiled for CPUs only"
        )
    cell = _cell(call)
    steps = recurrent_cell(cell, CPUInfo.from_target(target))
    function = builder.add_func(steps, f"{cell.kind.lower()}_steps")
    return relax.call_tir(function, list(call.args), list(_infer_type(call, None).fields))


_RECURRENCE = register_op(OP, "All steps of a recurrent layer.", _infer_type, _legalize)
