# SPDX-License-Identifier: Apache-2.0
"""Facts about the blocks of a function: loops, accesses and their strides.

Schedules look at the stride of an access along each loop, not at the names or the number of
dimensions, so that NCHW, NCHW[x]c, reshaped and broadcast tensors need no special cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tvm_ffi
from tvm import ir, s_tir, sym, tirx
from tvm.s_tir.dlight.analysis import SBlockInfo, normalize_prim_func
from tvm.s_tir.schedule import SBlockRV

from schedules.schedule_rule import KernelFacts
from schedules.tir.expression_walk import loads, op_name, variables
from schedules.tir.extents import constant
from schedules.tir.index_math import factors_of, ravel

from ..core.machine import CPUInfo


@dataclass
class Access:
    """One load or store, as a flat offset into its buffer."""

    buffer: ir.Var  # The buffer that is read or written.
    offset: ir.Expr
    """Elements from the start of the buffer, simplified over the block's iteration domain."""
    strides: tuple[int | None, ...]
    """Change of the offset by a step of each iteration variable; ``None`` where it is no
    constant."""
    written: tuple[ir.Expr, ...]  # Its index in each dimension, as written.
    domain: Domain  # The block's iteration domain.

    @cached_property
    def indices(self) -> tuple[ir.Expr, ...]:
        """Index in each dimension, simplified."""
        return tuple(self.domain.analyzer.simplify(index) for index in self.written)


@dataclass
class BlockFacts:
    """A block in normal form: one loop for each iteration variable."""

    block: SBlockRV  # The block in the schedule.
    name: str  # Its name, unique in the function.
    kinds: str  # ``S`` (spatial), ``R`` (reduced) or ``O`` for each iteration variable.
    extents: tuple[int | None, ...]  # Extents of the iteration variables, ``None`` where symbolic.
    vars: tuple[ir.Var, ...]  # The iteration variables.
    store: Access  # Where the block writes (its first store).
    loads: list[Access] = field(default_factory=list)
    """Loads of the block, without the accumulator of a reduction."""
    guards: frozenset[int] = frozenset()
    """Positions of the variables on which a condition depends (padding, concatenation)."""
    itemsize: int = 4  # Bytes of the widest element read or written.
    float_bytes: int = 0
    """Bytes of the widest float read, written or cast to; 0 where all are integers."""
    indirect: bool = False  # Whether an index is itself loaded from memory.

    def positions(self, kind: str) -> list[int]:
        """Positions of the variables of ``kind`` that iterate more than once."""
        return [
            k
            for k, (c, e) in enumerate(zip(self.kinds, self.extents, strict=True))
            if c == kind and e != 1
        ]

    def volume(self, positions: Sequence[int]) -> int:
        """Product of the extents at ``positions``; a symbolic one counts as 64."""
        result = 1
        for k in positions:
            extent = self.extents[k]
            result *= 64 if extent is None else extent
        return result

    @property
    def accesses(self) -> list[Access]:
        """The store and the loads."""
        return [self.store, *self.loads]


