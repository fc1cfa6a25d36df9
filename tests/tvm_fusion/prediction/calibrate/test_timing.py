# SPDX-License-Identifier: Apache-2.0
"""Measured kernels are those that the models describe."""

from dataclasses import replace

from schedules.cost.machine import load_machine
from schedules.cpu.core.machine import CPUInfo
from tvm_fusion.compiler.targets.target import resolve
from tvm_fusion.prediction.calibrate.cases import cases
from tvm_fusion.prediction.calibrate.timing import KernelTimer
from tvm_fusion.prediction.machines import NATIVE


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
