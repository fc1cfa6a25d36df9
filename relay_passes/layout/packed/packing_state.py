# SPDX-License-Identifier: Apache-2.0
"""State that the rules of ``PackLayout`` share: the packed tensors at a point of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst

from relay_passes.core.constants import array_of, tensor_constant
from relay_passes.core.expressions import Value, op_name
from relay_passes.op.channels import pack
from schedules.workload.conv2d import ChannelBlocks, Conv2DKernel

from .consumers import Uses
from .weight_packing import element_type, pack_array, pack_expr

# Beyond this, arithmetic on the lanes past the last channel might overflow, even in float16.
_LARGEST_BOUND = 1e4


@dataclass(frozen=True)
class Packed:
    """A tensor in NCHW[x]c.

    Parameters
    ----------
    expr : relax.Expr
        The packed tensor.
    channels : int
        True number of channels.
    bound : float
        No element past the last channel is larger in magnitude; infinity where unknown.
    """

    expr: relax.Expr
    channels: int
    bound: float = 0.0


Takes: TypeAlias = Callable[[Conv2DKernel], bool]
Result: TypeAlias = Packed | tuple[Packed, ...] | relax.Expr | None


def channels_of(expr: relax.Expr) -> int | None:
    """Channels of an NCHW tensor whose extents are known and whose channels are constant."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    if len(ty.shape.values) != 4 or not isinstance(ty.shape.values[1], tirx.IntImm):
        return None
    return int(ty.shape.values[1])


def is_single_pixel(expr: relax.Expr) -> bool:
    """Return whether an NCHW tensor has one pixel a channel, so that packing it is free."""
    return channels_of(expr) is not None and all(
        isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in expr.ty.shape.values[2:]
    )


@dataclass
class Scope:
    """Packed twins of the tensors in scope; keys are variables of the original function.

    Parameters
    ----------
    blocks : ChannelBlocks
        Lanes of the channel blocks.
    uses : Uses
        Readers of each tensor, in the whole function.
    emit : Callable
        Binds an expression in the block being built.
    visit : Callable
        The new form of an original expression, in NCHW.
    define : Callable
        The value of a new variable, if it is known.
    takes : Callable
        Whether a direct convolution, or a pair, is packed.
    pairs : bool
        Whether products of bytes are added in pairs of 16 bits.
    shifts : bool
        Whether products are those of signed bytes, so that 128 is subtracted from data.
    chunks : Callable
        Whether tensor cores copy the data of a kernel in chunks of a block: then images are packed,
        too, and dense weights of other than 16 bits have the input lanes of a block last.
    tile_groups : Callable
        Groups in which tile registers compute a convolution with groups; 0 where they do not.
    mmla : Callable
        Whether two pixels are multiplied by two output channels, of eight bytes each.
    packed : dict
        Tensors that exist packed.
    tuples : dict
        Tuples whose fields all exist packed.
    parameters : dict
        Constants already packed, by form.
    """

    blocks: ChannelBlocks
    uses: Uses
    emit: Callable[[relax.Expr], relax.Var]
    visit: Callable[[relax.Expr], relax.Expr]
    define: Callable[[relax.Expr], Value] = field(default=lambda _: None)
    takes: Takes = field(default=lambda _: True)
    pairs: bool = False
    shifts: bool = False
    chunks: Takes = field(default=lambda _: False)
    tile_groups: Callable[[Conv2DKernel], int] = field(default=lambda _: 0)
    mmla: Takes = field(default=lambda _: False)
    packed: dict[relax.Var, Packed] = field(default_factory=dict)
    tuples: dict[relax.Var, tuple[Packed, ...]] = field(default_factory=dict)
    parameters: dict[tuple[GenericConst, str], relax.Expr] = field(default_factory=dict)

    def layout(self, channels: int) -> str:
        """Name of the packed layout of a tensor."""
        return f"NCHW{self.blocks.of(channels)}c"

    def lookup(self, expr: relax.Expr) -> Packed | None:
        """The packed twin of ``expr``, if it exists."""
        return self.packed.get(expr) if isinstance(expr, relax.Var) else None

    def pack(self, expr: relax.Expr) -> Packed:
        """The packed twin of an NCHW tensor, created if there is none."""
        found = self.lookup(expr)
        if found is not None:
            return found
        channels = channels_of(expr)
        assert channels is not None, f"{expr} has no constant channels"
        if isinstance(expr, GenericConst):
            return Packed(self.parameter(expr, "data"), channels)
        result = Packed(self.emit(pack(self.visit(expr), self.blocks.of(channels))), channels)
        self.packed[expr] = result
        return result

    def reshape(self, expr: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
        """The elements of an original tensor in another shape, past all shapes before it."""
        source = self.visit(expr)
        while op_name(value := self.define(source)) == "relax.reshape":
            source = value.args[0]
        reshaped = relax.op.reshape(source, shape)
        same = tvm_ffi.structural_equal(source.ty.shape, reshaped.args[1])
        return source if same else self.emit(reshaped)

    def parameter(self, expr: relax.Expr, form: str) -> relax.Expr:
        """A weight, bias or constant tensor in ``form``; a constant is packed immediately."""
        extents = [int(extent) for extent in expr.ty.shape.values]
        axis = 1 if form == "data" else 0
        blocks = self.blocks.of(extents[axis]), self.blocks.of(extents[min(1, len(extents) - 1)])
        if not isinstance(expr, GenericConst):
            return self.emit(pack_expr(self.visit(expr), form, *blocks))
        if (expr, form) not in self.parameters:
            array = pack_array(array_of(expr), form, *blocks)
            dtype = element_type(form, str(expr.ty.dtype))
            self.parameters[expr, form] = tensor_constant(array, dtype)
        return self.parameters[expr, form]

    def fills_blocks(self, channels: int) -> bool:
        """Return whether the blocks of a tensor have no lanes past its last channel."""
        return channels % self.blocks.of(channels) == 0

    def is_safe(self, channels: int, bound: float) -> bool:
        """Return whether elements within ``bound`` past the last channel, if any, stay finite."""
        return self.fills_blocks(channels) or bound <= _LARGEST_BOUND

    def result(self, expr: relax.Expr, channels: int, bound: float) -> Packed | None:
        """``expr`` as a packed tensor; None where that is not safe."""
        if self.fills_blocks(channels):
            return Packed(expr, channels)
        return Packed(expr, channels, bound) if self.is_safe(channels, bound) else None

    def is_worth_packing(self, binding: relax.VarBinding) -> bool:
        """Return whether a call with a packed operand should stay packed, not in NCHW.

        It should if its result reaches a convolution, if it is tiny, or if a packed operand would
        otherwise be unpacked for this call alone.
        """
        if binding.var in self.uses.wanted or is_single_pixel(binding.var):
            return True
        operands = [arg for arg in flat_arguments(binding.value) if self.lookup(arg)]
        return any(arg not in self.uses.plain for arg in operands)


Rule = Callable[[Scope, relax.VarBinding], Result]


def flat_arguments(call: relax.Call) -> list[relax.Expr]:
    """The arguments of a call, with tuples replaced by their fields."""
    return [
        item
        for argument in call.args
        for item in (argument.fields if isinstance(argument, relax.Tuple) else [argument])
    ]
