# SPDX-License-Identifier: Apache-2.0
"""Passes on the tensors of a program: ``CheckAlignment``, ``LiftOutputs`` and ``LiftScratch``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import DataType, IRModule, relax, s_tir, tirx
from tvm.ir import GlobalVar, TupleType
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from relay_passes.core.expressions import op_name
from schedules import attributes
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


_PREPARATIONS = frozenset(
    [
        "relax.null_value",
        "relax.vm.alloc_storage",
        "relax.vm.alloc_tensor",
        "relax.vm.kill_object",
        "vm.builtin.check_tensor_info",
        "vm.builtin.match_shape",
    ]
)


@tvm.transform.module_pass(opt_level=0, name="LiftOutputs")
class LiftOutputs:
    """Turn the tensors that ``main`` allocates for its results into parameters after its own.

    Before::

        def main(x: R.Tensor((1, 64), "float32")):
            y = R.builtin.alloc_tensor(R.shape([1, 64]), "float32", 0, "global")
            cls.relu(x, y)
            return y

    After, with the attribute ``tvm_fusion.lifted_outputs``::

        def main(x: R.Tensor((1, 64), "float32"), y: R.Tensor((1, 64), "float32")):
            cls.relu(x, y)
            return y

    It runs on calls in destination-passing style, after ``CallTIRRewrite``, and before memory is
    planned and weights become parameters. Left alone: results that the program does not allocate,
    such as inputs, constants and views; those of unknown sizes; and a tensor that is returned
    again.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``main``."""
        main = mod["main"]
        values = {
            binding.var: binding.value
            for block in main.body.blocks
            for binding in block.bindings
            if isinstance(binding, relax.VarBinding)
        }
        result = _source(main.body.body, values)
        result = values.get(result, result)
        fields = list(result.fields) if isinstance(result, relax.Tuple) else [main.body.body]
        sources = [_source(field, values) for field in fields]
        is_lifted = [
            _is_new_tensor(source, values) and source not in sources[:number]
            for number, source in enumerate(sources)
        ]
        lifted = [source for source, chosen in zip(sources, is_lifted, strict=True) if chosen]
        if not lifted:
            return mod
        blocks = [
            type(block)([binding for binding in block.bindings if binding.var not in lifted])
            for block in main.body.blocks
        ]
        body = relax.BlockBuilder(mod).normalize(relax.SeqExpr(blocks, main.body.body))
        func = relax.Function(
            [*main.params, *lifted], body, main.ret_ty, main.is_pure, main.attrs
        ).with_attr(attributes.LIFTED_OUTPUTS, is_lifted)
        mod = mod.clone()
        mod.update_func(mod.get_global_var("main"), func)
        return mod


def _source(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    """Follow a variable to the one that is bound to another thing than a variable."""
    while isinstance(values.get(value), relax.Var):
        value = values[value]
    return value


def _is_new_tensor(value: relax.Expr, values: dict[relax.Var, relax.Expr]) -> bool:
    """Return whether a variable is a tensor of known sizes that the program allocates."""
    call = values.get(value)
    if not isinstance(call, relax.Call) or _name(call.op) != "relax.builtin.alloc_tensor":
        return False
    shape = value.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(constant(size) for size in shape.values)


def sole_kernel(main: relax.Function) -> relax.Call | None:
    """Find the only kernel call of a program.

    ``main``: lowered to the virtual machine. Returns the only call of a function of the module,
    whose last argument, a new tensor or one that the caller gives, the program returns. None if the
    program does more than check its arguments and allocate.
    """
    kernel: relax.Call | None = None
    tensors: list[relax.Var] = []
    for block in main.body.blocks if isinstance(main.body, relax.SeqExpr) else ():
        for binding in block.bindings:
            call = binding.value if isinstance(binding, relax.VarBinding) else None
            if not isinstance(call, relax.Call):
                return None
            if isinstance(call.op, GlobalVar) and call.op.name_hint.startswith(CHECK):
                continue
            if isinstance(call.op, GlobalVar) and kernel is None:
                kernel = call
            elif _name(call.op) not in _PREPARATIONS:
                return None
            elif _name(call.op) == "relax.vm.alloc_tensor":
                tensors.append(binding.var)
    if kernel is None or not kernel.args or not main.body.body.same_as(kernel.args[-1]):
        return None
    outputs = tensors or [param for param in main.params if param.same_as(kernel.args[-1])]
    return kernel if len(outputs) == 1 and outputs[0].same_as(kernel.args[-1]) else None


def _name(op: relax.Expr) -> str:
    return str(op.global_symbol if isinstance(op, relax.ExternFunc) else getattr(op, "name", ""))


@tvm.transform.module_pass(opt_level=0, name="LiftScratch")
class LiftScratch:
    """Make memory that functions of kernels allocate between their launches a result of theirs.

    Before::

        lv = R.call_tir(cls.decode, (q, k, v), out_ty=R.Tensor((8, 64), "float16"))

        def decode(q, k, v, out):
            parts = T.alloc_buffer((4096,))
            ...

    After::

        lv1 = R.call_tir(
            cls.decode,
            (q, k, v),
            out_ty=[R.Tensor((8, 64), "float16"), R.Tensor((4096,), "float32")],
        )
        lv = lv1[0]

        def decode(q, k, v, out, parts):
            ...

    A captured graph keeps the addresses of its first call. TVM allocates such memory from a pool of
    the calling thread, which frees it when that thread ends; results are planned, and live as long
    as the program. Left alone: functions that allocate memory of unknown size, which graphs leave
    alone, too, and those of the host. It runs on scheduled functions, before ``CallTIRRewrite``,
    where only ``call_tir`` calls them.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with longer lists of results."""
        functions, lifted = dict(mod.functions_items()), {}
        for var, func in mod.functions_items():
            scratch = _scratch(func) if isinstance(func, tirx.PrimFunc) else []
            if scratch:
                params, body = [*func.params, *scratch], _without(func.body, scratch)
                longer = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
                del functions[var]
                new = relax.BlockBuilder().add_func(longer, var.name_hint)
                functions[new] = longer
                types = [relax.TensorType(buffer.shape, buffer.dtype) for buffer in scratch]
                lifted[var] = new, types
        if not lifted:
            return mod
        caller = _Caller(lifted)
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function):
                functions[var] = caller.visit_expr(func)
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _scratch(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """The buffers in device memory that a function allocates; none if a size is unknown."""
    if func.attrs and "tirx.is_host_func" in func.attrs:
        return []
    buffers: list[tirx.Buffer] = []
    tvm_ffi.structural_walk(
        func.body,
        [
            (s_tir.SBlock, lambda block: buffers.extend(block.alloc_buffers)),
            (tirx.AllocBuffer, lambda stmt: buffers.append(stmt.buffer)),
        ],
    )
    buffers = [buffer for buffer in buffers if buffer.scope() == "global"]
    extents = [constant(extent) for buffer in buffers for extent in buffer.shape]
    return [] if None in extents else buffers


def _without(body: tirx.Stmt, scratch: list[tirx.Buffer]) -> tirx.Stmt:
    """The statement without the allocations."""

    def is_lifted(buffer: tirx.Buffer) -> bool:
        return any(buffer.same_as(each) for each in scratch)

    def shorter(block: s_tir.SBlock) -> s_tir.SBlock:
        kept = [buffer for buffer in block.alloc_buffers if not is_lifted(buffer)]
        if len(kept) == len(block.alloc_buffers):
            return block
        return s_tir.SBlock(
            *(block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init),
            *(kept, block.match_buffers, block.annotations),
        )

    return tvm_ffi.structural_map(
        body,
        [
            (s_tir.SBlock, shorter),
            (tirx.AllocBuffer, lambda s: tirx.Evaluate(0) if is_lifted(s.buffer) else s),
        ],
    )


@mutator
class _Caller(PyExprMutator):
    """Extends the calls of functions by their new results."""

    def __init__(self, lifted: dict[GlobalVar, tuple[GlobalVar, list[relax.TensorType]]]) -> None:
        super().__init__()
        self._lifted = lifted

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Return the results that the call had before."""
        call = super().visit_call_(call)
        if op_name(call) != "relax.call_tir" or call.args[0] not in self._lifted:
            return call
        new, types = self._lifted[call.args[0]]
        [before] = call.ty_args
        is_tuple = isinstance(before, relax.TupleType)
        own = list(before.fields) if is_tuple else [before]
        all_types = relax.TupleType([*own, *types])
        longer = relax.Call(call.op, [new, *call.args[1:]], call.attrs, [all_types])
        results = self.builder_.emit(longer)
        fields = [relax.TupleGetItem(results, index) for index in range(len(own))]
        return relax.Tuple(fields) if is_tuple else fields[0]