@dataclass
class Kernel:
    """A function opened for scheduling."""

    sch: s_tir.Schedule  # A fresh schedule; blocks are in normal form.
    blocks: list[SBlockInfo]  # The leaf blocks in order.
    cpu: CPUInfo  # The machine that the target names.

    def lanes(self, facts: BlockFacts) -> int:
        """Number of the block's widest elements in a vector (at least 1)."""
        return max(1, self.cpu.vector_bits // 8 // facts.itemsize)

    def copy(self) -> Kernel:
        """Return a kernel with a schedule of its own."""
        return Kernel(self.sch.copy(), self.blocks, self.cpu)


def open_kernel(facts: KernelFacts) -> Kernel | None:
    """Open a function for scheduling; None if no rule for nests can take it.

    Those are functions whose blocks have no normal form, are empty, or use buffers with strides.
    """
    opened = facts.read(_opened)
    return None if opened is None else opened.copy()


def _opened(facts: KernelFacts) -> Kernel | None:
    return open_blocks(s_tir.Schedule(facts.func), CPUInfo.from_target(facts.target))


def open_blocks(sch: s_tir.Schedule, cpu: CPUInfo) -> Kernel | None:
    """Open a schedule in which no loop has been transformed, as :func:`open_kernel` does."""
    blocks = normalize_prim_func(sch)
    if not blocks or any(extent == 0 for info in blocks for extent in info.dom()):
        return None
    if any(_has_strides(sch.get(info.block_rv)) for info in blocks):
        return None
    for info in blocks:
        if not sch.get_loops(info.block_rv):
            sch.add_unit_loop(info.block_rv)  # rfactor fails beside a block without loops
    return Kernel(sch, blocks, cpu)


def _has_strides(block: s_tir.SBlock) -> bool:
    """Return whether a buffer has strides, so that an offset is not row-major."""
    return any(list(region.source.strides) for region in (*block.reads, *block.writes))


def block_facts(
    sch: s_tir.Schedule,  # The schedule that holds the block.
    block: SBlockRV,  # A block whose loops are its iteration variables, in order.
) -> BlockFacts | None:
    """Collect the facts of a block in normal form; None if it stores nothing.

    Returns the facts as of now; a later primitive outdates them.
    """
    stmt = sch.get(block)
    iters = list(stmt.iter_vars)
    domain = Domain(iters)
    stores, loaded, conditions = _parts(stmt.body)
    if not stores:
        return None
    casts: list[tirx.Cast] = []
    tvm_ffi.structural_walk(stmt.body, (tirx.Cast, casts.append))
    store = domain.access(stores[0].buffer, stores[0].indices)
    written = [other.buffer for other in stores]
    reads = [load for load in loaded if not any(load.source.same_as(w) for w in written)]
    buffers = [store.buffer, *(load.source for load in reads)]
    guarded = set[ir.Var]().union(*map(variables, conditions))
    return BlockFacts(
        block=block,
        name=stmt.name_hint,
        kinds="".join(_KINDS.get(int(i.iter_type), "O") for i in iters),
        extents=domain.extents,
        vars=tuple(domain.vars),
        store=store,
        loads=[domain.access(load.source, load.indices) for load in reads],
        guards=frozenset(k for k, i in enumerate(iters) if i.var in guarded),
        itemsize=max((_bits(buffer) + 7) // 8 for buffer in buffers),
        float_bytes=_float_bytes([str(b.dtype) for b in buffers] + [str(c.ty) for c in casts]),
        indirect=any(loads(*filter(_is_computed, load.indices)) for load in loaded),
    )


def item_bytes(buffer: ir.Var) -> int:
    """Return the bytes of an element of a buffer; 1 of those of bits."""
    return max(1, tvm_ffi.dtype(str(buffer.dtype)).bits // 8)


def _is_computed(index: ir.Expr) -> bool:
    return not isinstance(index, ir.Var | tirx.IntImm)


def _float_bytes(dtypes: Sequence[str]) -> int:
    return max((tvm_ffi.dtype(name).bits // 8 for name in dtypes if "float" in name), default=0)


def _parts(
    body: tirx.Stmt,
) -> tuple[list[tirx.BufferStore], list[ir.TensorLoad], list[ir.Expr]]:
    """All stores, loads and conditions of a statement."""
    stores: list[tirx.BufferStore] = []
    loaded: list[ir.TensorLoad] = []
    conditions: list[ir.Expr] = []
    tvm_ffi.structural_walk(
        body,
        [
            (tirx.BufferStore, stores.append),
            (ir.TensorLoad, loaded.append),
            (ir.Call, lambda node: conditions.extend(_call_conditions(node))),
            (tirx.IfThenElse, lambda node: conditions.append(node.condition)),
        ],
    )
    return stores, loaded, conditions


_KINDS = {int(tirx.IterVar.DataPar): "S", int(tirx.IterVar.CommReduce): "R"}


class Domain:
    """The iteration domain of a block, with an analyzer that knows it."""

    def __init__(self, iters: Sequence[tirx.IterVar]) -> None:
        self.vars = [i.var for i in iters]
        self.extents = tuple(constant(i.dom.extent) for i in iters)
        self.analyzer = sym.Analyzer()
        for i in iters:
            self.analyzer.bind(i.var, i.dom)

    def access(self, buffer: ir.Var, indices: Sequence[ir.Expr]) -> Access:
        """A load or store at these indices."""
        offset = self.analyzer.simplify(_flatten(buffer, indices))
        strides = tuple(factors_of(self.vars, offset))
        return Access(buffer, offset, strides, tuple(indices), self)


def _flatten(buffer: ir.Var, indices: Sequence[ir.Expr]) -> ir.Expr:
    """Row-major offset of ``indices`` in ``buffer``, in the type of the indices."""
    dtypes = {str(index.ty.dtype) for index in indices}
    return ravel(indices, buffer.shape, dtypes.pop() if len(dtypes) == 1 else "int64")


def _bits(buffer: ir.Var) -> int:
    return tvm_ffi.dtype(str(buffer.dtype)).bits


def _call_conditions(call: ir.Call) -> list[ir.Expr]:
    return [call.args[0]] if op_name(call) in ("prim.if_then_else", "prim.likely") else []


def realize_of(sch: s_tir.Schedule, block: SBlockRV) -> s_tir.SBlockRealize:
    """The block with its bindings and guards."""
    return tvm_ffi.get_global_func("s_tir.schedule.GetSBlockRealize")(sch, block)
