# SPDX-License-Identifier: Apache-2.0
"""Time of PyTorch's kernels on this CPU, as they run inside a model.

Before each timed call the operands that the layer before writes are written again; weights come
from memory, copies of which take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from .library_cases import LibraryCase

ROUNDS = 3
"""Rounds of calls, a pause apart, of which the fastest counts: some are disturbed throughout."""
RUNS = 12
"""Calls of a round."""
SECONDS = 0.1
"""Most time of the calls of a round."""
_PAUSE = 0.02
MOST_COPIES = 64
_CHAIN = 65
_LARGEST = 31 << 20
"""Bytes of the largest buffer that the C library keeps when it is freed, just under 32 MB."""


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, for results up to 32 MB.

    glibc gives memory above twice the largest buffer freed so far back to the system, so that the
    pages of the next result fault, each of which takes a microsecond in a virtual machine.
    """
    import torch

    torch.empty(_LARGEST, dtype=torch.uint8)


def time_library(case: LibraryCase, threads: int, cold: int) -> float:
    """Typical seconds of a kernel.

    Parameters
    ----------
    case : LibraryCase
        The kernel.
    threads : int
        Threads of PyTorch.
    cold : int
        Bytes of all copies of the weights together.
    """
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    keep_freed_memory()
    with torch.no_grad():
        data = [torch.randn(shape) for shape in case.data]
        sets = [[torch.randn(shape) for shape in case.weights]]
        weights = sum(one.numel() * one.element_size() for one in sets[0])
        copies = max(1, min(MOST_COPIES, cold // weights)) if weights else 1
        sets += [[one.clone() for one in sets[0]] for _ in range(copies - 1)]

        def write() -> None:
            for one in data:
                one.mul_(1.0)

        turns = [partial(case.run, torch, *data, *own) for own in sets]
        found = [_typical(turns, write)]
        while len(found) < ROUNDS:
            time.sleep(_PAUSE)
            found.append(_typical(turns, write))
        return min(found)


def eager_overhead(threads: int) -> float:
    """Seconds that PyTorch's modules add to each operator of a model: T1 of its host."""
    import torch

    torch.set_num_threads(threads)
    one = torch.ones(1)
    with torch.no_grad():
        model = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(_CHAIN)))
        chain = _typical([lambda: model(one)], lambda: None)
        alone = _typical([lambda: [torch.relu(one) for _ in range(_CHAIN)]], lambda: None)
    return max(chain - alone, 1e-8) / _CHAIN


def _typical(turns: Sequence[Callable[[], Any]], before: Callable[[], None]) -> float:
    """Lower quartile of the seconds of calls: other work of the machine only lengthens them."""
    clock, times = time.perf_counter, []
    until = clock() + SECONDS
    for number, call in enumerate(cycle(turns)):
        before()
        begin = clock()
        call()
        end = clock()
        if number >= 3:
            times.append(end - begin)
        if len(times) >= RUNS or (len(times) >= 3 and end > until):
            return statistics.quantiles(times, n=4)[0]
    raise AssertionError("there is at least one turn")
