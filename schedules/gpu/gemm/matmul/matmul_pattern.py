# SPDX-License-Identifier: Apache-2.0
"""Matching of a matrix product with its producers and its epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import tvm_ffi
from tvm import DataType, ir, tirx

from schedules.tir.block_expressions import Stage, read_stages
from schedules.tir.expression_walk import loads, substitute, uses
from schedules.tir.extents import Extent, constant, extent_of, unravel
from schedules.tir.index_math import as_type, i64, volume

from ...core.tensor_core import CHUNK
from ...pointwise.coalescing import classify
from ...pointwise.element_program import ElementProgram, Read, Value
from ...pointwise.iteration_domain import IterationSpace, Store
from .row_statistics import RowStatistics, SegmentMoments, SplitStages, split_stages

ACCUMULATOR = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True)
class Operand:
    """One factor as a space over the batch, its own rows, and the reduced axis.

    Parameters
    ----------
    space : IterationSpace
        Axes: those of the batch, the rows, the reduced one; no stores.
    value : tirx.Expr
        The factor, in the type of the accumulator.
    rows_first : bool
        Whether neighbours in memory lie along the rows, not along the reduced axis.
    row_parts, depth_parts : tuple[Extent, ...]
        Extents of the axes of which the rows and the reduced axis are the product.
    shift : tirx.Var | None
        A value of each row, which is subtracted last.
    """

    space: IterationSpace
    value: tirx.Expr
    rows_first: bool
    row_parts: tuple[Extent, ...]
    depth_parts: tuple[Extent, ...]
    shift: tirx.Var | None = None

    @property
    def along_neighbours(self) -> IterationSpace:
        """The space with the axis of neighbours in memory as the last one."""
        if not self.rows_first:
            return self.space
        count = len(self.space.axes)
        return self.space.permuted([*range(count - 2), count - 1, count - 2])


@dataclass(frozen=True)
class MatmulFunction:
    """``C[b, m, n] = epilogue(sum_k left[b, m, k] * right[b, n, k])``.

    Parameters
    ----------
    left, right : Operand
        The factors; ``n`` is the last axis of the result.
    batch : tuple[Extent, ...]
        Extents of the batch axes.
    m, n, k : Extent
        Extents of the others.
    dtype : str
        Type of the accumulator.
    accumulator : tirx.Var
        Stands for the sum in the epilogue.
    epilogue : IterationSpace
        Axes: those of the batch, ``m``, ``n``; it stores the outputs.
    statistics : RowStatistics | None
        Values of each row that the left factor and the epilogue refer to.
    moments : SegmentMoments | None
        Further outputs: moments of segments of one that the epilogue stores.
    """

    left: Operand
    right: Operand
    batch: tuple[Extent, ...]
    m: Extent
    n: Extent
    k: Extent
    dtype: str
    accumulator: tirx.Var
    epilogue: IterationSpace
    statistics: RowStatistics | None = None
    moments: SegmentMoments | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether it has nothing to do with statistics of rows."""
        return self.statistics is None and self.moments is None

    @property
    def batches(self) -> Extent:
        """Number of products."""
        return IterationSpace((), self.batch, (), ()).size


