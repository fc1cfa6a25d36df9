# SPDX-License-Identifier: Apache-2.0
"""The gather that ends a distributed reduction: every rank gets the parts of all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gather:
    """Parts of a result, one of each rank, that all ranks get by one collective.

    Counted is a message from each rank to each other. MPI may make fewer of them by passing on
    several parts at once; each rank sends and receives as many bytes in any case.

    Parameters
    ----------
    buffer : str
        Name of the output.
    ranks : int
        Number of parts.
    elements : int
        Elements of a part.
    itemsize : int
        Bytes of an element.
    """

    buffer: str
    ranks: int
    elements: int
    itemsize: int

    @property
    def part_bytes(self) -> int:
        """Bytes of a part."""
        return self.elements * self.itemsize

    @property
    def bytes_each(self) -> int:
        """Bytes that each rank sends, and receives."""
        return (self.ranks - 1) * self.part_bytes

    @property
    def messages(self) -> int:
        """Messages of all ranks."""
        return self.ranks * (self.ranks - 1)

    @property
    def bytes(self) -> int:
        """Bytes of all messages."""
        return self.ranks * self.bytes_each

    @property
    def rounds(self) -> int:
        """Messages that follow each other on a rank, where parts are passed on.

        The number of recursive doubling, and of Bruck's algorithm (Thakur, Rabenseifner and Gropp,
        Optimization of collective communication operations in MPICH, 2005, section 4.1).
        """
        return (self.ranks - 1).bit_length()
