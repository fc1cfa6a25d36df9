# SPDX-License-Identifier: Apache-2.0
"""Register-tiled micro-kernels of packed convolutions, written into a function under construction.

A micro-kernel computes ``P`` pixels x ``V`` vectors of output channels with all accumulators in
registers over the whole reduction: it starts from the bias (or a partial sum), ends with residual
and activation, and touches the output once. The reduction runs over input blocks, kernel rows,
kernel columns and lanes; each step broadcasts ``P`` input elements and loads ``V`` weight vectors
for ``P x V`` multiply-adds (the batch-reduce GEMM of Georganas et al., arXiv 1906.06440). Zero
padding costs nothing: rows outside the image shorten the loop over kernel rows, and border tiles
have fixed taps (:mod:`.tiles`).

Where groups of ``g`` channels share a block, a step loads ``P`` input vectors and ``g`` weight
vectors. Each of the ``P x g`` accumulators sums, in the lane of an input channel, what it adds to
the output channel ``j`` lanes apart (``i ^ j``); at the end those of a pixel are permuted and added
up. Depthwise layers are the case ``g = 1``. Other groups that cross block boundaries read their
inputs in pieces that lie in one block, and where an output block belongs to several groups, each
lane selects the element of its own group.

Where AArch64 multiplies two rows by two columns of eight bytes (``usmmla``, ``bfmmla``), rows are
two pixels and columns two output channels. Each accumulator then holds 2 x 2 sums; those of two
pixels are turned into such before the reduction and back after it.

Each accumulator is a separate buffer of one vector and of scope ``global``: TVM 0.27 puts that
on the stack, where LLVM turns it into a register. Buffers of scope ``local``, and those of 1,024
bytes and more, are taken from the heap, and stay in memory.

The functions here may only be called between the ``with`` statements of an open ``IRBuilder``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import tvm
from tvm import sym, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target.codegen import llvm_version_major

from schedules.compute.conv2d import activate, add_bytes, finished
from schedules.tir.float_bits import widen_bits
from schedules.workload.conv2d import (
    WORD_BYTES,
    Activation,
    ByteAddition,
    ByteRounding,
    ConvLayer,
)

from .prefetch import line_elements, prefetch
from .tiles import Index, Run

# Kernel row, kernel column, and the pixels of the tile that see this tap.
Tap = tuple[Index, Index, tuple[int, int]]

# Steps of the reduction that are unrolled: with sixteen, LLVM 22 hoists all broadcasts, and
# spills them.
UNROLLED_STEPS = 8
# Multiply-adds of an unrolled body, which take many times as long as the end of its loop. With half
# as many, LLVM 22 spills a vector of tiles of 6 x 4 on AVX-512.
MOST_UNROLLED = 192
LANES_OF_128_BITS = 4
PACKED_LANES = 8  # Only CPUs with AVX2 store bytes in such blocks.
CURRENT_ROUNDING = 4  # The thread's mode, which rounds to even.
BYTES_SINCE_LLVM = 22  # The operands of LLVM's instruction for bytes were vectors of int32 before.
_ADD = "tvm_fusion_add_"
_ADDITIONS = "".join(
    f"""
define linkonce_odr {vector} @{_ADD}{lanes}({vector} %a, {vector} %b) alwaysinline {{
  %sum = call {vector} asm "vpaddd $2, $1, $0", "=x,x,x"({vector} %a, {vector} %b)
  ret {vector} %sum
}}
"""
    for lanes in (4, 8)
    for vector in (f"<{lanes} x i32>",)
)
"""LLVM IR of additions in the order given; else LLVM adds products to each other, and spills."""


_DOT = "tvm_fusion_dot_bfloat16"
_DOT_INTRINSICS = {
    4: "llvm.aarch64.neon.bfdot.v4f32.v8bf16",
    16: "llvm.x86.avx512bf16.dpbf16ps.512",
}
"""Instructions for pairs of bfloat16 by the lanes of their sums."""
_ONCE = "tvm_fusion_once"
_ONCE_FUNCTION = f"""
define linkonce_odr void @{_ONCE}() alwaysinline {{
  call void asm sideeffect "", ""() noduplicate
  ret void
}}
"""
"""LLVM IR of nothing, which may not be copied. A loop with it is not unrolled; LLVM 22 unrolls such
of few steps, loads what several tiles share before all of them, and spills."""
_MMLA, _MMLA_INTRINSIC = "tvm_fusion_mmla_bfloat16", "llvm.aarch64.neon.bfmmla"
# Elements of two vectors: sums of two pixels, or those of two pixels by two channels.
_TURNED = (0, 1, 4, 5), (2, 3, 6, 7)


def _dot_function(lanes: int, mmla: bool = False) -> str:
    """LLVM IR of an instruction whose operands of bfloat16 TVM cannot write."""
    sums, words = f"<{lanes} x float>", f"<{lanes} x i32>"
    halves = f"<{2 * lanes} x bfloat>"
    called, name = (_MMLA, _MMLA_INTRINSIC) if mmla else (_DOT, _DOT_INTRINSICS[lanes])
    return f"""
