# SPDX-License-Identifier: Apache-2.0
"""Measured kernels are those that the models describe."""

from dataclasses import replace

import pytest

from schedules.cost.machine import Figure, load_machine
from schedules.cpu.core.machine import CPUInfo
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.prediction.calibrate import timing
from tvm_fusion.prediction.calibrate.cases import cases
from tvm_fusion.prediction.calibrate.timing import KernelTimer
from tvm_fusion.prediction.machines import NATIVE


@pytest.mark.slow
def test_kernels_of_some_cases_are_timed():
    target = resolve(NATIVE, cores=2)
    family = CPUInfo.from_target(target).family
    timer = KernelTimer(target, replace(load_machine("znver4"), name=family))
    by_name = {case.name: case for case in cases()}
    found = [
        timed
        for name in ("matmul 1x512 by 512x256", "softmax 64x1000", "mean of 512 @14")
        for timed in timer.measure(by_name[name])
    ]
    ops = [call.op for call, _ in found]
    assert {"cpu.matvec", "cpu.softmax", "cpu.conv2d", "cpu.coalescedreduce"} <= set(ops)
    assert all(seconds > 0 for _, seconds in found)
    assert timer.peak() > 1e9


def test_what_cores_pass_to_each_other_is_a_median(monkeypatch):
    found = iter([5e-12, 9e-11, 3e-11])

    class Probe:
        def __init__(self, target, threads):
            assert threads == 2

        def seconds(self):
            return next(found)

    monkeypatch.setattr(timing, "ExchangeProbe", Probe)
    monkeypatch.setattr(timing, "EXCHANGES", 3)
    monkeypatch.setattr(timing, "_PAUSE", 0.0)
    machine = load_machine("znver4")
    timers = [KernelTimer(resolve(NATIVE, cores=n), with_threads(machine, n)) for n in (2, 1)]
    assert [timer.exchange() for timer in timers] == [3e-11, None]


def with_threads(machine, count):
    figures = {**machine.figures, "multiprocessors": Figure(count, "given")}
    return replace(machine, figures=figures)
