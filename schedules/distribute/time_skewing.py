# SPDX-License-Identifier: Apache-2.0
"""Steps of a repeated function in one pass over the memory: time skewing.

A step of a stencil reads and writes whole arrays, and takes as long as the memory does. Instead,
all steps between two exchanges pass over the rows together, a block of them at a time. Each step is
behind the one before by the rows that it reads beyond its own, so that it finds them in the cache::

    before: for step in range(4):              after: for b in range(64):
                for i in range(1024):                     for step in range(4):
                    compute(step, i)                          for i in range(16):
                                                                  compute(step, b * 16 - step + i)

The same two arrays take turns, and every element has the same bits. Threads have chunks of rows;
where two meet, the steps of both stay away from the border, ever farther, and what lies between is
computed when all are done (D. Wonnacott, "Achieving scalable locality with time skewing",
IJPP 2002; split tiling: T. Grosser et al., GPGPU-6, 2013).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import IRModule, ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tir.expression_walk import loads, substitute, variables
from ..tir.index_math import simplified
from .cost import Processor, Work, work_of
from .distribute import Distribution
from .exchange import Region, region_size
from .loop_nest import LoopNest
from .regions import domain_of, index_values

_MOST_ROWS = 32  # Rows of a block.
_LEAST_ROWS = 8
_UNIT = 4  # rows that kernels of filters compute together
_MOST_STEPS = 64  # each with ends of its own as arguments

_Body: TypeAlias = "Callable[[tirx.Stmt, tirx.Expr], None]"


@dataclass(frozen=True)
class Skew:
    """Blocks in which the steps between two exchanges pass over a rank's rows."""

    steps: int  # Their number.
    reach: int  # Rows by which each is behind the one before.
    block: int  # Rows of a block.
    chunks: int  # Chunks of rows, one a thread.


def skew_of(
    plan: Distribution,  # Parts of all ranks, of a function with ``repeat``.
    rank: int,
    rows: Region,  # All of its rows, or those that its CPU computes.
    cache_bytes: int,  # Bytes that a core keeps in its own cache.
    threads: int,  # Threads of the rank.
) -> Skew | None:
    """Choose how the steps between two exchanges pass over a rank's rows.

    Returns None if there is one step, or more than 64; if another loop than the outermost is
    distributed; if blocks compute more than outputs, reduce, or read rows at other than constant
    distances; if the cache holds all rows, or too few for a block and the distances of all steps;
    or if threads have too few rows to keep away from each other.
    """
    is_outermost = all(axes == (0,) for axes in plan.nest.loops)
    if not (1 < plan.deep <= _MOST_STEPS and is_outermost and region_size(rows)):
        return None
    reach = _reach(plan.nest, plan.takers)
    if reach is None or not _narrows(plan.steps_of(rank, rows)):
        return None
    [(begin, end)] = rows
    row_bytes = _row_bytes(plan, rank)
    room = cache_bytes // max(1, row_bytes) - reach * (plan.deep + 1)
    each = (end - begin) // threads  # Rows of a chunk.
    block = min(room, _MOST_ROWS, each) // _UNIT * _UNIT
    fits = block >= _LEAST_ROWS and row_bytes * (end - begin) > cache_bytes
    apart = threads == 1 or each >= 2 * reach * plan.deep
    return Skew(plan.deep, reach, block, threads) if fits and apart else None


def seconds_of_steps(
    plan: Distribution, rank: int, rows: Region, processor: Processor, is_skewed: bool
) -> float:
    """Predicted time of a rank's steps between two exchanges, of which the last computes ``rows``.

    Skewed, they move each array once, into the caches and back, and the first step waits for it.
    """
    nest, steps = plan.nest_of(rank), plan.steps_of(rank, rows)
    each = [work_of(nest, computed, plan.itemsizes) for computed in steps]
    return skewed_seconds(each, processor) if is_skewed else sum(map(processor.seconds, each))