declare {sums} @{name}({sums}, {halves}, {halves})
define linkonce_odr {sums} @{called}({sums} %a, {words} %b, {words} %c) alwaysinline {{
  %left = bitcast {words} %b to {halves}
  %right = bitcast {words} %c to {halves}
  %sum = call {sums} @{name}({sums} %a, {halves} %left, {halves} %right)
  ret {sums} %sum
}}
"""


def word_functions(
    in_pairs: bool, dots: int = 0, mmla: bool = False
) -> AbstractContextManager[None]:
    """Import what products of words call into what is opened next.

    That is an addition if they are added in pairs, and the instruction for pairs of bfloat16 with
    so many sums, if any: that for two rows by two columns with ``mmla``.
    """
    if not in_pairs and not dots and not mmla:
        return nullcontext()
    text = _dot_function(dots, mmla) if dots else _ADDITIONS if in_pairs else ""
    text += _ONCE_FUNCTION if mmla else ""
    return T.attr(T.int32(0), "pragma_import_llvm", text)


@dataclass(frozen=True)
class FeatureMap:
    """A feature map, or a tile of one, inside a flat buffer.

    Parameters
    ----------
    buffer : tirx.Buffer
        One-dimensional.
    offset : Index
        Element of the first stored block, row and column.
    block_stride, row_stride : int
        Elements from one channel block, and row, to the next.
    lanes : int
        Channels of a block; 1 for NCHW data.
    height, width : int
        Extents of the whole image, beyond which zeros are read.
    first_row, first_block : Index
        Image row and channel block that are stored first.
    is_local : bool
        Whether the buffer belongs to a block of the nest, rather than to the function's parameters.
    pixel_stride : int | None
        Elements from one pixel to the next; None for ``lanes``.
    parts : int
        Blocks that lie beside each other in a pixel: vectors of a wider block.
    """

    buffer: tirx.Buffer
    offset: Index
    block_stride: int
    row_stride: int
    lanes: int
    height: int
    width: int
    first_row: Index = 0
    first_block: Index = 0
    is_local: bool = False
    pixel_stride: int | None = None
    parts: int = 1

    @property
    def step(self) -> int:
        """Elements from one pixel to the next."""
        return self.lanes if self.pixel_stride is None else self.pixel_stride

    def is_apart(self, other: FeatureMap) -> bool:
        """Return whether pixels of another map of as many lie at other places in its buffer."""
        return (self.offset, self.block_stride) != (other.offset, other.block_stride)

    def at(self, block: Index, row: Index, column: Index) -> Index:
        """Element offset of lane 0 of a pixel."""
        whole, part = _part(cancelled(block - self.first_block), self.parts)
        return (
            self.offset
            + whole * self.block_stride
            + part * self.lanes
            + cancelled(row - self.first_row) * self.row_stride
            + column * self.step
        )

    def store(self, value: tirx.Expr, place: Index) -> None:
        """Store neighbouring channels; narrow ones may be words of the buffer."""
        found, stored = tvm.DataType(str(value.ty.dtype)), tvm.DataType(str(self.buffer.dtype))
        lanes = found.lanes * found.bits // stored.bits
        if found.bits < stored.bits:
            value = T.reinterpret(f"{stored}x{lanes}", value)
        _store(self.buffer, value, place, lanes)


def _part(block: Index, parts: int) -> tuple[Index, Index]:
    """Number of the block of ``parts`` vectors that a vector lies in, and its place there."""
    return (tirx.floordiv(block, parts), tirx.floormod(block, parts)) if parts > 1 else (block, 0)


def cancelled(index: Index) -> Index:
    """Simplify a difference: terms that cancel only later make TVM 0.27 divide by zero."""
    return index if isinstance(index, int) else sym.Analyzer().simplify(index)


@dataclass(frozen=True)
class LayerOperands:
    """Everything that a micro-kernel of one layer reads and writes.

    Parameters
    ----------
    layer : ConvLayer
        Attributes; channel counts are the true ones.
    source, output : FeatureMap
        Input and output.
    weight : tirx.Buffer
        Flat, in the packed layouts of :mod:`schedules.compute.conv2d`.
    bias : tirx.Buffer | None
        Likewise, or of int32 where ``dtype`` is that; None stands for zeros.
    residual : FeatureMap | None
        Added before the activation; of bytes, see ``addition``.
    lanes : int
        Output channels in a block (``x``).
    in_blocks : int
        Input blocks that one output channel reads, or pieces of ``step`` channels of its group; 1
        where blocks read their own block only.
    out_blocks : int
        Blocks of the output.
    dtype : str
        Element type of the accumulators. Buffers of bfloat16 hold the bits, as uint16.
    met : int
        Groups that the output blocks of the tile belong to.
    scale : tirx.Buffer | None
        Factors of the sums, like ``bias``; of layers of bytes, whose input and weights are int32
        words, and of layers of floats with weights of int8 or a source of bytes.
    out_dtype : str | None
        Element type of the output, if not ``dtype``.
    word : int
        Channels of a word: four in bytes, or two in 16 bits.
    pairs : bool
        Whether the weights are int32 words of two bfloat16, and the source those channels in
        float32: twice as many elements as its strides say.
    dots : bool
        Whether weights and source are int32 words of two bfloat16, whose products an instruction
        adds up.
    limited : bool
        Whether two neighbouring products of bytes fit in 16 bits.
    shifted : bool
        Whether 128 is subtracted from the bytes of ``source``, and the weights of each output block
        end with what the sums lack.
    addition : ByteAddition | None
        What is done with a residual of bytes, after the activation.
    rounding : ByteRounding | None
        How the elements of ``source``, a float32 image in NCHW, become bytes.
    mmla : bool
        Whether an instruction multiplies two words of two pixels by those of two output channels,
        which lie together in the weights; with ``dots``, or words of bytes.
    """

    layer: ConvLayer
    source: FeatureMap
    output: FeatureMap
    weight: tirx.Buffer
    bias: tirx.Buffer | None
    residual: FeatureMap | None
    lanes: int
    in_blocks: int
    out_blocks: int
    dtype: str
    met: int = 1
    scale: tirx.Buffer | None = None
    out_dtype: str | None = None
    word: int = WORD_BYTES
    addition: ByteAddition | None = None
    limited: bool = False
    shifted: bool = False
    pairs: bool = False
    dots: bool = False
    rounding: ByteRounding | None = None
    mmla: bool = False

    @property
    def group_lanes(self) -> int:
        """Channels of a group, if each block reads its own block only, else 0."""
        return self.layer.group_lanes(self.lanes)

    @property
    def step(self) -> int:
        """Channels of an input block, or of a piece that a group is read in.

        Two words at least that are multiplied at once, of two blocks if need be.
        """
        return max(self.layer.input_step(self.source.lanes), 1 + self.mmla)

    @property
    def weight_blocks(self) -> int:
        """Input blocks that the weights of an output block are stored for."""
        return self.in_blocks + self.shifted

    @property
    def starts_from_bias(self) -> bool:
        """Whether the bias is part of the sums, not added to them after their factors."""
        if self.bias is None or self.scale is None or self.dtype == "int32":
            return self.bias is not None and self.dtype == str(self.bias.dtype)
        return str(self.source.buffer.dtype) == "uint8"

    @property
    def ending(self) -> Activation:
        """The last activation."""
        return self.layer.activation if self.addition is None else self.addition.activation

    @property
    def vector(self) -> str:
        """Type of one vector of output channels."""
        return f"{self.dtype}x{self.lanes}"


@dataclass(frozen=True)
class ReducedBlocks:
    """Part of layer two's input blocks that one call sums up.

    ``first`` and ``last`` say whether this part starts from the bias and whether it ends with the
    post-ops; a constant, or a condition on a loop variable.
    """

    start: Index
    count: int
    first: tirx.Expr | bool = True
    last: tirx.Expr | bool = True


@contextmanager
def loop(start: Index, stop: Index) -> Iterator[Index]:
    """A serial loop, or none where it runs exactly once.

    The loop itself starts at zero: TVM 0.27's ``CanonicalizeLoop`` loses the offset of a loop whose
    variable stands in the bounds of an inner loop.
    """
    if isinstance(start, int) and isinstance(stop, int) and stop - start == 1:
        yield start
    else:
        with T.serial(0, stop - start) as variable:
            yield start + variable


def bound(index: Index) -> Index:
    """The value of an index that many loads or stores share, as an element of a small buffer.

    TVM writes the value of a variable out again in each of them, and its passes and LLVM's take
    several times as long. LLVM turns the buffer into a register.
    """
    if isinstance(index, int | tirx.IntImm | tirx.Var):
        return index
    value = T.alloc_buffer((1,), index.ty.dtype, layout=None)
    T.buffer_store(value, index, [0])
    return value[0]


@dataclass(frozen=True)
class RegisterTile:
    """A register tile of ``run.size`` pixels x ``blocks`` channel blocks.

    Parameters
    ----------
    block, blocks : Index, int
        First output block and their number ``V``; all in one group.
    row, column : Index
        Output pixel at which the tile starts.
    run : Run
        Its number of pixels ``P`` and its taps.
    reduction : ReducedBlocks
        Input blocks that are summed.
    following : Index | None
        First output block of the next tile, if it is not the block after this one.
    """

    block: Index
    blocks: int
    row: Index
    run: Run
    column: Index
    reduction: ReducedBlocks
    following: Index | None = None

    def cells(self) -> Iterator[tuple[int, int]]:
        """Pixel and vector of each accumulator, in order."""
        return itertools.product(range(self.run.size), range(self.blocks))


def dense_tile(ops: LayerOperands, tile: RegisterTile, turns: int = 0, lines: int = 1) -> None:
    """Compute a tile of a dense or grouped layer.

    Parameters
    ----------
    ops : LayerOperands
        The layer.
    tile : RegisterTile
        Which outputs.
    turns : int
        Tiles of a row, if they prefetch the next weights in turns: those of the next part of the
        reduction, or after the last part those of the next ``V`` blocks; else 0.
    lines : int
        Cache lines that a step of a tile then prefetches: several where tiles are few.
    """
    layer, width = ops.layer, ops.layer.out_channels // ops.layer.groups
    met = layer.groups_met(ops.lanes) if layer.groups > 1 else 1
    if met == 1 or width < ops.lanes:
        _tile_of_groups(replace(ops, met=met), tile, turns, lines)
        return
    with T.If(tirx.floormod(tile.block * ops.lanes, width) > width - ops.lanes):
        with T.Then():
            _tile_of_groups(replace(ops, met=met), tile, turns, lines)
        with T.Else():
            _tile_of_groups(ops, tile, turns, lines)


def _tile_of_groups(ops: LayerOperands, tile: RegisterTile, turns: int, lines: int) -> None:
    """Compute a tile whose output blocks belong to ``ops.met`` groups."""
    run, reduction = tile.run, tile.reduction
    with _tile_block(ops.source):
        sums = accumulators(run.size * tile.blocks, ops.lanes, ops.dtype)
        ahead: list[Index] = []
        if turns:
            number = run.first + tirx.floordiv(tile.column - run.start, run.size)
            turn = (tile.row * turns + number) * lines
            ahead = [next_weights(ops, tile, turn + line) for line in range(lines)]
        _start(ops, sums, tile)
        if ops.mmla:
            sums += accumulators(run.size % 2 * tile.blocks, ops.lanes, ops.dtype)
            _turn(ops, sums, tile.blocks)
        if ops.source.lanes > 1:
            for in_block, channels in _input_blocks(ops, reduction):
                for tap in _taps(ops, tile.row, run):
                    _multiply(ops, sums, tile, in_block, tap, channels, ahead)
        else:
            # Channels innermost, or rows of a single one: otherwise LLVM keeps the pixels that
            # neighbouring kernel columns share in registers, and spills the accumulators.
            for tap in _taps(ops, tile.row, run, rows_inside=reduction.count == 1):
                for in_block, channels in _input_blocks(ops, reduction):
                    _multiply(ops, sums, tile, in_block, tap, channels)
        if ops.mmla:
            _turn(ops, sums, tile.blocks)
        _finish(ops, sums[: run.size * tile.blocks], tile)


def _turn(ops: LayerOperands, sums: Sequence[tirx.Buffer], blocks: int) -> None:
    """Turn the sums of pairs of pixels into those of pixels by two channels, or back."""
    for start in range(0, len(sums), 2 * blocks):
        for v in range(start, start + blocks):
            pair = [T.bind(_load(sums[at], 0, ops.lanes)) for at in (v, v + blocks)]
            for at, order in zip((v, v + blocks), _TURNED, strict=True):
                _store(sums[at], tirx.Shuffle(pair, order), 0, ops.lanes)


def own_block_tile(ops: LayerOperands, block: Index, row: Index, run: Run, column: Index) -> None:
    """Compute ``run.size`` pixels of one channel block that reads its own input block only."""
    width, tile = ops.group_lanes, RegisterTile(block, 1, row, run, column, ReducedBlocks(0, 1))
    with _tile_block(ops.source):
        lanes, layer = ops.lanes, ops.layer
        sums = accumulators(run.size * width, lanes, ops.dtype)
        ends = sums[::width]
        _start(ops, ends, tile)
        for total in (sums[k] for k in range(len(sums)) if k % width):
            _store(total, T.broadcast(tirx.const(0, ops.dtype), lanes), 0, lanes)
        for kh, kw, (low, high) in _taps(ops, row, run, unroll_columns=width == 1):
            parts, step = ops.source.parts, layer.strides[1] * ops.source.step
            whole, part = _part(block, parts)
            number = (whole * layer.kernel[0] + kh) * layer.kernel[1] + kw
            weight = bound(number * (width * parts * lanes) + part * lanes)
            origin = bound(ops.source.at(block, *_source_pixel(layer, row, column, kh, kw)))
            # Pixels innermost: LLVM keeps them in registers, and one vector of weights.
            for j, p in itertools.product(range(width), range(low, high)):
                pixel = _load(ops.source.buffer, origin + p * step, lanes)
                factor = _load(ops.weight, weight + j * (parts * lanes), lanes)
                product = floats_of(pixel) * floats_of(factor)
                total = sums[p * width + j]
                _store(total, _load(total, 0, lanes) + product, 0, lanes)
        for p in range(run.size):
            _join(sums[p * width : (p + 1) * width], lanes)
        _finish(ops, ends, tile)


@contextmanager
def _tile_block(source: FeatureMap) -> Iterator[None]:
    """Open the block of a tile, declared to read the whole of a local source.

    Else TVM's ``CompactBufferAllocation`` joins the regions of all its reads, which takes minutes
    where many tiles begin with rows that depend on the task.
    """
    with T.sblock("tile"):
        if source.is_local:
            T.reads(source.buffer[0 : source.buffer.shape[0]])
            T.sblock_attr({"explicit_read_region": [0]})
        else:
            T.reads()
        T.writes()
        yield


def _join(sums: Sequence[tirx.Buffer], lanes: int) -> None:
    """Add the other accumulators to the first, each with its lanes ``j`` apart."""
    half = len(sums) // 2
    while half:
        order = [lane ^ half for lane in range(lanes)]
        for low, high in zip(sums[:half], sums[half : 2 * half], strict=True):
            moved = tirx.Shuffle([_load(high, 0, lanes)], order)
            _store(low, _load(low, 0, lanes) + moved, 0, lanes)
        half //= 2


def accumulators(count: int, lanes: int, dtype: str) -> list[tirx.Buffer]:
    """Vectors in registers, for the body of an open ``T.sblock``."""
    return [T.sblock_alloc_buffer((lanes,), dtype) for _ in range(count)]


def _input_blocks(ops: LayerOperands, reduction: ReducedBlocks) -> Iterator[tuple[Index, int]]:
    """Open the loops over the input blocks; yield each with its number of channels.

    The last block of a whole sum may have few; in a part of a sum, whose last block is known only
    when it runs, missing channels are summed as zeros.
    """
    lanes, stop = ops.step, reduction.start + reduction.count
    rest = ops.layer.in_channels % lanes if ops.layer.groups == 1 else 0
    whole = reduction.start == 0 and reduction.count == ops.in_blocks
    if not (rest and isinstance(reduction.start, int) and whole):
        with loop(reduction.start, stop) as in_block:
            yield in_block, lanes
        return
    if ops.in_blocks > 1:
        with loop(0, ops.in_blocks - 1) as in_block:
            yield in_block, lanes
    yield ops.in_blocks - 1, rest


def _group_inputs(ops: LayerOperands, block: Index, piece: Index) -> list[tuple[Index, Index]]:
    """Pieces of the groups that an output block belongs to: input blocks and lanes."""
    layer = ops.layer
    if layer.groups == 1:
        return [(piece * (ops.step // ops.source.lanes) if ops.mmla else piece, 0)]
    first = tirx.floordiv(block * ops.lanes, layer.out_channels // layer.groups)
    groups = [tirx.min(first + k, layer.groups - 1) for k in range(ops.met)]
    pieces = [group * ops.in_blocks + piece for group in groups]
    each = ops.source.lanes // ops.step
    return [(tirx.floordiv(at, each), tirx.floormod(at, each) * ops.step) for at in pieces]


def _selected(ops: LayerOperands, block: Index, elements: Sequence[tirx.Expr]) -> tirx.Expr:
    """Select for each lane the element of the group of the lane's output channel."""
    lanes, width = ops.lanes, ops.layer.out_channels // ops.layer.groups
    start = tirx.floormod(block * lanes, width)
    result = T.broadcast(elements[0], lanes)
    for k, element in enumerate(elements[1:], 1):
        behind = T.ramp(start, 1, lanes) >= T.broadcast(T.int32(k * width), lanes)
        result = tirx.Select(behind, T.broadcast(element, lanes), result)
    return result