@dataclass(frozen=True)
class _Axes:
    """Roles of the result's axes: batch, rows of the left factor, rows of the right factor."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]


def read_matmul(func: tirx.PrimFunc, windows: bool = False) -> MatmulFunction | None:
    """Read the product of a function; None if it is no product of two factors.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function.
    windows : bool
        Whether to take a convolution, too, as the product of its weights and the windows of its
        data: for each image a row for each output channel and a column for each pixel, summed over
        channels and taps; or, with channels in blocks of 16 bytes, a row for each pixel of all
        images and a column for each output channel, summed over taps and channels.

    Notes
    -----
    Factors may be computed by injective blocks. The epilogue reads the product at its own place
    and may have several outputs. Without windows, several reduced axes of more than one element
    are left alone. Other reductions are those of :mod:`.row_statistics`, if any, of one product
    without windows.
    """
    stages = read_stages(func)
    return None if stages is None else read_product(stages, func.params, windows)


def read_product(
    stages: Sequence[Stage],
    outputs: Sequence[tirx.Buffer],
    windows: bool = False,
    inlined: Sequence[Stage] = (),
) -> MatmulFunction | None:
    """Read the first product of some stages, as :func:`read_matmul` does that of a function.

    Of the stages' outputs, those in ``outputs`` are stored. Elements of what the stages in
    ``inlined`` compute, reductions among them, are computed where the factors need them.
    """
    products = [stage for stage in stages if product_factors(stage) is not None]
    if not products:
        return None
    product = products[0]
    parts = split_stages(outputs, stages, product)
    factors = product_factors(product)
    if parts is None or factors is None or (windows and not parts.is_plain):
        return None
    parts = replace(parts, before=[*inlined, *parts.before])
    before = parts.before
    reduced = [axis for axis in product.reduced if constant(axis.dom.extent) != 1]
    if len(reduced) > 1 and not windows:
        return None
    reduced = reduced or [product.reduced[0]]
    extents = product.shape
    left, right = factors
    axes = _roles(product, before, left, right, reduced, windows)
    if axes is None or not axes.n or _last(extents) not in axes.n:
        left, right = right, left
        axes = _roles(product, before, left, right, reduced, windows)
    if axes is None or (_last(extents) is not None and _last(extents) not in axes.n):
        return None
    if windows:
        reduced = _taps_first(product, before, left, reduced)
    return _assemble(outputs, product, parts, (left, right), axes, reduced)


def _taps_first(
    product: Stage, before: Sequence[Stage], left: tirx.Expr, reduced: Sequence[tirx.IterVar]
) -> list[tirx.IterVar]:
    """The reduced axes, those of taps before all channels if a block of channels comes last.

    So neighbours along the reduced axis are of one tap, and its place is computed once for them.
    """
    read, own = _only_read(before, left), [axis.var for axis in product.axes]
    if read is None or uses(read.indices[-1], *own):
        return list(reduced)
    taps = [
        axis
        for axis in reduced
        if any(uses(index, axis.var) and uses(index, *own) for index in read.indices)
    ]
    return [*taps, *(axis for axis in reduced if axis not in taps)]


def _only_read(before: Sequence[Stage], factor: tirx.Expr) -> Read | None:
    """The read of a factor that reads one element of a tensor with axes."""
    program = ElementProgram(before)
    program.add(factor)
    reads = [step for step in program.steps if isinstance(step, Read)]
    return reads[0] if len(reads) == 1 and reads[0].indices else None


def product_factors(product: Stage) -> tuple[tirx.Expr, tirx.Expr] | None:
    """The two factors, if the stage adds their product to zero."""
    value = product.value
    if not isinstance(value, tirx.Add) or product.init is None:
        return None
    if not _is_zero(product.init):
        return None
    sides = [value.a, value.b]
    own = [side for side in sides if _is_own(side, product)]
    if len(own) != 1:
        return None
    [term] = [side for side in sides if side is not own[0]]
    if not isinstance(term, tirx.Mul):
        return None
    return term.a, term.b


def _is_zero(value: tirx.Expr) -> bool:
    return getattr(value, "value", None) == 0


def _is_own(expression: tirx.Expr, product: Stage) -> bool:
    return isinstance(expression, ir.TensorLoad) and expression.source.same_as(product.output)


def _last(extents: Sequence[Extent]) -> int | None:
    """The last axis of more than one element."""
    return next((i for i in reversed(range(len(extents))) if extents[i] != 1), None)


def _roles(
    product: Stage,
    before: Sequence[Stage],
    left: tirx.Expr,
    right: tirx.Expr,
    reduced: Sequence[tirx.IterVar],
    windows: bool,
) -> _Axes | None:
    """Roles of the axes; None if they are not in the order batch, m, n."""
    depends = [dependences(product, before, factor) for factor in (left, right)]
    summed = [axis.var for axis in reduced if constant(axis.dom.extent) != 1]
    if not all(var in found for var in summed for found in depends):
        return None
    batch, m, n = [], [], []
    for number, axis in enumerate(product.axes):
        in_left, in_right = (axis.var in found for found in depends)
        if constant(axis.dom.extent) == 1:
            continue
        if in_left and in_right:
            batch.append(number)
        elif in_left:
            m.append(number)
        elif in_right:
            n.append(number)
        else:
            return None
    if windows and _are_blocks(product, before, right, n):
        return _Axes((), (*batch, *m), tuple(n))
    if windows and m:  # images, of which the weights are independent
        batch += [number for number in n if number < m[0]]
        n = [number for number in n if number > m[0]]
    order = [*batch, *m, *n]
    return _Axes(tuple(batch), tuple(m), tuple(n)) if order == sorted(order) else None


def _are_blocks(
    product: Stage, before: Sequence[Stage], weight: tirx.Expr, channels: Sequence[int]
) -> bool:
    """Return whether some axes are blocks of 16 bytes of channels, and the channels of a block.

    They are the first axis of the weights, and the last one or that before words of channels.
    """
    read = _only_read(before, weight)
    if read is None or len(channels) != 2:
        return False
    first, last = (product.axes[channel].var for channel in channels)
    is_chunk = constant(product.shape[channels[1]]) == _chunk(read.buffer)
    ends = any(last.same_as(index) for index in read.indices[-2:])
    return is_chunk and first.same_as(read.indices[0]) and ends


def _chunk(buffer: tirx.Buffer) -> int:
    """Elements of 16 bytes."""
    return CHUNK * 8 // DataType(str(buffer.dtype)).bits


def dependences(product: Stage, before: Sequence[Stage], factor: tirx.Expr) -> list[tirx.Var]:
    """The axes of a product on which a factor depends."""
    program = ElementProgram(before)
    value = program.add(factor)
    parts = [value]
    for step in program.steps:
        parts += [*step.guards, *(step.indices if hasattr(step, "indices") else [step.expression])]
    axes = [axis.var for axis in (*product.axes, *product.reduced)]
    return [axis for axis in axes if any(uses(part, axis) for part in parts)]


def _assemble(
    outputs: Sequence[tirx.Buffer],
    product: Stage,
    parts: SplitStages,
    factors: tuple[tirx.Expr, tirx.Expr],
    axes: _Axes,
    reduced: Sequence[tirx.IterVar],
) -> MatmulFunction | None:
    before = parts.before
    if not read_in_place(product, parts.after):
        return None
    if not parts.is_plain and axes.n != (len(product.shape) - 1,):
        return None
    if not parts.is_plain and axes.batch:
        return None
    shape = product.shape
    batch = tuple(shape[i] for i in axes.batch)
    m, n = (extent_of(volume(shape[i] for i in part)) for part in (axes.m, axes.n))
    depth = extent_of(volume(axis.dom.extent for axis in reduced))
    dtype = ACCUMULATOR.get(str(product.output.dtype), str(product.output.dtype))
    left, right = (
        read_operand(product, before, factor, part, axes.batch, reduced, depth, dtype, parts.known)
        for factor, part in zip(factors, (axes.m, axes.n), strict=True)
    )
    accumulator = tirx.Var("sum", dtype)
    epilogue = _epilogue(outputs, product, parts, axes, accumulator)
    if epilogue is None:
        return None
    found = MatmulFunction(left, right, batch, m, n, depth, dtype, accumulator, epilogue)
    return found if parts.is_plain else _with_statistics(found, product, parts)


def _with_statistics(
    matmul: MatmulFunction, product: Stage, parts: SplitStages
) -> MatmulFunction | None:
    """The product with values and moments of its rows; None if a factor uses them otherwise."""
    names, left = set(parts.known.values()), _with_shift(matmul.left, parts)
    value = left.value if left.shift is None else left.value.a
    steps = (*left.space.steps, *matmul.right.space.steps)
    computed = [step.expression for step in steps if isinstance(step, Value)]
    if any(uses(each, *names) for each in (value, matmul.right.value, *computed)):
        return None
    moments, stored = parts.moments, [store.buffer for store in matmul.epilogue.stores]
    if moments is not None and not any(moments.source.same_as(buffer) for buffer in stored):
        return None
    return replace(matmul, left=left, statistics=parts.statistics(product), moments=moments)


def _with_shift(operand: Operand, parts: SplitStages) -> Operand:
    """The factor with the value of each row that is subtracted from it last, if there is one."""
    steps, value = operand.space.steps, operand.value
    last = steps[-1] if steps else None
    if isinstance(last, Value) and last.var.same_as(value):
        steps, value = steps[:-1], last.expression
    if not isinstance(value, tirx.Sub) or value.b not in parts.known.values():
        return operand
    return replace(operand, space=replace(operand.space, steps=steps), value=value, shift=value.b)


def divides(part: int, extent: Extent) -> bool:
    """Return whether an extent is known to be a multiple."""
    known = constant(extent)
    return known is not None and known % part == 0


def read_in_place(product: Stage, after: Sequence[Stage]) -> bool:
    """Return whether the epilogue has the product's shape and reads it where it writes."""
    follow = {product.output}
    for stage in after:
        read = [load for load in loads(stage.value) if load.source in follow]
        if not read:
            continue
        if not tvm_ffi.structural_equal(list(stage.output.shape), list(product.output.shape)):
            return False
        for load in read:
            for index, axis in zip(load.indices, stage.axes, strict=True):
                is_unit = constant(axis.dom.extent) == 1 and constant(index) == 0
                if not is_unit and not axis.var.same_as(index):
                    return False
        follow.add(stage.output)
    return True


