# SPDX-License-Identifier: Apache-2.0
"""Register tile of the product of a recurrent layer: rows of the batch by gates."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.machine import CPUInfo

LANES = 16
"""Hidden units of a block."""

_FREE_REGISTERS = 4
"""Registers that hold no sums: one in this many, for weights and the state."""


@dataclass(frozen=True)
class ProductTile:
    """Sums that a loop over the state holds in registers.

    Parameters
    ----------
    rows : int
        Of the batch.
    gates : int
        Vectors of ``LANES`` units in each row.
    """

    rows: int
    gates: int


def vectors_of(dtype: str, cpu: CPUInfo) -> int:
    """Registers of ``LANES`` units."""
    return max(1, LANES // cpu.lanes(dtype))


def product_tile(batch: int, gates: int, dtype: str, cpu: CPUInfo) -> ProductTile:
    """The tile of the product of a state and its weights.

    As many rows as fit, because all tiles of a batch read the same weights: with R rows,
    a core with two multiply-adds a cycle needs two vectors of weights in R cycles. A row has two
    vectors at least, so that the state is loaded less often than it is multiplied.

    Parameters
    ----------
    batch, gates : int
        Rows, and vectors of ``LANES`` units in each.
    dtype : str
        Type of the elements.
    cpu : CPUInfo
        The CPU.

    Returns
    -------
    ProductTile
        At most ``batch`` rows and ``gates`` gates; the last of each may be less.
    """
    vectors = vectors_of(dtype, cpu)
    sums = cpu.num_vector_registers - cpu.num_vector_registers // _FREE_REGISTERS
    most = max(1, sums // max(2, vectors))
    rows = -(-batch // -(-batch // most))
    passes = -(-gates // max(1, sums // (rows * vectors)))
    return ProductTile(rows, -(-gates // passes))
