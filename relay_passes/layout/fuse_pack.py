# SPDX-License-Identifier: Apache-2.0
"""Pass ``FusePack``: fusion of layout changes into the kernel of a fused pair."""

from __future__ import annotations

import functools
from dataclasses import replace

import tvm
from tvm import relax, te, tirx
from tvm.ir import GlobalVar, IRModule, Op

from schedules import attributes
from schedules.compute import conv2d as compute_conv2d
from schedules.compute import pack as compute_pack
from schedules.cpu.cost.fused_conv2d_limits import takes_plain
from schedules.workload.conv2d import Conv2DKernel, from_json, to_json

from ..op.conv_call import OPAQUE_PATTERN


@tvm.transform.module_pass(opt_level=0, name="FusePack")
class FusePack:
    """Let a fused pair of convolutions read NCHW data and write an NCHW output itself.

    Before::

        lv = R.call_tir(cls.pack, (x,), ...)                     # x: [1, 32, 112, 112]
        lv1 = R.call_tir(cls.fused_conv2d, (lv, w1, b1, w2, b2), ...)
        lv2 = R.call_tir(cls.unpack, (lv1,), ...)

    After::

        lv2 = R.call_tir(cls.fused_conv2d1, (x, w1, b1, w2, b2), ...)

    It runs after ``LegalizeOps``. Left alone: packs and unpacks with other readers or operands,
    pairs whose kernel cannot take the layout (``takes_plain``), single convolutions, and anything
    outside a dataflow block.
    """

    def transform_module(self, mod: IRModule, ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        rewriter = _Rewriter(mod)
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.rewrite(name, func)
        return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Replaces the call of the pair, or the unpack after it, by one call."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.calls: dict[relax.Var, relax.Call] = {}
        self.users: dict[relax.Var, list[relax.Var]] = {}

    def rewrite(self, name: GlobalVar, func: relax.Function) -> None:
        """Rewrite one function, unless there is nothing to do."""
        self.calls, self.users = {}, {}
        for block in func.body.blocks if isinstance(func.body, relax.SeqExpr) else []:
            if isinstance(block, relax.DataflowBlock):
                for binding in block.bindings:
                    self._note(binding)
        if any(self._merges(var, call) for var, call in self.calls.items()):
            self.builder_.update_func(name, self.visit_expr(func))

    def _note(self, binding: relax.Binding) -> None:
        value = binding.value
        if isinstance(value, relax.Call) and self._kind(value):
            self.calls[binding.var] = value
        for var in relax.analysis.free_vars(value):
            self.users.setdefault(var, []).append(binding.var)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Emit the merged call in place of the last call that it replaces."""
        call = self.calls.get(binding.var)
        if call is None:
            super().visit_var_binding_(binding)
            return
        if self._kind(call) == "unpack":
            pair = self.calls.get(call.args[1].fields[0])
            if pair is not None and self._unpack_of(call.args[1].fields[0]) is not None:
                self._bind(binding, pair, out=True)
                return
        plain = self._pair(call) and self._plain_data(call) is not None
        if plain and self._unpack_of(binding.var) is None:
            self._bind(binding, call, out=False)
            return
        super().visit_var_binding_(binding)

    def _bind(self, binding: relax.VarBinding, pair: relax.Call, out: bool) -> None:
        kernel = self._pair(pair)
        assert kernel is not None
        source = self._plain_data(pair)
        kernel = replace(kernel, plain_data=source is not None, plain_out=out)
        arguments = [source if source is not None else pair.args[1].fields[0]]
        arguments += list(pair.args[1].fields[1:])
        merged = self.builder_.call_te(
            functools.partial(_compute, kernel),
            *[self.visit_expr(argument) for argument in arguments],
            primfunc_name_hint="fused_conv2d",
            primfunc_attrs={
                attributes.OP: "fused_conv2d",
                attributes.WORKLOAD: to_json(kernel),
                "op_pattern": OPAQUE_PATTERN,
            },
        )
        call = relax.Call(merged.op, merged.args, merged.attrs, ty_args=[binding.var.ty])
        super().visit_var_binding_(relax.VarBinding(binding.var, call))

    def _kind(self, call: relax.Call) -> str:
        """Kind of the called function as legalization marked it; empty for others."""
        func = self._function(call)
        return str(func.attrs.get(attributes.OP, "")) if func and func.attrs else ""

    def _function(self, call: relax.Call) -> tirx.PrimFunc | None:
        if not isinstance(call.op, Op) or call.op.name != "relax.call_tir":
            return None
        func = self.mod[call.args[0]] if isinstance(call.args[0], GlobalVar) else None
        static = len(call.args) == 2
        return func if static and isinstance(func, tirx.PrimFunc) else None

    def _pair(self, call: relax.Call) -> Conv2DKernel | None:
        """The workload of a packed pair that is not merged yet."""
        if self._kind(call) != "fused_conv2d":
            return None
        func = self._function(call)
        assert func is not None
        kernel = from_json(str(func.attrs[attributes.WORKLOAD]))
        merged = kernel.plain_data or kernel.plain_out or kernel.out_layout == "NCHW"
        return None if merged else kernel

    def _merges(self, var: relax.Var, call: relax.Call) -> bool:
        if self._pair(call) is None:
            return False
        return self._plain_data(call) is not None or self._unpack_of(var) is not None

    def _plain_data(self, pair: relax.Call) -> relax.Expr | None:
        """The NCHW tensor whose packed form only this pair reads."""
        kernel, (data, *others) = self._pair(pair), pair.args[1].fields
        pack = self.calls.get(data) if isinstance(data, relax.DataflowVar) else None
        if kernel is None or pack is None or self._kind(pack) != "pack":
            return None
        read_once = len(self.users.get(data, [])) == 1 and not any(data.same_as(e) for e in others)
        if not read_once or not takes_plain(kernel, data=True, out=False):
            return None
        return pack.args[1].fields[0]

    def _unpack_of(self, var: relax.Expr) -> relax.Var | None:
        """The unpacked form of the result of a pair, where nothing else reads that result."""
        pair = self.calls.get(var) if isinstance(var, relax.DataflowVar) else None
        kernel = self._pair(pair) if pair is not None else None
        users = self.users.get(var, [])
        if kernel is None or len(users) != 1 or users[0] not in self.calls:
            return None
        if self._kind(self.calls[users[0]]) != "unpack":
            return None
        return users[0] if takes_plain(kernel, data=False, out=True) else None


def _compute(kernel: Conv2DKernel, data: te.Tensor, *operands: te.Tensor) -> te.Tensor:
    """Compute of the pair with its layout changes; other schedules start from it, too."""
    layer1, layer2 = kernel.layers
    if kernel.plain_data:
        data = compute_pack.pack(data, kernel.lanes)
    residual = operands[4] if kernel.residual else None
    out = compute_conv2d.fused_conv2d(
        data,
        operands[0],
        operands[1],
        operands[2],
        operands[3],
        residual,
        layer1,
        layer2,
        kernel.data_layout,
        kernel.out_layout,
    )
    return compute_pack.unpack(out, layer2.out_channels) if kernel.plain_out else out