def read_operand(
    product: Stage,
    before: Sequence[Stage],
    factor: tirx.Expr,
    part: Sequence[int],
    batch: Sequence[int],
    reduced: Sequence[tirx.IterVar],
    depth: Extent,
    dtype: str,
    known: Mapping[tirx.Buffer, tirx.Expr] | None = None,
) -> Operand:
    """The factor over the axes (batch, rows, k), the rows and reduced axes flattened."""
    shape = product.shape
    outer = [tirx.Var(f"b{i}", "int64") for i in batch]
    row, inner = tirx.Var("row", "int64"), tirx.Var("k", "int64")
    places = dict(zip(batch, outer, strict=True))
    places |= dict(zip(part, unravel(row, [shape[i] for i in part]), strict=True))
    indices = [places.get(i, i64(0)) for i in range(len(shape))]
    moved = product.at(indices, factor)
    others = {axis.var: tirx.const(0, axis.var.ty.dtype) for axis in product.reduced}
    for axis, at in zip(reduced, unravel(inner, [a.dom.extent for a in reduced]), strict=True):
        others[axis.var] = as_type(at, str(axis.var.ty.dtype))
    moved = substitute(moved, others)
    program = ElementProgram(before, known)
    value = program.add(moved)
    value = value if str(value.ty.dtype) == dtype else value.astype(dtype)
    rows = extent_of(volume(shape[i] for i in part))
    extents = (*(shape[i] for i in batch), rows, depth)
    space = IterationSpace((*outer, row, inner), extents, tuple(program.steps), ())
    is_window = len(reduced) > 1 and any(space.linear(access) is None for access in space.accesses)
    # Of data with channels last they lie along the channels; else neighbouring pixels' windows
    # begin beside each other.
    rows_first = not _channels_are_chunks(space) if is_window else rows_are_neighbours(space)
    row_parts = tuple(extent_of(shape[i]) for i in part)
    depth_parts = tuple(extent_of(axis.dom.extent) for axis in reduced)
    return Operand(space, value, rows_first, row_parts, depth_parts)


