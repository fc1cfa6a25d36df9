# SPDX-License-Identifier: Apache-2.0
"""Calls of PrimFuncs in a dataflow block, classified for the fusion of reductions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import tvm_ffi
from tvm import DataType, relax, s_tir, tirx
from tvm.ir import GlobalVar, IRModule, Var
from tvm.sym import Analyzer

from schedules import attributes
from schedules.tir.expression_walk import nodes
from schedules.tir.extents import constant
from schedules.workload.reduce import ReduceWorkload

from ..core.element_function import ElementFunction
from ..core.expressions import op_name

BROADCAST, INJECTIVE, PRODUCT = 1, 2, 4  # tvm::relax::OpPatternKind
_SYMBOLIC = 1024  # assumed for an unknown extent


@dataclass
class TIRCalls:
    """The bindings of one dataflow block.

    Attributes
    ----------
    reductions, injective : dict[relax.Var, relax.Call]
        Calls of coalesced reductions; of element-wise, broadcast and injective functions; in the
        order of the block.
    columns : dict[relax.Var, relax.Call]
        Calls of sums of columns over groups of rows.
    products : set[relax.Var]
        Results of convolutions and matrix products.
    users : dict[relax.Var, set[relax.Var]]
        Readers of a variable within the block.
    """

    mod: IRModule
    reductions: dict[relax.Var, relax.Call] = field(default_factory=dict)
    injective: dict[relax.Var, relax.Call] = field(default_factory=dict)
    columns: dict[relax.Var, relax.Call] = field(default_factory=dict)
    products: set[relax.Var] = field(default_factory=set)
    users: dict[relax.Var, set[relax.Var]] = field(default_factory=dict)
    _tensors: dict[relax.Var, list[relax.Expr]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, mod: IRModule, bindings: Iterable[relax.Binding], gathers: bool = False
    ) -> TIRCalls:
        """Classify the bindings of a block.

        With ``gathers``, functions that compute each element independently are injective although
        TVM calls them opaque, because an index is read from memory.
        """
        calls = cls(mod)
        for binding in bindings:
            for var in relax.analysis.free_vars(binding.value):
                calls.users.setdefault(var, set()).add(binding.var)
            func = _called(mod, binding.value)
            if func is None or not isinstance(binding, relax.VarBinding):
                continue
            blocks = nodes(func.body, s_tir.SBlock)
            if any(attributes.COLUMN_SUMS in block.annotations for block in blocks):
                calls.columns[binding.var] = binding.value
            elif is_reduction(func):
                calls.reductions[binding.var] = binding.value
            elif _is_injective(func):
                calls.injective[binding.var] = binding.value
            elif _pattern(func) == PRODUCT:
                calls.products.add(binding.var)
            elif gathers and ElementFunction.read(func) is not None:
                calls.injective[binding.var] = binding.value
        return calls

    def call(self, var: relax.Var) -> relax.Call:
        """The call that computes a reduction, sums of columns, or an injective tensor."""
        kinds = (self.injective, self.reductions, self.columns)
        return next(kind[var] for kind in kinds if var in kind)

    def tensors(self, var: relax.Var) -> list[relax.Expr]:
        """The operands of that call."""
        if var not in self._tensors:
            self._tensors[var] = list(operands(self.call(var)))
        return self._tensors[var]

    def function(self, var: relax.Var) -> tirx.PrimFunc:
        """The function that it calls."""
        return self.mod[self.call(var).args[0]]

    def workload(self, var: relax.Var) -> ReduceWorkload:
        """The workload of a reduction."""
        block = reduction_block(self.function(var))
        assert block is not None, f"{var} is no reduction"
        return ReduceWorkload.from_json(str(block.annotations[attributes.REDUCE]))

    def is_reshape(self, var: relax.Var) -> bool:
        """Return whether TVM makes a view of an injective tensor, if it is not fused."""
        local = isinstance(var, relax.DataflowVar)
        return local and bool(relax.analysis.has_reshape_pattern(self.function(var)))

    def is_fusible(self, var: relax.Var, most: int = INJECTIVE) -> bool:
        """Return whether ``FuseOps`` fuses producers into the function that computes ``var``.

        ``most`` is the highest kind that ``AnnotateTIROpPattern`` may have assigned.
        """
        pattern = _pattern(self.function(var)) if var in self.injective else None
        return pattern is not None and pattern <= most


def operands(call: relax.Call) -> Iterator[relax.Expr]:
    """The tensors that a ``call_tir`` reads."""
    for operand in call.args[1].fields:
        if isinstance(operand.ty, relax.TensorType):
            yield operand


def is_reduction(func: tirx.PrimFunc) -> bool:
    """Return whether a function is a coalesced reduction."""
    return reduction_block(func) is not None


def reduction_block(func: tirx.PrimFunc) -> s_tir.SBlock | None:
    """The annotated block of a coalesced reduction."""
    blocks = nodes(func.body, s_tir.SBlock)
    return next((block for block in blocks if attributes.REDUCE in block.annotations), None)


def count_elements(tensor: relax.Expr) -> int:
    """The number of elements; a symbolic extent counts as a fixed number."""
    return math.prod(_count(extent) for extent in tensor.ty.shape)


def item_bytes(tensor: relax.Expr) -> int:
    """The size of an element."""
    return -(-DataType(str(tensor.ty.dtype)).bits // 8)


def count_bytes(tensor: relax.Expr) -> int:
    """The size of a tensor."""
    return count_elements(tensor) * item_bytes(tensor)


def _called(mod: IRModule, value: relax.Expr) -> tirx.PrimFunc | None:
    if op_name(value) != "relax.call_tir" or not isinstance(value.args[0], GlobalVar):
        return None
    plain = len(value.args) == 2 and isinstance(value.args[1], relax.Tuple)
    func = mod[value.args[0]]
    if not plain or not isinstance(func, tirx.PrimFunc) or "tirx.is_scheduled" in func.attrs:
        return None
    return func if isinstance(value.ty, relax.TensorType) else None


def _pattern(func: tirx.PrimFunc) -> int | None:
    return int(func.attrs["op_pattern"]) if "op_pattern" in func.attrs else None


def _is_injective(func: tirx.PrimFunc) -> bool:
    pattern = _pattern(func)
    if pattern is not None and pattern <= INJECTIVE:
        return True
    return bool(relax.analysis.has_reshape_pattern(func))  # TVM calls a reshape opaque


def _count(extent: tirx.Expr) -> int:
    known = constant(extent)
    if known is not None:
        return known
    number = tvm_ffi.structural_map(extent, (Var, lambda var: tirx.const(_SYMBOLIC, var.ty.dtype)))
    return int(Analyzer().simplify(number))
