# SPDX-License-Identifier: Apache-2.0
"""Pass ``ApplyRules``: each function by the first rule that takes it, for its own target."""

from __future__ import annotations

import pytest
import tvm
from tvm import te, tirx
from tvm.error import InternalError
from tvm.ir import assert_structural_equal
from tvm.s_tir import dlight
from tvm.target import Target

from relay_passes import ApplyRules
from schedules import attributes, cpu

CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2})


def function(*shape: int) -> tirx.PrimFunc:
    x = te.placeholder(shape, "float32", name="x")
    y = te.compute(shape, lambda *i: te.exp(x[i]) + 1.0, name="y")
    return te.create_prim_func([x, y])


def module() -> tvm.IRModule:
    scheduled = function(6).with_attr("tirx.is_scheduled", True)
    foreign = function(7, 8).with_attr("target", Target("c"))
    mod = tvm.IRModule({"one": function(4, 5), "done": scheduled, "foreign": foreign})
    return mod.with_attr("kept", "yes")


def test_functions_are_scheduled_as_by_tvm_and_carry_the_rule() -> None:
    before = module()
    with CPU:
        after = ApplyRules(*cpu.RULES)(before)
        expected = dlight.ApplyDefaultSchedule(*cpu.RULES)(module())
    assert after["one"].attrs[attributes.RULE] == "Elementwise" and after.attrs["kept"] == "yes"
    assert_structural_equal(after["one"].without_attr(attributes.RULE), expected["one"])
    assert_structural_equal(before, module())


def test_what_is_scheduled_or_for_another_target_stays() -> None:
    with CPU:
        after = ApplyRules(*cpu.RULES)(module())
        again = ApplyRules(*cpu.RULES)(after)
    for name in ("done", "foreign"):
        assert_structural_equal(after[name], module()[name])
    assert_structural_equal(after, again)


def test_a_target_is_needed() -> None:
    with pytest.raises(InternalError, match="Target context required"):
        ApplyRules(*cpu.RULES)(module())