def _load(buffer: tirx.Buffer, offset: Index, lanes: int) -> tirx.Expr:
    return buffer[T.ramp(offset, 1, lanes)] if lanes > 1 else buffer[offset]


def _store(buffer: tirx.Buffer, value: tirx.Expr, offset: Index, lanes: int) -> None:
    T.buffer_store(buffer, value, [T.ramp(offset, 1, lanes) if lanes > 1 else offset])


def _source_pixel(
    layer: ConvLayer, row: Index, column: Index, kh: Index, kw: Index
) -> tuple[Index, Index]:
    return (
        row * layer.strides[0] + kh * layer.dilation[0] - layer.padding[0],
        column * layer.strides[1] + kw * layer.dilation[1] - layer.padding[1],
    )


def _taps(
    ops: LayerOperands,
    row: Index,
    run: Run,
    unroll_columns: bool = False,
    rows_inside: bool = False,
) -> Iterator[Tap]:
    """Open the loops over the kernel and yield its taps with the pixels that see them.

    Neighbouring columns that the same pixels see are one loop: unrolled, the pixels that they share
    would be kept in registers, and the accumulators spilled. Short bodies unroll all columns; a tap
    that no pixel sees is left out.
    """
    low, high = _visible_rows(ops, row)
    if rows_inside:
        for start, stop, span in _columns(run):
            with loop(start, stop) as kw, loop(low, high) as kh:
                yield kh, kw, span
        return
    with loop(low, high) as kh:
        for start, stop, span in _columns(run):
            if unroll_columns:
                for kw in range(start, stop):
                    yield kh, kw, span
            else:
                with loop(start, stop) as kw:
                    yield kh, kw, span


