# SPDX-License-Identifier: Apache-2.0
"""Pass ``CompileExchanges``: exchanges of rows become kernels."""

from __future__ import annotations

import json
from dataclasses import replace

import tvm
from tvm import IRModule, relax
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.rows.exchange_kernel import exchange_kernel
from schedules.distribute.rows.exchange_table import table_width
from schedules.distribute.rows.row_plan import plan_from_json

from .rank_function import is_exchange


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
            writer = _Writer(builder, relax.Var("exchanges", relax.TensorType(shape, "int64")))
            builder.update_func(mod.get_global_var(name), writer.written(mod[name], self._is_x86))
            in_place[name] = tuple(writer.silent)
        parts = tuple(replace(part, in_place=in_place[part.function]) for part in plan.parts)
        plan = replace(plan, parts=parts, takes_table=True)
        return builder.get().with_attr(attributes.RANK_PLAN, json.dumps(plan.to_json()))


class _Writer:
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
