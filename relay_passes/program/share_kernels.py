# SPDX-License-Identifier: Apache-2.0
"""Passes on private functions: equal kernels become one, by ``ShareKernels``; names get shorter."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import IRModule, relax, s_tir, tirx
from tvm.ir import BaseFunc, GlobalVar
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import attributes


def calling(
    functions: Mapping[GlobalVar, BaseFunc], names: Mapping[GlobalVar, GlobalVar]
) -> dict[GlobalVar, BaseFunc]:
    """Return functions whose calls are to the new variables of ``names``; others stay."""
    rename = _Rename(names)
    return {
        var: rename.visit_expr(func) if isinstance(func, relax.Function) else func
        for var, func in functions.items()
    }


@mutator
class _Rename(PyExprMutator):
    """Replaces global variables."""

    def __init__(self, names: Mapping[GlobalVar, GlobalVar]) -> None:
        super().__init__()
        self._names = names

    def visit_global_var_(self, op: GlobalVar) -> GlobalVar:
        """The new variable, if there is one."""
        return self._names.get(op, op)


@tvm.transform.module_pass(opt_level=0, name="ShareKernels")
class ShareKernels:
    """Merge packed convolutions whose loop nests differ by their input blocks only.

    Before, two kernels that sum 8 and 10 input blocks::

        def conv2d(x: T.Buffer((1, 8, 28, 28, 16)), w: T.Buffer((8, 8, 1, 1, 16, 16)), ...):
            ... for block in range(8): ... w[tile * 2048 + block * 256 ...]
        def conv2d1(x: T.Buffer((1, 10, 28, 28, 16)), w: T.Buffer((8, 10, 1, 1, 16, 16)), ...):
            ... for block in range(10): ... w[tile * 2560 + block * 256 ...]

    After, one kernel, which reads the number of blocks from the shape of its first argument; all
    calls are to it::

        def conv2d(x: T.Buffer((1, n, 28, 28, 16)), w: T.Buffer((8, n, 1, 1, 16, 16)), ...):
            ... for block in range(n): ... w[tile * (n * 256) + block * 256 ...]

    Two nests are merged if each integer constant of theirs is linear in the number of blocks, or
    proportional to it where sums are cut into parts, and all else is equal; extents of unrolled or
    vector loops and of buffers in registers stay constants. It runs on scheduled functions, after
    ``CallTIRRewrite``.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with fewer kernels."""
        families: list[list[_Nest]] = []
        for members in _with_one_output(mod):
            families += _families([_read(var, func) for var, func in members])
        names: dict[GlobalVar, GlobalVar] = {}
        shared: dict[GlobalVar, tirx.PrimFunc] = {}
        for first, *others in families:
            func = _merged(first, others[0]) if others else None
            if func is not None:
                var = GlobalVar(first.var.name_hint)
                # The old one's type has the shapes of one kernel.
                relax.expr._update_type(var, relax.FuncType.opaque_func(ret=first.var.ty.ret))
                shared[var] = func
                names |= {nest.var: var for nest in (first, *others)}
        if not shared:
            return mod
        kept = {var: func for var, func in mod.functions_items() if var not in names}
        functions = calling(kept | shared, names)
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


class _Nest(NamedTuple):
    """A kernel, without attributes, its number of input blocks, and all its integers, in order.

    ``skeleton`` is the kernel with a placeholder instead of each integer.
    """

    var: GlobalVar
    func: tirx.PrimFunc
    bare: tirx.PrimFunc
    skeleton: tirx.PrimFunc
    blocks: int
    integers: tuple[int, ...]


def _with_one_output(mod: IRModule) -> list[list[tuple[GlobalVar, tirx.PrimFunc]]]:
    """Packed convolutions in groups of equal outputs, without groups of one."""
    groups: dict[tuple[str, ...], list[tuple[GlobalVar, tirx.PrimFunc]]] = {}
    for var, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc) or attributes.WORKLOAD not in func.attrs:
            continue
        shape = func.params[0].shape
        if len(shape) == len("NCHWc") and isinstance(shape[1], tirx.IntImm):
            output = tuple(map(str, func.params[-1].shape))
            groups.setdefault(output, []).append((var, func))
    return [members for members in groups.values() if len(members) > 1]


def _read(var: GlobalVar, func: tirx.PrimFunc) -> _Nest:
    bare = tirx.PrimFunc(func.params, func.body, func.ret_type)
    integers: list[int] = []
    placeholders: dict[str, tirx.IntImm] = {}

    def read(node: tirx.IntImm) -> tirx.IntImm:
        integers.append(int(node.value))
        dtype = str(node.ty.dtype)
        if dtype not in placeholders:
            placeholders[dtype] = tirx.IntImm(dtype, 0)
        return placeholders[dtype]

    skeleton = tvm_ffi.structural_map(bare, (tirx.IntImm, read))
    return _Nest(var, func, bare, skeleton, int(func.params[0].shape[1]), tuple(integers))


def _copy(node: tirx.IntImm) -> tirx.IntImm:
    """Return a new node: what a map visits depends on which variables have changed types."""
    return tirx.IntImm(str(node.ty.dtype), int(node))


def _families(nests: Sequence[_Nest]) -> list[list[_Nest]]:
    """Kernels in families whose members differ in their number of blocks only."""
    families: list[list[_Nest]] = []
    for nest in nests:
        found = next((family for family in families if _is_alike(family, nest)), None)
        if found is None:
            families.append([nest])
        else:
            found.append(nest)
    return families


def _is_alike(family: Sequence[_Nest], nest: _Nest) -> bool:
    """Return whether a kernel is that of a family with another number of blocks."""
    first = family[0]
    if len(first.integers) != len(nest.integers) or first.blocks == nest.blocks:
        return False
    second = family[1] if len(family) > 1 else nest
    lines = _lines(first, second)
    if lines is None:
        return False
    if any(line.value_for(nest.blocks) != k for line, k in zip(lines, nest.integers, strict=True)):
        return False
    return tvm_ffi.structural_equal(first.skeleton, nest.skeleton, map_free_vars=True)


class _Line(NamedTuple):
    """The number ``blocks * slope / parts + offset``."""

    slope: int
    parts: int
    offset: int

    def value_for(self, blocks: int) -> int | None:
        """The number for so many blocks; None where it is no integer."""
        value, rest = divmod(blocks * self.slope, self.parts)
        return None if rest else value + self.offset


def _line(blocks: tuple[int, int], values: tuple[int, int]) -> _Line | None:
    """The line through two numbers of blocks with their values.

    A slope that is no integer is that of parts of the blocks, and then without an offset.
    """
    slope, rest = divmod(values[1] - values[0], blocks[1] - blocks[0])
    if not rest:
        return _Line(slope, 1, values[0] - slope * blocks[0])
    if values[0] * blocks[1] != values[1] * blocks[0]:
        return None
    common = math.gcd(values[0], blocks[0])
    return _Line(values[0] // common, blocks[0] // common, 0)


def _lines(first: _Nest, second: _Nest) -> list[_Line] | None:
    """Lines of all integers over the number of blocks; None if one has none."""
    lines = []
    for values in zip(first.integers, second.integers, strict=True):
        line = _line((first.blocks, second.blocks), values)
        if line is None:
            return None
        lines.append(line)
    return lines


def _with_integers(
    func: tirx.PrimFunc, lines: Sequence[_Line], made: Callable[[_Line, str], tirx.Expr]
) -> tirx.PrimFunc:
    """Replace the integers that have a slope."""
    left = iter(lines)

    def replaced(node: tirx.IntImm) -> tirx.Expr:
        line = next(left)
        return made(line, str(node.ty.dtype)) if line.slope else _copy(node)

    return tvm_ffi.structural_map(func, (tirx.IntImm, replaced))


def _merged(first: _Nest, second: _Nest) -> tirx.PrimFunc | None:
    """Return the kernel for any number of blocks; None if a constant is needed somewhere."""
    lines = _lines(first, second)
    assert lines is not None, "kernels of a family are alike"
    counted = str(first.func.params[0].shape[1].ty.dtype)
    blocks = tirx.Var("blocks", counted)

    def expression(line: _Line, dtype: str) -> tirx.Expr:
        value = blocks if dtype == counted else tirx.Cast(dtype, blocks)
        if line.slope != 1:
            value = value * tirx.IntImm(dtype, line.slope)
        if line.parts != 1:
            value = tirx.truncdiv(value, tirx.IntImm(dtype, line.parts))
        return value + tirx.IntImm(dtype, line.offset) if line.offset else value

    func = _with_integers(first.bare, lines, expression)
    fixed: list[tirx.Expr] = []

    def look(node: tvm.ir.Node) -> None:
        if isinstance(node, tirx.For):
            if node.kind in (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED):
                fixed.append(node.extent)
        elif isinstance(node, (tirx.Ramp, tirx.Broadcast)):
            fixed.append(node.lanes)
        else:
            fixed.extend(e for buffer in node.alloc_buffers for e in buffer.shape)

    tvm_ffi.structural_walk(func, ((tirx.For, tirx.Ramp, tirx.Broadcast, s_tir.SBlock), look))
    if not all(isinstance(extent, tirx.IntImm) for extent in fixed):
        return None
    return func.with_attr(dict(first.func.attrs))


LONGEST = 120
_DIGITS = 8


@tvm.transform.module_pass(opt_level=0, name="ShortenNames")
class ShortenNames:
    """Cut the names of fused functions.

    Before::

        lv = R.call_tir(cls.fused_take_less_add_where_take_..._concat, (x,), ...)

    After, a name of at most 120 characters that ends with a digest of the whole::

        lv = R.call_tir(cls.fused_take_less_add_where_take_1b9d02c4, (x,), ...)

    ``FuseOps`` concatenates the names of all functions that it fuses, which makes names of kernels
    too long for files and tables. Functions with a ``global_symbol`` keep theirs, since they may be
    called by it. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rename functions and their calls."""
        names = {
            old: GlobalVar(_short(old.name_hint))
            for old, func in mod.functions_items()
            if len(old.name_hint) > LONGEST and "global_symbol" not in func.attrs
        }
        if not names:
            return mod
        for old, new in names.items():
            relax.expr._update_type(new, old.ty)
        functions = {
            names.get(var, var): func
            for var, func in calling(dict(mod.functions_items()), names).items()
        }
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _short(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: LONGEST - _DIGITS - 1].rstrip('_')}_{digest}"
