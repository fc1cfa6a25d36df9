# SPDX-License-Identifier: Apache-2.0
"""Model of our CPU kernels, against numbers worked by hand."""

from dataclasses import replace

import pytest

from schedules.cost.cpu_kernels import (
    HIGH,
    LOW,
    RESOLUTION,
    bare_seconds,
    level_of,
    predict_cpu_kernel,
)
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Figure, Machine

FIGURES = {
    "multiprocessors": 2,
    "clock": 1e9,
    "peak_flops.float32": 1e11,
    **{"capacity.L2": 1 << 20, "capacity.L3": 16 << 20},
    **{"bandwidth.L2": 1e11, "bandwidth.L3": 5e10, "bandwidth.memory": 1e10},
    **{"bandwidth.copy.L2": 4e10, "bandwidth.copy.L3": 2e10, "bandwidth.copy.memory": 5e9},
    "overhead.fork": 1e-6,
}
MACHINE = Machine(
    "toy", "cpu", "Toy", {name: Figure(value, "test") for name, value in FIGURES.items()}
)


def stream(size, **more):
    sizes = {"activation_bytes": size, "weight_bytes": 0, "functions": 0, "parallel": 0, **more}
    return KernelCall("cpu.elementwise", sizes, read_bytes=size / 2, written_bytes=size / 2)


def test_a_convolution_takes_its_cycles():
    call = KernelCall("cpu.conv2d", {"cycles": 5000}, flops=4e5)
    found = predict_cpu_kernel(call, MACHINE)
    assert found.seconds == pytest.approx(5e-6) and found.bound == "compute"
    assert (found.low, found.high) == pytest.approx((5e-6 * LOW, 5e-6 * HIGH + RESOLUTION))
    assert found.roofline_seconds == pytest.approx(4e-6) and not found.in_range


@pytest.mark.parametrize(
    "size, seconds", [(400_000, 1e-5), (4 << 20, (4 << 20) / 2e10), (40 << 20, (40 << 20) / 5e9)]
)
def test_a_stream_takes_the_bandwidth_of_its_level(size, seconds):
    assert bare_seconds(stream(size), MACHINE) == pytest.approx(seconds)
    forked = bare_seconds(stream(size, parallel=1), MACHINE)
    assert forked == pytest.approx(seconds + 1e-6)


def test_weights_come_from_the_level_that_keeps_those_of_the_whole_model():
    warm = stream(0, weight_bytes=1 << 20, kept_bytes=8 << 20)
    cold = stream(0, weight_bytes=1 << 20, kept_bytes=(8 << 20) + 1)
    assert bare_seconds(warm, MACHINE) == pytest.approx((1 << 20) / 5e10)
    assert bare_seconds(cold, MACHINE) == pytest.approx((1 << 20) / 1e10)


def test_arithmetic_and_traffic_overlap_in_part():
    moving = bare_seconds(stream(400_000), MACHINE)
    call = replace(stream(400_000), flops=0.4 * 1e11 * moving)  # It takes as long by itself.
    assert bare_seconds(call, MACHINE) == pytest.approx(2**0.5 * moving)
    assert bare_seconds(stream(400_000, functions=10**6), MACHINE) > 5e-4


def test_measured_ratios_scale_the_time_and_its_interval():
    figures = {"cpu.conv2d.factor": 1.2, "cpu.conv2d.low": 0.9, "cpu.conv2d.high": 1.1}
    entries = {name: Figure(value, "fitted") for name, value in figures.items()}
    machine = replace(MACHINE, figures={**MACHINE.figures, **entries})
    found = predict_cpu_kernel(KernelCall("cpu.conv2d", {"cycles": 1000}), machine)
    assert (found.low, found.seconds, found.high) == pytest.approx((1.08e-6, 1.2e-6, 1.42e-6))
    assert found.in_range and found.model == "cost model, calibrated"


@pytest.mark.parametrize("op, high", [("conv2d", 2), ("fused_conv2d", 3), ("softmax", 4)])
def test_intervals_are_those_of_kernels_in_networks(op, high):
    names = ("network.cpu.conv2d", "network.convolutions", "network.loops")
    entries = {f"{name}.low": Figure(0.5, "fitted") for name in names}
    entries |= {f"{name}.high": Figure(n, "fitted") for n, name in enumerate(names, 2)}
    entries |= {f"cpu.{op}.{end}": Figure(1.0, "fitted") for end in ("factor", "low", "high")}
    machine = replace(MACHINE, figures={**MACHINE.figures, **entries})
    found = predict_cpu_kernel(replace(stream(400_000, cycles=10000), op=f"cpu.{op}"), machine)
    assert found.low == pytest.approx(0.5 * found.seconds)
    assert found.high == pytest.approx(high * found.seconds + RESOLUTION)


def test_other_machines_have_no_such_kernels():
    assert predict_cpu_kernel(KernelCall("cpu.conv2d", {}), replace(MACHINE, kind="gpu")) is None


def test_levels():
    assert [level_of(size, MACHINE) for size in (1 << 20, (1 << 20) + 1, 1 << 30)] == [
        *("L2", "L3", "memory")
    ]
