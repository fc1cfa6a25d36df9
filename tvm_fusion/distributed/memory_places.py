# SPDX-License-Identifier: Apache-2.0
"""Description of the memory of a rank as text: on which NUMA nodes its windows lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedules.distribute.exchange import LocalBuffer

from ..errors import TargetError
from ..machine.numa import UNTOUCHED, bytes_on_nodes, numa_nodes

if TYPE_CHECKING:
    from .world.numa_placement import Placement


def describe_memory(
    rank: int, placement: Placement | None, buffers: Mapping[str, LocalBuffer]
) -> str:
    """Return a line for the rank, and one for each of its windows."""
    nodes = len(numa_nodes())
    place = "memory not bound" if placement is None else str(placement)
    lines = [f"rank {rank}: {place}; this machine has {nodes} NUMA node{'s' * (nodes != 1)}"]
    for name, buffer in buffers.items():
        window = ", ".join(f"{begin}:{end}" for begin, end in buffer.region)
        lines.append(f"  {name}[{window}], {buffer.array.nbytes} bytes: {_places(buffer.array)}")
    return "\n".join(lines)


def _places(array: np.ndarray) -> str:
    try:
        found = bytes_on_nodes(array)
    except TargetError as error:
        return f"unknown, {error}"
    return ", ".join(
        f"{100 * size / array.nbytes:.1f} % "
        + ("not touched yet" if node == UNTOUCHED else f"on node {node}")
        for node, size in found.items()
    )
