# SPDX-License-Identifier: Apache-2.0
"""Replacement of convolution chains by calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator


@dataclass
class Rewrites:
    """Changes of one dataflow block.

    Parameters
    ----------
    calls : dict[relax.Var, relax.Call]
        The new value of a variable, made of variables of the old block.
    dead : set[relax.Var]
        Variables whose bindings are removed.
    """

    calls: dict[relax.Var, relax.Call] = field(default_factory=dict)
    dead: set[relax.Var] = field(default_factory=set)


Plan = Callable[[relax.DataflowBlock], Rewrites]


@mutator
class ChainRewriter(PyExprMutator):
    """Rewrite every dataflow block of a module by a plan.

    Parameters
    ----------
    mod : IRModule
        The module; it is not changed.
    plan : Plan
        Called once for each block.
    """

    def __init__(self, mod: IRModule, plan: Plan) -> None:
        super().__init__(mod)
        self._plan = plan
        self._rewrites = Rewrites()

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Plan a block, then visit its bindings."""
        self._rewrites = self._plan(block)
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Drop, replace or keep a binding."""
        if binding.var in self._rewrites.dead:
            return
        call = self._rewrites.calls.get(binding.var)
        if call is not None:
            binding = relax.VarBinding(binding.var, call)
        super().visit_var_binding_(binding)


def rewrite_chains(mod: IRModule, plan: Callable[[str, relax.DataflowBlock], Rewrites]) -> IRModule:
    """Rewrite all Relax functions of ``mod``; ``plan`` gets each function's name and blocks."""
    result = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            rewriter = ChainRewriter(mod, partial(plan, variable.name_hint))
            result.update_func(variable, rewriter.visit_expr(function))
    return result
