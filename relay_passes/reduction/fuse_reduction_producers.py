# SPDX-License-Identifier: Apache-2.0
"""Choice of the producers that a reduction computes itself.

A producer is a ``call_tir`` of an element-wise, broadcast or injective function. It is *absorbed*
by the kernels of reductions that need it if that pays off. With ``k`` kernels that would compute
the producer, ``out`` bytes of its tensor, and ``in`` bytes that computing it once reads from
tensors that are stored anyway:

1. Traffic. As a separate kernel it costs ``in + out + k * out``, absorbed ``k * in``. It is
   absorbed if that is no more: always for one kernel, up to three tensors of its size for two, and
   so on.
2. Arithmetic. ``exp``, ``tanh``, ``erf`` and the like are computed for one kernel only.
3. Repetition. Before a broadcast, a kernel would recompute the producer for every copy: only cheap
   ones are absorbed, that read no more than twice what they produce (or, where copies are allowed,
   very little compared with the kernel's data).
4. Epilogues. Producers that ``FuseOps`` makes the epilogue of a convolution or matrix product stay
   with it, unless they widen the elements: the bytes are the same.
5. A kernel reads at most :data:`MAX_TENSORS`, since each has its own loads in flight. A
   concatenation of more stays separate. Tensors of fewer than a :data:`_SMALL` th of the elements
   do not count.

Separate producers may still be fused with their own producers by ``FuseOps``.
``FuseReductionProducers`` treats every reduction as a kernel and absorbs only producers without
other readers, so that the tensor is never written. ``FuseReductions`` has kernels of several calls,
which may also compute a copy:

6. A single injective reader outside, into which ``FuseOps`` fuses the original, counts as one more
   kernel. With other readers the tensor is written anyway: a kernel computes a copy only if that
   reads fewer bytes than the tensor has, and only of cheap ones.
7. Where a kernel could also write the tensor, it does, unless recomputing it everywhere else reads
   less than writing it and reading it there (:mod:`relay_passes.reduction.row_space`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import Call
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.tir.expression_walk import nodes

from ..core.expressions import is_claimed, op_name
from .tir_calls import BROADCAST, CallGroup, TIRCalls, count_bytes, count_elements, item_bytes

MAX_TENSORS = 8
_SMALL = 16
_EXPENSIVE = frozenset(
    f"tirx.{name}"
    for name in (
        *("exp", "exp2", "exp10", "erf", "log", "log2", "log10", "log1p", "pow", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
        *("atan2", "hypot"),
    )
)

Kernels = dict[relax.Var, int]
"""The kernel that computes each call; other calls belong to no kernel."""


def absorb_into_single(calls: TIRCalls) -> Absorption:
    """The producers of single reductions that nothing else reads."""
    kernels = {var: number for number, var in enumerate(calls.reductions)}
    absorption = Absorption(calls, kernels)
    local = {var for var in calls.injective if isinstance(var, relax.DataflowVar)}
    absorption.choose(local, copies=False)
    return absorption


class Absorption:
    """Choice of absorbed producers for all kernels of a block.

    ``kernels``: the candidate kernels. ``is_storable``: whether a kernel that reads a producer
    could write its tensor too. ``taken``: the absorbed producers, each by every kernel that needs
    it.
    """

    def __init__(
        self,
        calls: TIRCalls,
        kernels: Kernels,
        is_storable: Callable[[relax.Var], bool] | None = None,
    ) -> None:
        self.calls, self.kernels = calls, kernels
        self.taken: set[relax.Var] = set()
        self._is_storable = is_storable or (lambda _: False)
        self._expensive: dict[relax.Expr, bool] = {}
        self._kept: dict[relax.Var, bool] = {}
        self._copies = False

    def choose(self, candidates: Iterable[relax.Var], copies: bool) -> None:
        """Take every candidate that no rule of this module keeps separate.

        With ``copies``, one that is read outside as well may be taken.
        """
        self._copies = copies
        self.taken = set(candidates) - self.kernels.keys()
        order = [var for var in self.calls.injective if var in self.taken]
        for var in reversed(order):
            if not self._is_needed(var):
                self._drop(var)
        changed = True
        while changed:
            changed = False
            for var in order:
                if var in self.taken and self._refuses(var):
                    self._drop(var)
                    changed = True
            excess = None if changed else self._one_too_many()
            if excess is not None:
                self._drop(excess)
                changed = True

    def producers_of(self, members: Iterable[relax.Var]) -> list[relax.Var]:
        """The producers that a kernel of these calls absorbs, in the order of the block."""
        found: set[relax.Var] = set()
        for member in members:
            found |= self._upstream(member)[0]
        return [var for var in self.calls.injective if var in found]

    def is_kept(self, var: relax.Var) -> bool:
        """Return whether a taken producer is also computed outside of kernels."""
        if var not in self._kept:
            self._kept[var] = bool(self._outside(var))
        return self._kept[var]

    def is_epilogue(self, var: relax.Var) -> bool:
        """Return whether ``FuseOps`` computes a producer with the product that it follows."""
        if not self.calls.is_fusible(var, BROADCAST):
            return False
        for operand in self.calls.tensors(var):
            alone = self.calls.users.get(operand) == {var} and operand not in self.taken
            alone = alone and isinstance(operand, relax.DataflowVar)
            if alone and count_bytes(var) <= count_bytes(operand):
                if operand in self.calls.products:
                    return True
                if operand in self.calls.injective and self.is_epilogue(operand):
                    return True
        return False

    def _is_needed(self, var: relax.Var) -> bool:
        """Return whether enough readers of a producer are in kernels."""
        users = self.calls.users.get(var, set())
        inside = sum(user in self.taken or user in self.kernels for user in users)
        return inside > 0 and (self._copies or inside == len(users))

    def _drop(self, var: relax.Var) -> None:
        """Keep a producer separate, and those that no kernel then needs."""
        self._kept.clear()
        queue = [var]
        while queue:
            current = queue.pop()
            self.taken.discard(current)
            before = [e for e in self.calls.tensors(current) if e in self.taken]
            queue += [e for e in before if not self._is_needed(e)]

    def _refuses(self, var: relax.Var) -> bool:
        """Return whether one of the rules keeps a producer separate."""
        if self.is_epilogue(var):
            return True
        readers = self._members_reading(var)
        count, out = len({self.kernels[reader] for reader in readers}), count_bytes(var)
        leaves, elements = self._upstream(var)[1], count_elements(var)
        read = sum(min(count_bytes(leaf), elements * item_bytes(leaf)) for leaf in leaves)
        expensive = self._is_expensive(var)
        if count_large(leaves, elements) > MAX_TENSORS or (expensive and count > 1):
            return True
        if elements < max(map(self._domain, readers)):
            if expensive or (read > 2 * out and not self._is_tiny(var, read, readers)):
                return True
        outside = self._outside(var)
        fused = len(outside - {var}) == len(outside) <= 1
        if not fused or not all(map(self.calls.is_fusible, outside)):
            return self._is_storable(var) or expensive or read >= out
        count += len(outside)
        if count > 1 and self._is_storable(var):
            return (count - 1) * read >= count * out
        return count * read > read + (count + 1) * out

    def _is_tiny(self, var: relax.Var, read: int, readers: Iterable[relax.Var]) -> bool:
        """Return whether the inputs of a producer are negligible beside the data of its copies."""
        elements = max(map(self._domain, readers))
        return self._copies and _SMALL * read <= elements * item_bytes(var)

    def _one_too_many(self) -> relax.Var | None:
        """The last producer of a kernel that reads more tensors than allowed."""
        for kernel in dict.fromkeys(self.kernels.values()):
            members = [var for var, number in self.kernels.items() if number == kernel]
            leaves = {leaf for member in members for leaf in self._upstream(member)[1]}
            leaves -= set(members)
            if count_large(leaves, max(map(self._domain, members))) > MAX_TENSORS:
                producers = self.producers_of(members)
                wide = [var for var in producers if len(self._upstream(var)[1]) > 1]
                if wide:
                    return wide[-1]
        return None

    def _outside(self, var: relax.Var) -> set[relax.Var]:
        """Readers of a taken producer outside of kernels; itself if the block returns it."""
        found = set() if isinstance(var, relax.DataflowVar) else {var}
        for user in self.calls.users.get(var, set()) - self.kernels.keys():
            if user not in self.taken or self.is_kept(user):
                found.add(user)
        return found

    def _members_reading(self, var: relax.Var) -> set[relax.Var]:
        """The members of kernels that need a taken producer."""
        readers: set[relax.Var] = set()
        queue, seen = [var], {var}
        while queue:
            for user in self.calls.users[queue.pop()]:
                if user in self.kernels:
                    readers.add(user)
                elif user in self.taken and user not in seen:
                    seen.add(user)
                    queue.append(user)
        return readers

    def _domain(self, member: relax.Var) -> int:
        """Number of elements that a member of a kernel computes or reduces."""
        if member in self.calls.reductions or member in self.calls.columns:
            return count_elements(self.calls.tensors(member)[0])
        return count_elements(member)

    def _upstream(self, var: relax.Var) -> tuple[set[relax.Var], list[relax.Expr]]:
        """The absorbed producers before ``var``, and the tensors that all of them and it read."""
        producers: set[relax.Var] = set()
        leaves: dict[relax.Expr, None] = {}
        queue = [var]
        while queue:
            current = queue.pop()
            for operand in self.calls.tensors(current):
                if operand in self.taken and operand not in producers:
                    producers.add(operand)
                    queue.append(operand)
                elif operand not in self.taken:
                    leaves[operand] = None
        return producers, list(leaves)

    def _is_expensive(self, var: relax.Var) -> bool:
        name = self.calls.call(var).args[0]
        if name not in self._expensive:
            self._expensive[name] = _calls_expensive(self.calls.mod[name])
        return self._expensive[name]


def count_large(tensors: Iterable[relax.Expr], elements: int) -> int:
    """Number of tensors that are more than a few numbers for each element computed from them."""
    return sum(_SMALL * count_elements(tensor) >= elements for tensor in tensors)


def _calls_expensive(func: tirx.PrimFunc) -> bool:
    return any(op_name(call) in _EXPENSIVE for call in nodes(func.body, Call))


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
    PrimFunc of each group. :mod:`relay_passes.reduction.fuse_reduction_producers` has the rules by
    which a producer is absorbed; ``exp`` above would stay separate, because two reductions read it.

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
