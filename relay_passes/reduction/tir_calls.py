# SPDX-License-Identifier: Apache-2.0
"""Calls of PrimFuncs in a dataflow block: their kinds, their order, and several as one function."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import DataType, relax, s_tir, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule, Var
from tvm.relax.utils import copy_with_new_vars
from tvm.sym import Analyzer

from schedules import attributes
from schedules.errors import OpError
from schedules.tir.expression_walk import nodes
from schedules.tir.extents import constant
from schedules.workload.reduce import ReduceWorkload

from ..core.expressions import op_name
from ..core.prim_functions import ElementFunction

BROADCAST, INJECTIVE, PRODUCT = 1, 2, 4  # tvm::relax::OpPatternKind
_SYMBOLIC = 1024  # assumed for an unknown extent


@dataclass
class TIRCalls:
    """The bindings of one dataflow block."""

    mod: IRModule
    # Calls of coalesced reductions; of element-wise, broadcast and injective functions; in the
    # order of the block.
    reductions: dict[relax.Var, relax.Call] = field(default_factory=dict)
    injective: dict[relax.Var, relax.Call] = field(default_factory=dict)
    # Calls of sums of columns over groups of rows.
    columns: dict[relax.Var, relax.Call] = field(default_factory=dict)
    # Results of convolutions and matrix products.
    products: set[relax.Var] = field(default_factory=set)
    # Readers of a variable within the block.
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


@dataclass(frozen=True)
class Unit:
    """Bindings that are merged."""

    # Results in the order of the block; others may compute the same.
    computes: tuple[relax.Var, ...]
    provides: frozenset[relax.Var]  # The variables that others may read.
    turn: int  # A position in the block.


class BlockOrder:
    """The bindings of a dataflow block as a graph.

    ``block``: dead bindings do not count. ``bindings``: in the order of the block. ``position``:
    the number of a binding.
    """

    def __init__(self, block: relax.DataflowBlock) -> None:
        self.bindings = {binding.var: binding for binding in block.bindings}
        self.position = {var: number for number, var in enumerate(self.bindings)}
        self.reads = {
            var: {read for read in relax.analysis.free_vars(binding.value) if read in self.bindings}
            for var, binding in self.bindings.items()
        }
        self._add_fences()
        self._remove_dead()

    def is_convex(
        self, calls: Collection[relax.Var], groups: Mapping[relax.Var, Collection[relax.Var]]
    ) -> bool:
        """Return whether no call depends on another through a binding outside the set.

        ``calls``: the calls to merge into one binding. ``groups``: for each variable that is merged
        with others already, all of these.
        """
        first = self._earliest(calls, groups)
        queue = [read for var in calls for read in self.reads[var].difference(calls)]
        seen = set(queue)
        while queue:
            current = queue.pop()
            for var in groups.get(current, (current,)):
                if var in calls:
                    return False
                new = {read for read in self.reads[var] if self.position[read] >= first} - seen
                seen |= new
                queue += new
        return True

    def _earliest(
        self, calls: Collection[relax.Var], groups: Mapping[relax.Var, Collection[relax.Var]]
    ) -> int:
        """The earliest position before which nothing depends on ``calls``."""
        first = min(map(self.position.__getitem__, calls))
        for group in {id(group): group for group in groups.values()}.values():
            places = [self.position[var] for var in group]
            if min(places) < first <= max(places):
                return 0
        return first

    def sort(self, units: Sequence[Unit]) -> list[Unit]:
        """Sort units topologically: each as early as possible, but none before its turn.

        Raises OpError if units depend on each other in a cycle.
        """
        source = {var: number for number, unit in enumerate(units) for var in unit.provides}
        waiting = [
            {
                source[read]
                for var in unit.computes
                for read in self.reads[var].difference(unit.computes)
                if read in source
            }
            for unit in units
        ]
        readers: list[list[int]] = [[] for _ in units]
        for number, before in enumerate(waiting):
            for other in before:
                readers[other].append(number)
        ready = [(units[number].turn, number) for number, w in enumerate(waiting) if not w]
        heapq.heapify(ready)
        in_order: list[Unit] = []
        while ready:
            _, number = heapq.heappop(ready)
            in_order.append(units[number])
            for reader in readers[number]:
                waiting[reader].discard(number)
                if not waiting[reader]:
                    heapq.heappush(ready, (units[reader].turn, reader))
        if len(in_order) < len(units):
            left = [var.name for unit in units if unit not in in_order for var in unit.computes]
            raise OpError(
                f"bindings {', '.join(left)} depend on each other in a cycle once some are merged; "
                "expected convex units: check BlockOrder.is_convex first"
            )
        return in_order

    def _add_fences(self) -> None:
        """Prevent reordering across a binding that defines extents or writes into its argument."""
        fence: set[relax.Var] = set()
        since: set[relax.Var] = set()
        for var, binding in self.bindings.items():
            self.reads[var] |= fence
            if isinstance(binding, relax.MatchCast) or "inplace" in (op_name(binding.value) or ""):
                self.reads[var] |= since
                fence, since = {var}, set()
            else:
                since.add(var)

    def _remove_dead(self) -> None:
        live = {var for var in self.bindings if _is_root(self.bindings[var])}
        for var in reversed(self.bindings):
            if var in live:
                live |= self.reads[var]
        for var in [var for var in self.bindings if var not in live]:
            del self.bindings[var], self.reads[var]


def _is_root(binding: relax.Binding) -> bool:
    return not isinstance(binding.var, relax.DataflowVar) or isinstance(binding, relax.MatchCast)


_NAMES = 8  # functions whose names form the name of the fused one


class CallGroup:
    """A function of several calls, as ``FuseOps`` builds it.

    ``calls``: in topological order. ``results``: those that the function returns, in a tuple if
    they are several. ``inputs``: the tensors passed to the function: variables and constants from
    outside. ``shape_arguments``: the symbolic extents that do not follow from these tensors, if
    there are any. ``function``: private and with the attribute ``Primitive``. ``name``: after the
    functions that are called.
    """

    def __init__(self, calls: dict[relax.Var, relax.Call], results: Sequence[relax.Var]) -> None:
        self.calls, self.results = calls, list(results)
        self._local: dict[relax.Expr, relax.Var] = {}
        self.inputs = self._read_inputs()
        names = [str(call.args[0].name_hint) for call in calls.values()]
        self.name = f"fused_{'_'.join(names[-_NAMES:])}"
        params = [self._local[tensor] for tensor in self.inputs]
        function = self._function(params)
        unknown = relax.analysis.free_symbolic_vars(function)
        self.shape_arguments = [relax.ShapeExpr(unknown)] if unknown else []
        if unknown:
            params.append(relax.Var("tir_vars", relax.ShapeType(unknown)))
            function = relax.Function(params, function.body, function.ret_ty)
            function = function.with_attr("Primitive", True)
        self.function = copy_with_new_vars(function)

    @property
    def arguments(self) -> list[relax.Expr]:
        """Arguments of a call of the function."""
        return [*self.inputs, *self.shape_arguments]

    def prim_func(self, mod: tvm.IRModule) -> tirx.PrimFunc:
        """The PrimFunc that ``FuseTIR`` makes of the function; ``mod`` has its callees."""
        called = [call.args[0] for call in self.calls.values()]
        builder = relax.BlockBuilder(tvm.IRModule({name: mod[name] for name in called}))
        name = builder.add_func(self.function, self.name)
        params = list(copy_with_new_vars(self.function).params)
        with builder.function("main", params):
            with builder.dataflow():
                result = builder.emit_output(relax.Call(name, params))
            builder.emit_func_output(result)
        fused = relax.transform.FuseTIR()(builder.get())
        [binding] = fused["main"].body.blocks[0].bindings
        return fused[binding.value.args[0]]

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
            alone = self.results == [var]
            kind = relax.Var if alone else relax.DataflowVar
            self._local[var] = kind("gv" if alone else var.name, call.ty)
            bindings.append(relax.VarBinding(self._local[var], self._copy(call)))
        result = self._local[self.results[0]]
        if len(self.results) > 1:
            value = relax.Tuple([self._local[var] for var in self.results])
            result = relax.Var("gv", value.ty)
            bindings.append(relax.VarBinding(result, value))
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        return relax.Function(params, body, result.ty).with_attr("Primitive", True)

    def _copy(self, call: relax.Call) -> relax.Call:
        function, arguments = call.args
        local = [self._local.get(argument, argument) for argument in arguments.fields]
        return relax.Call(call.op, [function, relax.Tuple(local)], call.attrs, call.ty_args)
