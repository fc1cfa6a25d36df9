# SPDX-License-Identifier: Apache-2.0
"""Predicted scaling of a distributed function or network, from the messages of its plans.

Messages and bytes are those that a program sends, and of the gather that ends a reduction one from
each rank to each other, of which MPI may join some; times are predicted: a rank's part by the
roofline or by a measured run, an exchange by the postal model. Ranks of a node share its memory if
the processor says how fast that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tvm import tirx

from schedules.distribute.cost import Network, Processor, combining, overlap_gain
from schedules.distribute.distribute import Distribution, distribute
from schedules.distribute.exchange import Exchange, Message, Region
from schedules.distribute.partition import is_count
from schedules.distribute.rows.row_cost import RowCost, choose_exchanges, row_cost
from schedules.distribute.rows.row_plan import NetworkStage, RowPlacement, heighten
from schedules.distribute.time_skewing import seconds_of_steps, skew_of
from tvm_fusion.errors import EngineError, InvalidInputError
from tvm_fusion.paths import written_aside

from .network_figures import check_figures

RANKS = tuple(2**k for k in range(13))
"""1 to 4096."""


@dataclass(frozen=True)
class ScalingPoint:
    """A number of ranks.

    Parameters
    ----------
    ranks : int
        Their number.
    messages, bytes : int
        What all of them send in one run, one message a pair of ranks and exchange, or gather.
    compute, exchange : float
        Predicted seconds of the rank that computes, and of the one that exchanges, longest; parts
        of a reduction are combined, and gathered, in addition.
    seconds : float
        Predicted seconds of a run, overlapped where that gains.
    efficiency : float
        Efficiency of strong scaling: time of the first number of ranks, times that number, over
        ranks times this time. Efficiency of weak scaling: time of the first over this time.
    beyond : bool
        Whether there are more ranks than those with which the network was measured.
    """

    ranks: int
    messages: int
    bytes: int
    compute: float
    exchange: float
    seconds: float
    efficiency: float
    beyond: bool = True


@dataclass(frozen=True)
class Scaling:
    """A simulation.

    Parameters
    ----------
    kind : str
        ``strong``: the same function for all numbers of ranks; ``weak``: one that grows with them.
    points : tuple[ScalingPoint, ...]
        One for each number of ranks.
    notes : tuple[str, ...]
        What to know about the figures of the processor.
    """

    kind: Literal["strong", "weak"]
    points: tuple[ScalingPoint, ...]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """The points as text; times are predicted."""
        lines = [
            f"{self.kind} scaling, predicted",
            f"{'ranks':>6}{'messages':>10}{'bytes':>14}{'compute':>12}{'exchange':>12}"
            f"{'run':>12}{'efficiency':>12}",
        ]
        for p in self.points:
            times = "".join(f"{1e6 * t:>9.1f} us" for t in (p.compute, p.exchange, p.seconds))
            lines.append(
                f"{p.ranks:>6}{p.messages:>10}{p.bytes:>14}{times}{100 * p.efficiency:>10.1f} %"
                + ("" if p.beyond else "  network measured")
            )
        return "\n".join([*lines, *self.notes])

    def draw(self, path: str | Path) -> None:
        """Draw the predicted times over the ranks, to a file whose suffix names its format.

        Raises
        ------
        EngineError
            If matplotlib is not installed.
        InvalidInputError
            If it has no such format.
        ArtifactError
            If the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise EngineError(
                "a drawing needs matplotlib; install it by: pip install 'tvm-fusion[bench]'"
            ) from error
        path = Path(path)
        figure = Figure()
        formats = sorted(figure.canvas.get_supported_filetypes())
        if path.suffix[1:].lower() not in formats:
            raise InvalidInputError(
                f"cannot draw to {str(path)!r}; expected a suffix of {', '.join(formats)}"
            )
        axes = figure.subplots()
        ranks = [point.ranks for point in self.points]
        first = self.points[0]
        ideal = [first.seconds * (first.ranks / n if self.kind == "strong" else 1) for n in ranks]
        axes.loglog(ranks, ideal, "k:", label="ideal")
        for name, label in (("seconds", "run"), ("compute", "compute"), ("exchange", "exchange")):
            axes.loglog(ranks, [getattr(p, name) or None for p in self.points], "o-", label=label)
        measured = [point.ranks for point in self.points if not point.beyond]
        if measured:
            axes.axvspan(ranks[0], max(measured), alpha=0.2, label="network measured")
        axes.set(xlabel="ranks", ylabel="seconds", title=f"{self.kind} scaling, predicted")
        axes.legend()
        with written_aside(path) as aside:
            figure.savefig(aside, format=path.suffix[1:].lower())


