# SPDX-License-Identifier: Apache-2.0
"""Functions to distribute, and an interpreter that tells which elements each output reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
from tvm import ir, te, tirx

from examples import stencils
from examples.stencils import TAPS, function, image, total
from schedules.tir.block_expressions import read_stages
from schedules.tir.expression_walk import is_if_then_else

Element = tuple[str, tuple[int, ...]]
Case = Callable[..., tirx.PrimFunc]


def window(low: int, high: int, name: str = "k") -> tirx.IterVar:
    """A reduced variable."""
    return te.reduce_axis((low, high), name)


def small(case: Callable[[int, int], tirx.PrimFunc], rows: int, cols: int) -> Case:
    """A stencil of the examples, on a small image by default."""

    def sized(rows: int = rows, cols: int = cols) -> tirx.PrimFunc:
        return case(rows, cols)

    sized.__name__ = case.__name__
    return sized


blur = small(stencils.blur, 13, 5)
convolution = small(stencils.convolution, 11, 4)
cvt_color = small(stencils.cvt_color, 9, 7)
gaussian = small(stencils.gaussian, 12, 3)
pipeline = small(stencils.pipeline, 9, 4)
sobel = small(stencils.sobel, 10, 6)
heat2d = small(stencils.heat2d, 11, 7)
heat3d = small(stencils.heat3d, 6, 4)


def reduced_convolution(rows: int = 11, cols: int = 6) -> tirx.PrimFunc:
    """A 3x3 convolution of all channels, as a reduction."""
    a, w = image(rows + 2, cols + 2, 3), image(3, 3, 3, 4, name="W")
    y, x, c = window(0, 3, "y"), window(0, 3, "x"), window(0, 3, "c")
    return function(
        a,
        w,
        te.compute(
            (rows, cols, 4),
            lambda i, j, o: te.sum(a[i + y, j + x, c] * w[y, x, c, o], axis=[y, x, c]),
            "C",
        ),
    )


def padded(a: te.Tensor, size: int, name: str = "P") -> te.Tensor:
    """An image with zeros around it."""
    rows, cols = (int(n) for n in a.shape)
    return te.compute(
        (rows + 2 * size, cols + 2 * size),
        lambda i, j: tirx.if_then_else(
            tirx.all(i >= size, i < rows + size, j >= size, j < cols + size),
            a[i - size, j - size],
            tirx.const(0, "float32"),
        ),
        name,
    )


def with_zeros(rows: int = 12, cols: int = 6) -> tirx.PrimFunc:
    """A separable filter of 5x5 pixels of an image with zeros around it."""
    a = image(rows, cols)
    p = padded(a, 2)
    gx = te.compute(
        (rows + 4, cols), lambda i, j: total(p[i, j + k] * tap for k, tap in enumerate(TAPS)), "gx"
    )
    gy = te.compute(
        (rows, cols), lambda i, j: total(gx[i + k, j] * tap for k, tap in enumerate(TAPS)), "gy"
    )
    return function(a, gy)


def lagging(rows: int = 96, cols: int = 16) -> tirx.PrimFunc:
    """Reads two rows above and one below, and a row of weights that all parts use."""
    a, w = image(rows, cols), image(1, cols, name="W")
    inside = lambda i: tirx.all(i >= 2, i < rows - 1)  # noqa: E731
    return function(
        a,
        w,
        te.compute(
            (rows, cols),
            lambda i, j: tirx.if_then_else(
                inside(i), 0.5 * a[i - 2, j] + w[0, j] * a[i + 1, j], a[i, j]
            ),
            "next",
        ),
    )


def upsample(rows: int = 3, cols: int = 2) -> tirx.PrimFunc:
    """Two stages, each of which doubles an image."""
    a = image(rows, cols)
    u = te.compute((2 * rows, 2 * cols), lambda i, j: a[i // 2, j // 2], "u")
    return function(a, te.compute((4 * rows, 4 * cols), lambda i, j: u[i // 2, j // 2] + 1.0, "v"))


def downsample(rows: int = 5, cols: int = 3) -> tirx.PrimFunc:
    """Two stages, each of which halves an image."""
    a = image(4 * rows, 4 * cols)
    d = te.compute(
        (2 * rows, 2 * cols), lambda i, j: (a[2 * i, 2 * j] + a[2 * i + 1, 2 * j + 1]) * 0.5, "d"
    )
    return function(
        a, te.compute((rows, cols), lambda i, j: d[2 * i, 2 * j] + d[2 * i, 2 * j + 1], "e")
    )


def dilated(rows: int = 9, cols: int = 4, step: int = 3) -> tirx.PrimFunc:
    """A sum of rows at a distance: parts of few rows read with gaps."""
    a, k = image(rows + 2 * step, cols), window(0, 3)
    return function(
        a, te.compute((rows, cols), lambda i, j: te.sum(a[i + step * k, j], axis=k), "C")
    )


def strided(rows: int = 12, cols: int = 5) -> tirx.PrimFunc:
    """A filter of three rows at every second row, with its zeros inside of the reduction."""
    a, k = image(rows, cols), window(0, 3)
    return function(
        a,
        te.compute(
            (rows // 2, cols),
            lambda i, j: te.sum(
                tirx.if_then_else(
                    tirx.all(2 * i + k >= 1, 2 * i + k < rows + 1),
                    a[2 * i + k - 1, j],
                    tirx.const(0, "float32"),
                ),
                axis=k,
            ),
            "C",
        ),
    )


def every_fourth(rows: int = 6, cols: int = 3) -> tirx.PrimFunc:
    """Rows with gaps between them, of an intermediate that reads rows in another order."""
    a = image(4 * rows, cols)
    t = te.compute((4 * rows, cols), lambda i, j: a[i // 2 + i % 2, j] * 2.0, "T")
    return function(a, te.compute((rows, cols), lambda i, j: t[4 * i, j] + 1.0, "C"))


def chain(rows: int = 13, cols: int = 4) -> tirx.PrimFunc:
    """Two filters whose zeros stand inside, so that the first is clipped at the image's border."""
    a = image(rows, cols)

    def smooth(t: te.Tensor, name: str) -> te.Tensor:
        k = window(0, 5)
        return te.compute(
            (rows, cols),
            lambda i, j: te.sum(
                tirx.if_then_else(
                    tirx.all(i + k >= 2, i + k < rows + 2),
                    t[i + k - 2, j],
                    tirx.const(0, "float32"),
                ),
                axis=k,
            ),
            name,
        )

    return function(a, smooth(smooth(a, "S"), "T"))


