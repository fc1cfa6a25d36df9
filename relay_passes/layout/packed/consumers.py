# SPDX-License-Identifier: Apache-2.0
"""Readers of the tensors of a function: convolutions that read them packed, or others in NCHW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tvm import relax


@dataclass
class Uses:
    """Two sets of variables; one may be in both or in neither.

    Parameters
    ----------
    wanted : set
        Tensors that reach a packed convolution, directly or through ops that stay packed.
    plain : set
        Tensors that are certainly read in NCHW.
    """

    wanted: set[relax.Var] = field(default_factory=set)
    plain: set[relax.Var] = field(default_factory=set)


def find_uses(
    func: relax.Function,
    is_sink: Callable[[relax.Call], bool],
    can_stay_packed: Callable[[relax.Call], bool],
) -> Uses:
    """Classify the variables of ``func`` in one walk from its end.

    Parameters
    ----------
    func : relax.Function
        A function in normal form.
    is_sink : Callable
        Whether a call reads its activations packed.
    can_stay_packed : Callable
        Whether a call may read and write packed tensors.

    Returns
    -------
    Uses
        The tensors to pack and those read in NCHW.
    """
    uses = Uses()
    bindings, results = _flatten(func)
    uses.plain.update(results)
    for binding in reversed(bindings):
        _add_binding(uses, binding, is_sink, can_stay_packed)
    return uses


def _add_binding(
    uses: Uses,
    binding: relax.Binding,
    is_sink: Callable[[relax.Call], bool],
    can_stay_packed: Callable[[relax.Call], bool],
) -> None:
    value, var = binding.value, binding.var
    read = set(_variables([value]))
    if isinstance(binding, relax.VarBinding) and isinstance(value, relax.Var | relax.TupleGetItem):
        # The same tensor under another name.
        for group in (uses.wanted, uses.plain):
            if var in group:
                group.update(read)
    elif isinstance(value, relax.Call) and is_sink(value):
        uses.wanted.update(read)
    elif isinstance(value, relax.Call) and can_stay_packed(value):
        if var in uses.wanted:
            uses.wanted.update(read)
    else:
        uses.plain.update(read)


def _flatten(func: relax.Function) -> tuple[list[relax.Binding], list[relax.Var]]:
    """All bindings, those of nested bodies after the enclosing one; and all results."""
    bindings: list[relax.Binding] = []
    results: list[relax.Var] = []

    def add(body: relax.SeqExpr) -> None:
        for block in body.blocks:
            for binding in block.bindings:
                bindings.append(binding)
                value = binding.value
                if isinstance(value, relax.If):
                    add(value.true_branch)
                    add(value.false_branch)
                elif isinstance(value, relax.Function):
                    add(value.body)
        results.extend(_variables([body.body]))

    add(func.body)
    return bindings, results


def _variables(exprs: Iterable[relax.Expr]) -> Iterator[relax.Var]:
    """The variables that expressions in normal form read directly."""
    for expr in exprs:
        if isinstance(expr, relax.Var):
            yield expr
        elif isinstance(expr, relax.Tuple):
            yield from _variables(expr.fields)
        elif isinstance(expr, relax.TupleGetItem):
            yield from _variables([expr.tuple_value])
        elif isinstance(expr, relax.Call):
            yield from _variables(expr.args)
        elif isinstance(expr, relax.If):
            yield from _variables([expr.cond])
