# SPDX-License-Identifier: Apache-2.0
"""Nodes of GPUs by a JSON file, and times of collectives over both levels of their links.

::

    {"name": "eight", "machine": "h100", "nodes": 8, "gpus_per_node": 8,
     "link": {"bandwidth": 5e10, "latency": 5e-6, "origin": "data sheet: InfiniBand NDR a GPU"}}

``bandwidth`` is that of a GPU to other nodes in each direction, in bytes/s, ``latency`` the seconds
of a message between them. Within a node collectives follow the curves of its machine. Between nodes
three algorithms are known: a ring of all ranks, a tree of the nodes, and a hierarchy, that
reduces within the nodes, exchanges shares between them, and gathers within. The fastest counts.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from schedules.cost.machine import Machine, load_machine, read_json

from ..errors import PredictionError
from .collectives import CollectiveTime, bus_factor, node_collectives

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
_MAX_FILE_BYTES = 1 << 20
_SPREAD = 1.5
"""Ratio by which a time between nodes may be off: none has been measured here."""


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike; ranks are numbered node by node."""

    name: str  # Name of the cluster.
    machine: Machine  # GPU of each rank.
    nodes: int
    gpus_per_node: int
    """``nodes`` and ``gpus_per_node``: numbers of nodes, and of GPUs in each."""
    bandwidth: float  # Bytes/s of a GPU to other nodes in each direction.
    latency: float  # Seconds of a message to another node.
    origin: str  # Where bandwidth and latency come from.

    def predict(self, kind: str, ranks: Sequence[int], message: float) -> CollectiveTime:
        """Predict a collective of some ranks, wherever they are.

        Parameters
        ----------
        kind : str
            One of ``KINDS``.
        ranks : sequence of int
            Ranks of the group; of ``send_recv`` the sender and the receiver.
        message : float
            Bytes: the larger of what a rank puts in and gets out.

        Raises
        ------
        PredictionError
            If kind or message is none, or a rank is twice in the group or not in the cluster.
        """
        if kind not in KINDS:
            raise PredictionError(f"collective {kind!r}; expected one of {', '.join(KINDS)}")
        if not 0 <= message < math.inf:
            raise PredictionError(f"message is {message!r} bytes; expected a finite number from 0")
        total = self.nodes * self.gpus_per_node
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < total for rank in ranks):
            raise PredictionError(
                f"ranks {list(ranks)!r:.80}; expected different ones of 0 to {total - 1}"
            )
        if len(ranks) < 2 or not message:
            return CollectiveTime(0.0, 0.0, 0.0, "nothing to exchange", True)
        places = Counter(rank // self.gpus_per_node for rank in ranks)
        if len(places) == 1:
            return self._within(kind, len(ranks), message)
        each = {
            name: algorithm(kind, places, message)
            for name, algorithm in (("ring", self._ring), ("tree", self._tree))
        }
        each["hierarchy"] = self._hierarchy(kind, places, message)
        name, seconds = min(each.items(), key=lambda found: found[1])
        return CollectiveTime(seconds, seconds / _SPREAD, seconds * _SPREAD, name, False)

    def _within(self, kind: str, ranks: int, message: float) -> CollectiveTime:
        """Predict by the curves of the node; a send is half of an exchange of two ranks."""
        curves, note = node_collectives(self.machine)
        known = "all_to_all" if kind == "send_recv" else kind
        share = 2.0 if kind == "send_recv" else 1.0
        found = curves.predict(known, ranks, share * message)
        return replace(found, in_range=found.in_range and not note)

    def _ring(self, kind: str, places: Counter[int], message: float) -> float:
        """All ranks in a ring, in which a step waits for a link between nodes."""
        ranks = sum(places.values())
        if kind == "send_recv":
            return self.latency + message / self.bandwidth
        if kind == "all_to_all":
            most = max(places.values())
            away = (ranks - min(places.values())) / ranks
            inside = self._within(kind, most, message * most / ranks).seconds if most > 1 else 0.0
            return max(inside, self.latency + away * message / self.bandwidth)
        steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        hops = steps * len(places) / ranks
        # Each node has as many rings as GPUs, so that all its links are used.
        rings = min(places.values())
        moved = bus_factor(kind, ranks) * message / (self.bandwidth * rings)
        inside = self._within(kind, rings, message).seconds if rings > 1 else 0.0
        return max(moved, inside) + hops * self.latency

    def _tree(self, kind: str, places: Counter[int], message: float) -> float:
        """Nodes in a binary tree, up and down, after a reduction within each; only sums."""
        if kind != "all_reduce":
            return math.inf
        rings = min(places.values())
        hops = 2 * math.ceil(math.log2(len(places)))
        moved = 2 * message / (self.bandwidth * rings)
        inside = self._within(kind, rings, message).seconds if rings > 1 else 0.0
        return max(moved, inside) + hops * self.latency

    def _hierarchy(self, kind: str, places: Counter[int], message: float) -> float:
        """Steps within nodes, between the ranks of one place, and within nodes again."""
        inner, outer = min(places.values()), len(places)
        if kind not in ("all_reduce", "all_gather", "reduce_scatter") or inner < 2:
            return math.inf
        steps = {"all_reduce": ("reduce_scatter", "all_gather")}.get(kind, (kind,))
        inside = sum(self._within(step, inner, message).seconds for step in steps)
        factor, hops = bus_factor(kind, outer), len(steps) * (outer - 1)
        return inside + factor * message / inner / self.bandwidth + hops * self.latency


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read a cluster from its file.

    Raises
    ------
    PredictionError
        If it cannot be read, or a field is missing or wrong: the message names file and field.
    """
    data = read_json(Path(path), _MAX_FILE_BYTES, "file of a cluster")
    try:
        return _cluster(data, Path(path).parent)
    except PredictionError as error:
        raise PredictionError(f"{path}: {error}") from None


def _cluster(data: Any, folder: Path) -> Cluster:
    name, machine = (_field(data, field, str) for field in ("name", "machine"))
    nodes, gpus = (_field(data, field, int) for field in ("nodes", "gpus_per_node"))
    link = _field(data, "link", dict)
    bandwidth, latency = (_field(link, field, (int, float)) for field in ("bandwidth", "latency"))
    for field, value in (("nodes", nodes), ("gpus_per_node", gpus), ("bandwidth", bandwidth)):
        if not 0 < value < math.inf:
            raise PredictionError(f"{field!r} is {value!r}; expected a positive number")
    if not 0 <= latency < math.inf:
        raise PredictionError(f"'latency' is {latency!r}; expected seconds from 0 on")
    beside = str(folder / machine)
    # False where pathlib raises: a name too long.
    found = load_machine(beside if os.path.isfile(beside) else machine)  # noqa: PTH113
    if found.kind != "gpu":
        raise PredictionError(f"'machine' {machine!r} is a CPU; expected a GPU")
    return Cluster(name, found, nodes, gpus, bandwidth, latency, _field(link, "origin", str))


def _field(data: Any, name: str, kind: Any) -> Any:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        names = ", ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise PredictionError(f"{name!r} is {value!r:.60}; expected {names}")
    return value