def _columns(run: Run) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Ranges of neighbouring columns of the kernel that the same pixels see, and these."""
    for span, columns in itertools.groupby(range(len(run.taps)), key=run.taps.__getitem__):
        first, *rest = columns
        if span[0] < span[1]:
            yield first, first + 1 + len(rest), span


def _visible_rows(ops: LayerOperands, row: Index) -> tuple[Index, Index]:
    """Kernel rows whose input row exists, for output row ``row``."""
    layer, height = ops.layer, ops.source.height
    taps, dilation, top = layer.kernel[0], layer.dilation[0], layer.padding[0]
    last = (ops.output.height - 1) * layer.strides[0] + (taps - 1) * dilation - top
    low: Index = 0
    high: Index = taps
    origin = row * layer.strides[0] - top
    if top > 0:
        low = tirx.max(0, tirx.floordiv(dilation - 1 - origin, dilation))
    if last >= height:
        high = tirx.min(taps, tirx.floordiv(height - 1 - origin, dilation) + 1)
    return low, high


def next_weights(ops: LayerOperands, tile: RegisterTile, turn: Index) -> Index:
    """First weights that a tile prefetches: tiles take turns until all lines are prefetched.

    The weights of a part are ``V`` pieces of ``steps`` squares of lanes; a turn prefetches as many
    lines of one piece as it has steps.

    Parameters
    ----------
    ops : LayerOperands
        The layer.
    tile : RegisterTile
        The tile.
    turn : Index
        Number of the tile among those of the same blocks and part.

    Returns
    -------
    Index
        Element of the packed weights from which the tile's step 0 (input block 0, tap 0) counts.
    """
    reduction = tile.reduction
    layer, lanes = ops.layer, ops.lanes
    taps, square = layer.kernel[0] * layer.kernel[1], ops.step * lanes
    line = line_elements(str(ops.weight.dtype))
    turns = max(1, square // line)
    piece = tirx.floormod(tirx.floordiv(turn, turns), tile.blocks)
    following = tile.block + tile.blocks if tile.following is None else tile.following
    first: Index = tile.block
    start: Index = reduction.start + reduction.count
    if reduction.last is True:
        first, start = following, 0
    elif reduction.last is not False:
        first = tirx.Select(reduction.last, following, first)
        start = tirx.Select(reduction.last, 0, start)
    lines = tirx.floormod(turn, turns) * reduction.count - reduction.start
    return ((first + piece) * ops.weight_blocks + start) * (taps * square) + lines * (taps * line)


def _multiply(
    ops: LayerOperands,
    sums: Sequence[tirx.Buffer],
    tile: RegisterTile,
    in_block: Index,
    tap: Tap,
    channels: int,
    ahead: Sequence[Index] = (),
) -> None:
    """All multiply-adds of one tap and the ``channels`` of one input block (within the group).

    They take long enough to prefetch cache lines of weights, one counted from each of ``ahead``.
    """
    layer, lanes, source, square = ops.layer, ops.lanes, ops.source, ops.step * ops.lanes
    block, blocks = tile.block, tile.blocks
    kh, kw, span = tap
    taps = layer.kernel[0] * layer.kernel[1]
    per_block = ops.weight_blocks * taps * square
    position = (in_block * taps + kh * layer.kernel[1] + kw) * square
    weight = bound(block * per_block + position)
    in_pixel = _source_pixel(layer, tile.row, tile.column, kh, kw)
    inputs = _group_inputs(ops, block, in_block)
    origins = [bound(source.at(at, *in_pixel) + lane) for at, lane in inputs]
    pixel_step = layer.strides[1] * source.step
    line = line_elements(str(ops.weight.dtype))
    for start in ahead:
        step = in_block * taps + kh * layer.kernel[1] + kw
        prefetch(ops.weight, start + step * line, level=2)
    if ops.mmla:
        _multiply_pairs(ops, sums, tile, span, channels, origins[0], weight)
        return
    parts = ops.word if ops.pairs else 1
    # A tile of one vector may be a whole row: without a loop, LLVM would keep the elements that
    # kernel columns share, and spill the accumulators.
    fitting = max(1, MOST_UNROLLED // (parts * blocks * (span[1] - span[0])))
    most = min(UNROLLED_STEPS, 1 << (fitting.bit_length() - 1))
    constant = _shuffles(ops, len(origins))
    if constant:
        most = channels
    elif layer.groups > 1 and lanes > LANES_OF_128_BITS:
        most = min(most, max(1, ops.step // 2))
    pixels = [[(origin + p * pixel_step) * parts for p in range(*span)] for origin in origins]
    element = _elements(ops, block, pixels)
    for lane in _channel_steps(channels, most, constant):
        vectors = [
            _load(ops.weight, weight + v * per_block + lane * lanes, lanes) for v in range(blocks)
        ]
        for part in range(parts):
            factors = [word_part(vector, part) for vector in vectors] if ops.pairs else vectors
            for number, p in enumerate(range(*span)):
                factor = element(number, lane * parts + part)
                for v, vector in enumerate(factors):
                    total = sums[p * blocks + v]
                    value = _multiply_add(ops, _load(total, 0, lanes), factor, vector)
                    _store(total, value, 0, lanes)


def _multiply_pairs(
    ops: LayerOperands,
    sums: Sequence[tirx.Buffer],
    tile: RegisterTile,
    span: tuple[int, int],
    channels: int,
    origin: Index,
    weight: Index,
) -> None:
    """Those of :func:`_multiply` by an instruction for two pixels and two output channels.

    The sums of even pixels are those of the first two channels of each vector, for two pixels.
    """
    taps = ops.layer.kernel[0] * ops.layer.kernel[1]
    per_block = ops.weight_blocks * taps * ops.step * ops.lanes
    for word in range(0, channels, 2):
        T.evaluate(T.call_extern("void", _ONCE))
        pairs = {
            p: T.bind(_pixel_pair(ops, origin, word, p, span, word + 2 <= channels))
            for p in range(span[0] - span[0] % 2, span[1], 2)
        }
        for v, half in itertools.product(range(tile.blocks), range(2)):
            at = weight + v * per_block + (word + half) * ops.lanes
            columns = T.bind(_load(ops.weight, at, ops.lanes))
            for p, rows in pairs.items():
                total = sums[(p + half) * tile.blocks + v]
                value = add_block_products(_load(total, 0, ops.lanes), rows, columns)
                _store(total, value, 0, ops.lanes)


def _pixel_pair(
    ops: LayerOperands, origin: Index, word: int, pixel: int, span: tuple[int, int], whole: bool
) -> tirx.Expr:
    """Two words of a pixel and of the next one, zeros for pixels outside ``span``.

    Words of one block beyond the last channel are multiplied by zeros; there are none in a block
    that does not exist, unless the pair is ``whole``.
    """
    source, width = ops.source, ops.source.lanes
    pixel_step = ops.layer.strides[1] * source.step
    word_step = 1 if width > 1 else source.block_stride
    start = origin + (word if width > 1 else word * source.block_stride) + pixel * pixel_step
    seen = [span[0] <= p < span[1] for p in (pixel, pixel + 1)]
    whole = whole or width > 1
    zeros = T.broadcast(T.int32(0), 2)
    if whole and word_step == 1:
        if all(seen) and pixel_step == 2:
            return _load(source.buffer, start, 4)
        rows = [
            _load(source.buffer, start + k * pixel_step, 2) if is_seen else zeros
            for k, is_seen in enumerate(seen)
        ]
        return tirx.Shuffle(rows, [0, 1, 2, 3])
    if all(seen) and pixel_step == 1:
        low = _load(source.buffer, start, 2)
        high = _load(source.buffer, start + word_step, 2) if whole else zeros
        return tirx.Shuffle([low, high], [0, 2, 1, 3])
    words = [
        source.buffer[start + k * pixel_step + j * word_step]
        if is_seen and (whole or not j)
        else T.int32(0)
        for k, is_seen in enumerate(seen)
        for j in range(2)
    ]
    return tirx.Shuffle(words, [0, 1, 2, 3])


def word_part(words: tirx.Expr, part: int) -> tirx.Expr:
    """One of the two bfloat16 of each word as float32."""
    lanes = tvm.DataType(str(words.ty.dtype)).lanes
    if part:
        bits = words & T.broadcast(T.int32(-(1 << 16)), lanes)
    else:
        bits = words << T.broadcast(T.int32(16), lanes)
    return T.reinterpret(f"float32x{lanes}", bits)


def floats_of(value: tirx.Expr) -> tirx.Expr:
    """Numbers to multiply: those of bytes and of bits of bfloat16 as float32, others themselves."""
    dtype = str(value.ty.dtype)
    if dtype.startswith("uint16"):
        return widen_bits(value)
    kind = dtype.partition("x")[0]
    return T.Cast(dtype.replace(kind, "float32"), value) if kind in ("uint8", "int8") else value


def _multiply_add(
    ops: LayerOperands, total: tirx.Expr, factor: tirx.Expr, vector: tirx.Expr
) -> tirx.Expr:
    """Add to ``total`` products of floats, or those of the channels of a word in each lane."""
    if ops.dots:
        return add_half_products(total, vector, factor)
    if ops.dtype != "int32":
        return total + floats_of(factor) * floats_of(vector)
    how = ops.word, ops.limited, ops.shifted
    return add_word_products(total, factor, vector, ops.lanes, *how)


def add_word_products(
    total: tirx.Expr,
    factor: tirx.Expr,
    vector: tirx.Expr,
    lanes: int,
    word: int,
    limited: bool = False,
    signed: bool = False,
) -> tirx.Expr:
    """Add to each int32 of ``total`` the products of the channels of its words.

    Those are four of bytes, or two in 16 bits, which cannot saturate: their sum is at most
    ``2 * 255 * 128``. Vectors of 128 bits are multiplied in words of four by AArch64 alone, where
    those of ``factor`` may be ``signed``, too. Four of ``limited`` weights are first added up in
    pairs, as AVX2 does with saturation. Two, and four so, need :func:`word_functions`.
    """
    bits, vector_type = 32 * lanes, f"int32x{lanes}"
    if word != WORD_BYTES:
        pairs = (T.reinterpret(f"int16x{bits // 16}", each) for each in (factor, vector))
        return _add_pairs(total, *pairs)
    if lanes == LANES_OF_128_BITS:
        name = f"llvm.aarch64.neon.{'sdot' if signed else 'usdot'}.v4i32.v16i8"
        bytes_ = "int8x16"
        factor, vector = (T.reinterpret(bytes_, each) for each in (factor, vector))
        return T.call_llvm_pure_intrin(vector_type, name, total, factor, vector)
    if llvm_version_major() >= BYTES_SINCE_LLVM:
        factor, vector = (T.reinterpret(f"int8x{bits // 8}", each) for each in (factor, vector))
    if limited:
        sums = T.call_llvm_pure_intrin("int16x16", "llvm.x86.avx2.pmadd.ub.sw", factor, vector)
        return _add_pairs(total, sums, T.broadcast(T.int16(1), 2 * lanes))
    name = f"llvm.x86.avx512.vpdpbusd.{bits}"
    return T.call_llvm_pure_intrin(vector_type, name, total, factor, vector)


def add_block_products(total: tirx.Expr, left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    """Add to two by two sums the products of two rows by two columns, each of eight bytes.

    The bytes of ``left`` are unsigned, those of ``right`` signed; for AArch64 with I8MM. To float32
    those of bfloat16 are added, with BF16 and :func:`word_functions`.
    """
    if str(total.ty.dtype).startswith("float32"):
        return T.call_pure_extern(str(total.ty.dtype), _MMLA, total, left, right)
    name, bytes_ = "llvm.aarch64.neon.usmmla.v4i32.v16i8", "int8x16"
    left, right = (T.reinterpret(bytes_, each) for each in (left, right))
    return T.call_llvm_pure_intrin(str(total.ty.dtype), name, total, left, right)


def add_half_products(total: tirx.Expr, left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    """Add to each float32 the products of the two bfloat16 of words; needs ``word_functions``."""
    return T.call_pure_extern(str(total.ty.dtype), _DOT, total, left, right)


def rounded_halves(value: tirx.Expr) -> tirx.Expr:
    """The bits of the bfloat16 nearest to 16 float32, by an instruction; below 2^-126 zero."""
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return T.reinterpret("uint16x16", T.call_llvm_pure_intrin("bfloat16x16", name, value))


def finished_sum(
    value: tirx.Expr, activation: Activation, dtype: str, out_dtype: str | None, dots: bool
) -> tirx.Expr:
    """Value that is stored of a complete sum; ``dots`` as in :class:`LayerOperands`."""
    if dots and out_dtype == "bfloat16" and value.ty.dtype.lanes > LANES_OF_128_BITS:
        return rounded_halves(activate(value, activation, dtype))
    return finished(value, activation, dtype, out_dtype)


def _add_pairs(total: tirx.Expr, left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    """Add to each int32 both products of its halves."""
    vector, lanes = str(total.ty.dtype), tvm.DataType(str(total.ty.dtype)).lanes
    name = "llvm.x86.avx2.pmadd.wd" if lanes == PACKED_LANES else "llvm.x86.sse2.pmadd.wd"
    products = T.call_llvm_pure_intrin(vector, name, left, right)
    return T.call_pure_extern(vector, f"{_ADD}{lanes}", total, products)


def _elements(
    ops: LayerOperands, block: Index, pixels: Sequence[Sequence[Index]]
) -> Callable[[int, Index], tirx.Expr]:
    """Return a function that gives an element of a pixel, by number and channel, in all lanes.

    ``pixels`` are those of each group that the output block belongs to. Vectors of 128 bits are
    loaded once a pixel: NEON multiplies by one of their lanes, where single elements would take a
    load and a register each.
    """
    source, lanes = ops.source, ops.lanes
    if _shuffles(ops, len(pixels)):
        vectors = [T.bind(_load(source.buffer, pixel, lanes)) for pixel in pixels[0]]
        return lambda number, lane: tirx.Shuffle([vectors[number]], [int(lane)] * lanes)

    def element(number: int, lane: Index) -> tirx.Expr:
        return _selected(ops, block, [source.buffer[group[number] + lane] for group in pixels])

    return element


def _shuffles(ops: LayerOperands, groups: int) -> bool:
    """Return whether elements are lanes of loaded vectors, whose numbers are constants."""
    return groups == 1 and ops.step == ops.source.lanes == ops.lanes == LANES_OF_128_BITS


def _channel_steps(count: int, most: int, constant: bool) -> Iterator[Index]:
    """Open a loop over the channels of an input block, unrolled by ``most``.

    TVM unrolls it, after the passes that would take as much longer; here only ``constant`` steps.
    """
    whole, rest = divmod(count, most)
    if whole > 1:
        with T.serial(0, whole) as part:
            for step in unrolled(most, constant):
                yield part * most + step
        first = whole * most
    else:
        first, rest = 0, count
    for step in unrolled(rest, constant):
        yield first + step


def unrolled(count: int, constant: bool = False) -> Iterator[Index]:
    """Open an unrolled loop, or count."""
    if constant or count < 2:
        yield from range(count)
    else:
        with T.unroll(0, count) as step:
            yield step


def _start(ops: LayerOperands, sums: Sequence[tirx.Buffer], tile: RegisterTile) -> None:
    """Fill the accumulators with the bias, or with the partial sums of an earlier part."""
    lanes, first = ops.lanes, tile.reduction.first
    block = bound(tile.block * lanes)
    places = _places(ops.output, tile) if first is not True else [None] * len(sums)
    for total, place, (_, v) in zip(sums, places, tile.cells(), strict=True):
        if ops.starts_from_bias:
            value = _load(ops.bias, block + v * lanes, lanes)
        else:
            value = T.broadcast(tirx.const(0, ops.dtype), lanes)
        if place is not None:
            value = tirx.if_then_else(first, value, _load(ops.output.buffer, place, lanes))
        _store(total, value, 0, lanes)
    if not ops.shifted:
        return
    with (
        nullcontext() if first is True else T.If(first),
        nullcontext() if first is True else T.Then(),
    ):
        _add_shifts(ops, sums, tile)


def _add_shifts(ops: LayerOperands, sums: Sequence[tirx.Buffer], tile: RegisterTile) -> None:
    """Add 128 times the weights of the taps that each pixel sees, which end those of a block."""
    lanes, blocks, square = ops.lanes, tile.blocks, ops.step * ops.lanes
    taps = ops.layer.kernel[0] * ops.layer.kernel[1]
    for kh, kw, span in _taps(ops, tile.row, tile.run):
        tap = ops.in_blocks * taps + kh * ops.layer.kernel[1] + kw
        for v in range(blocks):
            at = ((tile.block + v) * (ops.weight_blocks * taps) + tap) * square
            shift = _load(ops.weight, at, lanes)
            for total in (sums[p * blocks + v] for p in range(*span)):
                _store(total, _load(total, 0, lanes) + shift, 0, lanes)


def _finish(ops: LayerOperands, sums: Sequence[tirx.Buffer], tile: RegisterTile) -> None:
    """Write the accumulators, with residual and activation once the sum is complete."""
    lanes, last = ops.lanes, tile.reduction.last

    def write(complete: bool) -> None:
        places, block = _places(ops.output, tile), bound(tile.block * lanes)
        added = _places(ops.residual, tile) if ops.residual is not None else places
        values = []
        for total, position, (_, v) in zip(sums, added, tile.cells(), strict=True):
            value = _load(total, 0, lanes)
            if complete and ops.scale is not None:
                channel, floats = block + v * lanes, f"float32x{lanes}"
                value = T.Cast(floats, value) * _load(ops.scale, channel, lanes)
                if not ops.starts_from_bias:
                    value = value + _load(ops.bias, channel, lanes)
            values.append(with_residual(ops, value, position) if complete else value)
        if not complete or ops.out_dtype != "uint8" or lanes != PACKED_LANES:
            for value, place in zip(values, places, strict=True):
                ops.output.store(ended(ops, value) if complete else value, place)
            return
        together = 4 if ops.output.step == ops.output.lanes else 1
        for v in range(tile.blocks):
            for p in range(0, tile.run.size, together):
                cells = range(p, min(p + together, tile.run.size))
                data = packed_bytes([values[q * tile.blocks + v] for q in cells], ops.ending)
                ops.output.store(data, places[p * tile.blocks + v])

    if last is True:
        write(True)
        return
    with T.If(last):
        with T.Then():
            write(True)
        with T.Else():
            write(False)


def with_residual(ops: LayerOperands, value: tirx.Expr, at: Index) -> tirx.Expr:
    """A complete sum and the residual; with bytes, after the layer's activation."""
    if ops.residual is None:
        return value
    added = _load(ops.residual.buffer, at, ops.lanes)
    if ops.addition is None:
        return value + floats_of(added)
    return add_bytes(value, ops.layer.activation, added, ops.addition)


