# SPDX-License-Identifier: Apache-2.0
"""Kernel that quantises a tensor by its own range, as ONNX's DynamicQuantizeLinear.

::

    low, high = min(0, x), max(0, x)                    over all elements
    scale = (high - low) / 255, or 1 where that is 0
    point = round(-low / scale)
    out, zero = saturate(round(x / scale) + point), saturate(point)

One loop over the tensor finds both extremes, a second one quantises; all cores share each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add, mul

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.extents import Extent

from ..core.machine import CPUInfo
from .matmul.narrow_matrix import flat
from .selections import Shapes, cpu_kernel, long, own_extents

_FLOAT = "float32"
_MOST = 255.0
_VECTORS = 4  # Vectors of a step: so many extremes hide the latency of each.
_WORTH_THREADS = 16384  # elements from which starting threads takes less time than they save


def dynamic_quantize(shape: Sequence[Extent], cpu: CPUInfo) -> tirx.PrimFunc:
    """Build the kernel for a tensor of a shape, whose extents may be symbolic.

    Returns ``main(x, out, scale, zero)``: ``x`` float32 and ``out`` uint8 of ``shape``; ``scale``
    float32 and ``zero`` uint8, scalars. A NaN makes the scale NaN, and all bytes 0; so does a range
    without a lower end, but for the scale. Bytes of infinities are 0.
    """
    shape = own_extents(shape)
    buffers: Shapes = {
        "x": (shape, _FLOAT),
        "out": (shape, "uint8"),
        "scale": ((), _FLOAT),
        "zero": ((), "uint8"),
    }

    def write(x: tirx.Buffer, out: tirx.Buffer, scale: tirx.Buffer, zero: tirx.Buffer) -> None:
        _Kernel(reduce(mul, shape, long(1)), cpu, flat(x), flat(out)).write(scale, zero)

    return cpu_kernel("DynamicQuantize", buffers, write, {attributes.TITLE: "quantise by range"})


def _number(value: float) -> tirx.Expr:
    return tirx.const(value, _FLOAT)


def _extremes(x: tirx.Expr, found: Sequence[tirx.Expr]) -> list[tirx.Expr]:
    """The extremes with another number, and the last NaN, which is no extreme."""
    low, high, nan = found
    return [tirx.min(x, low), tirx.max(x, high), tirx.Select(tirx.isnan(x), x, nan)]


class _Kernel:
    """Writes both loops, over flat views of the tensors."""

    def __init__(self, size: tirx.Expr, cpu: CPUInfo, x: tirx.Buffer, out: tirx.Buffer) -> None:
        self.size, self.x, self.out = size, x, out
        self.lanes = cpu.lanes(_FLOAT)
        self.step = long(self.lanes * _VECTORS)
        is_small = isinstance(size, tirx.IntImm) and int(size) < _WORTH_THREADS
        self.tasks = 1 if is_small else cpu.num_cores

    def write(self, scale: tirx.Buffer, zero: tirx.Buffer) -> None:
        """Write the kernel."""
        found = T.sblock_alloc_buffer((3 * self.tasks * self.lanes,), _FLOAT)
        with T.parallel(long(0), long(self.tasks)) as task:
            self._find(task, found)
        low, high, nan = self._join(found)
        unit = T.bind((high - low + nan) / _number(_MOST))
        unit = T.bind(tirx.Select(unit == _number(0), _number(1), unit))
        point = T.bind(tirx.nearbyint(_number(0) - low / unit))
        # Both ends are whole: bounds in front of rounding are those behind it.
        known = [
            T.bind(tirx.Select(tirx.isnan(point), _number(0), value))
            for value in (_number(0) - point, _number(_MOST) - point, point)
        ]
        T.buffer_store(scale, unit, [])
        T.buffer_store(zero, T.Cast("uint8", tirx.min(known[2], _number(_MOST))), [])
        with T.parallel(long(0), long(self.tasks)) as task, T.sblock("quantise"):
            with self._steps(task) as place:
                for vector in range(_VECTORS):
                    self._quantize(self._vector(place, vector), self.lanes, unit, known)
        with self._rest() as place:
            self._quantize(place, 1, unit, known)

    def _steps(self, task: tirx.Expr) -> T.frame.ForFrame:
        """A loop over the steps of a task."""
        T.reads()
        T.writes()
        steps, tasks = tirx.floordiv(self.size, self.step), long(self.tasks)
        ends = [tirx.floordiv(steps * (task + long(at)), tasks) for at in range(2)]
        return T.serial(*ends)

    def _rest(self) -> T.frame.ForFrame:
        """A loop over the elements behind the last step."""
        return T.serial(tirx.floordiv(self.size, self.step) * self.step, self.size)

    def _vector(self, step: tirx.Expr, vector: int) -> tirx.Expr:
        """Places of a vector of a step."""
        return T.ramp(step * self.step + long(vector * self.lanes), 1, self.lanes)

    def _find(self, task: tirx.Expr, extremes: tirx.Buffer) -> None:
        """Write the extremes of a task, and its NaN or 0, of each lane."""
        every = T.ramp(0, 1, self.lanes)
        with T.sblock("find"):
            loop = self._steps(task)
            sums = [
                [T.sblock_alloc_buffer((self.lanes,), _FLOAT) for _ in range(3)]
                for _ in range(_VECTORS)
            ]
            for buffer in (one for several in sums for one in several):
                T.buffer_store(buffer, T.broadcast(_number(0), self.lanes), [every])
            with loop as step:
                for vector, several in enumerate(sums):
                    x = T.bind(self.x[self._vector(step, vector)])
                    values = _extremes(x, [buffer[every] for buffer in several])
                    for buffer, value in zip(several, values, strict=True):
                        T.buffer_store(buffer, value, [every])
            for kind, join in enumerate((tirx.min, tirx.max, add)):
                value = reduce(join, (several[kind][every] for several in sums))
                place = (long(kind) * long(self.tasks) + task) * long(self.lanes)
                T.buffer_store(extremes, value, [T.ramp(place, 1, self.lanes)])

    def _join(self, extremes: tirx.Buffer) -> list[tirx.Expr]:
        """The extremes of all elements, and NaN or 0."""
        whole = T.sblock_alloc_buffer((3,), _FLOAT)
        for kind in range(3):
            T.buffer_store(whole, _number(0), [kind])
        each = self.tasks * self.lanes
        with T.serial(0, each) as place:
            for kind, join in enumerate((tirx.min, tirx.max, add)):
                value = join(extremes[place + kind * each], whole[kind])
                T.buffer_store(whole, value, [kind])
        with self._rest() as place:
            values = _extremes(self.x[place], [whole[kind] for kind in range(3)])
            for kind, value in enumerate(values):
                T.buffer_store(whole, value, [kind])
        return [T.bind(whole[kind]) for kind in range(3)]

    def _quantize(
        self, place: tirx.Expr, lanes: int, unit: tirx.Expr, known: Sequence[tirx.Expr]
    ) -> None:
        """Write the bytes of a vector, or of an element."""

        def spread(value: tirx.Expr) -> tirx.Expr:
            return T.broadcast(value, lanes) if lanes > 1 else value

        low, high, point = map(spread, known)
        level = tirx.max(self.x[place] / spread(unit), low)  # NaN becomes what is second
        level = tirx.nearbyint(tirx.min(level, high)) + point
        kind = f"x{lanes}" if lanes > 1 else ""
        T.buffer_store(self.out, T.Cast(f"uint8{kind}", T.Cast(f"int32{kind}", level)), [place])
