# SPDX-License-Identifier: Apache-2.0
"""The list of a module's kernels: threads, serial loops, rules."""

from __future__ import annotations

import pytest
import tvm
from audit import audit
from graph_cases import CUDA, fused
from tvm import te, tirx
from tvm.relax import op
from tvm.s_tir import dlight

from relay_passes import ApplyRules
from schedules.gpu import RULES


def _scheduled(mod: tvm.IRModule, *rules: dlight.ScheduleRule) -> tvm.IRModule:
    with CUDA:
        return ApplyRules(*rules)(mod)


def test_rules_are_named() -> None:
    mod = fused(lambda x: op.exp(x), ((4096, 32), "float32"), target=CUDA)
    [kernel] = audit(_scheduled(mod, *RULES))
    assert (kernel.rule, kernel.blocks, kernel.threads, kernel.serial) == (
        "Elementwise",
        512,
        64,
        1,
    )
    assert not kernel.is_slow
    mod = fused(lambda x: op.exp(x), ((4096, 32), "float32"), target=CUDA)
    [kernel] = audit(_scheduled(mod, dlight.gpu.Fallback()))
    assert kernel.rule == "dlight.Fallback"
    assert str(kernel).endswith("dlight.Fallback, 128 x 1024 threads, loops of 1")


@pytest.mark.parametrize(
    ("rows", "columns", "is_slow"), [(8, 65, True), (8, 64, False), (2048, 500, False)]
)
def test_few_threads_with_long_loops_are_slow(rows: int, columns: int, is_slow: bool) -> None:
    x = te.placeholder((rows, columns), "float32", name="x")
    k = te.reduce_axis((0, columns))
    func = te.create_prim_func([x, te.compute((rows,), lambda i: te.sum(x[i, k], k))])
    schedule = tvm.s_tir.Schedule(func)
    block = schedule.get_sblock("compute")
    loop, _ = schedule.get_loops(block)
    outer, inner = schedule.split(loop, [None, 8])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    [kernel] = audit(schedule.mod)
    assert (kernel.blocks, kernel.threads, kernel.serial) == (rows // 8, 8, columns)
    assert kernel.is_slow == is_slow


def test_functions_without_threads_are_slow() -> None:
    mod = fused(lambda x: op.exp(x), ((4, 4), "float32"), target=CUDA)
    [kernel] = audit(mod)
    assert not kernel.is_scheduled
    assert kernel.is_slow
    assert str(kernel).endswith("not scheduled")


def test_symbolic_sizes_are_not_known() -> None:
    mod = fused(lambda x: op.exp(x), ((tirx.Var("n", "int64"), 4), "float32"), target=CUDA)
    [kernel] = audit(_scheduled(mod, *RULES))
    assert kernel.blocks is None
    assert not kernel.is_slow
