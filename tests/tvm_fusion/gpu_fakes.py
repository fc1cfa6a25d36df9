# SPDX-License-Identifier: Apache-2.0
"""A driver, a clock and engines for tests of the GPU benchmarks without a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks.gpu import engine
from examples.benchmarks.gpu.engine import Engine, Launcher

DRIVER = Path(__file__).resolve().parents[1] / "gpu" / "fake_cuda_driver.c"


def fake_driver(folder: Path, report: Path) -> dict[str, str]:
    """Build the driver that computes nothing; the environment of a process that finds it.

    Skips the test where no C compiler is.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    driver = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", driver, DRIVER], check=True)
    (folder / "libcudart.so.13").symlink_to(driver)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_REPORT": str(report)}


class FakeClock:
    """Time passes only when something is launched."""

    device = "cpu"
    cache_bytes = 1000
    memory_bytes = 1 << 20

    def __init__(self) -> None:
        self.time = 0.0
        self.log: list[str] = []

    def now(self) -> float:
        return self.time

    def wait(self) -> None:
        pass

    def flush(self) -> None:
        self.time += 7.0
        self.log.append("flush")

    def release(self) -> None:
        self.log.append("release")

    def seconds(self, work: Callable[[], object]) -> float:
        start = self.time
        work()
        return self.time - start

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        self.log.append("capture")
        return work

    def scope(self, _: Engine) -> Any:
        return contextlib.nullcontext()


class FakeEngine(Engine):
    """Takes a fixed time for each launch; its result is a number."""

    def __init__(self, clock: FakeClock, title: str, seconds: float, **options: Any) -> None:
        self.clock, self.title, self.cost, self.options = clock, title, seconds, options
        self.launched: list[int] = []

    def prepare(self, case: Any, sets: engine.Sets) -> Launcher:
        def launch(number: int) -> tuple[Any, ...]:
            self.clock.time += self.cost
            self.clock.log.append(self.title)
            self.launched.append(number)
            if len(self.launched) > self.options.get("breaks_after", 1 << 30):
                raise RuntimeError("device lost\nsecond line")
            varying = len(self.launched) if self.options.get("varies") else 0
            return (self.options.get("value", 0.0), varying)

        def all_sets() -> None:
            for number in range(len(sets)):
                launch(number)

        return Launcher(
            launch,
            all_sets=all_sets if self.options.get("own_stream") else None,
            repeatable=self.options.get("repeatable", False),
        )
