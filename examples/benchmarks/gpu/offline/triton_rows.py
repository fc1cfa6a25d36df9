# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton, one row a block; imported only where there is Triton."""

import triton
import triton.language as tl


@triton.jit
def softmax(x, y, columns, width: tl.constexpr):
    """Softmax of the row of this block."""
    start = tl.program_id(0).to(tl.int64) * columns
    places = tl.arange(0, width)
    inside = places < columns
    row = tl.load(x + start + places, mask=inside, other=-float("inf")).to(tl.float32)
    terms = tl.exp(row - tl.max(row, axis=0))
    tl.store(y + start + places, terms / tl.sum(terms, axis=0), mask=inside)


@triton.jit
def layer_norm(x, gain, bias, y, columns, width: tl.constexpr):
    """Layer norm of the row of this block."""
    start = tl.program_id(0).to(tl.int64) * columns
    places = tl.arange(0, width)
    inside = places < columns
    row = tl.load(x + start + places, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, row - tl.sum(row, axis=0) / columns, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + 1e-5)
    factor = tl.load(gain + places, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + places, centred * scale * factor + offset, mask=inside)