def ended(ops: LayerOperands, value: tirx.Expr) -> tirx.Expr:
    """Value that is stored of a complete sum."""
    dtype = "float32" if ops.scale is not None else ops.dtype
    return finished_sum(value, ops.ending, dtype, ops.out_dtype, ops.dots)


def packed_bytes(values: Sequence[tirx.Expr], activation: Activation) -> tirx.Expr:
    """Round up to four vectors of floats to bytes, as ``activate_to_bytes`` does.

    Vectors have eight lanes, or sixteen where there are AVX-512. They are bounded from above first,
    so that the integers fit: those of NaN and of numbers that are too small are the smallest one.
    Packing bounds them from below, as long as the difference from a bound does not wrap around. It
    is done within pieces of 128 bits, whose words are put in order at the end.
    """
    lanes = tvm.DataType(str(values[0].ty.dtype)).lanes
    low, high = (tirx.const(end, "float32") for end in (activation.low, activation.high))
    words = []
    for value in values:
        if activation.low > 0:
            value = tirx.max(value, T.broadcast(low, lanes))
        value = tirx.min(T.broadcast(high, lanes), value)  # NaN stays: it is the second
        word = _rounded(value, lanes)
        if activation.low:
            word = word - T.broadcast(T.int32(int(activation.low)), lanes)
        words.append(word)

    def packed(name: str, dtype: str, first: tirx.Expr, second: tirx.Expr) -> tirx.Expr:
        name = f"avx512.{name}.512" if lanes > PACKED_LANES else f"avx2.{name}"
        return T.call_llvm_pure_intrin(dtype, f"llvm.x86.{name}", first, second)

    pairs = [
        packed("packssdw", f"int16x{2 * lanes}", *(words[p : p + 2] * 2)[:2])
        for p in range(0, len(words), 2)
    ]
    data = packed("packuswb", f"int8x{4 * lanes}", pairs[0], pairs[-1])
    pieces = lanes // LANES_OF_128_BITS
    order = [piece * 4 + number for number in range(len(words)) for piece in range(pieces)]
    data = tirx.Shuffle([T.reinterpret(f"int32x{lanes}", data)], order)
    return T.reinterpret(f"uint8x{len(words) * lanes}", data)


def _rounded(value: tirx.Expr, lanes: int) -> tirx.Expr:
    """Floats to the nearest integers."""
    vector = f"int32x{lanes}"
    if lanes == PACKED_LANES:
        return T.call_llvm_pure_intrin(vector, "llvm.x86.avx.cvt.ps2dq.256", value)
    name, zeros = "llvm.x86.avx512.mask.cvtps2dq.512", T.broadcast(T.int32(0), lanes)
    rest = T.int16(-1), T.int32(CURRENT_ROUNDING)
    return T.call_llvm_pure_intrin(vector, name, value, zeros, *rest)


def _places(image: FeatureMap, tile: RegisterTile) -> list[Index]:
    """Offsets in a feature map of a tile's vectors, in the order of its cells."""
    start = bound(image.at(tile.block, tile.row, tile.column))
    return [start + (p * image.step + v * image.block_stride) for p, v in tile.cells()]
