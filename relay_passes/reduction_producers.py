# SPDX-License-Identifier: Apache-2.0
"""Which producers a reduction shall compute itself: the choice behind ``FuseReductionProducers``.

A producer is a ``call_tir`` of an element-wise, broadcast or injective function. It is *absorbed*
if every reader of its tensor is a reduction or absorbed itself, so that the tensor is never
written, and if that pays. With ``k`` reductions that would compute the producer, ``out`` bytes of
its tensor, and ``in`` bytes that computing it once reads from tensors that are written anyway:

1. Traffic. Kept apart it costs ``in + out + k * out``, absorbed ``k * in``. It is absorbed if that
   is not more: always for one reduction, up to three tensors of its size for two, and so on.
2. Arithmetic. ``exp``, ``tanh``, ``erf`` and the like are computed for one reduction only.
3. Repetition. Before a broadcast, a reduction would compute the producer again for every copy:
   only cheap ones are, that read no more than twice what they produce.
4. Epilogues. What ``FuseOps`` computes on the way out of a convolution or matrix product stays
   with it, unless it widens the elements: the bytes are the same.
5. A kernel reads at most :data:`MAX_TENSORS`, for each keeps loads in flight of its own. A
   concatenation of more than that stays apart.

What stays apart may still be fused with its own producers by ``FuseOps``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import tvm_ffi
from tvm import DataType, relax, s_tir, tirx
from tvm.ir import Call, GlobalVar, IRModule, Var
from tvm.sym import Analyzer

from schedules.compute.coalesced_reduce import ATTRIBUTE
from schedules.reduce_workload import constant

from .simplify.expressions import op_name

MAX_TENSORS = 8
_BROADCAST, _INJECTIVE, _PRODUCT = 1, 2, 4  # tvm::relax::OpPatternKind; 0 is element-wise
_SYMBOLIC = 1024  # what an unknown extent counts as
_EXPENSIVE = frozenset(
    f"tirx.{name}"
    for name in (
        *("exp", "exp2", "exp10", "erf", "log", "log2", "log10", "log1p", "pow", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
        *("atan2", "hypot"),
    )
)


@dataclass
class TIRCalls:
    """The calls of PrimFuncs in one dataflow block that are reductions or can be absorbed.

    Attributes
    ----------
    reductions, producers : dict[relax.Var, relax.Call]
        In the order of the block.
    products : set[relax.Var]
        Results of convolutions and matrix products.
    users : dict[relax.Var, set[relax.Var]]
        Who reads a variable within the block.
    """

    mod: IRModule
    reductions: dict[relax.Var, relax.Call] = field(default_factory=dict)
    producers: dict[relax.Var, relax.Call] = field(default_factory=dict)
    products: set[relax.Var] = field(default_factory=set)
    users: dict[relax.Var, set[relax.Var]] = field(default_factory=dict)

    @classmethod
    def read(cls, mod: IRModule, block: relax.DataflowBlock) -> TIRCalls:
        """Sort the bindings of a block."""
        calls = cls(mod)
        for binding in block.bindings:
            for var in relax.analysis.free_vars(binding.value):
                calls.users.setdefault(var, set()).add(binding.var)
            func = _called(mod, binding.value)
            if func is None:
                continue
            if is_reduction(func):
                calls.reductions[binding.var] = binding.value
            elif isinstance(binding.var, relax.DataflowVar) and _is_injective(func):
                calls.producers[binding.var] = binding.value
            elif _pattern(func) == _PRODUCT:
                calls.products.add(binding.var)
        return calls

    def call(self, var: relax.Var) -> relax.Call:
        """The call that computes a reduction or a producer."""
        return self.producers[var] if var in self.producers else self.reductions[var]


def absorbed_producers(calls: TIRCalls) -> set[relax.Var]:
    """The producers whose tensors shall not be written."""
    taken = set(calls.producers)
    while True:
        for var in reversed(calls.producers):
            users = calls.users.get(var, set())
            if not users or not users <= taken | calls.reductions.keys():
                taken.discard(var)
        refused = next((var for var in calls.producers if _refused(calls, var, taken)), None)
        if refused is None:
            return taken
        taken.discard(refused)


def producers_of(calls: TIRCalls, reduction: relax.Var, taken: set[relax.Var]) -> list[relax.Var]:
    """The absorbed producers of one reduction, in the order of the block."""
    found = _upstream(calls, reduction, taken)[0]
    return [var for var in calls.producers if var in found]


def operands(call: relax.Call) -> Iterator[relax.Expr]:
    """The tensors that a ``call_tir`` reads."""
    for operand in call.args[1].fields:
        if isinstance(operand.ty, relax.TensorType):
            yield operand


def is_reduction(func: tirx.PrimFunc) -> bool:
    """Whether a function is a coalesced reduction."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, blocks.append))
    return any(ATTRIBUTE in block.annotations for block in blocks)


