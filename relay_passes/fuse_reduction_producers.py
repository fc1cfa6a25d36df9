# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseReductionProducers``: a reduction computes what it reduces."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.utils import copy_with_new_vars

from .reduction_producers import TIRCalls, absorbed_producers, operands, producers_of

_CLAIMS = ("Primitive", "Composite", "Codegen")
_NAMES = 8  # functions whose names make up the name of the fused one


@tvm.transform.module_pass(opt_level=0, name="FuseReductionProducers")
class FuseReductionProducers:
    """Group every coalesced reduction with the producers that it shall compute itself.

    Before::

        lv = R.call_tir(cls.exp, (x,), ...)
        lv1 = R.call_tir(cls.reshape, (lv,), ...)
        lv2 = R.call_tir(cls.coalesced_sum, (lv1,), ...)
        lv3 = R.call_tir(cls.coalesced_max, (lv1,), ...)

    After, with ``lv1`` an input of the reductions no more if that pays::

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

    It runs after ``LegalizeOps`` and ``AnnotateTIROpPattern`` and before ``FuseOps``, which puts no
    reshape and no producer with two readers before a reduction; ``FuseTIR`` then makes one PrimFunc
    of each group. :mod:`relay_passes.reduction_producers` has the rules by which a producer is
    absorbed; ``exp`` above would stay apart, because two reductions read it.

    Left alone: reductions without such producers, other reductions than ``coalesced_reduce``,
    whatever lies outside a dataflow block, and functions that another pass has claimed. A binding
    ``a = b`` counts as a reader; ``CanonicalizeBindings`` removes these. Applied twice the pass
    does what it does once.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        rewriter = _Rewriter(mod)
        for name, func in mod.functions_items():
            claimed = any(claim in func.attrs for claim in _CLAIMS)
            if isinstance(func, relax.Function) and not claimed:
                rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):
    """Replaces the calls of reductions by calls of groups, and drops what these absorb."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.calls = TIRCalls(mod)
        self.absorbed: set[relax.Var] = set()

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Decide about a block, then visit its bindings."""
        self.calls = TIRCalls.read(self.mod, block)
        self.absorbed = absorbed_producers(self.calls)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Drop, replace or keep a binding."""
        if binding.var in self.absorbed:
            return
        if binding.var in self.calls.reductions:
            producers = producers_of(self.calls, binding.var, self.absorbed)
            if producers:
                self._bind_group(binding, producers)
                return
        super().visit_var_binding_(binding)

    def _bind_group(self, binding: relax.VarBinding, producers: list[relax.Var]) -> None:
        members = {var: self.calls.producers[var] for var in producers}
        group = _Group(members | {binding.var: binding.value})
        names = [str(call.args[0].name_hint) for call in group.calls.values()]
        name = self.builder_.add_func(group.function, f"fused_{'_'.join(names[-_NAMES:])}")
        arguments = [*group.inputs, *group.shape_arguments]
        call = relax.Call(name, [self.visit_expr(argument) for argument in arguments])
        super().visit_var_binding_(relax.VarBinding(binding.var, call))


class _Group:
    """Calls that become one function.

    Parameters
    ----------
    calls : dict[relax.Var, relax.Call]
        In order; the last one is the result.

    Attributes
    ----------
    inputs : list[relax.Expr]
        The tensors that the function gets: variables and constants from outside.
    shape_arguments : list[relax.ShapeExpr]
        The symbolic extents that do not follow from these tensors, if there are any.
    function : relax.Function
        As ``FuseOps`` builds it.
    """

    def __init__(self, calls: dict[relax.Var, relax.Call]) -> None:
        self.calls = calls
        self._local: dict[relax.Expr, relax.Var] = {}
        self.inputs = self._read_inputs()
        params = [self._local[tensor] for tensor in self.inputs]
        function = self._function(params)
        unknown = relax.analysis.free_symbolic_vars(function)
        self.shape_arguments = [relax.ShapeExpr(unknown)] if unknown else []
        if unknown:
            params.append(relax.Var("tir_vars", relax.ShapeType(unknown)))
            function = relax.Function(params, function.body, function.ret_ty)
            function = function.with_attr("Primitive", True)
        self.function = copy_with_new_vars(function)

    def _read_inputs(self) -> list[relax.Expr]:
        inputs: dict[relax.Expr, None] = {}
        for call in self.calls.values():
            inputs |= dict.fromkeys(e for e in operands(call) if e not in self.calls)
        for number, tensor in enumerate(inputs):
            name = f"param_{number}" if isinstance(tensor, GenericConst) else tensor.name
            self._local[tensor] = relax.Var(name, tensor.ty)
        return list(inputs)

    def _function(self, params: list[relax.Var]) -> relax.Function:
        bindings: list[relax.VarBinding] = []
        for var, call in self.calls.items():
            is_result = len(bindings) == len(self.calls) - 1
            kind = relax.Var if is_result else relax.DataflowVar
            self._local[var] = kind("gv" if is_result else var.name, call.ty)
            bindings.append(relax.VarBinding(self._local[var], self._copy(call)))
        result = bindings[-1].var
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        return relax.Function(params, body, result.ty).with_attr("Primitive", True)

    def _copy(self, call: relax.Call) -> relax.Call:
        function, arguments = call.args
        local = [self._local.get(argument, argument) for argument in arguments.fields]
        return relax.Call(call.op, [function, relax.Tuple(local)], call.attrs, call.ty_args)
