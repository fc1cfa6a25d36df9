# SPDX-License-Identifier: Apache-2.0
"""Figures of networks and processors: of a calibrated file, or as a user writes them."""

from __future__ import annotations

import re
from pathlib import Path

from schedules.cost.machine import Machine, load_machine
from schedules.distribute.cost import Network, Processor
from schedules.distribute.partition import is_count

from ..errors import InvalidInputError

_UNITS = {
    "alpha": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "beta": {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
    "progress": {"": 1.0},
}
_FIELDS = {"alpha": "latency", "beta": "bandwidth", "progress": "progress"}


def read_figures(
    # A file that ``tvm-fusion calibrate --network`` wrote, or figures: ``alpha``, the latency,
    # ``beta``, the bandwidth, and ``progress``, as in ``alpha=1.5us,beta=12GB/s``, which are those
    # of a network between nodes; None for estimates of one node.
    text: str | None,
) -> tuple[Network, int]:
    """Figures of a network, and the number of ranks with which they were measured, 0 if none.

    Raises ``InvalidInputError`` if it is neither. Raises ``PredictionError`` if the file is not one
    of a network.
    """
    if text is None:
        return Network(), 0
    if Path(text).is_file():
        machine = load_machine(text)
        return network_of(machine), ranks_of(machine)
    figures: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        number = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-z/]*)", value)
        unit = _UNITS.get(name, {}).get(number[2]) if number else None
        if number is None or unit is None:
            what = "is not" if "=" in item else "is no file that is there, and not"
            raise InvalidInputError(
                f"{item!r} {what} a network figure; expected a file of `calibrate --network`, or "
                "alpha=1.5us,beta=12GB/s with units s, ms, us, ns and B/s, KB/s, MB/s, GB/s"
            )
        figures[_FIELDS[name]] = _number(number[1], item) * unit
    return Network(**figures, is_shared=False), 0


def network_of(machine: Machine) -> Network:
    """The network of a machine that was calibrated; shared if all of its ranks were on one node.

    Raises
    ------
    PredictionError
        If it has no such figures.
    """
    figures = machine["network.latency"], machine["network.bandwidth"]
    progress = min(machine.get("network.progress", 0.0), 1.0)
    return Network(*figures, progress, machine.get("node.ranks", 0.0) >= ranks_of(machine))


def ranks_of(machine: Machine) -> int:
    """Ranks with which a machine was calibrated, 0 if none."""
    found = re.fullmatch(r"ranks-(\d+)", machine.name)
    return int(found[1]) if found else 0


def processor_of(machine: Machine) -> Processor:
    """The processor of each rank of a machine that was calibrated.

    Raises
    ------
    PredictionError
        If it has no such figures.
    """
    return Processor(
        machine["rank.rate"],
        machine["rank.bandwidth"],
        node_bandwidth=machine["node.bandwidth"],
        node_ranks=int(machine["node.ranks"]),
    )


def check_figures(network: object, processor: object, threads: object) -> None:
    """Refuse arguments of a compilation that are no figures, and threads that are none.

    Raises ``InvalidInputError`` if one of the figures is not None and of another type, or threads
    are no positive number.
    """
    if not is_count(threads):
        raise InvalidInputError(f"threads is {threads!r}; expected a positive integer")
    if not isinstance(network, Network | None):
        raise InvalidInputError(
            f"network is {network!r:.60}; expected a Network, such as that of a file: "
            "network_of(load_machine(file))"
        )
    if not isinstance(processor, Processor | None):
        raise InvalidInputError(
            f"processor is {processor!r:.60}; expected a Processor, such as Processor(rate=2e10, "
            "bandwidth=1e10)"
        )


def _number(text: str, item: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InvalidInputError(f"{item!r} has no positive number")
    return value