def _called(mod: IRModule, value: relax.Expr) -> tirx.PrimFunc | None:
    if op_name(value) != "relax.call_tir" or not isinstance(value.args[0], GlobalVar):
        return None
    plain = len(value.args) == 2 and isinstance(value.args[1], relax.Tuple)
    func = mod[value.args[0]]
    if not plain or not isinstance(func, tirx.PrimFunc):
        return None
    return func if isinstance(value.ty, relax.TensorType) else None


def _pattern(func: tirx.PrimFunc) -> int | None:
    return int(func.attrs["op_pattern"]) if "op_pattern" in func.attrs else None


def _is_injective(func: tirx.PrimFunc) -> bool:
    pattern = _pattern(func)
    if pattern is not None and pattern <= _INJECTIVE:
        return True
    return bool(relax.analysis.has_reshape_pattern(func))  # TVM calls a reshape opaque


def _refused(calls: TIRCalls, var: relax.Var, taken: set[relax.Var]) -> bool:
    """Whether one of the rules of this module keeps a producer apart."""
    if var not in taken:
        return False
    if _is_epilogue(calls, var, taken):
        return True
    reductions = _reductions_of(calls, var, taken)
    count, out = len(reductions), _bytes(var)
    leaves = _upstream(calls, var, taken)[1]
    elements = _elements(var)
    read = sum(min(_bytes(leaf), elements * _item_bytes(leaf)) for leaf in leaves)
    expensive = _is_expensive(calls.mod[calls.producers[var].args[0]])
    if len(leaves) > MAX_TENSORS or (expensive and count > 1):
        return True
    data = max(_elements(next(operands(calls.reductions[other]))) for other in reductions)
    if elements < data and (expensive or read > 2 * out):
        return True
    return count * read > read + (count + 1) * out


def _is_epilogue(calls: TIRCalls, var: relax.Var, taken: set[relax.Var]) -> bool:
    """Whether ``FuseOps`` computes a producer with the product that it follows."""
    call = calls.producers[var]
    pattern = _pattern(calls.mod[call.args[0]])
    if pattern is None or pattern > _BROADCAST:
        return False
    for operand in operands(call):
        alone = calls.users.get(operand) == {var} and operand not in taken
        if alone and _bytes(var) <= _bytes(operand):
            if operand in calls.products:
                return True
            if operand in calls.producers and _is_epilogue(calls, operand, taken):
                return True
    return False


def _reductions_of(calls: TIRCalls, var: relax.Var, taken: set[relax.Var]) -> set[relax.Var]:
    found: set[relax.Var] = set()
    queue, seen = [var], {var}
    while queue:
        for user in calls.users[queue.pop()]:
            if user in calls.reductions:
                found.add(user)
            elif user in taken and user not in seen:
                seen.add(user)
                queue.append(user)
    return found


def _upstream(
    calls: TIRCalls, var: relax.Var, taken: set[relax.Var]
) -> tuple[set[relax.Var], list[relax.Expr]]:
    """The absorbed producers before ``var``, and the tensors that all of them and it read."""
    found: set[relax.Var] = set()
    leaves: dict[relax.Expr, None] = {}
    queue = [var]
    while queue:
        current = queue.pop()
        for operand in operands(calls.call(current)):
            if operand in taken and operand not in found:
                found.add(operand)
                queue.append(operand)
            elif operand not in taken:
                leaves[operand] = None
    return found, list(leaves)


def _is_expensive(func: tirx.PrimFunc) -> bool:
    found: list[relax.Call] = []
    tvm_ffi.structural_walk(func.body, (Call, found.append))
    return any(op_name(call) in _EXPENSIVE for call in found)


def _elements(tensor: relax.Expr) -> int:
    return math.prod(_count(extent) for extent in tensor.ty.shape)


def _count(extent: tirx.Expr) -> int:
    known = constant(extent)
    if known is not None:
        return known
    number = tvm_ffi.structural_map(extent, (Var, lambda var: tirx.const(_SYMBOLIC, var.ty.dtype)))
    return int(Analyzer().simplify(number))


def _item_bytes(tensor: relax.Expr) -> int:
    return -(-DataType(str(tensor.ty.dtype)).bits // 8)


def _bytes(tensor: relax.Expr) -> int:
    return _elements(tensor) * _item_bytes(tensor)
