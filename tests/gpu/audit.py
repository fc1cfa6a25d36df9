# SPDX-License-Identifier: Apache-2.0
"""Audit of a scheduled module: the rule and the threads of each kernel, and slow ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
from tvm import s_tir, tirx

from schedules import attributes
from schedules.tir.expression_walk import loads
from schedules.tir.extents import constant

LONGEST_LOOP = 64
FEWEST_THREADS = 1024


@dataclass(frozen=True)
class KernelAudit:
    """Facts about one launch of a function.

    Parameters
    ----------
    function : str
        Name of the function in the module.
    rule : str
        The rule that scheduled it; empty if that is not recorded, or no rule did.
    blocks, threads : int | None
        Size of the grid and of a block; None where symbolic.
    serial : int | None
        Longest chain of iterations in which a thread reads or writes global memory; None where
        it is symbolic.
    is_scheduled : bool
        Whether the code runs in threads of the device at all.
    is_scattered : bool
        Whether the rule found no order in which neighbouring threads access neighbours.
    """

    function: str
    rule: str
    blocks: int | None = 1
    threads: int | None = 1
    serial: int | None = 1
    is_scheduled: bool = True
    is_scattered: bool = False

    @property
    def is_slow(self) -> bool:
        """Return whether few threads run a long loop, or the code has no threads."""
        if not self.is_scheduled:
            return True
        known = self.blocks is not None and self.threads is not None
        few = known and (self.blocks or 0) * (self.threads or 0) < FEWEST_THREADS
        return few and (self.serial is None or self.serial > LONGEST_LOOP)

    def __str__(self) -> str:
        if not self.is_scheduled:
            return f"{self.function}: not scheduled"
        size = " x ".join(
            "n" if part is None else str(part) for part in (self.blocks, self.threads)
        )
        serial = "n" if self.serial is None else str(self.serial)
        slow = "; too few threads" if self.is_slow else ""
        scattered = "; scattered accesses" if self.is_scattered else ""
        rule = self.rule or "?"
        return f"{self.function}: {rule}, {size} threads, loops of {serial}{slow}{scattered}"


def audit(mod: tvm.IRModule) -> list[KernelAudit]:
    """List the kernels of all TensorIR functions, before they are lowered.

    Parameters
    ----------
    mod : tvm.IRModule
        A module whose functions have been scheduled for a GPU.

    Returns
    -------
    list[KernelAudit]
        In the order of the functions' names, and of the launches in each.
    """
    found: list[KernelAudit] = []
    functions = [
        (var.name_hint, func)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    ]
    for name, func in sorted(functions, key=lambda item: item[0]):
        found += audit_function(name, func)
    return found


def audit_function(name: str, func: tirx.PrimFunc) -> list[KernelAudit]:
    """List the kernels of one function."""
    rule = str(func.attrs.get(attributes.RULE, ""))
    kernels = []
    for launch in _launches(func.body):
        kernel = KernelAudit(
            name, rule, is_scattered=bool(func.attrs.get(attributes.SCATTERED, False))
        )
        if _extent(launch) is None:
            kernels.append(replace(kernel, is_scheduled=False, serial=_serial(launch, 1)))
            continue
        grid: dict[str, int | None] = {}
        _sizes(launch, grid)
        blocks, threads = (_product(grid, part) for part in ("blockIdx", "threadIdx"))
        serial = _serial(launch, 1)
        kernels.append(replace(kernel, blocks=blocks, threads=threads, serial=serial))
    return kernels


def _launches(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """Outermost statements bound to the device, and stores to memory that are in none."""
    if _extent(stmt) is not None or isinstance(stmt, tirx.BufferStore):
        yield stmt
        return
    for child in _children(stmt):
        yield from _launches(child)


def _extent(stmt: tirx.Stmt) -> tuple[str, int | None] | None:
    """The dimension of the grid that a statement opens, and its size."""
    if isinstance(stmt, tirx.AttrStmt) and stmt.attr_key == "thread_extent":
        return str(stmt.node.thread_tag), constant(stmt.value)
    if isinstance(stmt, tirx.For) and stmt.thread_binding is not None:
        tag = str(stmt.thread_binding.thread_tag)
        return None if tag.startswith("vthread") else (tag, constant(stmt.extent))
    return None


def _sizes(stmt: tirx.Stmt, grid: dict[str, int | None]) -> None:
    found = _extent(stmt)
    if found is not None:
        grid[found[0]] = found[1]
    for child in _children(stmt):
        _sizes(child, grid)


def _product(grid: dict[str, int | None], part: str) -> int | None:
    total = 1
    for tag, size in grid.items():
        if tag.startswith(part):
            if size is None:
                return None
            total *= size
    return total


def _serial(stmt: tirx.Stmt, around: int | None) -> int | None:
    """Most iterations in which a thread accesses global memory; None where not known."""
    if isinstance(stmt, tirx.For) and stmt.kind in (tirx.ForKind.SERIAL, tirx.ForKind.UNROLLED):
        extent = constant(stmt.extent)
        around = None if around is None or extent is None else around * extent
    found: list[int | None] = [1]
    if _touches_global(stmt):
        found.append(around)
    found += [_serial(child, around) for child in _children(stmt)]
    return None if None in found else max(size for size in found if size is not None)


def _touches_global(stmt: tirx.Stmt) -> bool:
    expressions = []
    if isinstance(stmt, tirx.BufferStore):
        if stmt.buffer.scope() == "global":
            return True
        expressions = [stmt.value, *stmt.indices]
    elif isinstance(stmt, tirx.Bind | tirx.Evaluate):
        expressions = [stmt.value]
    elif isinstance(stmt, tirx.IfThenElse):
        expressions = [stmt.condition]
    return any(load.source.scope() == "global" for part in expressions for load in loads(part))


def _children(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    if isinstance(stmt, tirx.SeqStmt):
        return list(stmt.seq)
    if isinstance(stmt, s_tir.SBlockRealize):
        return _children(stmt.block)
    parts = [getattr(stmt, name, None) for name in ("init", "body", "then_case", "else_case")]
    return [part for part in parts if isinstance(part, tirx.Stmt)]
