# SPDX-License-Identifier: Apache-2.0
"""Decisions by predicted times: without a machine by cycles, with one by its figures."""

from dataclasses import replace

import pytest
from tvm.target import Target

from schedules.cost.cpu_kernels import CYCLES
from schedules.cost.decisions import compare, deciding_for, machine_in_use, recorded
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Figure, load_machine
from schedules.cpu.core.machine import CPUInfo
from schedules.errors import TargetError


def call(op, cycles):
    return KernelCall(op, {"cycles": cycles})


ONE = {"fused": [call("cpu.fused_conv2d", 90.5)], "separate": [call("cpu.conv2d", 50.0)] * 2}


def measured(**factors):
    machine = load_machine("znver4")
    figures = {f"cpu.{op}.factor": Figure(value, "test") for op, value in factors.items()}
    return replace(machine, figures={**machine.figures, **figures})


def test_without_a_machine_cycles_decide():
    found = compare("fuse", "a pair", ONE, 0.05)
    assert found.gain == 100.0 / 90.5 - 1 and found.chosen == "fused"
    assert found.seconds == {"fused": 90.5 / 3e9, "separate": 100 / 3e9}
    assert compare("fuse", "a pair", ONE, 0.2).chosen == "separate"


def test_measured_ratios_and_clock_decide():
    machine = measured(fused_conv2d=2.0)
    with deciding_for(machine):
        found = compare("fuse", "a pair", ONE, 0.05)
        assert machine_in_use() is machine
    assert found.chosen == "separate" and found.gain == pytest.approx(100 / 181 - 1)
    assert found.seconds["fused"] == pytest.approx(2 * 90.5 / machine["clock"])
    assert machine_in_use() is None


def test_work_of_known_cycles_has_no_ratio():
    alternatives = {"a": [call(CYCLES, 10)], "b": [call(CYCLES, 20), call(CYCLES, 0)]}
    with deciding_for(measured()):
        assert compare("split", "x", alternatives, 0).gain == pytest.approx(1)


def test_nominal_cycles_stand_for_calls_without_any():
    nominal = {"threads": 3.0, "one thread": 2.0}
    calls = {name: [KernelCall("cpu.coalescedreduce", {})] for name in nominal}
    assert compare("split", "x", calls, 0.0, nominal).chosen == "one thread"


def test_equal_comparisons_are_recorded_once():
    with recorded() as found:
        compare("fuse", "a pair", ONE, 0.05)
        compare("fuse", "a pair", ONE, 0.05)
        compare("fuse", "another", ONE, 0.05)
    assert [one.subject for one in found] == ["a pair", "another"]
    compare("fuse", "a third", ONE, 0.05)
    assert len(found) == 2


def test_costs_of_a_measured_cpu():
    target = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 4})
    machine, family = load_machine("znver4"), CPUInfo.from_target(target)
    with deciding_for(machine):
        cpu = CPUInfo.from_target(target)
    assert (cpu.l1d_bytes, cpu.l2_bytes, cpu.l3_bytes) == (32 << 10, 1 << 20, 32 << 20)
    of_two = machine["bandwidth.memory"] / 2 / machine["clock"]
    assert cpu.costs.bytes_per_cycle == (*family.costs.bytes_per_cycle[:3], pytest.approx(of_two))
    assert cpu.costs.memory_cores == pytest.approx(2)
    assert cpu.costs.drain == family.costs.drain and cpu.num_cores == 4
    with deciding_for(machine), pytest.raises(TargetError, match="the target for 'znver3'"):
        CPUInfo.from_target(Target({"kind": "llvm", "mcpu": "znver3"}))


def test_of_several_the_fastest_must_gain_over_the_last():
    cycles = {"a": 3.0, "b": 2.0, "c": 4.0, "default": 2.1}
    calls = {name: [call(CYCLES, count)] for name, count in cycles.items()}
    assert compare("split", "x", calls, 0.1).chosen == "default"
    found = compare("split", "x", calls, 0.05)
    assert found.chosen == "b" and found.gain == pytest.approx(0.05)
    assert set(found.seconds) == set(cycles)
