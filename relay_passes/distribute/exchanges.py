# SPDX-License-Identifier: Apache-2.0
"""Passes on the exchanges of a rank: ``ExchangeInPlace`` and ``CompileExchanges``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GlobalVar
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.rows.exchange_kernel import exchange_kernel
from schedules.distribute.rows.exchange_table import table_width
from schedules.distribute.rows.row_plan import EXCHANGE, RankPlan, plan_from_json
from schedules.tir.expression_walk import nodes
from schedules.tir.index_math import simplified
from schedules.tir.parameter_windows import Window, with_window

from ..core.expressions import op_name, operands
from .distribute_rows import is_exchange

_SENT_ONLY = relax.TensorType([1], "uint8")
_PACKED = len("NCHWc")


@tvm.transform.module_pass(opt_level=0, name="ExchangeInPlace")
class ExchangeInPlace:
    """Let convolutions write their rows into the tensor that holds those of other ranks, too.

    Before, where the exchange copies four rows, and receives one::

        lv = R.call_tir(conv2d, (x, w, b), R.Tensor((1, 4, 4, 8, 16)))
        lv1 = R.call_dps_packed("tvm_fusion.exchange_rows", (0, lv), R.Tensor((1, 4, 5, 8, 16)))
        lv2 = R.call_tir(conv2d1, (lv1, w1, b1, lv), R.Tensor((1, 4, 4, 8, 16)))

    After, with attributes ``tvm_fusion.windows`` of both functions for the four rows::

        lv = R.call_tir(conv2d2, (x, w, b), R.Tensor((1, 4, 5, 8, 16)))
        lv1 = R.call_dps_packed("tvm_fusion.exchange_rows", (0, lv), R.Tensor((1,), "uint8"))
        lv2 = R.call_tir(conv2d3, (lv, w1, b1, lv), R.Tensor((1, 4, 4, 8, 16)))

    A convolution that reads a slice of an image reads its region from the image. Left alone: what
    other kernels than packed convolutions write, or read beside the exchange, and what ranks that
    share a program have at different places. It runs after legalization, before kernels are
    scheduled.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with other programs."""
        if not mod.attrs or attributes.RANK_PLAN not in mod.attrs:
            return mod
        plan = plan_from_json(json.loads(str(mod.attrs[attributes.RANK_PLAN])))
        builder = relax.BlockBuilder(mod)
        for name in plan.functions:
            program = _Program(mod, mod[name])
            program.place_results(_windows(plan, name))
            program.fold_slices()
            if program.views:
                var = mod.get_global_var(name)
                builder.update_func(var, program.written(builder, name))
        found = builder.get()
        return relax.transform.DeadCodeElimination(list(plan.functions))(found)


def _windows(plan: RankPlan, function: str) -> dict[int, Window]:
    """Rows that ranks with a program have computed, within those that they need after each."""
    ranks = [rank for rank, part in enumerate(plan.parts) if part.function == function]
    windows = {}
    for number, exchange in enumerate(plan.exchanges):
        places = set()
        for rank in ranks:
            both = zip(exchange.own_region(rank), exchange.held_region(rank), strict=True)
            places.add(tuple((b - low, e - low) for (b, e), (low, _) in both))
        if len(places) == 1:
            windows[number] = places.pop()
    return windows


@dataclass(frozen=True)
class _View:
    """Region of another variable."""

    source: relax.Var
    window: Window


class _Program:
    """The bindings of a rank's program, and those of them that become views of others."""

    def __init__(self, mod: IRModule, func: relax.Function) -> None:
        self._mod, self._func = mod, func
        self._bindings = [b for block in func.body.blocks for b in block.bindings]
        self._values = {binding.var: binding.value for binding in self._bindings}
        self._readers: dict[relax.Var, list[relax.VarBinding]] = {}
        for binding in self._bindings:
            for operand in set(operands(binding.value)):
                self._readers.setdefault(operand, []).append(binding)
        self.views: dict[relax.Var, _View] = {}
        self._larger: dict[relax.Var, relax.TensorType] = {}  # types of results in place
        self._silent: dict[relax.Var, relax.Var] = {}  # exchanges in place, and what they fill

    def place_results(self, windows: Mapping[int, Window]) -> None:
        """Find exchanges that can be in place."""
        for binding in self._bindings:
            call = binding.value
            if not is_exchange(call) or binding.var.ty.ndim != _PACKED:
                continue
            fields = list(call.args[1].fields)
            window = windows.get(int(fields[0].value))
            if len(fields) < 2 or window is None:  # a rank may have nothing to send
                continue
            source = fields[1]
            if not _is_inside(window, _shape(binding.var.ty)):
                continue
            others = [each for each in self._readers[source] if not each.var.same_as(binding.var)]
            produced = self._convolution(self._values.get(source)) is not None
            if produced and all(map(self._reads_images, others)):
                self.views[source] = _View(source, window)
                self._larger[source] = binding.var.ty
                self._silent[binding.var] = source

    def fold_slices(self) -> None:
        """Find slices of images that convolutions alone read."""
        for binding in self._bindings:
            window = self._slice(binding.value)
            if window is None or not self._is_image_alone(binding.var):
                continue
            source = binding.value.args[1].fields[0]
            if source in self.views:
                outer = self.views[source].window
                pairs = zip(outer, window, strict=True)
                window = tuple((low + b, low + e) for (low, _), (b, e) in pairs)
            self.views[binding.var] = _View(source, window)

    def written(self, builder: relax.BlockBuilder, name: str) -> relax.Function:
        """The program with its views; new kernels are added to the module of ``builder``."""
        inner = relax.BlockBuilder()
        new: dict[relax.Var, relax.Expr] = {}
        with inner.function(name, list(self._func.params)):
            with inner.dataflow():
                for binding in self._bindings[:-1]:
                    self._write(binding, inner, builder.add_func, new)
                result = inner.emit_output(self._result(new))
            inner.emit_func_output(result)
        return inner.get()[name].with_attrs(dict(self._func.attrs))

    def _result(self, new: Mapping[relax.Var, relax.Expr]) -> relax.Tuple:
        """The results, with that of the last exchange, without which it would be dead code."""
        fields = [_replaced(field, new) for field in self._bindings[-1].value.fields]
        exchanges = [binding.var for binding in self._bindings if is_exchange(binding.value)]
        return relax.Tuple(
            [*fields, *(new[last] for last in exchanges[-1:] if last in self._silent)]
        )

    def _write(
        self,
        binding: relax.VarBinding,
        inner: relax.BlockBuilder,
        add: Callable[[tirx.PrimFunc, str], GlobalVar],
        new: dict[relax.Var, relax.Expr],
    ) -> None:
        var, value = binding.var, binding.value
        view = self.views.get(var)
        if view is not None and not view.source.same_as(var):
            return  # a slice: its readers read its source
        if self._convolution(value) is not None:
            value = self._windowed(var, value, add)
        if var in self._silent:
            number, own, *last = (_replaced(field, new) for field in value.args[1].fields)
            arguments = relax.Tuple([number, own, *last])
            call = relax.op.call_dps_packed(EXCHANGE, arguments, _SENT_ONLY)
            new[var] = inner.emit(call, var.name)
            return
        if not is_exchange(value):  # Only others read what an exchange returns.
            value = _replaced(value, self._silent)
        new[var] = inner.emit(_replaced(value, new), var.name)

    def _windowed(
        self, var: relax.Var, call: relax.Call, add: Callable[[tirx.PrimFunc, str], GlobalVar]
    ) -> relax.Call:
        """A convolution's call with the images of which its operands, or its result, are views."""
        func, arguments = self._mod[call.args[0]], list(call.args[1].fields)
        changed = func
        for position, argument in enumerate(arguments):
            view = self.views.get(argument) if isinstance(argument, relax.Var) else None
            if view is not None:
                arguments[position] = self._silent.get(view.source, view.source)
                shape = _shape(self._larger.get(view.source, view.source.ty))
                changed = with_window(changed, position, shape, view.window)
        ty = self._larger.get(var, call.ty)
        if var in self._larger:
            changed = with_window(changed, len(func.params) - 1, _shape(ty), self.views[var].window)
        if changed is func:
            return call
        name = add(changed, call.args[0].name_hint)
        return relax.Call(call.op, [name, relax.Tuple(arguments)], call.attrs, [ty])

    def _convolution(self, value: relax.Expr | None) -> tirx.PrimFunc | None:
        """The function of a call of a convolution with a packed result."""
        if value is None or op_name(value) != "relax.call_tir" or len(value.args) != 2:
            return None
        func = self._mod[value.args[0]]
        is_packed = isinstance(value.ty, relax.TensorType) and value.ty.ndim == _PACKED
        return func if is_packed and attributes.WORKLOAD in func.attrs else None

    def _reads_images(self, reader: relax.VarBinding) -> bool:
        """True if a reader takes what it reads as an image, or slices it for one that does."""
        if self._convolution(reader.value) is not None:
            return True
        return self._slice(reader.value) is not None and self._is_image_alone(reader.var)

    def _is_image_alone(self, var: relax.Var) -> bool:
        readers = self._readers.get(var, [])
        return bool(readers) and all(self._convolution(each.value) is not None for each in readers)

    def _slice(self, value: relax.Expr) -> Window | None:
        """The region of which a call of TensorIR is a copy."""
        if op_name(value) != "relax.call_tir" or len(value.args) != 2:
            return None
        if not isinstance(value.ty, relax.TensorType) or value.ty.ndim != _PACKED:
            return None
        func, arguments = self._mod[value.args[0]], value.args[1].fields
        if len(arguments) != 1 or not isinstance(arguments[0], relax.Var):
            return None
        return _sliced(func)


