# SPDX-License-Identifier: Apache-2.0
"""Predicted times of exchanges and parts, and the choice whether an exchange is overlapped.

A message takes ``latency + bytes / bandwidth`` (the postal model), a part the longer of its
arithmetic and its memory traffic (the roofline). All figures come from the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import ir, tirx

from ..workload.reduce import constant
from .exchange import Exchange, Region, region_size
from .loop_nest import LoopNest, operands
from .regions import regions_computed

_OPERATIONS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, ir.Call)
CALL_SECONDS = 2e-6
"""Time of one more kernel call of a part."""


@dataclass(frozen=True)
class Network:
    """Link between two ranks.

    Parameters
    ----------
    latency : float
        Seconds of a message without bytes.
    bandwidth : float
        Bytes per second of a long message.
    progress : float
        Share of a message's time that passes while both ranks compute: 1 where a network card
        moves the data, 0 where the cores that compute do.
    """

    latency: float = 1.5e-6
    bandwidth: float = 14e9
    progress: float = 0.0

    def seconds(self, exchange: Exchange, rank: int, itemsizes: Mapping[str, int]) -> float:
        """Predicted time of an exchange on one rank; it sends and receives at the same time."""
        sent, received = exchange.sent_by(rank), exchange.received_by(rank)
        peers = max(len({m.dest for m in sent}), len({m.source for m in received}))
        size = max(sum(m.size * itemsizes[m.buffer] for m in way) for way in (sent, received))
        return peers * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Processor:
    """Processor of one rank.

    Parameters
    ----------
    rate : float
        Operations per second.
    bandwidth : float
        Bytes per second from and to memory.
    """

    rate: float
    bandwidth: float

    def seconds(self, work: Work) -> float:
        """Predicted time of some work."""
        return max(work.operations / self.rate, work.bytes / self.bandwidth)


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic of a part.

    Parameters
    ----------
    operations : int
        Arithmetic operations, those of recomputed halos included.
    bytes : int
        Bytes of the parameters that it reads and writes, each once.
    """

    operations: int
    bytes: int


def work_of(nest: LoopNest, rows: Region, itemsizes: Mapping[str, int]) -> Work:
    """Work of a range of the distributed loops."""
    computed = regions_computed(nest, nest.output_region(rows))
    operations = 0
    for stage in nest.stages:
        points = region_size(computed[stage.output]) if stage.output in computed else 0
        for axis in stage.reduced:
            points *= constant(axis.dom.extent) or 1
        operations += points * _operations(stage.value)
    size = sum(
        region_size(computed[buffer]) * itemsizes[buffer.name]
        for buffer in nest.func.params
        if buffer in computed
    )
    return Work(operations, size)


def _operations(expression: tirx.Expr) -> int:
    """Arithmetic operations of an expression, without those of indices."""
    if isinstance(expression, ir.TensorLoad):
        return 0
    return isinstance(expression, _OPERATIONS) + sum(map(_operations, operands(expression)))


def overlap_gains(network: Network, exchange: float, interior: float) -> bool:
    """True if an exchange should be started, the interior computed, and then be finished.

    Parameters
    ----------
    network : Network
        What connects the ranks.
    exchange, interior : float
        Predicted seconds of the exchange, and of what does not depend on it.
    """
    return network.progress * min(exchange, interior) > 2 * CALL_SECONDS  # two borders more
