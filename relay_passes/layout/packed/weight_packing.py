# SPDX-License-Identifier: Apache-2.0
"""Parameters of convolutions in blocks of ``x`` channel lanes.

========== ============================ =====================================================
form       from                         to
========== ============================ =====================================================
dense      ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, x, x]``, input lanes before output
first      ``[O, I, kh, kw]``           ``[O/x, I, kh, kw, 1, x]``, for data left in NCHW
depthwise  ``[C, 1, kh, kw]``           ``[C/x, kh, kw, x]``
grouped    ``[O, I/g, kh, kw]``         ``[O/x, (I/g)/d, kh, kw, d, x]``, ``d = gcd(I/g, x)``
narrow     ``[C, g, kh, kw]``           ``[C/x, 1, kh, kw, g, x]``: from input lane ``i`` to output
                                        lane ``i ^ j`` at ``[.., j, i]``, both of one group
quantized  ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, x/4, x, 4]``: words of input lanes,
                                        output lanes, input lanes of a word
quantized_ ``[O, I, kh, kw]``           ``[O/x, I/4, kh, kw, 1, x, 4]``, for data in words of four
first
quantized_ ``[O, I/g, kh, kw]``         ``[O/x, (I/g)/d, kh, kw, d/4, x, 4]``, ``d = gcd(I/g, x)``
grouped
quantized_ ``[C, g, kh, kw]``           ``[C/x, 1, kh, kw, 4, x, 4]``: as of groups of 16 channels,
diagonal                                with zeros between those of the true groups
shifted    as quantized, also           with a block of input channels more, whose first word is 128
           ``_first``, ``_grouped``     times the sum of the weights of each tap and output lane
quantized_ ``[O, I, kh, kw]``           ``[O/x, I/d, kh, kw, d/8, x, 8]``, ``d`` 8 or a larger x
mmla
pairs      ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, x/2, x, 2]`` of int16
pairs_     ``[O, I, kh, kw]``           ``[O/x, I/4, kh, kw, 2, x, 2]`` of int16, for data in words
first                                   of four
pairs_     ``[O, I/g, kh, kw]``         ``[O/x, (I/g)/d, kh, kw, d/2, x, 2]`` of int16
grouped
words      ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, x/2, x, 2]`` of bfloat16
words_     ``[O, I, kh, kw]``           ``[O/x, I/4, kh, kw, 2, x, 2]`` of bfloat16, for data in
first                                   blocks of four
words_     ``[O, I/g, kh, kw]``         ``[O/x, (I/g)/d, kh, kw, d/2, x, 2]`` of bfloat16
grouped
words_mmla ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, x/4, x, 4]`` of bfloat16
words_     ``[C, g, kh, kw]``           ``[C/x, 1, kh, kw, 8, x, 2]`` of bfloat16
diagonal
chunks     ``[O, I, kh, kw]``           ``[O/x, I/x, kh, kw, 1, x, x]``, input lanes last
bias       ``[C]``                      ``[C/x, x]``
data       ``[N, C, H, W]``             ``[N, C/x, H, W, x]``
========== ============================ =====================================================

Divisions round up; lanes past the last channel are zero. Every form but the shifted one, which only
constants have, is one padding, possibly one choice of rows, one reshape and one permutation, so
that the same description applies to numpy arrays and Relax expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

from schedules.compute.pack import channel_blocks
from schedules.cpu.core.tile_unit import TILE_WORDS
from schedules.errors import OpError
from schedules.workload.conv2d import WORD_BYTES, WORDS, ConvLayer

FORMS = (
    *("dense", "first", "depthwise", "grouped", "narrow", "quantized", "quantized_first"),
    *("quantized_grouped", "pairs", "pairs_first", "pairs_grouped", "words", "words_first"),
    *("quantized_diagonal", "words_grouped", "words_diagonal", "chunks", "bias", "data"),
    *("quantized_mmla", "words_mmla"),
)


@dataclass(frozen=True)
class Packing:
    """Packing of one array into blocks.

    Parameters
    ----------
    padding : tuple[int, ...]
        Zeros to append to each axis.
    split : tuple[int, ...]
        Shape after the channel axes are split into blocks and lanes.
    order : tuple[int, ...]
        Permutation of the split axes.
    rows : tuple[int, ...] | None
        Rows of the first two axes as one, selected before the split; None for all in order.
    """

    padding: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    rows: tuple[int, ...] | None = None

    @classmethod
    def of(cls, form: str, shape: Sequence[int], block: int, inner: int) -> Packing:
        """The packing of an array of ``shape`` into ``form`` (one of ``FORMS``).

        Input channels of words are in blocks of ``inner``.
        """
        if form not in FORMS:
            raise OpError(f"weight form is {form!r}; expected one of {', '.join(FORMS)}")
        extents = tuple(int(extent) for extent in shape)
        blocks = tuple(channel_blocks(extent, block) for extent in extents)
        tail = tuple(count * block - extent for count, extent in zip(blocks, extents, strict=True))
        if form == "bias":
            return cls(tail, (blocks[0], block), (0, 1))
        if form == "data":
            split = (extents[0], blocks[1], block, *extents[2:])
            return cls((0, tail[1], 0, 0), split, (0, 1, 3, 4, 2))
        if form == "depthwise":
            split = (blocks[0], block, *extents[2:])
            return cls((tail[0], 0, 0, 0), split, (0, 2, 3, 1))
        if form == "first":
            split = (blocks[0], block, extents[1], 1, *extents[2:])
            return cls((tail[0], 0, 0, 0), split, (0, 2, 4, 5, 3, 1))
        if form == "grouped":
            step = math.gcd(extents[1], block)
            split = (blocks[0], block, extents[1] // step, step, *extents[2:])
            return cls((tail[0], 0, 0, 0), split, (0, 2, 4, 5, 3, 1))
        if form == "narrow":
            width, i = extents[1], np.arange(blocks[0] * block)
            rows = (i ^ np.arange(width)[:, None]) * width + i % width
            rows = rows.reshape(width, blocks[0], block).swapaxes(0, 1)
            split = (blocks[0], 1, width, block, *extents[2:])
            return cls((tail[0], 0, 0, 0), split, (0, 1, 4, 5, 2, 3), tuple(rows.ravel().tolist()))
        if form.startswith(("quantized", "pairs", "words", "chunks")):
            lanes = WORD_BYTES if form.endswith("_first") else inner
            lanes = math.gcd(extents[1], inner) if form.endswith("_grouped") else lanes
            inputs, padding, chosen = extents[1], 0, None
            if form.endswith("_diagonal"):
                chosen = _diagonal(blocks[0] * block, inputs)
                inputs, padding, lanes = TILE_WORDS, 1, math.gcd(TILE_WORDS, inner)
            word = WORDS["bfloat16" if form.startswith("words") else element_type(form, "int8")]
            word = lanes if form == "chunks" else word
            if form.endswith("_mmla"):
                word *= 2
                lanes = max(lanes, word)
            count = channel_blocks(inputs, lanes)
            padding += count * lanes - inputs
            split = (blocks[0], block, count, lanes // word, word, *extents[2:])
            return cls((tail[0], padding, 0, 0), split, (0, 2, 5, 6, 3, 1, 4), chosen)
        split = (blocks[0], block, blocks[1], block, *extents[2:])
        return cls((tail[0], tail[1], 0, 0), split, (0, 2, 4, 5, 3, 1))


def _diagonal(outputs: int, own: int) -> tuple[int, ...]:
    """Rows of weights of groups of ``own`` channels, and one of zeros, as groups of 16."""
    output, channel = np.arange(outputs)[:, None], np.arange(TILE_WORDS)
    is_own = output % TILE_WORDS // own == channel // own
    rows = output * (own + 1) + np.where(is_own, channel % own, own)
    return tuple(rows.ravel().tolist())


def weight_form(layer: ConvLayer, block: int, nchw_data: bool) -> str | None:
    """The form of the weight of ``layer``.

    Parameters
    ----------
    layer : ConvLayer
        The convolution.
    block : int
        Lanes of one channel block.
    nchw_data : bool
        Whether the layer reads NCHW data rather than packed data.

    Returns
    -------
    str | None
        One of ``FORMS``, or None for a convolution that has no packed form: groups on NCHW data.
    """
    if layer.groups == 1:
        return "first" if nchw_data else "dense"
    if nchw_data:
        return None
    if layer.is_depthwise:
        return "depthwise"
    return "narrow" if layer.group_lanes(block) else "grouped"


def element_type(form: str, dtype: str) -> str:
    """Element type of a parameter of ``dtype`` in ``form``."""
    return "int16" if form.startswith("pairs") else dtype


def pack_array(array: np.ndarray, form: str, block: int, inner: int | None = None) -> np.ndarray:
    """Pack a parameter at compile time.

    Parameters
    ----------
    array : np.ndarray
        The parameter in the shape on the left of the module's table.
    form : str
        One of ``FORMS``.
    block : int
        Lanes of one channel block.
    inner : int | None
        Lanes of the data that weights in words multiply, if not as many.

    Returns
    -------
    np.ndarray
        The packed parameter, contiguous; see :func:`element_type`.
    """
    if form.startswith("shifted"):
        return _with_shifts(pack_array(array, form.replace("shifted", "quantized"), block, inner))
    packing = Packing.of(form, array.shape, block, inner or block)
    padded = np.pad(array, [(0, count) for count in packing.padding])
    if packing.rows is not None:
        padded = padded.reshape(-1, *padded.shape[2:])[list(packing.rows)]
    packed = padded.reshape(packing.split).transpose(packing.order)
    return np.ascontiguousarray(packed, element_type(form, "") or None)


def _with_shifts(packed: np.ndarray) -> np.ndarray:
    """Append to packed words of bytes what their sums lack if 128 is subtracted from the data."""
    sums = np.ascontiguousarray(128 * packed.sum(axis=(1, 4, 6)), "<i4")
    block = np.zeros_like(packed[:, :1])
    block[:, 0, :, :, 0] = sums.view("int8").reshape(*sums.shape, WORD_BYTES)
    return np.concatenate([packed, block], axis=1)


def pack_expr(value: relax.Expr, form: str, block: int, inner: int | None = None) -> relax.Expr:
    """Pack a parameter that is known only at run time.

    Parameters
    ----------
    value : relax.Expr
        A tensor of constant shape.
    form : str
        One of ``FORMS``.
    block : int
        Lanes of one channel block.
    inner : int | None
        Lanes of the data that weights in words multiply, if not as many.

    Returns
    -------
    relax.Expr
        Nested calls of Relax's own pad, take, reshape, permute_dims and astype.
    """
    shape, dtype = [int(extent) for extent in value.ty.shape.values], str(value.ty.dtype)
    packing = Packing.of(form, shape, block, inner or block)
    if any(packing.padding):
        widths = [width for count in packing.padding for width in (0, count)]
        value = relax.op.nn.pad(value, widths)
    if packing.rows is not None:
        outputs, inputs = (shape[axis] + packing.padding[axis] for axis in range(2))
        value = relax.op.reshape(value, (outputs * inputs, *shape[2:]))
        value = relax.op.take(value, relax.const(np.array(packing.rows, "int64")), axis=0)
    value = relax.op.reshape(value, packing.split)
    if packing.order != tuple(sorted(packing.order)):
        value = relax.op.permute_dims(value, list(packing.order))
    stored = element_type(form, dtype)
    return value if stored == dtype else relax.op.astype(value, stored)
