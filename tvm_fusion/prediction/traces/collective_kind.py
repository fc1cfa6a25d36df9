# SPDX-License-Identifier: Apache-2.0
"""Kind of a collective by the names that libraries, operators and kernels give it."""

from __future__ import annotations

import re

_KINDS = {
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
_PREFIXES = re.compile("^(nccl:|gloo:|c10d::)")


def collective_kind(name: str) -> str:
    """Kind of a collective by any of its names: ``nccl:all_to_all``, ``alltoallv`` and others."""
    bare = re.sub("[^a-z0-9]", "", _PREFIXES.sub("", name.lower()))
    if bare in _KINDS:
        return _KINDS[bare]
    found = [kind for part, kind in _KINDS.items() if part in bare]
    return found[0] if found else "send" if "sendrecv" in bare else bare
