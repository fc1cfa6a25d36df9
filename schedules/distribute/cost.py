# SPDX-License-Identifier: Apache-2.0
"""Predicted times of exchanges and parts, and the choice whether an exchange is overlapped.

A message takes ``latency + bytes / bandwidth`` (the postal model), a part the longer of its
arithmetic and its memory traffic (the roofline). Where ranks of a node share its memory, a part and
the traffic of all of them delay each other, most where both take as long. All figures come from the
caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real

from tvm import ir, tirx

from ..errors import OpError
from ..tir.extents import constant
from .distribute import Distribution
from .exchange import Exchange, Gather, Region, difference, region_size
from .loop_nest import LoopNest, operands
from .regions import regions_computed

_OPERATIONS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, ir.Call)
CALL_SECONDS = 2e-6
"""Time of one more kernel call of a part."""
_SHARING = 3.0  # exponent of the norm of the two: 2 to 4 fit seven stencils on a Zen 4


@dataclass(frozen=True)
class Network:
    """Link between two ranks.

    Raises
    ------
    OpError
        If a figure is none, or out of its range.
    """

    latency: float = 1.5e-6  # Seconds of a message without bytes.
    bandwidth: float = 14e9  # Bytes per second of a long message.
    progress: float = 0.0
    """Share of a message's time that passes while both ranks compute: 1 where a network card moves
    the data, 0 where the cores that compute do."""
    is_shared: bool = True
    """Whether it is the memory of one node, an x86-64, through which kernels exchange the rows of a
    neural network; else Python does, which takes longer."""

    def __post_init__(self) -> None:
        """Refuse figures that no network has."""
        _check(self, "latency", 0.0)
        _check(self, "bandwidth", 0.0, is_open=True)
        _check(self, "progress", 0.0, 1.0)

    def seconds(self, exchange: Exchange, rank: int, itemsizes: Mapping[str, int]) -> float:
        """Predicted time of an exchange on one rank; it sends and receives at the same time."""
        sent, received = exchange.sent_by(rank), exchange.received_by(rank)
        peers = max(len({m.dest for m in sent}), len({m.source for m in received}))
        size = max(sum(m.size * itemsizes[m.buffer] for m in way) for way in (sent, received))
        return peers * self.latency + size / self.bandwidth

    def gather_seconds(self, gather: Gather) -> float:
        """Predicted time of a gather."""
        return gather.rounds * self.latency + gather.bytes_each / self.bandwidth


@dataclass(frozen=True)
class Processor:
    """Processor of one rank.

    Raises
    ------
    OpError
        If a rate or a bandwidth is no positive number.
    """

    rate: float  # Operations per second.
    bandwidth: float  # Bytes per second from and to memory.
    only_read: float | None = None
    """Bytes per second of what is only read, such as weights; by default ``bandwidth``."""
    node_bandwidth: float | None = None
    """Bytes per second of all ranks of a node together; by default they share nothing."""
    node_ranks: int = 1  # Ranks of a node.
    busy: int = 1  # Number of them that compute at once: see :meth:`beside`.
    note: str = ""
    """Remark on the figures, which predictions repeat; empty if they are the device's own."""

    def __post_init__(self) -> None:
        """Refuse figures that no processor has."""
        for name in ("rate", "bandwidth"):
            _check(self, name, 0.0, is_open=True)
        for name in ("only_read", "node_bandwidth"):
            if getattr(self, name) is not None:
                _check(self, name, 0.0, is_open=True)

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second of what is only read."""
        return self.bandwidth if self.only_read is None else self.only_read

    def slower(self, factor: float) -> Processor:
        """A processor that needs so many times as long; the memory of its node stays as it is."""
        only_read = None if self.only_read is None else self.only_read / factor
        rate, bandwidth = self.rate / factor, self.bandwidth / factor
        return replace(self, rate=rate, bandwidth=bandwidth, only_read=only_read)

    def beside(self, ranks: int) -> Processor:
        """The processor where so many ranks, itself among them, compute at once."""
        return replace(self, busy=max(1, min(ranks, self.node_ranks)))

    def seconds(self, work: Work) -> float:
        """Predicted time of some work."""
        alone = max(work.operations / self.rate, work.bytes / self.bandwidth)
        if self.busy == 1 or self.node_bandwidth is None:
            return alone
        return sharing_seconds(alone, self.busy * work.bytes / self.node_bandwidth)


def sharing_seconds(
    alone: float,  # Seconds of the longest part by itself.
    memory: float,  # Bytes of all parts by the bandwidth of their memory.
) -> float:
    """Predicted time of parts that share a memory; for all of them it needs ``memory`` seconds."""
    return (alone**_SHARING + memory**_SHARING) ** (1 / _SHARING)


def _check(
    figures: Network | Processor,
    name: str,
    least: float,
    most: float = math.inf,
    is_open: bool = False,
) -> None:
    """Refuse a figure that is none, or out of its range."""
    value = getattr(figures, name)
    number = float(value) if isinstance(value, Real) else math.nan
    if not least <= number <= most or (is_open and number == least):
        above = f"a number above {least:g}" if is_open else f"a number of at least {least:g}"
        expected = above if most == math.inf else f"a number from {least:g} to {most:g}"
        raise OpError(f"{name} of a {type(figures).__name__} is {value!r}; expected {expected}")


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic of a part."""

    operations: int  # Arithmetic operations, those of recomputed halos included.
    bytes: int  # Bytes of the parameters that it reads and writes, each once.


def work_of(nest: LoopNest, rows: Region, itemsizes: Mapping[str, int]) -> Work:
    """Work of a range of the distributed loops."""
    computed = regions_computed(nest, nest.output_regions(rows))
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


def combining(gather: Gather) -> Work:
    """Work of combining the gathered parts, of which a single one is the result."""
    others = gather.ranks - 1
    size = (gather.ranks + 1) * gather.part_bytes if others else 0
    return Work(others * gather.elements, size)


def _operations(expression: tirx.Expr) -> int:
    """Arithmetic operations of an expression, without those of indices."""
    if isinstance(expression, ir.TensorLoad):
        return 0
    return isinstance(expression, _OPERATIONS) + sum(map(_operations, operands(expression)))


def overlap_gain(
    network: Network,  # What connects the ranks.
    # ``exchange``, ``interior``: predicted seconds of the exchange, and of what does not depend on
    # it.
    exchange: float,
    interior: float,
    borders: int = 2,  # Kernel calls for what depends on it.
    # Seconds by which interior and borders take longer than one call, since each computes the halos
    # of its stages.
    more: float = 0.0,
) -> float:
    """Predicted seconds that are saved where the interior is computed while messages travel.

    Less than 0 where it had better be computed afterwards, in one call with its borders.
    """
    return network.progress * min(exchange, interior) - borders * CALL_SECONDS - more


def overlap_gain_of(
    plan: Distribution, rank: int, network: Network, processor: Processor
) -> float | None:
    """Predicted seconds that a rank saves by overlapping; None if it has nothing to overlap."""
    part, interior = plan.parts[rank], plan.interior(rank)
    if not region_size(interior):
        return None

    def seconds(rows: Region) -> float:
        return processor.seconds(work_of(plan.nest_of(rank), rows, plan.itemsizes))

    awaited = [plan.exchange, *(t.exchange for t in plan.before if not t.mode.blocking)]
    exchange = sum(network.seconds(each, rank, plan.itemsizes) for each in awaited)
    borders = difference(part.steps[0], interior)
    inside = seconds(interior)
    more = inside + sum(map(seconds, borders)) - seconds(part.steps[0])
    return overlap_gain(network, exchange, inside, len(borders), max(more, 0.0))