def skewed_seconds(steps: Sequence[Work], processor: Processor) -> float:
    """Predicted time of steps that pass over the memory together, from the work of each."""
    operations = sum(work.operations for work in steps)
    moved = 2 * max(work.bytes for work in steps)
    return processor.seconds(Work(operations, 0)) + processor.seconds(Work(0, moved))


def row_ends(steps: Sequence[Region]) -> tuple[int, ...]:
    """Begin and end of the rows that each step computes, as :func:`skewed_steps` takes them."""
    return tuple(end for [ends] in steps for end in ends)


def skewed_steps(
    # ``block``, ``row``: scheduled kernels of ``skew.block`` rows, and of one: their parameters are
    # the windows, then the first row, then where windows begin (:func:`.localize.localize`).
    block: tirx.PrimFunc,
    row: tirx.PrimFunc,
    repeat: Mapping[str, str],  # Inputs, and the outputs that each takes in the next step.
    skew: Skew,  # How the steps pass over the rows.
) -> tirx.PrimFunc:
    """Write the function of the steps between two exchanges.

    Its parameters are those of ``block`` without the first row, then begin and end of the rows that
    each step computes, then the first step of a call, from 0. Every odd step reads what is an
    output of the even ones, and writes what is their input.
    """
    return _Writer(block, row, repeat, skew).function()


def _reach(nest: LoopNest, takers: Mapping[tirx.Buffer, tirx.Buffer]) -> int | None:
    """Rows by which a step reads beyond its own, above or below; None if that is not constant."""
    reach = 0
    for stage, reads in zip(nest.stages, nest.reads, strict=True):
        if stage.output not in nest.outputs or stage.reduced:
            # Rows of a hidden buffer depend on where a part begins, and the order of a sum on its
            # rows.
            return None
        row = stage.axes[0].var
        domain = domain_of(stage, [(0, int(axis.dom.extent)) for axis in stage.axes])
        for read in reads:
            if read.buffer not in takers and read.buffer not in nest.outputs:
                continue
            apart = simplified(read.indices[0] - row)
            if row in variables(apart) or loads(apart):
                return None
            found = index_values(apart, domain, [])
            if not found:
                return None
            far = max(-found[0][0], found[-1][1] - 1)
            if far and read.buffer in nest.outputs:
                return None
            reach = max(reach, far)
    return reach


def _narrows(steps: Sequence[Region]) -> bool:
    """True if no step computes rows outside those of the first one."""
    [(begin, end)] = steps[0]
    return all(begin <= first and last <= end for [(first, last)] in steps)


def _row_bytes(plan: Distribution, rank: int) -> int:
    """Bytes of a row of all windows whose rows differ between parts."""
    nest, total = plan.nest_of(rank), 0
    for buffer in nest.func.params:
        window = plan.parts[rank].windows[buffer.name]
        loops_of = nest.varying.get(buffer, ((),) * len(window))
        moved = [ends for ends, loops in zip(window, loops_of, strict=True) if loops]
        if moved:
            [(begin, end), *_] = moved
            total += region_size(window) // (end - begin) * plan.itemsizes[buffer.name]
    return total