def _channels_are_chunks(space: IterationSpace) -> bool:
    """Return whether windows are read in whole chunks along the reduced axis."""
    return all(
        classify(space, _chunk(read.buffer)).kinds[read.var] == "vector"
        for read in space.steps
        if isinstance(read, Read)
    )


def rows_are_neighbours(space: IterationSpace) -> bool:
    """Return whether the widest read moves by one element along the rows."""
    for access in space.accesses:
        linear = space.linear(access)
        if linear is not None and constant(linear[0][-1]) != 1 and constant(linear[0][-2]) == 1:
            return True
    return False


def _epilogue(
    outputs: Sequence[tirx.Buffer],
    product: Stage,
    parts: SplitStages,
    axes: _Axes,
    accumulator: tirx.Var,
) -> IterationSpace | None:
    shape, before, after = product.shape, parts.before, parts.after
    outer = [tirx.Var(f"b{i}", "int64") for i in axes.batch]
    row, column = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    places = dict(zip(axes.batch, outer, strict=True))
    for var, part in ((row, axes.m), (column, axes.n)):
        places |= dict(zip(part, unravel(var, [shape[i] for i in part]), strict=True))
    indices = tuple(places.get(i, i64(0)) for i in range(len(shape)))
    stored = accumulator.astype(str(product.output.dtype))
    program = ElementProgram([*before, *after], {**parts.known, product.output: stored})
    stages = (*before, product, *after)
    written = [s for s in stages if any(s.output.same_as(each) for each in outputs)]
    same = [tvm_ffi.structural_equal(list(s.shape), list(shape)) for s in written]
    if not written or not all(same):
        return None
    stores = [Store(s.output, indices, program.element(s.output, indices)) for s in written]
    rows, columns = (extent_of(volume(shape[i] for i in part)) for part in (axes.m, axes.n))
    extents = (*(shape[i] for i in axes.batch), rows, columns)
    return IterationSpace((*outer, row, column), extents, tuple(program.steps), tuple(stores))
