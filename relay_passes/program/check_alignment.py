# SPDX-License-Identifier: Apache-2.0
"""Pass ``CheckAlignment``: a program refuses tensors that its vector loads cannot read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import DataType, IRModule, relax, tirx
from tvm.ir import TupleType
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules.tir.extents import Extent, constant
from schedules.tir.index_math import floor_power_of_two

CHECK = "tvm_fusion_check_alignment"
"""Beginning of the names of the functions that check."""

_ALIGNMENTS = {"llvm": 64, "cuda": 16}
_SHAPE, _INT64_ELEMENT = 2, 17
"""Numbers of TVM's ``tvm_struct_get``: a field of a tensor, and an element of an array."""
_DATA = 0
"""The first word of DLPack's tensor is its address, which only so can be read as a number."""


@dataclass(frozen=True)
class _Argument:
    """A tensor among the arguments, its name for the user, and the alignment that it needs."""

    value: relax.Expr
    name: str
    alignment: int


@tvm.transform.module_pass(opt_level=0, name="CheckAlignment")
class CheckAlignment:
    """Check at the entry of every public function where the data of its arguments begins.

    TVM checks nothing, although its code for CPUs relies on multiples of 64 bytes, and kernels of
    CUDA read up to 16 bytes at once. A tensor of fewer bytes needs the largest power of two that it
    has.

    Before::

        def main(x: R.Tensor((8, 64), "float32")):
            cls.relu(x, alloc)

    After, with a function of the host that raises ``ValueError`` with the argument's name::

        def main(x: R.Tensor((8, 64), "float32")):
            cls.tvm_fusion_check_alignment(x)
            cls.relu(x, alloc)

    It runs on calls in destination-passing style, after ``CallTIRRewrite``, once, and before
    weights become parameters. Programs for OpenCL stay as they are: their tensors are handles of
    buffers. Tensors of unknown rank or type are not checked.

    Parameters
    ----------
    target : Target
        The device of the kernels.
    """

    def __init__(self, target: Target) -> None:
        self._alignment = _ALIGNMENTS.get(target.kind.name, 1)

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Return the module with checks."""
        builder = relax.BlockBuilder(mod)
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {}):
                builder.update_func(var, self._checked(builder, func))
        return builder.get()

    def _checked(self, builder: relax.BlockBuilder, func: relax.Function) -> relax.Function:
        """The function with a call of a new function before all others."""
        bindings: list[relax.Binding] = []
        found = [self._arguments(builder, param, param.name, bindings) for param in func.params]
        arguments = [argument for of_one in found for argument in of_one]
        if not arguments:
            return func
        check = builder.add_func(_check_function(arguments), CHECK)
        call = builder.normalize(relax.Call(check, [argument.value for argument in arguments]))
        bindings.append(relax.VarBinding(relax.Var("_", call.ty), call))
        blocks = [relax.BindingBlock(bindings), *func.body.blocks]
        body = builder.normalize(relax.SeqExpr(blocks, func.body.body))
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    def _arguments(
        self,
        builder: relax.BlockBuilder,
        value: relax.Var,
        name: str,
        bindings: list[relax.Binding],
    ) -> Iterator[_Argument]:
        """The tensors of a parameter that need a check; ``bindings`` unpack its tuples."""
        if isinstance(value.ty, TupleType):
            for index in range(len(value.ty.fields)):
                item = builder.normalize(relax.TupleGetItem(value, index))
                var = relax.Var(f"{value.name}_{index}", item.ty)
                bindings.append(relax.VarBinding(var, item))
                yield from self._arguments(builder, var, f"{name}[{index}]", bindings)
        elif isinstance(value.ty, relax.TensorType) and value.ty.ndim >= 0 and value.ty.dtype:
            alignment = min(self._alignment, _widest_load(value.ty))
            if alignment > 1:
                yield _Argument(value, name, alignment)


def _widest_load(tensor: relax.TensorType) -> int:
    """The largest power of two of bytes in a tensor of this type, 0 if it is empty."""
    known = [size for extent in _extents(tensor) if (size := constant(extent)) is not None]
    if len(known) < tensor.ndim:
        return max(_ALIGNMENTS.values())
    size = math.prod(known) * DataType(str(tensor.dtype)).bits // 8
    return floor_power_of_two(size) if size else 0


def _extents(tensor: relax.TensorType) -> Sequence[Extent | None]:
    """The sizes of a tensor; those that are unknown as None."""
    shape = tensor.shape
    return list(shape) if isinstance(shape, relax.ShapeExpr) else [None] * tensor.ndim


def _check_function(arguments: Sequence[_Argument]) -> tirx.PrimFunc:
    """A function of the host that takes these arguments and raises an error.

    Its parameters are handles: TVM assumes that buffers are aligned, and of a device.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(CHECK)
            T.func_attr({"tirx.is_host_func": True, "tirx.is_scheduled": True})
            names = [f"x{number}" for number in range(len(arguments))]
            tensors = [T.arg(name, tirx.Var(name, "handle")) for name in names]
            for tensor, argument in zip(tensors, arguments, strict=True):
                _check(tensor, argument)
    return builder.get().without_attr("global_symbol")


def _check(tensor: tirx.Var, argument: _Argument) -> None:
    """Emit the check of one argument."""
    address = tirx.tvm_struct_get(tensor, _DATA, _INT64_ELEMENT, "int64")
    low_bits = tirx.bitwise_and(address, tirx.const(argument.alignment - 1, "int64"))
    is_valid = tirx.EQ(low_bits, tirx.const(0, "int64"))
    shape = tirx.tvm_struct_get(tensor, 0, _SHAPE, "handle")
    for axis, extent in enumerate(_extents(argument.value.ty)):
        if constant(extent) is None:
            size = tirx.tvm_struct_get(shape, axis, _INT64_ELEMENT, "int64")
            is_valid = tirx.Or(is_valid, tirx.EQ(size, tirx.const(0, "int64")))
    message = (
        f"argument {argument.name!r} is misaligned: its data must begin at a multiple of "
        f"{argument.alignment} bytes; pass a copy of it"
    )
    with T.Assert(is_valid, message, "ValueError"):
        pass
