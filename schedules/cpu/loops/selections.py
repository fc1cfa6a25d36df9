# SPDX-License-Identifier: Apache-2.0
"""Kernels that pick elements by their values: how many there are is known when they have run.

Each fills the first rows of a buffer that is large enough for all::

    for i, j in T.grid(4, 5):                         # find_nonzero
        if x[i, j] != 0:
            places[size[0], 0], places[size[0], 1] = i, j
            size[0] = size[0] + 1

``size`` is the shape of the part that was filled, rows and columns.

They are serial: a place depends on all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.tir.extents import Extent

Shapes = dict[str, tuple[Sequence[Extent], str] | tirx.Var]
"""The arguments of a kernel: the shapes and types of its buffers, or numbers."""


def find_nonzero(
    shape: Sequence[Extent],  # Extents of the tensor, at least one; they may be symbolic.
    dtype: str,  # Its element type.
) -> tirx.PrimFunc:
    """Build the kernel that lists the coordinates of the elements that are not 0.

    Returns ``main(x, places, size)``: ``places`` int64 [elements, rank], the coordinates in
    row-major order; ``size`` int64 [2].
    """
    shape = own_extents(shape)
    total = _product(shape)
    buffers: Shapes = {
        "x": (shape, dtype),
        "places": ((total, len(shape)), "int64"),
        "size": ((2,), "int64"),
    }

    def write(x: tirx.Buffer, places: tirx.Buffer, size: tirx.Buffer) -> None:
        _begin(size, len(shape))
        with T.grid(*shape) as loops:
            indices = list(loops) if isinstance(loops, Sequence) else [loops]
            element = x[tuple(indices)]
            chosen = element if dtype == "bool" else element != tirx.const(0, dtype)
            with T.If(chosen), T.Then():
                _append(places, size, indices)

    return cpu_kernel("NonZero", buffers, write)


def suppress_boxes(
    # ``batch``, ``classes``, ``boxes``: images, classes, and boxes of an image.
    batch: Extent,
    classes: Extent,
    boxes: Extent,
    most: int,  # Most boxes that a class of an image keeps.
    # Whether a box is its centre's x and y, width and height; else two opposite corners.
    centred: bool,
    dtype: str,  # Type of boxes and scores.
) -> tirx.PrimFunc:
    """Build the kernel of non-maximum suppression.

    Returns ``main(boxes, scores, order, overlap, score, selected, size)``: ``boxes`` [batch, boxes,
    4]; ``scores`` [batch, classes, boxes] and ``order`` int64, the boxes of each class by falling
    score; ``overlap`` and ``score`` [1], above which a box is suppressed and considered;
    ``selected`` int64 [batch * classes * min(most, boxes), 3], image, class and box; ``size`` int64
    [2].

    Notes
    -----
    A box without area suppresses none, and corners may come in any order, as in ONNX Runtime.
    """
    batch, classes, boxes = own_extents((batch, classes, boxes))
    kept = tirx.min(long(most), boxes)
    buffers: Shapes = {
        "boxes": ((batch, boxes, 4), dtype),
        "scores": ((batch, classes, boxes), dtype),
        "order": ((batch, classes, boxes), "int64"),
        "overlap": ((1,), dtype),
        "score": ((1,), dtype),
        "selected": ((_product((batch, classes, kept)), 3), "int64"),
        "size": ((2,), "int64"),
    }

    def write(
        places: tirx.Buffer,
        scores: tirx.Buffer,
        order: tirx.Buffer,
        overlap: tirx.Buffer,
        score: tirx.Buffer,
        selected: tirx.Buffer,
        size: tirx.Buffer,
    ) -> None:
        start = T.sblock_alloc_buffer((1,), "int64")
        is_kept = T.sblock_alloc_buffer((1,), "bool")
        _begin(size, 3)
        with T.grid(batch, classes, boxes) as (image, kind, rank):
            with T.If(rank == 0), T.Then():
                T.buffer_store(start, size[0], [0])
            box = order[image, kind, rank]
            room = size[0] - start[0] < long(most)
            T.buffer_store(is_kept, tirx.all(room, scores[image, kind, box] > score[0]), [0])
            with T.If(is_kept[0]), T.Then():
                with T.serial(start[0], size[0]) as other:
                    corners = [
                        _corners([places[image, which, i] for i in range(4)], centred, dtype)
                        for which in (box, selected[other, 2])
                    ]
                    with T.If(_overlaps(corners[0], corners[1], overlap[0], dtype)), T.Then():
                        T.buffer_store(is_kept, tirx.const(False, "bool"), [0])
                with T.If(is_kept[0]), T.Then():
                    _append(selected, size, (image, kind, box))

    return cpu_kernel("NonMaxSuppression", buffers, write)


def _begin(size: tirx.Buffer, columns: int) -> None:
    for axis, extent in enumerate((0, columns)):
        T.buffer_store(size, long(extent), [axis])


def _append(rows: tirx.Buffer, size: tirx.Buffer, values: Sequence[tirx.Expr]) -> None:
    """Write a row behind the others, and count it."""
    for column, value in enumerate(values):
        T.buffer_store(rows, tirx.Cast("int64", value), [size[0], column])
    T.buffer_store(size, size[0] + long(1), [0])


def _corners(box: Sequence[tirx.Expr], centred: bool, dtype: str) -> list[tirx.Expr]:
    """Lower corner, then upper one."""
    a, b, c, d = box
    if centred:
        half = [side / tirx.const(2, dtype) for side in (c, d)]
        return [a - half[0], b - half[1], a + half[0], b + half[1]]
    return [tirx.min(a, c), tirx.min(b, d), tirx.max(a, c), tirx.max(b, d)]


def _overlaps(
    first: Sequence[tirx.Expr], other: Sequence[tirx.Expr], most: tirx.Expr, dtype: str
) -> tirx.Expr:
    """True if the shared area of two boxes is a larger part of their union than ``most``."""
    zero = tirx.const(0, dtype)
    sides = [tirx.min(first[i + 2], other[i + 2]) - tirx.max(first[i], other[i]) for i in range(2)]
    shared = tirx.max(sides[0], zero) * tirx.max(sides[1], zero)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, other)]
    union = areas[0] + areas[1] - shared
    has_area = [tirx.all(area > zero) for area in (*areas, shared, union)]
    return tirx.all(*has_area, shared / union > most)


def cpu_kernel(
    operator: str,
    shapes: Shapes,
    write: Callable[..., None],
    attrs: Mapping[str, object] | None = None,
) -> tirx.PrimFunc:
    """Function ``main``, whose body ``write`` emits from its buffers, for CPUs only."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            buffers = []
            for name, argument in shapes.items():
                if isinstance(argument, tirx.Var):
                    T.arg(name, argument)
                else:
                    buffers.append(tirx.decl_buffer(*argument, name))
                    T.arg(name, buffers[-1])
            marks = {
                "tirx.is_scheduled": True,
                attributes.RULE: operator,
                attributes.CPU_ONLY: operator,
            }
            T.func_attr(marks | dict(attrs or {}))
            with T.sblock("root"):
                T.reads()
                T.writes()
                write(*buffers)
    return builder.get().without_attr("global_symbol")


def own_extents(shape: Sequence[Extent]) -> list[Extent]:
    """The extents, with a variable of the kernel's own for each that is no number."""
    return [
        long(int(extent))
        if isinstance(extent, int | tirx.IntImm)
        else tirx.Var(f"extent_{axis}", "int64")
        for axis, extent in enumerate(shape)
    ]


def _product(extents: Sequence[Extent]) -> Extent:
    return reduce(lambda a, b: a * b, extents)


def long(value: int) -> tirx.Expr:
    """A constant of int64."""
    return tirx.const(value, "int64")