def flip(rows: int = 9, cols: int = 3) -> tirx.PrimFunc:
    """The rows of an image in the opposite order, each with the next one."""
    a = image(rows + 1, cols)
    return function(
        a, te.compute((rows, cols), lambda i, j: a[rows - i, j] - a[rows - 1 - i, j], "C")
    )


def concatenation(rows: int = 4, cols: int = 3) -> tirx.PrimFunc:
    """One image below another: a part reads of either or of both."""
    a, b = image(rows, cols), image(rows + 3, cols, name="B")
    return function(
        a,
        b,
        te.compute(
            (2 * rows + 3, cols),
            lambda i, j: tirx.if_then_else(i < rows, a[i, j], b[i - rows, j]),
            "C",
        ),
    )


def joined(rows: int = 4, cols: int = 3) -> tirx.PrimFunc:
    """One computed image below another: a part may need nothing of a block."""
    a, b = image(rows, cols), image(rows + 3, cols, name="B")
    p = te.compute((rows, cols), lambda i, j: a[i, j] * 2.0, "P")
    q = te.compute((rows + 3, cols), lambda i, j: b[i, j] + 1.0, "Q")
    return function(
        a,
        b,
        te.compute(
            (2 * rows + 3, cols),
            lambda i, j: tirx.if_then_else(i < rows, p[i, j], q[i - rows, j]),
            "C",
        ),
    )


def matmul(rows: int = 7, cols: int = 5, inner: int = 4) -> tirx.PrimFunc:
    """A product of matrices: rows of one input, columns of the other."""
    a, b, k = image(rows, inner), image(inner, cols, name="B"), window(0, inner)
    return function(
        a, b, te.compute((rows, cols), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    )


def centred(rows: int = 6, cols: int = 4) -> tirx.PrimFunc:
    """An image less the sum of its columns: every part reads all rows."""
    a, k = image(rows, cols), window(0, rows)
    total = te.compute((cols,), lambda j: te.sum(a[k, j], axis=k), "total")
    return function(a, te.compute((rows, cols), lambda i, j: a[i, j] - total[j], "C"))


wave2d = small(stencils.wave2d, 11, 7)


def gradients(rows: int = 10, cols: int = 6) -> tirx.PrimFunc:
    """Differences along the rows and along the columns, which need different halos."""
    a = image(rows + 3, cols + 1)
    down = te.compute((rows, cols), lambda i, j: a[i + 3, j] - a[i, j], "down")
    return function(a, down, te.compute((rows, cols), lambda i, j: a[i, j + 1] - a[i, j], "across"))


def levels(rows: int = 11, cols: int = 4) -> tirx.PrimFunc:
    """An image smoothed once and twice: the second output reads a halo of the first."""
    a = image(rows + 4, cols)
    once = te.compute((rows, cols), lambda i, j: a[i, j] + a[i + 4, j], "once")
    twice = te.compute(
        (rows, cols),
        lambda i, j: once[te.max(i - 2, 0), j] + once[te.min(i + 1, rows - 1), j],
        "twice",
    )
    return function(a, once, twice)


def turned(rows: int = 8, cols: int = 5) -> tirx.PrimFunc:
    """An image and its transpose, whose rows are the image's columns."""
    a = image(rows + 1, cols)
    plain = te.compute((rows, cols), lambda i, j: a[i, j] + 1.0, "plain")
    return function(a, plain, te.compute((cols, rows), lambda j, i: a[i + 1, j] * 2.0, "turned"))


def gaps(rows: int = 12, cols: int = 3) -> tirx.PrimFunc:
    """A step that reads the rows two above and two below, and not its own."""
    a = image(rows, cols)
    p = padded(a, 2)
    return function(a, te.compute((rows, cols), lambda i, j: p[i, j] + p[i + 4, j], "next"))


def larger(mine: tuple[tirx.Expr, ...], other: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
    """Larger of two pairs of a position and a value; the first of equal ones."""
    holds = mine[1] >= other[1]
    return tuple(tirx.Select(holds, a, b) for a, b in zip(mine, other, strict=True))


def argmax(
    choice: Callable[..., tuple[tirx.Expr, ...]] = larger, least: Callable = te.min_value
) -> Callable:
    """A reduction of pairs by a choice between two."""
    return te.comm_reducer(choice, lambda at, value: (tirx.const(-1, at), least(value)), "argmax")


def positions(rows: int = 8, cols: int = 5) -> tirx.PrimFunc:
    """The largest of three rows, and in which of them it is, by one block."""
    a, k = image(rows + 2, cols), window(0, 3)
    pair = te.compute(
        (rows, cols),
        lambda i, j: argmax()(((i + k).astype("float32"), a[i + k, j]), axis=k),
        "most",
    )
    return function(a, *pair)


SEVERAL: dict[str, Case] = {
    case.__name__: case for case in (wave2d, gradients, levels, turned, positions)
}
"""Functions with several outputs; ``turned`` is distributed over its loop ``i``."""

CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        blur,
        convolution,
        cvt_color,
        gaussian,
        pipeline,
        sobel,
        heat2d,
        heat3d,
        reduced_convolution,
        with_zeros,
        upsample,
        downsample,
        dilated,
        strided,
        every_fourth,
        chain,
        flip,
        concatenation,
        joined,
        matmul,
        centred,
    )
}
"""All functions, by name; they take the number of rows."""

