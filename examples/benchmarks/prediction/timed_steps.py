# SPDX-License-Identifier: Apache-2.0
"""Times of training steps, and what PyTorch's profiler adds to them."""

from __future__ import annotations

import time

import numpy as np
import torch

from examples.benchmarks.prediction.trainings import Step

WARM_UP = 5
TRACED = 9  # steps that are recorded
TINY = 2000  # operators by which the cost of the profiler is measured


def time_steps(step: Step, count: int) -> list[float]:
    """Seconds of some steps after some others."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return times


def profiler(**options: object) -> torch.profiler.profile:
    """PyTorch's profiler of the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, record_shapes=True, **options)


def event_cost() -> float:
    """Seconds that the profiler adds to an event: by operators on one element."""
    one = torch.zeros(1)

    def step() -> None:
        for _ in range(TINY):
            one.add_(one)

    plain = np.median(time_steps(step, TRACED))
    with profiler():
        traced = np.median(time_steps(step, TRACED))
    return max(float(traced - plain), 0.0) / TINY
