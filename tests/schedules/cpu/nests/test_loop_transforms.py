# SPDX-License-Identifier: Apache-2.0
"""Steps that the rules share."""

from __future__ import annotations

from cpu.rule_cases import AVX2, function, tensor
from tvm import s_tir, te

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.nests.blocks import Kernel
from schedules.cpu.nests.loop_transforms import open_reduction, static_extent


def test_spatial_loops_of_a_reduction_are_numbered_as_its_axes_that_move():
    x = tensor("x", 5, 1, 64, 1, 3, 7)
    r, s = te.reduce_axis((0, 3), name="r"), te.reduce_axis((0, 7), name="s")
    total = te.compute((5, 1, 64, 1), lambda *i: te.sum(x[(*i, r, s)], axis=[r, s]), name="total")
    sch = s_tir.Schedule(function([x], total))
    kernel = Kernel(sch, [], CPUInfo.from_target(AVX2))  # not in the form that drops such loops
    facts, spatial, reduced = open_reduction(kernel, sch.get_sblock("total"))
    moving = [facts.extents[k] for k in facts.positions("S")]
    assert moving == [5, 64]
    assert [static_extent(sch, loop) for loop in spatial] == [1, 1, *moving]
    assert [static_extent(sch, loop) for loop in reduced] == [21]
    assert [static_extent(sch, loop) for loop in sch.get_loops(facts.block)] == [1, 1, 5, 64, 21]
