# SPDX-License-Identifier: Apache-2.0
"""Device and host time on a CUDA GPU, through PyTorch's events and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from .engine import Engine, module
from .protocol import COLD_FACTOR


class Clock(Protocol):
    """Interface of a device for the comparison; tests have one without a GPU."""

    cache_bytes: int
    memory_bytes: int
    device: str

    def now(self) -> float:
        """Seconds on the host."""

    def wait(self) -> None:
        """Return when the device is idle."""

    def flush(self) -> None:
        """Start to fill the cache with something else, by reading, for a tenth of a millisecond."""

    def release(self) -> None:
        """Give memory that nothing uses back to the device, for engines beside PyTorch."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Device seconds of the launches of ``work``."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record the launches of ``work`` as a graph; returns its replay."""

    def scope(self, engine: Engine) -> Any:
        """Context in which the engine launches on the stream of this clock."""


class CudaClock:
    """The first CUDA device.

    Everything timed runs on one stream other than the default one, where graphs cannot be captured.
    """

    device = "cuda"

    def __init__(self) -> None:
        self.torch = module("torch")
        properties = self.torch.cuda.get_device_properties(0)
        self.cache_bytes = int(properties.L2_cache_size)
        free, _ = self.torch.cuda.mem_get_info()
        self.memory_bytes = free // 4  # float64 references need the rest
        self.stream = self.torch.cuda.Stream()
        self._cold = self.torch.ones(COLD_FACTOR * self.cache_bytes // 4, device=self.device)

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def wait(self) -> None:
        """Return when the device is idle."""
        self.torch.cuda.synchronize()

    def flush(self) -> None:
        """Read four times the cache, twice; written lines would be written back later."""
        with self.torch.cuda.stream(self.stream):
            self._cold.sum()
            self._cold.sum()

    def release(self) -> None:
        """Empty PyTorch's pool."""
        self.torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> float:
        """Time between two events around the work."""
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record a graph; allocations of engines beside PyTorch are allowed meanwhile."""
        graph = self.torch.cuda.CUDAGraph()
        kept = []
        with self.torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"):
            kept.append(work())

        def replay() -> object:
            with self.torch.cuda.stream(self.stream):
                graph.replay()
            return kept

        return replay

    @contextmanager
    def scope(self, engine: Engine) -> Iterator[None]:
        """Send PyTorch's and the engine's launches to the stream."""
        with ExitStack() as stack:
            stack.enter_context(self.torch.cuda.stream(self.stream))
            stack.enter_context(engine.stream_scope(self.stream.cuda_stream))
            yield
