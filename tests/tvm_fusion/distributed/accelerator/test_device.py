# SPDX-License-Identifier: Apache-2.0
"""Figures of devices: of data sheets, or of the host where an OpenCL device is its CPU."""

from __future__ import annotations

import math

import pytest
from loop_nests import blur
from opencl import opencl_context

from schedules.cost.machine import load_machine
from schedules.cpu.core.machine import CPUInfo
from schedules.distribute.cost import Processor, Work
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.distributed import Device, accelerator_of, compile
from tvm_fusion.distributed.accelerator.device import resolve_devices
from tvm_fusion.errors import InvalidInputError

HOST = resolve("znver4", 2)
CPU = Processor(rate=2e11, bandwidth=4e10)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenCL device that is a CPU of 3 cores, on a machine of 4."""
    monkeypatch.setattr("tvm_fusion.distributed.accelerator.device._cpu_units", lambda index: 3)
    monkeypatch.setattr(
        "tvm_fusion.distributed.accelerator.device._shares_memory", lambda index: True
    )
    monkeypatch.setattr("tvm_fusion.distributed.accelerator.device.usable_processors", lambda: 4)


@pytest.mark.parametrize(("threads", "cores"), [(1, 3), (2, 2)])
def test_figures_of_the_host(threads: int, cores: int, units: None) -> None:
    host = resolve("znver4", threads)
    [[device]] = resolve_devices([Device("opencl", chunks=2)], 1, host, CPU)
    figures = device.accelerator
    assert device.has_cores and not device.in_place and not figures.overlaps
    assert figures.rate == pytest.approx(2e11 * cores / threads)
    assert figures.bandwidth == 2 * figures.link == pytest.approx(4e10 * cores / threads)
    assert CPUInfo.from_target(device.cpu).num_cores == cores
    [[shared]] = resolve_devices(["opencl"], 1, host, CPU)
    assert shared.in_place and math.isinf(shared.accelerator.link)
    assert shared.accelerator.stages(Work(4, 8), 0, 0)[::2] == (0, 0)


def test_who_computes_in_place(units: None) -> None:
    [[copies]] = resolve_devices([Device("opencl", in_place=False)], 1, HOST, CPU)
    assert not copies.in_place
    for device in (
        Device("opencl", chunks=2, in_place=True),
        Device("cuda -arch=sm_90", in_place=True),
    ):
        with pytest.raises(InvalidInputError, match="is to compute in place; expected OpenCL"):
            resolve_devices([device], 1, HOST, CPU)


def test_no_core_is_left(units: None) -> None:
    [[device]] = resolve_devices(["opencl"], 1, resolve("znver4", 4), CPU)
    assert not device.has_cores
    program = compile(blur(400, 64), target="znver4", threads=4, devices=["opencl"], split="model")
    assert program.shares.devices == ((),)


def test_figures_of_data_sheets(units: None) -> None:
    [[gpu]] = resolve_devices(["cuda -arch=sm_80"], 1, HOST, CPU)
    assert gpu.accelerator == accelerator_of(load_machine("a100-80")) and gpu.has_cores


def test_other_opencl_devices(as_gpu: None) -> None:
    [[device]] = resolve_devices(["opencl"], 1, HOST, CPU)
    assert device.accelerator == accelerator_of(load_machine("p4"))


def test_units_of_the_opencl_here() -> None:
    [device] = opencl_context().devices
    from tvm_fusion.distributed.accelerator.opencl_driver import cpu_units, shares_memory

    assert cpu_units(0) == device.max_compute_units > 0 == cpu_units(77)
    assert shares_memory(0) and not shares_memory(77)