def _sliced(func: tirx.PrimFunc) -> Window | None:
    """The region of its first parameter that a function copies to its second."""
    stores = nodes(func.body, tirx.BufferStore)
    if len(func.params) != 2 or len(stores) != 1:
        return None
    [store], (source, result) = stores, func.params
    value = store.value
    if not isinstance(value, tvm.ir.TensorLoad) or not value.source.same_as(source):
        return None
    window = []
    for at, read, extent in zip(store.indices, value.indices, result.shape, strict=True):
        first = simplified(read - at)
        if not isinstance(at, tirx.Var) or not isinstance(first, tirx.IntImm):
            return None
        window.append((int(first), int(first) + int(extent)))
    return tuple(window)


def _is_inside(window: Window, shape: Sequence[int]) -> bool:
    pairs = zip(window, shape, strict=True)
    return all(0 <= begin < end <= extent for (begin, end), extent in pairs)


def _shape(ty: relax.TensorType) -> list[int]:
    return [int(extent) for extent in ty.shape.values]


def _replaced(value: relax.Expr, new: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """An expression that reads other variables."""
    if isinstance(value, relax.Var):
        return new.get(value, value)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_replaced(field, new) for field in value.fields])
    if isinstance(value, relax.Call):
        arguments = [_replaced(argument, new) for argument in value.args]
        return relax.Call(value.op, arguments, value.attrs, value.ty_args)
    return value


