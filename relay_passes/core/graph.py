# SPDX-License-Identifier: Apache-2.0
"""The bindings of one Relax function as a graph that rules edit in place.

A rule gets the call bound to one variable and returns the expression to bind instead, or None. It
may look at producers (:meth:`Graph.definition`), count their other uses (:meth:`Graph.has_one_use`,
:meth:`Graph.users`), and emit helper bindings in front of the variable (:meth:`Graph.emit`). The
graph keeps exact use counts, removes dead bindings, and rejects results of another type than the
variable's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import GenericConst
from tvm.target import Target

from schedules.errors import OpError

from .expressions import (
    Value,
    is_claimed,
    is_removable,
    op_name,
    operands,
    permutation,
    substitute,
)


def pass_target(given: Target | None, name: str) -> Target:
    """Return the target that a pass was given, the current one for None.

    ``given``: the parameter ``target`` of the pass. ``name``: the pass, for the message. Raises
    OpError if there is none.
    """
    target = given or Target.current(allow_none=True)
    if target is None:
        raise OpError(f"{name}: no target; pass target=, or run it inside `with target:`")
    return target


Rule = Callable[["Graph", relax.Expr], Value]

_NOBODY: Counter[Value] = Counter()


@dataclass
class _BindingBlock:
    is_dataflow: bool
    order: list[relax.Var] = field(default_factory=list)


class Graph:
    """The editable bindings of one function.

    ``mod``: the module of the function; rules look at the PrimFuncs that it calls. ``func``: a
    function in A-normal form; it is not changed. ``func``: the function as it was. ``current``: the
    variable whose value a rule may rewrite.
    """

    def __init__(self, mod: tvm.IRModule, func: relax.Function) -> None:
        self.mod = mod
        self.func = func
        self._builder = relax.BlockBuilder()
        self._values: dict[relax.Var, relax.Expr] = {}
        self._casts: dict[relax.Var, relax.MatchCast] = {}
        self._home: dict[relax.Var, _BindingBlock] = {}
        self._users: dict[relax.Var, Counter[relax.Var | None]] = {}
        self._blocks: list[_BindingBlock] = []
        self._here = _BindingBlock(True)
        self._emitted: list[relax.Var] = []
        self.current = relax.Var("none", relax.AnyType())
        self._memory: dict[tuple[Any, Any], Any] = {}
        for block in func.body.blocks:
            self._read_block(block)
        self._count(None, func.body.body, 1)

    # Queries of rules

    def definition(self, expr: relax.Expr, *names: str) -> Value:
        """The value bound to ``expr`` if it is a call of one of the ops ``names``.

        A variable of another binding block counts as unknown: the variables of its value may not be
        visible here.
        """
        if not isinstance(expr, relax.Var) or self._home.get(expr) is not self._here:
            return None
        value = self._values.get(expr)
        return value if not names or op_name(value) in names else None

    def unturned(self, expr: relax.Expr, axes: Sequence[int]) -> tuple[relax.Expr, list[int]]:
        """The tensor whose axes ``expr`` has in another order, and theirs for ``axes`` of it."""
        order = list(axes)
        while (turn := self.definition(expr, "relax.permute_dims")) is not None:
            inner = permutation(turn)
            expr, order = turn.args[0], [inner[axis] for axis in order]
        return expr, order

    def has_one_use(self, expr: relax.Expr) -> bool:
        """Return whether exactly one operand in the whole function reads the variable ``expr``."""
        return isinstance(expr, relax.Var) and sum(self._users.get(expr, _NOBODY).values()) == 1

    def users(self, expr: relax.Var) -> list[Value]:
        """The values that read ``expr``; None stands for the function's result."""
        users = self._users.get(expr, ())
        return [None if user is None else self._values.get(user) for user in users]

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind ``expr`` to a new variable in front of the one being rewritten."""
        value = self._builder.normalize(expr)
        kind = relax.DataflowVar if self._here.is_dataflow else relax.Var
        var = kind("lv", value.ty)
        self._define(self._here, var, value)
        self._emitted.append(var)
        return var

    def emit_once(self, expr: relax.Expr) -> relax.Var:
        """The variable in front of the current one that is bound to ``expr``, a new one if none."""
        value = self._builder.normalize(expr)
        for operand in operands(value):
            for user in self._users.get(operand, _NOBODY):
                bound = self._values.get(user)
                if bound is not None and tvm_ffi.structural_equal(bound, value):
                    if user in self._here.order:
                        return user
        return self.emit(value)

    def remember(self, key: Any, compute: Callable[[Any], Any]) -> Any:
        """``compute(key)``, cached; for costly facts about a PrimFunc."""
        if (key, compute) not in self._memory:
            self._memory[key, compute] = compute(key)
        return self._memory[key, compute]

    def values(self) -> list[relax.Expr]:
        """The values of all bindings."""
        return list(self._values.values())

    # The pass itself

    def sweep(self, rules: Mapping[str, Sequence[Rule]]) -> bool:
        """Try ``rules`` at every binding in order; return whether any of them changed something."""
        changed = False
        for block in self._blocks:
            self._here = block
            old, block.order = block.order, []
            for var in old:
                changed |= self._rewrite(var, rules)
                if var in self._values or var in self._casts:
                    block.order.append(var)
        return changed

    def settle(self, rules: Mapping[str, Sequence[Rule]]) -> bool:
        """Sweep until no rule changes anything; return whether any of them did."""
        changed = False
        while self.sweep(rules):
            changed = True
        return changed

    def to_function(self) -> relax.Function:
        """The function with the current bindings."""
        blocks = []
        for block in self._blocks:
            bindings = [self._binding(var) for var in block.order if self._is_bound(var)]
            make = relax.DataflowBlock if block.is_dataflow else relax.BindingBlock
            if bindings:
                blocks.append(make(bindings))
        func = self.func
        body = self._builder.normalize(relax.SeqExpr(blocks, func.body.body))
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)

    # Reading

    def _read_block(self, block: relax.BindingBlock) -> None:
        home = _BindingBlock(isinstance(block, relax.DataflowBlock))
        self._blocks.append(home)
        for binding in block.bindings:
            if isinstance(binding, relax.MatchCast):
                self._casts[binding.var] = binding
                self._home[binding.var] = home
                home.order.append(binding.var)
                self._count(binding.var, binding.value, 1)
            else:
                self._define(home, binding.var, binding.value)

    def _define(self, block: _BindingBlock, var: relax.Var, value: relax.Expr) -> None:
        self._values[var] = value
        self._home[var] = block
        block.order.append(var)
        self._count(var, value, 1)

    def _is_bound(self, var: relax.Var) -> bool:
        return var in self._values or var in self._casts

    def _binding(self, var: relax.Var) -> relax.Binding:
        return self._casts[var] if var in self._casts else relax.VarBinding(var, self._values[var])

    def _count(self, user: relax.Var | None, value: relax.Expr, step: int) -> None:
        """Add ``step`` uses by ``user`` to all variables that ``value`` reads."""
        for var in operands(value):
            users = self._users.setdefault(var, Counter())
            users[user] += step
            if users[user] == 0:
                del users[user]

    # Editing

    def _rewrite(self, var: relax.Var, rules: Mapping[str, Sequence[Rule]]) -> bool:
        changed = False
        while var in self._values:
            value = self._values[var]
            if isinstance(value, relax.Var | GenericConst):
                return self._forward(var, value) or changed
            if not any(self._apply(rule, var) for rule in rules.get(op_name(value) or "", ())):
                return changed
            changed = True
        return changed

    def _apply(self, rule: Rule, var: relax.Var) -> bool:
        self._emitted = []
        self.current = var
        answer = rule(self, self._values[var])
        if answer is not None:
            answer = self._builder.normalize(answer)
            if var.ty.is_base_of(answer.ty):
                self._set(var, answer)
                return True
        for emitted in reversed(self._emitted):
            self._drop_if_dead(emitted)
        return False

    def _set(self, var: relax.Var, value: relax.Expr) -> None:
        old, self._values[var] = self._values[var], value
        self._count(var, value, 1)
        self._count(var, old, -1)
        for operand in operands(old):
            self._drop_if_dead(operand)

    def _forward(self, var: relax.Var, target: relax.Expr) -> bool:
        """Let the readers of ``var``, bound to ``target``, read ``target`` itself."""
        changed = False
        for user in list(self._users.get(var, ())):
            value = None if user is None else self._values.get(user)
            if value is None or self._home[user] is not self._here:
                continue
            replaced = substitute(value, var, target)
            if not any(operand.same_as(var) for operand in operands(replaced)):
                self._set(user, self._builder.normalize(replaced))
                changed = True
        self._drop_if_dead(var)
        return changed

    def _drop_if_dead(self, var: relax.Var) -> None:
        if var not in self._values or self._users.get(var):
            return
        if not isinstance(var.ty, relax.TensorType | relax.TupleType):
            return  # a shape or a number may also be read from within types
        value = self._values[var]
        if not self._home[var].is_dataflow and not is_removable(value):
            return
        del self._values[var]
        self._count(var, value, -1)
        for operand in operands(value):
            self._drop_if_dead(operand)


def function_graphs(mod: tvm.IRModule) -> Iterator[tuple[tvm.ir.GlobalVar, Graph]]:
    """Yield the graph of every Relax function with bindings that no other pass has claimed."""
    for global_var, func in mod.functions_items():
        if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
            continue
        if not is_claimed(func):
            yield global_var, Graph(mod, func)
