# SPDX-License-Identifier: Apache-2.0
"""Figures of devices: of data sheets, or of the host where an OpenCL device is its CPU."""

from __future__ import annotations

import pytest
from loop_nests import blur
from opencl import opencl_context
from tvm import s_tir

from schedules.cost.machine import load_machine
from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.cost import Processor
from tvm_fusion.compiler.targets.target import resolve
from tvm_fusion.distributed import Device, accelerator_of, compile
from tvm_fusion.distributed.device.device import resolve_devices

HOST = resolve("znver4", 2)
CPU = Processor(rate=2e11, bandwidth=4e10)


def bound(schedule: s_tir.Schedule) -> None:
    """Stands for a schedule of a user."""


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenCL device that is a CPU of 3 cores, on a machine of 4."""
    monkeypatch.setattr("tvm_fusion.distributed.device.device._cpu_units", lambda index: 3)
    monkeypatch.setattr("tvm_fusion.distributed.device.device.usable_processors", lambda: 4)


def test_figures_of_the_host(units: None) -> None:
    [[device]] = resolve_devices(["opencl"], 1, HOST, CPU)
    cpu = CPUInfo.from_target(HOST)
    figures = device.accelerator
    assert device.has_cores and not figures.overlaps
    assert figures.rate == pytest.approx(2e11 / (2 * cpu.lanes("float32") * cpu.fma_per_cycle))
    assert (figures.bandwidth, figures.link) == (4e10, 2e10)  # of the two cores that are left
    [[own]] = resolve_devices([Device("opencl", schedule=bound)], 1, HOST, CPU)
    assert own.accelerator.rate == pytest.approx(2e11)


def test_no_core_is_left(units: None) -> None:
    [[device]] = resolve_devices(["opencl"], 1, resolve("znver4", 4), CPU)
    assert not device.has_cores
    program = compile(blur(400, 64), target="znver4", threads=4, devices=["opencl"], split="model")
    assert program.shares.devices == ((),)


def test_figures_of_data_sheets(units: None) -> None:
    [[gpu]] = resolve_devices(["cuda -arch=sm_80"], 1, HOST, CPU)
    assert gpu.accelerator == accelerator_of(load_machine("a100-80")) and gpu.has_cores


def test_other_opencl_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_fusion.distributed.device.device._cpu_units", lambda index: 0)
    [[device]] = resolve_devices(["opencl"], 1, HOST, CPU)
    assert device.accelerator == accelerator_of(load_machine("p4"))


def test_units_of_the_opencl_here() -> None:
    [device] = opencl_context().devices
    from tvm_fusion.distributed.device.opencl_driver import cpu_units

    assert cpu_units(0) == device.max_compute_units > 0 == cpu_units(77)
