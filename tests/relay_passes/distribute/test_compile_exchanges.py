# SPDX-License-Identifier: Apache-2.0
"""Pass ``CompileExchanges``: programs take a table, and what is in place is noted in the plan."""

from __future__ import annotations

import json

import tvm
from rank_programs import calls, distributed, residual_block
from tvm.target import Target

from relay_passes import CompileExchanges, ExchangeInPlace
from schedules import attributes
from schedules.distribute.rows.row_plan import plan_from_json

TARGET = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4"})


def plan_of(mod: tvm.IRModule) -> object:
    return plan_from_json(json.loads(str(mod.attrs[attributes.RANK_PLAN])))


def test_kernels_and_their_table() -> None:
    before = ExchangeInPlace()(distributed(residual_block))
    after = CompileExchanges(TARGET)(before)
    plan = plan_of(after)
    assert plan.takes_table and not plan_of(before).takes_table
    assert [part.in_place for part in plan.parts] == [(0, 1), (0, 1)]
    for rank, name in enumerate(plan.functions):
        func = after[name]
        assert func.params[-1].ty.dtype == "int64"
        kernels = [c for c in calls(after, name).values() if "exchange" in str(c.args[0])]
        assert len(kernels) == 2 and all(c.op.name == "relax.call_tir" for c in kernels)
        assert all(call.args[1].fields[-1].same_as(func.params[-1]) for call in kernels)
        texts = [after[call.args[0]].script(show_meta=True) for call in kernels]
        assert all("llvm.x86.sse2.pause" in text for text in texts), rank


def test_processors_without_the_instruction() -> None:
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu"})
    after = CompileExchanges(target)(distributed(residual_block))
    text = after.script(show_meta=True)
    assert "tvm_fusion_slot_is_late" in text and "pause" not in text


def test_modules_without_ranks_stay() -> None:
    mod = distributed(residual_block).without_attr(attributes.RANK_PLAN)
    assert CompileExchanges(TARGET)(mod).same_as(mod)
