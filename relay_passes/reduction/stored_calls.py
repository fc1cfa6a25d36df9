# SPDX-License-Identifier: Apache-2.0
"""Calls whose tensors a group of reductions can store, although it needs no results for them.

They are *before* the group if it is computed from them, with calls between that become members,
too. They are *beside* it if they read what it reads, at the same place: as one kernel they read it
once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from tvm import relax

from schedules.cost.decisions import compare
from schedules.cost.gpu_kernels import STORE
from schedules.cost.kernel_call import KernelCall
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS

from .primfunc_calls import TIRCalls, count_bytes
from .row_space import TILE, RowSpace

Agrees = Callable[[relax.Var, frozenset[relax.Expr]], bool]
"""Function that tells if a call reads the given tensors at the place that it writes."""


def is_stored(calls: TIRCalls, var: relax.Var) -> bool:
    """Return whether a tensor is stored whatever is fused: others than injective calls read it."""
    users = calls.users.get(var, set())
    return not isinstance(var, relax.DataflowVar) or any(
        not any(user in kind for kind in (calls.injective, calls.reductions, calls.columns))
        for user in users
    )


def calls_between(
    calls: TIRCalls, space: RowSpace, var: relax.Var, members: Collection[relax.Var]
) -> frozenset[relax.Var]:
    """A call and those that compute members from it; nothing if no member is."""
    after = {var}
    found: set[relax.Var] = set()  # the calls that members read
    queue = [var]
    while queue:
        current = queue.pop()
        for user in calls.users.get(current, ()):
            if user in members:
                found.add(current)
            elif user in calls.injective and user not in after and space.kind(user) is not None:
                after.add(user)
                queue.append(user)
    queue = list(found)
    while queue:
        new = after.intersection(calls.tensors(queue.pop())) - found
        found |= new
        queue += new
    return frozenset(found)


def tensors_in_place(
    calls: TIRCalls, space: RowSpace, var: relax.Var, agrees: Agrees
) -> frozenset[relax.Expr]:
    """The tensors of the size of the data from which a call and its producers are computed.

    Nothing if one of them is not read at the place that is written.
    """
    found: set[relax.Expr] = set()
    queue = [var]
    while queue:
        current = queue.pop()
        large = frozenset(e for e in calls.tensors(current) if space.kind(e) == TILE)
        if not agrees(current, large):
            return frozenset()
        queue += [e for e in large - found if e in calls.injective and not is_stored(calls, e)]
        found |= large
    return frozenset(found)


def calls_after(
    calls: TIRCalls, tensors: Collection[relax.Expr], members: Collection[relax.Var]
) -> frozenset[relax.Var]:
    """Those of some tensors that are computed from members, but are none."""
    found = set(members)
    for var in calls.injective:
        if var in tensors and not found.isdisjoint(calls.tensors(var)):
            found.add(var)
    return frozenset(found.difference(members))


def tensors_before(
    calls: TIRCalls, space: RowSpace, members: Collection[relax.Var]
) -> frozenset[relax.Expr]:
    """The tensors of the size of the data that are members, or from which members are computed."""

    def large(var: relax.Var) -> Iterator[relax.Expr]:
        return (tensor for tensor in calls.tensors(var) if space.kind(tensor) == TILE)

    found: set[relax.Expr] = {var for var in members if space.kind(var) == TILE}
    queue = list(members)
    while queue:
        new = set(large(queue.pop())) - found
        found |= new
        queue += [tensor for tensor in new if tensor in calls.injective]
    return frozenset(found)


def pays_off(
    subject: relax.Var,
    blocks: int,
    more: Collection[relax.Expr],
    alone: Collection[relax.Expr],
    gpu: GPUInfo,
) -> bool:
    """Return whether a kernel of few blocks stores a tensor faster than a kernel of its own would.

    Parameters
    ----------
    subject : relax.Var
        The tensor.
    blocks : int
        Blocks of the kernel that run at once.
    more : Collection[relax.Expr]
        The tensors that the kernel moves in addition.
    alone : Collection[relax.Expr]
        Those that a kernel of its own would move.
    gpu : GPUInfo
        The device.
    """
    moved, own = (sum(map(count_bytes, tensors)) for tensors in (more, alone))
    busy = min(blocks, gpu.multiprocessors)
    cycles = {
        "one kernel": moved / (busy * COSTS.memory_bytes),
        "two kernels": COSTS.launch + own / (gpu.multiprocessors * COSTS.memory_bytes),
    }
    alternatives = {
        "one kernel": [_store(moved, busy, 0)],
        "two kernels": [_store(own, gpu.multiprocessors, 1)],
    }
    found = compare("store", subject.name, alternatives, 0.0, cycles)
    return found.chosen == "one kernel"


def _store(moved: int, blocks: int, launches: int) -> KernelCall:
    return KernelCall(STORE, {"blocks": blocks, "launches": launches}, read_bytes=moved)