def simulate(
    source: tirx.PrimFunc | Callable[[int], tirx.PrimFunc],
    processor: Processor,
    ranks: Sequence[int] = RANKS,
    *,
    network: Network | None = None,
    one_rank: float | None = None,
    cache_bytes: int = 0,
    loop: Any = 0,
    **distribution: Any,
) -> Scaling:
    """Predict the time of a function on different numbers of ranks.

    Parameters
    ----------
    source : tirx.PrimFunc or callable
        The function, for strong scaling; or what makes it from the number of ranks, for weak.
    processor : Processor
        What each rank computes with.
    ranks : Sequence[int]
        Numbers of ranks, ascending.
    network : Network, optional
        What connects them: calibrated (:func:`.network_of`) or, by default, estimated.
    one_rank : float, optional
        Measured seconds of one rank alone, by which predicted times of parts are corrected.
    cache_bytes : int
        Bytes that a core keeps in its own cache, for steps that pass over the memory together
        (:mod:`schedules.distribute.time_skewing`); by default each does by itself.
    loop, **distribution
        Loops, grid and so on, as for :func:`schedules.distribute.distribute.distribute`. With
        ``exchange_every`` a run is of all steps between two exchanges.

    Returns
    -------
    Scaling
        Exact messages and bytes, and predicted times.

    Raises
    ------
    InvalidInputError
        If there is no number of ranks, or an argument is of another type.
    OpError
        If the function cannot be distributed so.
    """
    check_ranks(ranks)
    check_figures(network, processor, 1)
    if not isinstance(cache_bytes, int) or cache_bytes < 0:
        raise InvalidInputError(f"cache_bytes is {cache_bytes!r:.60}; expected bytes, or 0")
    if not isinstance(source, tirx.PrimFunc) and not callable(source):
        raise InvalidInputError(
            f"{source!r:.60} is no function; expected a PrimFunc, or what makes one from the ranks"
        )

    def plan(number: int) -> Distribution:
        function = source if isinstance(source, tirx.PrimFunc) else source(number)
        return distribute(function, loop, number, **distribution)

    if one_rank is not None:
        alone = _compute_seconds(plan(1), processor.beside(1), cache_bytes)
        processor = processor.slower(one_rank / max(alone))
    kind: Literal["strong", "weak"] = "strong" if isinstance(source, tirx.PrimFunc) else "weak"
    net = network or Network()
    points = [_point(plan(n), net, processor.beside(n), cache_bytes) for n in ranks]
    return scaling_of(kind, points, processor)


def check_ranks(ranks: Sequence[int]) -> None:
    """Refuse numbers of ranks that are none.

    Raises ``InvalidInputError`` if there is none, or they do not ascend from 1 or more.
    """
    numbers = [] if isinstance(ranks, int | str) else list(ranks)
    if not numbers or not all(map(is_count, numbers)) or numbers != sorted({*numbers}):
        raise InvalidInputError(
            f"numbers of ranks are {ranks!r}; expected ascending ones, as in 1, 2, 4"
        )


def scaling_of(
    kind: Literal["strong", "weak"], points: Sequence[ScalingPoint], processor: Processor
) -> Scaling:
    """Scaling of points whose efficiency is still to be computed."""
    first = points[0]
    found = []
    for point in points:
        ideal = first.seconds * (first.ranks / point.ranks if kind == "strong" else 1)
        found.append(replace(point, efficiency=ideal / point.seconds))
    return Scaling(kind, tuple(found), (processor.note,) if processor.note else ())


