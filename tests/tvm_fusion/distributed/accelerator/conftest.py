# SPDX-License-Identifier: Apache-2.0
"""The OpenCL device of the tests, which is this CPU, as a device of programs."""

from __future__ import annotations

import pytest
from device_runs import WatchedDriver
from opencl import opencl_context


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[WatchedDriver]:
    """The devices that programs open, which are the OpenCL device of the tests."""
    opencl_context()
    found: list[WatchedDriver] = []

    def open_driver(kind: str, index: int) -> WatchedDriver:
        assert kind == "opencl"
        found.append(WatchedDriver(index))
        return found[-1]

    monkeypatch.setattr("tvm_fusion.distributed.program.open_driver", open_driver)
    return found


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it for a GPU: kernels for GPUs, and copies to memory of its own."""
    monkeypatch.setattr("tvm_fusion.distributed.accelerator.device._cpu_units", lambda index: 0)
    monkeypatch.setattr(
        "tvm_fusion.distributed.accelerator.device._shares_memory", lambda index: False
    )