_OPERATORS: dict[str, Callable[[int, int], int | bool]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "FloorMod": lambda a, b: a % b,
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "Min": min,
    "Max": max,
    "And": lambda a, b: a and b,
}


class Interpreter:
    """Elements of the inputs that an element of the output reads, found by evaluating it."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        stages = read_stages(func, several=True)
        assert stages is not None
        self.stages = {stage.output.name: stage for stage in stages}
        self.outputs = [stage.output.name for stage in stages if stage.output in func.params]
        self.known: dict[Element, frozenset[Element]] = {}

    def reads(self, index: tuple[int, ...], output: str | None = None) -> frozenset[Element]:
        """Elements of the inputs that an element of the output, or of one of several, reads."""
        return self._element(output or self.outputs[-1], index)

    def _element(self, name: str, index: tuple[int, ...]) -> frozenset[Element]:
        if name not in self.stages:
            return frozenset([(name, index)])
        if (name, index) not in self.known:
            stage = self.stages[name]
            found: set[Element] = set()
            own = {output.name for output in stage.outputs}
            values = dict(zip((axis.var for axis in stage.axes), index, strict=True))
            ranges = [range(int(axis.dom.extent)) for axis in stage.reduced]
            for place in itertools.product(*ranges):
                reduced = dict(zip((axis.var for axis in stage.reduced), place, strict=True))
                self._walk(stage.value, values | reduced, own, found)
            self.known[name, index] = frozenset(found)
        return self.known[name, index]

    def _walk(
        self, value: tirx.Expr, values: Mapping[ir.Var, int], own: set[str], found: set[Element]
    ) -> None:
        """Add what an expression reads, of the branch that is taken."""
        if is_if_then_else(value):
            taken = value.args[1 if evaluate(value.args[0], values) else 2]
            self._walk(taken, values, own, found)
        elif isinstance(value, ir.TensorLoad):
            if value.source.name not in own:
                index = tuple(int(evaluate(i, values)) for i in value.indices)
                found |= self._element(value.source.name, index)
        elif isinstance(value, ir.Call):
            for argument in value.args:
                self._walk(argument, values, own, found)
        else:
            for field in ("a", "b", "value", "condition", "true_value", "false_value"):
                child = getattr(value, field, None)
                if isinstance(child, ir.Expr):
                    self._walk(child, values, own, found)


def evaluate(value: tirx.Expr, values: Mapping[ir.Var, int]) -> int | bool:
    """An expression of integers."""
    if isinstance(value, ir.Var):
        return values[value]
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tirx.Cast):
        return evaluate(value.value, values)
    operator = _OPERATORS[type(value).__name__]
    return operator(evaluate(value.a, values), evaluate(value.b, values))


def random_arrays(func: tirx.PrimFunc, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values for all parameters."""
    random = np.random.default_rng(seed)
    return {
        buffer.name: random.random([int(n) for n in buffer.shape], np.float32)
        for buffer in func.params
    }


def elements(region: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    """The indices of a region."""
    return list(itertools.product(*(range(begin, end) for begin, end in region)))