def _point(
    plan: Distribution, network: Network, processor: Processor, cache_bytes: int
) -> ScalingPoint:
    """Exact counts, and the times of the slowest rank."""
    compute = _compute_seconds(plan, processor, cache_bytes)
    exchange = [0.0] * plan.ranks
    messages = 0
    for each in plan.exchanges:
        for rank, own in _by_rank(each).items():
            exchange[rank] += network.seconds(Exchange(each.id, tuple(own)), rank, plan.itemsizes)
        messages += len({(message.source, message.dest) for message in each.messages})
    pairs = list(zip(compute, exchange, strict=True))
    seconds = max(c + e - max(overlap_gain(network, e, c), 0.0) for c, e in pairs)
    messages += sum(gather.messages for gather in plan.gathers)
    gathering = sum(map(network.gather_seconds, plan.gathers))  # Gathers come after all else.
    combination = sum(processor.seconds(combining(gather)) for gather in plan.gathers)
    return ScalingPoint(
        plan.ranks,
        messages,
        plan.bytes,
        max(compute) + combination,
        max(exchange) + gathering,
        seconds + gathering + combination,
        1.0,
    )


def _compute_seconds(plan: Distribution, processor: Processor, cache_bytes: int) -> list[float]:
    """Seconds of each rank's part; parts of one shape have the same."""
    known: dict[Any, float] = {}
    seconds = []
    for part in plan.parts:
        nest = plan.nest_of(part.rank)
        windows = (_extents(window) for window in part.windows.values())
        key = id(nest), *map(_extents, part.steps), *windows
        if key not in known:
            skew = skew_of(plan, part.rank, part.rows, cache_bytes, 1)
            known[key] = seconds_of_steps(plan, part.rank, part.rows, processor, skew is not None)
        seconds.append(known[key])
    return seconds


def _extents(region: Region) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in region)


def _by_rank(exchange: Exchange) -> dict[int, list[Message]]:
    """The messages that each rank sends or receives."""
    found: dict[int, list[Message]] = {}
    for message in exchange.messages:
        for rank in (message.source, message.dest):
            found.setdefault(rank, []).append(message)
    return found


def simulate_network(
    stages: Sequence[NetworkStage],
    processor: Processor,
    ranks: Sequence[int] = RANKS,
    *,
    network: Network | None = None,
    kind: Literal["strong", "weak"] = "strong",
    one_rank: float | None = None,
    measured: int = 0,
    exchange: str = "auto",
) -> Scaling:
    """Predict the time of a network on different numbers of ranks.

    Parameters
    ----------
    stages : Sequence[NetworkStage]
        The network (:func:`.build_network.read_network`).
    processor : Processor
        What each rank computes with.
    ranks : Sequence[int]
        Numbers of ranks, ascending.
    network : Network, optional
        What connects them, by default an estimate.
    kind : str
        ``strong``: the same image; ``weak``: as many times its height as there are ranks.
    one_rank : float, optional
        Measured seconds of one rank alone, by which predicted times of kernels are corrected.
    measured : int
        Ranks with which the network was measured.
    exchange : str
        Choice as in :func:`.build_network.compile_network`.

    Returns
    -------
    Scaling
        Messages and bytes are those of a compiled model of so many ranks; times are predicted.

    Raises
    ------
    InvalidInputError
        If the numbers of ranks are none.
    OpError
        If the network cannot be distributed, or not for higher images.
    """
    check_ranks(ranks)
    connection = network or Network()
    correction = 1.0
    if one_rank is not None:
        alone = choose_exchanges(stages, 1, connection, processor)
        correction = one_rank / row_cost(stages, alone, connection, processor).seconds
    points = []
    for number in ranks:
        own = list(stages) if kind == "strong" else heighten(stages, number)
        # Choices are those of compilation, of which no measured time is known.
        placement = choose_exchanges(own, number, connection, processor, exchange)
        cost = row_cost(own, placement, connection, processor)
        points.append(_network_point(own, placement, cost, correction, number > measured))
    return scaling_of(kind, points, processor)


def _network_point(
    stages: Sequence[NetworkStage],
    placement: RowPlacement,
    cost: RowCost,
    correction: float,
    beyond: bool,
) -> ScalingPoint:
    messages = size = 0
    for index in placement.exchanged:
        messages += len(placement.transfers(index))
        size += int(placement.sent_bytes(stages, index).sum())
    compute = correction * float(cost.compute.max(axis=1).sum())
    waiting = float(cost.exchange.max(axis=1).sum())
    ranks = cost.compute.shape[1]
    return ScalingPoint(ranks, messages, size, compute, waiting, compute + waiting, 1.0, beyond)
