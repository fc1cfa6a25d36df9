# SPDX-License-Identifier: Apache-2.0
"""Pass ``NameSizes``: gives sizes that are quotients of open ones a name."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, relax, tirx
from tvm.sym import Analyzer

from schedules.errors import OpError
from schedules.tir.expression_walk import nodes

from ..core.expressions import is_claimed, op_name

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)
_NESTED = (relax.If, relax.Function, relax.SeqExpr)


@tvm.transform.module_pass(opt_level=0, name="NameSizes")
class NameSizes:
    """Name each size that a stride divides.

    Before::

        y: R.Tensor((1, 8, (h - 1) // 2 + 1), "float32") = R.nn.max_pool1d(x, strides=[2])
        z: R.Tensor((1, 8, ((h - 1) // 2 + 1 - 1) // 2 + 1), "float32") = R.nn.max_pool1d(y, ...)

    After::

        lv: R.Tensor((1, 8, (h - 1) // 2 + 1), "float32") = R.nn.max_pool1d(x, strides=[2])
        y = R.match_cast(lv, R.Tensor((1, 8, s0), "float32"))
        lv1: R.Tensor((1, 8, (s0 - 1) // 2 + 1), "float32") = R.nn.max_pool1d(y, strides=[2])
        z = R.match_cast(lv1, R.Tensor((1, 8, s1), "float32"))

    The size of a pooling with ``ceil_mode`` reads its input's size several times, so after a few of
    them TVM's analyzer takes minutes for a kernel. Equal sizes share a name. A function stays as it
    was if it has branches, calls of functions of TensorIR, a tensor whose shape would be lost, or a
    call that refuses the names.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Name the sizes of all functions of Relax."""
        changed = {
            name: _Names(func).function()
            for name, func in mod.functions_items()
            if isinstance(func, relax.Function) and not is_claimed(func) and _is_concerned(func)
        }
        if changed:
            mod = mod.clone()
            mod.update({name: func for name, func in changed.items() if func is not None})
        return mod


def _is_concerned(func: relax.Function) -> bool:
    """Return whether a function has such a size, and nothing whose types depend on its form."""
    if not all(isinstance(block, relax.DataflowBlock) for block in func.body.blocks):
        return False
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    plain = all(
        isinstance(binding, relax.VarBinding)
        and not isinstance(binding.value, _NESTED)
        and not (op_name(binding.value) or "").startswith("relax.call_")
        for binding in bindings
    )
    return plain and any(_quotients(binding.var.ty) for binding in bindings)


def _quotients(ty: tvm.ir.Type) -> list[tirx.Expr]:
    """The sizes of a tensor that are quotients."""
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return []
    return [size for size in ty.shape if nodes(size, tirx.FloorDiv)]


def _is_kept(old: relax.Var, new: relax.Var) -> bool:
    """Return whether a variable's shape is known if it was."""
    known = [isinstance(getattr(var.ty, "shape", None), relax.ShapeExpr) for var in (old, new)]
    return known[1] or not known[0]


def _cast(var: relax.Var, sizes: list[tirx.Expr]) -> relax.MatchCast:
    """A cast of a tensor to the same sizes in another form."""
    ty = relax.TensorType(sizes, var.ty.dtype)
    return relax.MatchCast(relax.DataflowVar(var.name, ty), var, ty)


class _Names:
    """Writes a function again, with names for its sizes."""

    def __init__(self, func: relax.Function) -> None:
        self._func = func
        self._builder = relax.BlockBuilder()
        self._analyzer = Analyzer()
        self._names: list[tuple[tirx.Expr, tirx.Var]] = []
        self._vars: dict[relax.Var, relax.Var] = {}

    def function(self) -> relax.Function | None:
        """The function; None if a tensor's shape is lost or a call refuses the names."""
        try:
            return self._written()
        except OpError:
            return None

    def _written(self) -> relax.Function | None:
        func = self._func
        blocks = []
        for block in func.body.blocks:
            bindings = [new for binding in block.bindings for new in self._bindings(binding)]
            if not all(
                _is_kept(binding.var, self._vars[binding.var]) for binding in block.bindings
            ):
                return None
            blocks.append(relax.DataflowBlock(bindings))
        body = self._builder.normalize(relax.SeqExpr(blocks, self._read(func.body.body)))
        return relax.Function(func.params, body, None, func.is_pure, func.attrs, func.span)

    def _bindings(self, binding: relax.VarBinding) -> list[relax.Binding]:
        """A binding of the same value, and casts that name its sizes."""
        old = binding.var
        casts, value = self._value(self._read(binding.value))
        var = self._vars[old] = type(old)(old.name, value.ty)
        bindings = [*casts, relax.VarBinding(var, value)]
        if isinstance(old, relax.DataflowVar) and _quotients(value.ty):
            cast = _cast(var, [self._name(size) for size in value.ty.shape])
            self._vars[old] = cast.var
            bindings.append(cast)
        return bindings

    def _value(self, value: relax.Expr) -> tuple[list[relax.Binding], relax.Expr]:
        """A value with its type, and a cast of a residual where it needs one."""
        try:
            return [], self._builder.normalize(value)
        except OpError:  # the output's sizes have no names yet, those of a residual have
            *operands, residual = value.args
            if not isinstance(getattr(residual.ty, "shape", None), relax.ShapeExpr):
                raise
            sizes = {name: size for size, name in self._names}
            cast = _cast(residual, [sizes.get(size, size) for size in residual.ty.shape])
            call = relax.Call(value.op, [*operands, cast.var], value.attrs, value.ty_args)
            return [cast], self._builder.normalize(call)

    def _read(self, value: relax.Expr) -> relax.Expr:
        """A value that reads the new variables and names; its type is to be inferred again."""
        if isinstance(value, relax.Var):
            return self._vars.get(value, value)
        if isinstance(value, relax.Call):
            arguments = [self._read(argument) for argument in value.args]
            return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._read(element) for element in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self._read(value.tuple_value), value.index)
        return tvm_ffi.structural_map(value, (_ARITHMETIC, self._named), order="pre")

    def _named(self, size: tirx.Expr) -> tirx.Expr:
        """The name of a size, or the size itself if it has none yet."""
        for known, name in self._names:
            if self._analyzer.can_prove_equal(size, known):
                return name
        return size

    def _name(self, size: tirx.Expr) -> tirx.Expr:
        """The name of a quotient, a new one if it has none; other sizes stay."""
        if not nodes(size, tirx.FloorDiv):
            return size
        named = self._named(size)
        if named is size:
            named = tirx.Var(f"s{len(self._names)}", size.ty.dtype)
            self._names.append((size, named))
        return named
