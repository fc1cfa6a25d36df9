# SPDX-License-Identifier: Apache-2.0
"""Templates: the default comes first, every setting is legal, and a change raises the version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx, topi
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from schedules import cpu
from schedules.compute.conv2d import conv2d, fused_conv2d
from schedules.compute.pack import pack, unpack
from schedules.compute.winograd_conv2d import winograd_conv2d
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.rule import CPUTemplate, TunableRule
from schedules.cpu.loops.dense import DenseWorkload
from schedules.errors import OpError
from schedules.tuning.tunable import (
    PREFIX,
    VERSION,
    decisions_of,
    read_setting,
    sample_knobs,
    without_decisions,
)
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json

HASHES = Path(__file__).with_name("template_hashes.json")
# Fixed, so that hashes do not depend on where the tests run.
TARGET = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
MACHINE = CPUInfo(512, 32, True, 2, 32 << 10, 1 << 20, 32 << 20, "znver4")
SAME = (1, 1, 1, 1)
RELU = Activation("relu")
DENSE = ConvLayer(32, 64, (3, 3), padding=SAME, activation=RELU)
DEPTHWISE = ConvLayer(32, 32, (3, 3), padding=SAME, groups=32, activation=RELU)
POINTWISE = ConvLayer(32, 64, (1, 1), activation=RELU)


def kernel(*layers: ConvLayer, size: int = 28, **options: object) -> Conv2DKernel:
    return Conv2DKernel(
        layers, 1, size, size, data_layout="NCHW16c", out_layout="NCHW16c", **options
    )


WORKLOADS = {
    "cpu.conv2d": kernel(DENSE),
    "cpu.fused_conv2d": kernel(DEPTHWISE, POINTWISE),
    "cpu.planar_conv2d": kernel(DEPTHWISE, POINTWISE, plain_data=True, plain_out=True),
    "cpu.winograd_conv2d": kernel(DENSE, winograd=4),
    "cpu.dense": DenseWorkload("columns", 1, 48, 96, 64, 4),
}


def function(workload: Conv2DKernel | DenseWorkload) -> tirx.PrimFunc:
    """The function of a workload as legalization makes it."""
    if isinstance(workload, DenseWorkload):
        left = te.placeholder((workload.rows, workload.depth), name="left")
        right = te.placeholder((workload.depth, workload.columns), name="right")
        return te.create_prim_func([left, right, topi.matmul(left, right)])
    size, lanes = workload.height, workload.lanes
    channels = workload.layers[0].in_channels
    shape = (1, channels // lanes, size, size, lanes)
    plain = workload.plain_data
    data = te.placeholder((1, channels, size, size) if plain else shape, name="data")
    inputs = [data]
    for number, layer in enumerate(workload.layers):
        blocks = layer.out_channels // lanes
        weight: tuple[int, ...] = (blocks, channels // lanes, *layer.kernel, lanes, lanes)
        if layer.is_depthwise:
            weight = (blocks, *layer.kernel, lanes)
        if workload.winograd:
            weight = ((workload.winograd + 2) ** 2, blocks, channels // lanes, lanes, lanes)
        inputs.append(te.placeholder(weight, name=f"weight{number}"))
        inputs.append(te.placeholder((blocks, lanes), name=f"bias{number}"))
    source = [pack(data, lanes) if plain else data, *inputs[1:]]
    layouts = workload.data_layout, workload.out_layout
    if workload.winograd:
        output = winograd_conv2d(*source, None, workload.layers[0], workload.winograd)
    elif len(workload.layers) == 1:
        output = conv2d(*source, None, *workload.layers, *layouts)
    else:
        output = fused_conv2d(*source, None, *workload.layers, *layouts)
    output = unpack(output, workload.layers[-1].out_channels) if workload.plain_out else output
    func = te.create_prim_func([*inputs, output])
    return func.with_attr("tvm_fusion.workload", to_json(workload))


def fingerprint(template: CPUTemplate, workload: Conv2DKernel | DenseWorkload) -> str:
    """Hash of the space, and of the code of some of its settings."""
    space = sorted(template.settings(workload, MACHINE), key=str)
    func = function(workload)
    step = max(1, len(space) // 4)
    texts = [
        template.write(func, workload, knobs, TARGET).mod.script(show_meta=False)
        for knobs in space[::step]
    ]
    names = [json.dumps(asdict(knobs), sort_keys=True) for knobs in space]
    return hashlib.sha256("\n".join([*names, *texts]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_a_changed_template_has_another_version(name: str) -> None:
    """If this fails, raise the template's ``version`` and write the new pair to the file."""
    template = cpu.TEMPLATES[name]
    now = {"version": template.version, "hash": fingerprint(template, WORKLOADS[name])}
    assert json.loads(HASHES.read_text())[name] == now


