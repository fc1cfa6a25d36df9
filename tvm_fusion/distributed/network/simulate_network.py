# SPDX-License-Identifier: Apache-2.0
"""Predicted scaling of a network over ranks: exact messages and bytes, and predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from schedules.distribute.cost import Network, Processor
from schedules.distribute.rows.row_cost import RowCost, choose_exchanges, row_cost
from schedules.distribute.rows.row_plan import NetworkStage, RowPlacement, heighten

from ..simulate import RANKS, Scaling, ScalingPoint, check_ranks, scaling_of


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
        The network (:func:`.compile_network.read_network`).
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
        As for :func:`.compile_network.compile_network`.

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
        # As it is compiled, of which no measured time is known.
        placement = choose_exchanges(own, number, connection, processor, exchange)
        cost = row_cost(own, placement, connection, processor)
        points.append(_point(own, placement, cost, correction, number > measured))
    return scaling_of(kind, points, processor)


def _point(
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
