# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseReductionProducers``: fusion of reductions with their producers."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..core.expressions import is_claimed
from .call_group import CallGroup
from .primfunc_calls import TIRCalls
from .producers import absorb_into_single


@tvm.transform.module_pass(opt_level=0, name="FuseReductionProducers")
class FuseReductionProducers:
    """Group every coalesced reduction with the producers that it computes itself.

    Before::

        lv = R.call_tir(cls.exp, (x,), ...)
        lv1 = R.call_tir(cls.reshape, (lv,), ...)
        lv2 = R.call_tir(cls.coalesced_sum, (lv1,), ...)
        lv3 = R.call_tir(cls.coalesced_max, (lv1,), ...)

    After, where recomputing ``lv1`` in both reductions pays off::

        lv2 = cls.fused_exp_reshape_coalesced_sum(x)
        lv3 = cls.fused_exp_reshape_coalesced_max(x)

        @R.function(private=True)
        def fused_exp_reshape_coalesced_sum(x):
            R.func_attr({"Primitive": True})
            with R.dataflow():
                lv = R.call_tir(cls.exp, (x,), ...)
                lv1 = R.call_tir(cls.reshape, (lv,), ...)
                gv = R.call_tir(cls.coalesced_sum, (lv1,), ...)
                R.output(gv)
            return gv

    It runs after ``LegalizeOps`` and ``AnnotateTIROpPattern`` and before ``FuseOps``, which fuses
    no reshape and no producer with two readers into a reduction; ``FuseTIR`` then makes one
    PrimFunc of each group. :mod:`relay_passes.reduction.producers` has the rules by which a
    producer is absorbed; ``exp`` above would stay separate, because two reductions read it.

    Left alone: reductions without such producers, other reductions than ``coalesced_reduce``,
    anything outside a dataflow block, and functions that another pass has claimed. A binding
    ``a = b`` counts as a reader; ``CanonicalizeBindings`` removes these. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        rewriter = _Rewriter(mod)
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and not is_claimed(func):
                rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):
    """Replaces calls of reductions by calls of groups, and drops absorbed producers."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.calls = TIRCalls(mod)
        self.absorption = absorb_into_single(self.calls)

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Choose the groups of a block, then visit its bindings."""
        self.calls = TIRCalls.read(self.mod, block.bindings)
        self.absorption = absorb_into_single(self.calls)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Drop, replace or keep a binding."""
        if binding.var in self.absorption.taken:
            return
        if binding.var in self.calls.reductions:
            producers = self.absorption.producers_of([binding.var])
            if producers:
                self._bind_group(binding, producers)
                return
        super().visit_var_binding_(binding)

    def _bind_group(self, binding: relax.VarBinding, producers: list[relax.Var]) -> None:
        members = {var: self.calls.call(var) for var in [*producers, binding.var]}
        group = CallGroup(members, [binding.var])
        name = self.builder_.add_func(group.function, group.name)
        call = relax.Call(name, [self.visit_expr(argument) for argument in group.arguments])
        super().visit_var_binding_(relax.VarBinding(binding.var, call))
