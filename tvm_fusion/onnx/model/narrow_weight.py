# SPDX-License-Identifier: Apache-2.0
"""Constant matrices that a model stores in 8 or fewer bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from tvm import relax

from relay_passes.core.constants import tensor_constant
from relay_passes.op.widen_weight import LEAST_ELEMENTS, widen_weight, widened

_BITS: dict[np.dtype, int] = {
    **dict.fromkeys(map(np.dtype, (np.int8, np.uint8)), 8),
    **dict.fromkeys(map(np.dtype, (ml_dtypes.int4, ml_dtypes.uint4)), 4),
    **dict.fromkeys(map(np.dtype, (ml_dtypes.int2, ml_dtypes.uint2)), 2),
}


@dataclass(frozen=True, eq=False)
class NarrowWeight:
    """A matrix of floats that is stored as integers and scales.

    Parameters
    ----------
    integers : np.ndarray
        int8 [rows, columns].
    scales : np.ndarray
        float32, one for each block of a line along ``axis``.
    zeros : np.ndarray | None
        Numbers that stand for zero, as many: int8 or float32.
    block, axis : int
        Numbers that share a scale lie one after the other along ``axis``.
    bits : int
        8, or 4 where integers lie between -8 and 7.
    dtype : np.dtype
        Type of the floats.
    by_bytes : bool
        Whether what is multiplied by the matrix may be rounded to 8 bits.
    """

    integers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    block: int
    axis: int
    bits: int
    dtype: np.dtype
    by_bytes: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return self.integers.shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.integers.size

    def transposed(self) -> NarrowWeight:
        """The matrix with rows for columns."""
        zeros = None if self.zeros is None else self.zeros.T
        integers, scales = self.integers.T, self.scales.T
        return replace(self, integers=integers, scales=scales, zeros=zeros, axis=1 - self.axis)

    def floats(self) -> np.ndarray:
        """The numbers."""
        found = widened(self.integers, self.scales, self.zeros, self.block, self.axis)
        return found.astype(self.dtype)

    def expression(self) -> relax.Call:
        """The numbers as a call of ``widen_weight``."""
        zeros = None if self.zeros is None else tensor_constant(self.zeros, self.zeros.dtype)
        return widen_weight(
            tensor_constant(self.integers, "int8"),
            tensor_constant(self.scales, "float32"),
            zeros,
            block=self.block,
            axis=self.axis,
            bits=self.bits,
            by_bytes=self.by_bytes,
            out_dtype=str(self.dtype),
        )


def narrow_weight(
    integers: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    axis: int,
    block: int = 0,
    dtype: np.dtype | None = None,
) -> NarrowWeight | None:
    """The matrix that a DequantizeLinear of constants makes.

    Parameters
    ----------
    integers, scale, zero : np.ndarray
        Its inputs; without ``zero`` it is 0. A zero point may be a float.
    axis, block : int
        Its attributes. Without blocks a scale belongs to a slice across ``axis``.
    dtype : np.dtype | None
        Type of the floats, by default that of ``scale``.

    Returns
    -------
    NarrowWeight | None
        None for other integers than those of 8 or fewer bits, for a small matrix or none, and for
        scales that are infinite or NaN: a kernel multiplies a sum of integers by its scale, where
        a sum of infinities of both signs is NaN.
    """
    bits = _BITS.get(integers.dtype)
    if bits is None or integers.ndim != 2 or integers.size < LEAST_ELEMENTS:
        return None
    axis %= 2
    dtype = np.dtype(dtype or scale.dtype)
    if not block:
        axis, shape = 1 - axis, [1, 1]
        block, shape[1 - axis] = integers.shape[axis], integers.shape[1 - axis]
        if any(one is not None and one.size not in (1, shape[1 - axis]) for one in (scale, zero)):
            return None
        scale = np.broadcast_to(scale.ravel(), shape[1 - axis]).reshape(shape)
        if zero is not None:
            zero = np.broadcast_to(zero.ravel(), shape[1 - axis]).reshape(shape)
    blocks = list(integers.shape)
    blocks[axis] = -(-blocks[axis] // block)
    if list(scale.shape) != blocks:
        return None
    scale = scale.astype(np.float32)
    if not np.isfinite(scale).all():
        return None
    is_unsigned = "uint" in str(integers.dtype)
    centre = 1 << (bits - 1) if is_unsigned else 0
    centred = (integers.astype(np.int16) - centre).astype(np.int8)
    if zero is None:
        zero = np.zeros(blocks, np.int8)
    is_float = zero.dtype.kind not in "iu" and zero.dtype not in _BITS
    zeros = zero.astype(np.float32) - centre
    if not is_float:
        zeros = zeros.astype(np.int8)
    return NarrowWeight(
        integers=centred,
        scales=scale,
        zeros=zeros if zeros.any() else None,
        block=block,
        axis=axis,
        bits=max(bits, 4),
        dtype=dtype,
    )


def is_divisor(scale: np.ndarray) -> bool:
    """Return whether numbers can be divided by all of a scale."""
    return bool((np.abs(scale.astype(np.float32)) > 0).all())
