# SPDX-License-Identifier: Apache-2.0
"""Configurations of GPU reductions, chosen once and carried to the rule."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from reduction_checks import random_data, run
from reduction_graphs import data, legal, op, several, total
from tvm import relax, tirx
from tvm.target import Target

import relay_passes
from relay_passes import ApplyRules, ConfigureReductions
from schedules import attributes, gpu
from schedules.tir.expression_walk import nodes
from schedules.workload.workspace_layout import is_workspace

T4 = Target({"kind": "cuda", "arch": "sm_75"}, host="llvm")  # has no clusters
LONG = (3, 300_000)


def fused(build, *params: relax.Var) -> tvm.IRModule:
    """A module as the pass expects it."""
    transform = relax.transform
    passes = [transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()]
    return tvm.transform.Sequential(passes)(legal(several(build, *params)))


def configure(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass; check that it leaves its input alone and does nothing the second time."""
    functions = dict(mod.functions_items())
    once = ConfigureReductions(T4)(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(ConfigureReductions(T4)(once), once)
    assert relax.analysis.well_formed(once) is None
    return once


def calls(mod: tvm.IRModule) -> list[relax.Call]:
    """The calls of functions of TensorIR."""
    bindings = [binding.value for binding in mod["main"].body.blocks[0].bindings]
    return [value for value in bindings if isinstance(value, relax.Call)]


def config(mod: tvm.IRModule, call: relax.Call) -> dict:
    return json.loads(str(mod[call.args[0]].attrs[attributes.REDUCE_CONFIG]))


def test_pass_has_the_name_of_its_file_and_is_exported():
    assert ConfigureReductions().info.name == "ConfigureReductions"
    assert "ConfigureReductions" in relay_passes.__all__


def test_a_split_reduction_gets_a_workspace():
    mod = configure(fused(lambda _, x: [total(op.negative(x), [1])], data(*LONG)))
    [call] = calls(mod)
    func, [workspace, x] = mod[call.args[0]], call.args[1].fields
    found = config(mod, call)
    assert (found["finish"], found["is_online"]) == ("last_block", False) and found["splits"] > 1
    assert x.same_as(mod["main"].params[0])
    param = func.params[0]
    assert str(param.dtype) == "int32" and [int(param.shape[0])] == list(workspace.value.shape)
    content = workspace.value.numpy()
    assert not content[:-2].any() and content[-1] not in (1, 2)  # which are tags of launches
    assert is_workspace(content) and not is_workspace(content[:-1])
    assert f"{param.name}[" not in func.script()


@pytest.mark.parametrize("target", [T4, Target({"kind": "opencl"}, host="llvm")])
def test_the_rule_writes_what_was_chosen(target):
    mod = ConfigureReductions(target)(fused(lambda _, x: [total(x, [1])], data(*LONG)))
    [call] = calls(mod)
    func = mod[call.args[0]]
    chosen = json.loads(str(func.attrs[attributes.REDUCE_CONFIG]))
    chosen["splits"] += 1
    mod.update_func(call.args[0], func.with_attr(attributes.REDUCE_CONFIG, json.dumps(chosen)))
    with target:
        scheduled = ApplyRules(*gpu.RULES)(mod)[call.args[0]]
    extents = {
        str(statement.node.thread_tag): int(statement.value)
        for statement in nodes(scheduled.body, tirx.AttrStmt)
        if statement.attr_key == "thread_extent"
    }
    assert extents["blockIdx.x"] == chosen["splits"]


def test_calls_of_one_function_share_a_workspace():
    def build(emit, x, y):
        return [emit(total(x, [1])), emit(total(y, [1])), emit(total(x, [1], "max"))]

    mod = configure(fused(build, data(*LONG), data(*LONG, name="y")))
    first, second, other = calls(mod)
    assert first.args[0].same_as(second.args[0]) and not first.args[0].same_as(other.args[0])
    one, same, another = (call.args[1].fields[0] for call in (first, second, other))
    assert one.value.data_ptr() == same.value.data_ptr()
    # They have the same size; the virtual machine has equal constants once, but did not merge
    # these.
    assert one.value.shape == another.value.shape
    assert (one.value.numpy() != another.value.numpy()).any()


@pytest.mark.parametrize(
    ("shape", "finish"), [((5000, 64), "one_block"), ((3, 700_000), "atomic"), ((7, 9), "auto")]
)
def test_other_finishes_need_no_workspace(shape, finish):
    def build(_, x):
        return [relay_passes.op.coalesced_reduce(x, "sum", [1], finish=finish)]

    before = fused(build, data(*shape, dtype="int32"))
    mod = configure(before)
    [call] = calls(mod)
    assert config(mod, call)["finish"] == ("atomic" if finish == "atomic" else "one_block")
    tvm.ir.assert_structural_equal(mod["main"], before["main"])


def test_the_workspace_is_ignored_elsewhere():
    mod = configure(fused(lambda _, x: [total(op.negative(x), [1])], data(*LONG)))
    values = random_data(np.random.default_rng(0), LONG, "float32")
    np.testing.assert_allclose(run(mod, values)[0], -values.sum(1))


@pytest.mark.parametrize("attribute", ["tirx.is_scheduled", "global_symbol"])
def test_what_is_left_alone(attribute):
    def build(_, x):
        return [total(x, [1]), op.negative(x)]

    mod = fused(build, data(*LONG))
    assert ConfigureReductions()(mod).same_as(mod)  # no target
    assert ConfigureReductions(T4.host)(mod).same_as(mod)
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            mod.update_func(name, func.with_attr(attribute, name.name_hint))
    tvm.ir.assert_structural_equal(configure(mod), mod)