def test_a_change_changes_the_hash() -> None:
    template, workload = cpu.TEMPLATES["cpu.conv2d"], WORKLOADS["cpu.conv2d"]
    other = replace(workload, layers=(replace(DENSE, activation=Activation("relu6")),))
    assert fingerprint(template, other) != fingerprint(template, workload)


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_the_default_comes_first_and_each_setting_once(name: str) -> None:
    template, workload = cpu.TEMPLATES[name], WORKLOADS[name]
    space = template.space(workload, MACHINE)
    assert space[0] == template.default(workload, MACHINE)
    assert len(set(space)) == len(space) > 20
    assert all(template.contains(workload, knobs, MACHINE) for knobs in space[1::7])
    texts = [json.loads(json.dumps(asdict(knobs))) for knobs in space[::7]]
    assert [template.read_knobs(text) for text in texts] == space[::7]


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_defaults_are_members_of_the_space(name: str) -> None:
    template, workload = cpu.TEMPLATES[name], WORKLOADS[name]
    assert template.contains(workload, template.default(workload, MACHINE), MACHINE)


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_settings_drawn_from_the_space_can_be_written(name: str) -> None:
    template, workload = cpu.TEMPLATES[name], WORKLOADS[name]
    space = template.space(workload, MACHINE)
    func = function(workload)
    for index in np.random.default_rng().choice(len(space), 12, replace=False):
        assert template.write(func, workload, space[index], TARGET) is not None


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_features_are_numbers_under_the_same_names(name: str) -> None:
    template, workload = cpu.TEMPLATES[name], WORKLOADS[name]
    rows = [
        template.features(workload, knobs, MACHINE)
        for knobs in template.space(workload, MACHINE)[::9]
    ]
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert all(np.isfinite(list(row.values())).all() and row["cycles"] > 0 for row in rows)




def rule_of(name: str, func: tirx.PrimFunc) -> TunableRule:
    """The rule that takes the function of a template."""
    rules = [rule for rule in cpu.RULES if isinstance(rule, TunableRule)]
    return next(rule for rule in rules if rule.workload(func, TARGET) is not None)


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_closed_with_the_defaults_decisions_an_open_function_is_the_default(name: str) -> None:
    template, func = cpu.TEMPLATES[name], function(WORKLOADS[name])
    rule, info = rule_of(name, func), CPUInfo.from_target(TARGET)
    workload = rule.workload(func, TARGET)
    space, default = template.space(workload, info), template.default(workload, info)
    opened = s_tir.Schedule(func)
    sample_knobs(opened, template, rule.workload_json(workload), space, default)
    assert not tvm_ffi.structural_equal(opened.mod["main"], func)
    again = s_tir.Schedule(func)
    Trace.apply_json_to_schedule(opened.trace.as_json(), again)
    wanted = template.write(func, workload, default, TARGET).mod
    for one in (opened, again):
        closed = rule.apply(one.mod["main"], TARGET, False)
        tvm.ir.assert_structural_equal(closed.mod, wanted)


@pytest.mark.parametrize("name", cpu.TEMPLATES)
def test_decisions_are_drawn_from_the_space(name: str) -> None:
    func = function(WORKLOADS[name])
    rule, info = rule_of(name, func), CPUInfo.from_target(TARGET)
    workload = rule.workload(func, TARGET)
    templates = rule.templates(workload, info)
    drawn = set()
    for _ in range(4):
        opened = rule.apply(func, TARGET, True)
        assert len(opened) == len(templates)
        for sch, template in zip(opened, templates, strict=True):
            drawn_func = sch.mod["main"]
            tvm.ir.assert_structural_equal(without_decisions(drawn_func), func)
            found, values = read_setting(decisions_of(drawn_func), templates)
            assert found is template
            assert template.contains(workload, template.read_knobs(values), info)
            drawn.add(json.dumps(values))
    assert len(drawn) > 1
    assert rule.apply(opened[0].mod["main"], TARGET, False) is not None


def decide(sch: s_tir.Schedule, key: str, value: int) -> None:
    """Put another decision in the place of one."""
    root = sch.get_sblock("root")
    sch.unannotate(root, key)
    sch.annotate(root, key, value)


def test_decisions_that_are_not_in_the_space_are_refused() -> None:
    func = function(WORKLOADS["cpu.conv2d"])
    sch = rule_of("cpu.conv2d", func).apply(func, TARGET, True)[0]
    decide(sch, f"{PREFIX}pixels", 999)
    with pytest.raises(OpError, match="pixels=999.* is not in the space of conv 3x3 32->64"):
        cpu.Conv2D().apply(sch.mod["main"], TARGET, False)
    decide(sch, VERSION, 999)
    with pytest.raises(OpError, match="for version 999 of 'cpu.conv2d'; expected cpu.conv2d 1"):
        cpu.Conv2D().apply(sch.mod["main"], TARGET, False)
    assert cpu.Pack().apply(func, TARGET, True) is None