@tvm.transform.module_pass(opt_level=0, name="CompileExchanges")
class CompileExchanges:
    """Let kernels exchange rows through shared memory, which take a table as their last parameter.

    Before::

        def part_0(x: R.Tensor((1, 3, 5, 8))):
            lv = R.call_tir(conv2d, (x, w, b), R.Tensor((1, 1, 5, 8, 16)))
            lv1 = R.call_dps_packed("tvm_fusion.exchange_rows", (0, lv), R.Tensor((1,), "uint8"))
            ...

    After::

        def part_0(x: R.Tensor((1, 3, 5, 8)), exchanges: R.Tensor((1, 41), "int64")):
            lv = R.call_tir(conv2d, (x, w, b), R.Tensor((1, 1, 5, 8, 16)))
            lv1 = R.call_tir(exchange, (lv, exchanges), R.Tensor((1,), "uint8"))
            ...

    Each rank fills the table of :mod:`schedules.distribute.rows.exchange_table` when its session
    has begun. It runs after ``ExchangeInPlace``.

    Parameters
    ----------
    target : Target
        CPU of the ranks.
    """

    def __init__(self, target: Target) -> None:
        # Both are instructions of x86.
        self._is_x86 = CPUInfo.from_target(target).has_streaming_stores

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with other programs."""
        if not mod.attrs or attributes.RANK_PLAN not in mod.attrs:
            return mod
        plan = plan_from_json(json.loads(str(mod.attrs[attributes.RANK_PLAN])))
        shape = max(1, len(plan.exchanges)), table_width(plan.ranks)
        builder = relax.BlockBuilder(mod)
        in_place: dict[str, tuple[int, ...]] = {"": ()}
        for name in plan.functions:
            writer = _Compiler(builder, relax.Var("exchanges", relax.TensorType(shape, "int64")))
            builder.update_func(mod.get_global_var(name), writer.written(mod[name], self._is_x86))
            in_place[name] = tuple(writer.silent)
        parts = tuple(replace(part, in_place=in_place[part.function]) for part in plan.parts)
        plan = replace(plan, parts=parts, takes_table=True)
        return builder.get().with_attr(attributes.RANK_PLAN, json.dumps(plan.to_json()))


class _Compiler:
    """Writes programs with kernels that exchange rows."""

    def __init__(self, builder: relax.BlockBuilder, table: relax.Var) -> None:
        self._builder, self._table = builder, table
        self.silent: list[int] = []  # exchanges that return nothing

    def written(self, func: relax.Function, is_x86: bool) -> relax.Function:
        """A program that takes the table, too."""
        blocks = []
        for block in func.body.blocks:
            bindings = [self._binding(binding, is_x86) for binding in block.bindings]
            blocks.append(type(block)(bindings))
        body = relax.SeqExpr(blocks, func.body.body)
        params = [*func.params, self._table]
        written = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
        return self._builder.normalize(written)

    def _binding(self, binding: relax.VarBinding, is_x86: bool) -> relax.VarBinding:
        value = binding.value
        if not is_exchange(value):
            return binding
        number, *operands = value.args[1].fields
        shape = [int(extent) for extent in self._table.ty.shape.values]
        if value.ty.ndim == 1:
            self.silent.append(int(number.value))
        types = [operand.ty for operand in operands]
        kernel = exchange_kernel(int(number.value), types, value.ty, shape, is_x86)
        name = self._builder.add_func(kernel, "exchange")
        call = relax.call_tir(name, [*operands, self._table], value.ty)
        return relax.VarBinding(binding.var, call)
