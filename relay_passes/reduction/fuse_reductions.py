# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseReductions``: fusion of related reductions into one kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from schedules.gpu.core.machine import GPUInfo, gpu_target
from schedules.tir.extents import constant

from ..core.expressions import is_claimed
from .coalesce_reduction import Entry, extend_reduction_report
from .groups import ReductionGroup, ReductionGroups
from .joined_sums import (
    Links,
    are_kept,
    find_column_sums,
    find_online_sums,
    pays_off,
    with_column_sums,
    with_own_links,
)
from .tir_calls import BlockOrder, CallGroup, TIRCalls, Unit


@tvm.transform.module_pass(opt_level=0, name="FuseReductions")
class FuseReductions:
    """Merge reductions over the same loops, with their producers and consumers, into one function.

    Before::

        lv = R.call_tir(cls.coalesced_max, (x,), ...)         # x: [64, 128], lv: [64, 1]
        lv1 = R.call_tir(cls.subtract, (x, lv), ...)
        lv2 = R.call_tir(cls.exp, (lv1,), ...)
        lv3 = R.call_tir(cls.coalesced_sum, (lv2,), ...)
        gv = R.call_tir(cls.divide, (lv2, lv3), ...)

    After::

        gv = cls.fused_coalesced_max_subtract_exp_coalesced_sum_divide(x)

        @R.function(private=True)
        def fused_coalesced_max_subtract_exp_coalesced_sum_divide(x):
            R.func_attr({"Primitive": True})
            with R.dataflow():
                lv = R.call_tir(cls.coalesced_max, (x,), ...)
                lv1 = R.call_tir(cls.subtract, (x, lv), ...)
                lv2 = R.call_tir(cls.exp, (lv1,), ...)
                lv3 = R.call_tir(cls.coalesced_sum, (lv2,), ...)
                gv = R.call_tir(cls.divide, (lv2, lv3), ...)
                R.output(gv)
            return gv

    It runs after ``LegalizeOps`` and ``AnnotateTIROpPattern`` and before ``FuseOps``; ``FuseTIR``
    then makes one PrimFunc of each group, and one GPU rule schedules it. A group holds

    * *sisters*, independent reductions with the same parallel and reduced extents, of the same or
      of different inputs;
    * *epilogues*, computed from the results at the same place;
    * *stored* tensors of the size of the data that others read: producers of what is reduced, and
      element-wise calls on the same data, at the same place;
    * a *chain*: reductions that use earlier ones of the group, and element-wise consumers of all
      elements, as in softmax and the norms, where a block can process a whole row. Elsewhere a
      chain becomes one kernel for each step, and intermediates are recomputed rather than stored if
      that moves fewer bytes;
    * an *online softmax*: where no block can process a row, a sum of exponentials with the maximum
      that it is relative to. Element-wise consumers are left to another kernel;
    * sums of the columns of the rows of a chain, as in the gradient of a norm: each block sums
      those of its rows, and another kernel adds the sums of all blocks;
    * the producers of all of these.

    :mod:`relay_passes.reduction.groups`, :mod:`relay_passes.reduction.row_space`,
    :mod:`relay_passes.reduction.fuse_reduction_producers` and
    :mod:`relay_passes.reduction.joined_sums` have the rules. Values of a group that others read are
    its outputs; several make a tuple. Bindings move after all that they read. The module attribute
    ``tvm_fusion.reduction_report``
    (:func:`relay_passes.reduction.coalesce_reduction.read_reduction_report`) records the groups.

    Left alone: anything outside a dataflow block, functions that another pass has claimed, and all
    modules for other targets than ``cuda`` and ``opencl``, whose rules take one reduction at a time
    (``FuseReductionProducers`` handles these). The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        Target of the module; the current target if None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = gpu_target(self.target)
        if target is None:
            return mod
        rewriter = _Rewriter(mod, GPUInfo.from_target(target))
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and not is_claimed(func):
                rewriter.caller = str(name.name_hint)
                rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        return extend_reduction_report(rewriter.builder_.get(), groups=rewriter.entries)


@mutator
class _Rewriter(PyExprMutator):
    """Rewrites dataflow blocks by their groups."""

    def __init__(self, mod: IRModule, gpu: GPUInfo) -> None:
        super().__init__(mod)
        self.mod, self.gpu = mod, gpu
        self.caller = ""
        self.entries: list[Entry] = []

    def visit_function_(self, func: relax.Function) -> relax.Expr:
        """Skip the local functions of other passes."""
        if is_claimed(func):
            return func
        return super().visit_function_(func)

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Replace the members of groups by calls, then visit the bindings."""
        groups = self._groups(block)
        sums = find_online_sums(groups)
        links: Links = {}
        if sums:
            block, links = with_own_links(block, sums)
            groups = self._groups(block, links)
        block, groups = self._sum_columns(block, groups, links)
        kernels = _kernels(groups)
        if kernels:
            block = self._regroup(kernels, groups)
        return super().visit_dataflow_block_(block)

    def _sum_columns(
        self, block: relax.DataflowBlock, groups: ReductionGroups, links: Links
    ) -> tuple[relax.DataflowBlock, ReductionGroups]:
        """Let kernels of rows sum their columns where that pays off."""
        chosen = find_column_sums(groups)
        while chosen:
            builder = relax.BlockBuilder(self.mod)
            found, originals = with_column_sums(block, groups.calls, chosen, builder)
            tried = self._groups(found, links, builder.get())
            kernels = _kernels(tried)
            kept = {
                originals[var]
                for unit, group in kernels.items()
                if group.columns and are_kept(group, unit, tried)
                for var in group.columns
            }
            if len(kept) == len(chosen):
                name = next(iter(chosen))
                if not pays_off(name, (kernels, tried), (_kernels(groups), groups), self.gpu):
                    break
                block, _ = with_column_sums(block, groups.calls, chosen, self.builder_)
                self.mod = self.builder_.get()
                return block, self._groups(block, links)
            chosen = {var: rows for var, rows in chosen.items() if var in kept}
        return block, groups

    def _groups(
        self, block: relax.DataflowBlock, links: Links | None = None, mod: IRModule | None = None
    ) -> ReductionGroups:
        order = BlockOrder(block)
        calls = TIRCalls.read(mod or self.mod, order.bindings.values(), gathers=True)
        return ReductionGroups(calls, order, self.gpu, links)

    def _regroup(
        self, kernels: dict[Unit, ReductionGroup], groups: ReductionGroups
    ) -> relax.DataflowBlock:
        bindings: list[relax.Binding] = []
        order = groups.order
        for unit in order.sort([*kernels, *_others(kernels, groups)]):
            if unit in kernels:
                bindings += self._bind(unit, kernels[unit], groups)
            else:
                bindings += [order.bindings[var] for var in unit.computes]
        return relax.DataflowBlock(bindings)

    def _bind(
        self, unit: Unit, group: ReductionGroup, groups: ReductionGroups
    ) -> list[relax.Binding]:
        """Bind the call of a group, and the fields of its results."""
        results = [var for var in unit.computes if groups.is_result(var, group)]
        fused = CallGroup({var: groups.calls.call(var) for var in unit.computes}, results)
        name = self.builder_.add_func(fused.function, fused.name)
        kind = groups.kind(group)
        self.entries.append(_entry(self.caller, str(name.name_hint), kind, group, fused))
        call = relax.Call(name, fused.arguments)
        if len(results) == 1:
            return [relax.VarBinding(results[0], call)]
        together = relax.DataflowVar("lv", relax.TupleType([var.ty for var in results]))
        parts = (relax.TupleGetItem(together, number) for number in range(len(results)))
        return [relax.VarBinding(together, call), *map(relax.VarBinding, results, parts)]