class _Writer:
    """Writes :func:`skewed_steps`."""

    def __init__(
        self, block: tirx.PrimFunc, row: tirx.PrimFunc, repeat: Mapping[str, str], skew: Skew
    ) -> None:
        count = sum(isinstance(param.ty, tirx.BufferType) for param in block.params)
        self.buffers, (self.lo, *self.firsts) = block.params[:count], block.params[count:]
        named = {buffer.name: buffer for buffer in self.buffers}
        self.swapped: dict[ir.Var, tirx.Expr] = {}
        for taker, output in repeat.items():
            self.swapped |= {named[taker]: named[output], named[output]: named[taker]}
        same = dict(zip(row.params, block.params, strict=True))
        self.block, self.row = block.body, substitute(row.body, same)
        self.skew = skew
        dtype = self.lo.ty.dtype
        self.start = tirx.Var("start", dtype)
        self.ends = [
            tuple(tirx.Var(f"{name}_{step}", dtype) for name in ("begin", "end"))
            for step in range(skew.steps)
        ]

    def function(self) -> tirx.PrimFunc:
        """The function."""
        with IRBuilder() as builder:
            with T.prim_func(s_tir=True):
                T.func_name("main")
                ends = itertools.chain(*self.ends)
                for param in (*self.buffers, *self.firsts, *ends, self.start):
                    T.arg(param.name, param)
                T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
                with T.sblock("root"):
                    T.reads()
                    T.writes()
                    with T.parallel(0, self._number(self.skew.chunks)) as chunk:
                        self._chunk(chunk)
                    if self.skew.chunks > 1:
                        with T.parallel(0, self._number(self.skew.chunks - 1)) as chunk:
                            self._between(self._cut(chunk + 1))
        # Each copy of a kernel is to define variables of its own.
        module = tirx.transform.ConvertSSA()(IRModule({"main": builder.get()}))
        return module["main"].without_attr("global_symbol")

    def _chunk(self, chunk: tirx.Var) -> None:
        """Blocks of all steps; the later a step, the farther away from other chunks."""
        steps, reach, block = self.skew.steps, self.skew.reach, self.skew.block
        is_first, is_last = chunk.equal(0), chunk.equal(self.skew.chunks - 1)
        top, bottom = self.ends[0]
        begin = tirx.Select(is_first, top, self._cut(chunk))
        end = tirx.Select(is_last, bottom, self._cut(chunk + 1))
        past = tirx.Select(is_last, bottom + reach * (steps - 1), end)
        with T.serial(0, tirx.floordiv(past - begin + (block - 1), block)) as number:

            def rows(step: tirx.Expr, body: _Body) -> None:
                low = tirx.Select(is_first, self._end(step, 0), begin + step * reach)
                high = tirx.Select(is_last, self._end(step, 1), end - step * reach)
                place = begin + number * block - step * reach
                first, last = tirx.max(place, low), tirx.min(place + block, high)
                with T.If((last - first).equal(block)):
                    with T.Then():
                        body(self.block, first)
                    with T.Else(), T.serial(0, tirx.max(last - first, 0)) as row:
                        body(self.row, first + row)

            self._in_turns(rows)

    def _between(self, cut: tirx.Expr) -> None:
        """Rows around the border of two chunks, which these leave out."""

        def rows(step: tirx.Expr, body: _Body) -> None:
            far = step * self.skew.reach
            with T.serial(0, 2 * far) as row:
                body(self.row, cut - far + row)

        self._in_turns(rows)

    def _in_turns(self, rows: Callable[[tirx.Expr, _Body], None]) -> None:
        """Write what computes the rows of each step, of the odd ones with swapped arrays."""
        with T.serial(0, self._number((self.skew.steps + 1) // 2)) as pair:
            for odd in range(2):
                step = pair * 2 + odd
                with T.If(tirx.all(self.start <= step, step < self.skew.steps)), T.Then():
                    rows(step, self._swapped if odd else self._plain)

    def _plain(self, kernel: tirx.Stmt, first: tirx.Expr) -> None:
        T.add_to_parent(substitute(kernel, {self.lo: first}))

    def _swapped(self, kernel: tirx.Stmt, first: tirx.Expr) -> None:
        T.add_to_parent(substitute(kernel, {self.lo: first} | self.swapped))

    def _cut(self, chunk: tirx.Expr) -> tirx.Expr:
        """Begin of a chunk: those of the last step's rows are even."""
        begin, end = self.ends[-1]
        return begin + tirx.floordiv((end - begin) * chunk, self.skew.chunks)

    def _end(self, step: tirx.Expr, side: int) -> tirx.Expr:
        """Begin or end of the rows that a step computes."""
        found = self.ends[-1][side]
        for number, ends in reversed(list(enumerate(self.ends[:-1]))):
            found = tirx.Select(step.equal(number), ends[side], found)
        return found

    def _number(self, value: int) -> tirx.Expr:
        return tirx.const(value, str(self.lo.ty.dtype))
