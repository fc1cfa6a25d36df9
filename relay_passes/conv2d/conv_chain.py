# SPDX-License-Identifier: Apache-2.0
"""Matching of a convolution with the bias, residual and activation after it.

The normal form of a chain, each line optional but the first, inside one dataflow block::

    lv0 = R.nn.conv2d(data, weight)     # NCHW, OIHW, constant channels and kernel
    lv1 = R.add(lv0, bias)              # one number a channel: [1, C, 1, 1], [C, 1, 1] or fewer
    lv2 = R.add(lv1, residual)          # a tensor of the same shape
    lv3 = R.nn.relu(lv2)                # or clip, sigmoid, silu, gelu, tvm_fusion.hardswish
                                        # or tvm_fusion.round_clip

Every value but the last has one consumer, the next line. Matching uses ops, attributes, types
and uses; the operands of an addition may stand in either order. All tensors are of one element
type; a convolution of 16-bit floats may give float32, if the next line casts it. There bounds are
two lines, ``minimum(maximum(x, low), high)``. On CPUs a convolution of bfloat16 gives float32, all
lines are of float32, and a last one may round to bfloat16; the residual may be of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tvm import relax, tirx
from tvm.ir import Constant, Op
from tvm.sym import Analyzer

from schedules.workload.conv2d import Activation, ByteAddition, ConvLayer

from .. import op as ops
from ..op.elementwise import bounds_of

_ASTYPE = Op.get("relax.astype")

Users = Mapping[relax.Var, list[relax.Binding]]


@dataclass(frozen=True)
class ConvChain:
    """One convolution and its epilogue.

    Parameters
    ----------
    layer : ConvLayer
        The convolution and its activation.
    data, weight : relax.Expr
        Operands of the convolution.
    bias : relax.Expr | None
        The added numbers, one a channel, in one axis.
    residual : relax.Expr | None
        The added tensor.
    bindings : tuple[relax.VarBinding, ...]
        The lines of the chain in order.
    out_dtype : str | None
        ``uint8`` where the activation gives bytes.
    scale : relax.Expr | None
        Factors of the sums of a convolution of bytes, one number a channel.
    sums : str | None
        Element type of the lines, if not that of the operands.
    addition : ByteAddition | None
        Addition of the residual to a convolution of bytes.
    """

    layer: ConvLayer
    data: relax.Expr
    weight: relax.Expr
    bias: relax.Expr | None
    residual: relax.Expr | None
    bindings: tuple[relax.VarBinding, ...]
    out_dtype: str | None = None
    scale: relax.Expr | None = None
    sums: str | None = None
    addition: ByteAddition | None = None

    @property
    def dtype(self) -> str:
        """Element type of the lines."""
        return self.sums or str(self.data.ty.dtype)

    @property
    def output(self) -> relax.Var:
        """The variable that holds the result."""
        return self.bindings[-1].var

    @property
    def dead(self) -> list[relax.Var]:
        """The variables that vanish when the chain becomes one call."""
        return [binding.var for binding in self.bindings[:-1]]

    def to_call(self) -> relax.Call:
        """The chain as one call of ``relax.tvm_fusion.conv2d``; OpError if the op rejects it."""
        bias = self.bias
        if self.sums is not None and bias is None:
            bias = relax.const(np.zeros(self.layer.out_channels, self.sums))
        operands = self.data, self.weight, bias, self.residual
        return ops.conv2d(*operands, **self.layer.to_attrs(), out_dtype=self.out_dtype)


def find_users(block: relax.DataflowBlock) -> Users:
    """The bindings that read each variable; a dataflow variable has no readers elsewhere."""
    users: dict[relax.Var, list[relax.Binding]] = {}
    for binding in block.bindings:
        for var in relax.analysis.free_vars(binding.value):
            users.setdefault(var, []).append(binding)
    return users


def find_chains(
    block: relax.DataflowBlock, users: Users, dtype: str = "float32", sums: str | None = None
) -> list[ConvChain]:
    """All chains of an element type in a dataflow block, in the order of their convolutions.

    With ``sums``, those whose lines are of that type.

    Where an addition joins two convolutions, it belongs to the later one: the other is complete
    by then and is the residual.
    """
    chains: list[ConvChain] = []
    taken: set[relax.Var] = set()
    values = {binding.var: binding.value for binding in block.bindings}
    for binding in reversed(block.bindings):
        chain = _match(binding, users, taken, dtype, sums)
        if chain is not None and chain.sums is not None:
            chain = replace(chain, residual=_unwidened(chain.residual, values, dtype))
        if chain is not None:
            chains.append(chain)
            taken.update(line.var for line in chain.bindings)
    return chains[::-1]


def _match(
    binding: relax.Binding, users: Users, taken: set[relax.Var], dtype: str, sums: str | None
) -> ConvChain | None:
    """The chain that starts at ``binding``, without bindings already ``taken``."""
    layer = read_convolution(binding, dtype)
    if layer is None:
        return None
    conv = binding.value
    chain = ConvChain(layer, conv.args[0], conv.args[1], None, None, (binding,), sums=sums)
    if sums is not None:
        if not _has_dtype(binding.var.ty, sums):
            return None
        chain = replace(chain, out_dtype=sums)
    elif not _has_dtype(binding.var.ty, dtype):
        line = _only_consumer(binding.var, users)
        if line is None or not _calls(line, "relax.astype") or not _has_dtype(line.var.ty, dtype):
            return None
        chain = replace(chain, bindings=(binding, line))
    activate = partial(_add_activation, users=users)
    for step in (_add_bias, _add_residual, activate, partial(_add_rounding, dtype=dtype)):
        line = _only_consumer(chain.output, users)
        # A binding of another chain stays there; only an addition can belong to two.
        if line is None or line.var in taken:
            break
        chain = step(chain, line) or chain
    return chain


def read_convolution(binding: relax.Binding, dtype: str = "float32") -> ConvLayer | None:
    """The layer of a binding to a convolution that the op can take over, else None."""
    if not _calls(binding, "relax.nn.conv2d"):
        return None
    call = binding.value
    attrs = call.attrs
    if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW"):
        return None
    if any(not _has_dtype(tensor.ty, dtype) for tensor in call.args):
        return None
    # Other element types would change how sums are accumulated: on a GPU, in float32.
    if not any(_has_dtype(binding.var.ty, each) for each in (dtype, "float32")):
        return None
    weight, channels = _constant_extents(call.args[1].ty.shape), call.args[0].ty.shape.values[1]
    if weight is None or not isinstance(channels, tirx.IntImm):
        return None
    return ConvLayer(
        in_channels=int(channels),
        out_channels=weight[0],
        kernel=(weight[2], weight[3]),
        strides=tuple(int(value) for value in attrs.strides),  # type: ignore[arg-type]
        padding=tuple(int(value) for value in attrs.padding),  # type: ignore[arg-type]
        dilation=tuple(int(value) for value in attrs.dilation),  # type: ignore[arg-type]
        groups=int(attrs.groups),
    )


def _only_consumer(value: relax.Var, users: Users) -> relax.VarBinding | None:
    """The one binding that reads ``value``; None if there are more, or the block returns it."""
    readers = users.get(value, [])
    if not isinstance(value, relax.DataflowVar) or len(readers) != 1:
        return None
    return readers[0] if isinstance(readers[0], relax.VarBinding) else None


def _add_bias(chain: ConvChain, line: relax.VarBinding) -> ConvChain | None:
    other = _other_addend(chain.output, line)
    shape = None if other is None else _constant_extents(other.ty.shape)
    channels = chain.layer.out_channels
    if shape is None or len(shape) > 4 or not _same_type(chain.output, line.var, chain.dtype):
        return None
    per_channel = (1,) * (4 - len(shape)) + shape
    if per_channel not in ((1, channels, 1, 1), (1, 1, 1, 1)):
        return None
    if isinstance(other, Constant):
        values = np.broadcast_to(other.value.numpy().reshape(per_channel), (1, channels, 1, 1))
        bias = relax.const(np.ascontiguousarray(values.reshape(channels)))
    elif per_channel[1] == channels:
        bias = relax.BlockBuilder().normalize(relax.op.reshape(other, (channels,)))
    else:
        return None  # one number for all channels, known only at run time
    return replace(chain, bias=bias, bindings=(*chain.bindings, line))


def _add_residual(chain: ConvChain, line: relax.VarBinding) -> ConvChain | None:
    other = _other_addend(chain.output, line)
    if other is None or not _same_type(chain.output, other, chain.dtype):
        return None
    return replace(chain, residual=other, bindings=(*chain.bindings, line))


def _unwidened(
    residual: relax.Expr | None, values: Mapping[relax.Var, relax.Expr], dtype: str
) -> relax.Expr | None:
    """The tensor of 16 bits that a residual is the float32 of, if it is that of one."""
    value = values.get(residual) if isinstance(residual, relax.Var) else None
    if not isinstance(value, relax.Call) or value.op != _ASTYPE:
        return residual
    return value.args[0] if _has_dtype(value.args[0].ty, dtype) else residual


def _add_bounds(chain: ConvChain, line: relax.VarBinding, users: Users) -> ConvChain | None:
    """Take the two lines of bounds."""
    last, low = _only_consumer(line.var, users), _bound(chain.output, line, "relax.maximum")
    if low is None or last is None:
        return None
    high = _bound(line.var, last, "relax.minimum")
    if high is None or not low <= high:
        return None
    layer = replace(chain.layer, activation=_clip(low, high))
    return replace(chain, layer=layer, bindings=(*chain.bindings, line, last))


def _bound(value: relax.Var, line: relax.VarBinding, name: str) -> float | None:
    """The number with which a call of an extreme compares ``value``."""
    if not _calls(line, name):
        return None
    left, right = line.value.args
    number = right if left.same_as(value) else left
    if not isinstance(number, Constant) or number.value.numpy().size != 1:
        return None
    return float(number.value.numpy().reshape(()))


def _clip(low: float, high: float) -> Activation:
    return Activation("relu6") if (low, high) == (0.0, 6.0) else Activation("clip", low, high)


def _add_activation(chain: ConvChain, line: relax.VarBinding, users: Users) -> ConvChain | None:
    if _calls(line, "relax.maximum") and chain.dtype != "float32":
        return _add_bounds(chain, line, users)
    activation = read_activation(line)
    if activation is None:
        return None
    out_dtype = chain.out_dtype
    if not _has_dtype(line.var.ty, chain.dtype):
        out_dtype = str(line.var.ty.dtype)
        if chain.layer.suits_winograd or chain.sums is not None:
            return None  # Winograd's algorithm stores floats
    layer = replace(chain.layer, activation=activation)
    return replace(chain, layer=layer, bindings=(*chain.bindings, line), out_dtype=out_dtype)


def _add_rounding(chain: ConvChain, line: relax.VarBinding, dtype: str) -> ConvChain | None:
    """Take a last line that rounds float32 to the type of the operands."""
    if chain.sums is None or not _calls(line, "relax.astype") or not _has_dtype(line.var.ty, dtype):
        return None
    return replace(chain, bindings=(*chain.bindings, line), out_dtype=dtype)


def read_activation(line: relax.VarBinding) -> Activation | None:
    """The activation that a binding applies, or None."""
    for name, kind in (
        ("relax.nn.relu", "relu"),
        ("relax.nn.relu6", "relu6"),
        ("relax.sigmoid", "sigmoid"),
        ("relax.nn.silu", "silu"),
        ("relax.nn.gelu", "gelu"),
        ("relax.tvm_fusion.hardswish", "hardswish"),
    ):
        if _calls(line, name):
            return Activation(kind)
    if _calls(line, "relax.tvm_fusion.round_clip"):
        return Activation("round_clip", *bounds_of(line.value))
    if not _calls(line, "relax.clip"):
        return None
    bounds = line.value.args[1:]
    if not all(isinstance(bound, tirx.IntImm | tirx.FloatImm) for bound in bounds):
        return None
    low, high = (float(bound.value) for bound in bounds)
    if not low <= high:
        return None  # everything becomes one number: not worth a separate kind
    return _clip(low, high)


def _other_addend(value: relax.Var, line: relax.VarBinding) -> relax.Expr | None:
    """The tensor that ``line`` adds to ``value``; None if it is no such addition."""
    if not _calls(line, "relax.add"):
        return None
    left, right = line.value.args
    if left.same_as(value):
        left, right = right, left
    # Also rejects value + value, which reads the chain twice.
    if not right.same_as(value) or left.same_as(value):
        return None
    return left if isinstance(left.ty, relax.TensorType) else None


def _calls(binding: relax.Binding, name: str) -> bool:
    """Return whether a binding is a call of the op called ``name``."""
    call = binding.value
    return (
        isinstance(binding, relax.VarBinding)
        and isinstance(call, relax.Call)
        and isinstance(call.op, Op)
        and call.op.name == name
    )


def _has_dtype(ty: relax.Type, dtype: str) -> bool:
    return (
        isinstance(ty, relax.TensorType)
        and isinstance(ty.shape, relax.ShapeExpr)
        and str(ty.dtype) == dtype
    )


def _constant_extents(shape: relax.Expr | None) -> tuple[int, ...] | None:
    values = shape.values if isinstance(shape, relax.ShapeExpr) else None
    if values is None or not all(isinstance(value, tirx.IntImm) for value in values):
        return None
    return tuple(int(value) for value in values)


def _same_type(left: relax.Expr, right: relax.Expr, dtype: str) -> bool:
    """Return whether two tensors have an element type and provably the same shape."""
    if not _has_dtype(left.ty, dtype) or not _has_dtype(right.ty, dtype):
        return False
    first, second = left.ty.shape.values, right.ty.shape.values
    analyzer = Analyzer()
    return len(first) == len(second) and all(
        analyzer.can_prove_equal(a, b) for a, b in zip(first, second, strict=True)
    )