def _kernels(groups: ReductionGroups) -> dict[Unit, ReductionGroup]:
    """The groups of more than one reduction, with their producers."""
    kernels: dict[Unit, ReductionGroup] = {}
    order = groups.order
    for group in groups.groups:
        members = group.members
        computes = {*groups.absorption.producers_of(members), *members}
        if len(computes) > 1:
            in_order = sorted(computes, key=order.position.__getitem__)
            turn = max(order.position[var] for var in members)
            kernels[Unit(tuple(in_order), frozenset(members), turn)] = group
    return kernels


def _others(kernels: Iterable[Unit], groups: ReductionGroups) -> Iterator[Unit]:
    """The bindings that stay."""
    order = groups.order
    provided = {var for unit in kernels for var in unit.provides}
    for var in order.bindings:
        absorbed = var in groups.absorption.taken and not groups.absorption.is_kept(var)
        if var not in provided and not absorbed:
            yield Unit((var,), frozenset({var}), order.position[var])


def _entry(caller: str, name: str, kind: str, group: ReductionGroup, fused: CallGroup) -> Entry:
    """The report entry of a group."""

    def names(chosen: Collection[relax.Var]) -> list[str]:
        return [str(fused.calls[v].args[0].name_hint) for v in fused.calls if v in chosen]

    return {
        "function": caller,
        "name": name,
        "kind": kind,
        "outputs": constant(group.space.outputs),
        "reduced": constant(group.space.reduced),
        "reductions": names(group.reductions),
        "members": names(group.members - group.reductions),
        "producers": names(set(fused.calls) - group.members),
        "results": names(fused.results),
    }
