# SPDX-License-Identifier: Apache-2.0
"""Position in a reduced loop over several axes that are no neighbours, stepped from load to load.

In the form R-P-R an address follows from the quotient and the remainder of the position and the
inner extent. A thread divides once, where its share begins; then it adds its stride to the digits
of the position, in 32 bits, with a carry.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from schedules.tir.extents import constant, size_of, unravel
from schedules.tir.index_math import INT32_END, i64, narrowed

from .context import ReduceContext


class SteppedPosition:
    """The digits of a thread's position, in vectors, the outermost first.

    Parameters
    ----------
    extents : list[int]
        Of the digits.
    vector : int
        Elements of a vector in the reduced loop.
    """

    def __init__(self, extents: list[int], vector: int):
        self._extents = extents
        self._vector = vector
        self._digits = [T.alloc_buffer((1,), "int32", scope="local") for _ in extents]
        self._analyzer = Analyzer()

    @classmethod
    def open(cls, ctx: ReduceContext) -> SteppedPosition | None:
        """The digits of the group's reduced loop; None if nothing has to be divided."""
        loops = ctx.group.reductions[0].loops
        vector = 1 if ctx.is_y else ctx.config.vector
        size = constant(size_of(loops.shape))
        if size is None or size >= INT32_END:
            return None
        extents = [int(extent) for kind, extent in loops.runs if kind == "R"]
        if len(extents) < 2 or extents[-1] % vector:
            return None
        return cls([*extents[:-1], extents[-1] // vector], vector)

    def start(self, n: tirx.Expr) -> None:
        """Divide the position of the first vector."""
        for digit, index in zip(self._digits, self._split(n // i64(self._vector)), strict=True):
            T.buffer_store(digit, index.astype("int32"), [0])

    def bind(self) -> tirx.Expr:
        """The position at this moment, whose subscripts need no division."""
        position: tirx.Expr = i64(0)
        for digit, extent in zip(self._digits, self._extents, strict=True):
            index = T.bind(digit[0].astype("int64"))
            self._analyzer.bind(index, Range.from_min_extent(i64(0), i64(extent)))
            position = position * i64(extent) + index
        return position * i64(self._vector)

    def advance(self, stride: int) -> None:
        """Add a stride, a multiple of the vector."""
        steps = [int(step) for step in self._split(tirx.const(stride // self._vector, "int64"))]
        carry = tirx.const(0, "int32")
        for number in range(len(steps) - 1, 0, -1):
            digit, step, extent = self._digits[number], steps[number], self._extents[number]
            moved = T.bind(digit[0] + tirx.const(step, "int32") + carry)
            end = tirx.const(extent, "int32")
            T.buffer_store(digit, tirx.Select(moved >= end, moved - end, moved), [0])
            carry = tirx.Select(moved >= end, tirx.const(1, "int32"), tirx.const(0, "int32"))
        first = self._digits[0]
        T.buffer_store(first, first[0] + tirx.const(steps[0], "int32") + carry, [0])

    def narrow(self, index: tirx.Expr) -> tirx.Expr:
        """An index that depends on the position, in 32 bits."""
        return narrowed(self._analyzer.simplify(index), self._analyzer)

    def _split(self, vectors: tirx.Expr) -> list[tirx.Expr]:
        return [self._analyzer.simplify(index) for index in unravel(vectors, self._extents)]
