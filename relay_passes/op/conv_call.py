# SPDX-License-Identifier: Apache-2.0
"""Construction and legalization of calls of the two convolution ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx

from schedules import attributes
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, Conv2DKernel, to_json

from .conv_types import ConvOp, constant_shape, output_type, packed_lanes, read_kernel
from .register import is_typed

OPAQUE_PATTERN = 8  # tvm::relax::OpPatternKind::kOpaque: FuseOps fuses nothing into the kernel

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")

Compute = Callable[[Conv2DKernel, Sequence[te.Tensor], "te.Tensor | None"], te.Tensor]


def build_call(
    op: ConvOp,
    operands: Sequence[relax.Expr | None],
    residual: relax.Expr | None,
    attrs: dict[str, Any],
) -> relax.Call:
    """A checked call of ``op``.

    ``op``: the op, which must be registered. ``operands``: data, then a weight and a bias for each
    layer; None stands for a bias of zeros. ``residual``: the last operand, if any. ``attrs``: all
    attributes as the caller gave them.
    """
    attrs = checked_attrs(op, attrs)
    packed = attrs["out_layout"] != "NCHW"
    arguments = [
        _zero_bias(operands[index - 1], op.operand_name(index - 1), packed, op)
        if operand is None
        else operand
        for index, operand in enumerate(operands)
    ]
    arguments += [] if residual is None else [residual]
    call = relax.Call(op.get(), arguments, attrs)
    if is_typed(*arguments):
        output_type(call, op)
    return call


Known = dict[tuple[str, Conv2DKernel], tirx.PrimFunc]
"""Functions of kernels of known sizes, by op."""


def legalize_call(
    builder: relax.BlockBuilder,
    call: relax.Call,
    op: ConvOp,
    compute: Compute,
    known: Known | None = None,
) -> relax.Expr:
    """Replace a call by ``compute``, as one function named after the op."""
    return legalize_kernel(builder, call, op.name, read_kernel(call, op), compute, known)


def legalize_kernel(
    builder: relax.BlockBuilder,
    call: relax.Call,
    op: str,
    kernel: Conv2DKernel,
    compute: Compute,
    known: Known | None = None,
) -> relax.Expr:
    """Replace a call of ``op`` that computes ``kernel`` by ``compute``.

    Functions in ``known`` are used again, and new ones are added: to write one of Winograd's
    algorithm takes longer than to schedule it.
    """
    short_name = op.rpartition(".")[2]
    if known is not None and (op, kernel) in known:
        name = builder.add_func(known[op, kernel], short_name)
        return relax.Call(_CALL_TIR, [name, relax.Tuple(call.args)], ty_args=[call.ty])

    def generate(*tensors: te.Tensor) -> te.Tensor:
        operands, residual = (tensors[:-1], tensors[-1]) if kernel.residual else (tensors, None)
        return compute(kernel, operands, residual)

    legal = builder.call_te(
        generate,
        *call.args,
        primfunc_name_hint=short_name,
        primfunc_attrs={
            attributes.OP: short_name,
            attributes.WORKLOAD: to_json(kernel),
            "op_pattern": OPAQUE_PATTERN,
        },
    )
    if known is not None and kernel.is_static:
        known[op, kernel] = builder.get()[legal.args[0]]
    # The inferred type, not the compute's: its symbolic extents are simplified.
    return relax.Call(legal.op, legal.args, legal.attrs, ty_args=[call.ty])


def checked_attrs(op: ConvOp, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers, lists and strings for every attribute; packed calls need their channels."""
    checked: dict[str, Any] = {}
    for suffix in op.suffixes:
        for name in ("strides", "padding", "dilation"):
            checked[name + suffix] = integers(attrs[name + suffix], name + suffix, op.name)
        groups = integers([attrs["groups" + suffix]], "groups" + suffix, op.name)
        checked["groups" + suffix] = groups[0]
        activation = Activation(
            str(attrs["activation" + suffix]),
            float(attrs["low" + suffix]),
            float(attrs["high" + suffix]),
        )
        checked["activation" + suffix] = activation.kind
        checked["low" + suffix], checked["high" + suffix] = activation.low, activation.high
    data_layout = str(attrs["data_layout"])
    out_layout = data_layout if attrs["out_layout"] is None else str(attrs["out_layout"])
    checked |= {"data_layout": data_layout, "out_layout": out_layout}
    if attrs.get("out_dtype") is not None:
        checked["out_dtype"] = str(attrs["out_dtype"])
    channels = {name: attrs[name] for name in op.channels if attrs[name] is not None}
    if packed_lanes(data_layout, out_layout, op.name):
        if len(channels) < len(op.channels):
            raise OpError(
                f"{op.name}: {out_layout} output without all of {', '.join(op.channels)}; give "
                "the true channel counts, which blocks do not determine"
            )
        for name, value in channels.items():
            checked[name] = integers([value], name, op.name)[0]
    elif channels:
        raise OpError(
            f"{op.name}: {', '.join(channels)} given for NCHW tensors; leave them out, the weights "
            "determine the channels"
        )
    return checked


def integers(values: Any, name: str, op: str) -> list[int]:
    """An attribute's values as plain integers; rejects values that are not exact integers."""
    try:
        numbers = [int(value) for value in values]
        exact = all(number == value for number, value in zip(numbers, values, strict=True))
    except (TypeError, ValueError):
        exact = False
    if not exact:
        raise OpError(f"{op}: {name} is {values!r}; expected integers")
    return numbers


def _zero_bias(weight: relax.Expr | None, name: str, packed: bool, op: ConvOp) -> relax.Expr:
    """Zeros for a layer without bias, in the layout of its weight."""
    if weight is None or not is_typed(weight):
        raise OpError(
            f"{op.name}: no bias beside {name}, whose type is not known yet; emit its producer "
            "first, or give a bias"
        )
    shape = constant_shape(weight, name, op.name)
    bias = (shape[0], shape[-1]) if packed else (shape[0],)
    return relax.const(np.zeros(bias), str(weight.ty.dtype))
