# SPDX-License-Identifier: Apache-2.0
"""Records of forms: ``FuseConv2D``, ``ChooseWinograd`` and the choice over a chain follow them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes import ChooseWinograd, FuseConv2D, FuseEpilogue, PackLayout
from schedules.cost.decisions import recorded
from schedules.cpu.conv2d.forms import FORMS, Form, form_key, pair_workload, recorded_form
from schedules.cpu.core.machine import CPUInfo
from schedules.tuning.records import Record, Records
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, FusedConv2DWorkload

TARGET = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
MACHINE = CPUInfo.from_target(TARGET)
SIZE, CHANNELS = 28, 32
DENSE = ConvLayer(CHANNELS, CHANNELS, (3, 3), padding=(1, 1, 1, 1), activation=Activation("relu"))
LAYER = Conv2DKernel((DENSE,), 1, SIZE, SIZE)
TITLES = {0: "direct", 2: "Winograd 2x2", 4: "Winograd 4x4"}
FUSED, APART = Form(fused=True), Form()


def form_record(workload: Conv2DKernel, form: Form, **times: float) -> Record:
    named = {name.replace("_", " "): seconds for name, seconds in times.items()}
    key = form_key(workload, MACHINE)
    return Record.of_key(key, FORMS, form, (2e-5, 1e-5), trials=3, times=named)


def records(*found: Record) -> Records:
    return Records(("forms.jsonl", one) for one in found)


def chain(count: int) -> tvm.IRModule:
    """So many 3x3 convolutions with ReLU in a row."""
    generator = np.random.default_rng(2)
    data = relax.Var("x", relax.TensorType((1, CHANNELS, SIZE, SIZE), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        with builder.dataflow():
            value = data
            for _ in range(count):
                weight = generator.standard_normal((CHANNELS, CHANNELS, 3, 3), "float32")
                called = relax.op.nn.conv2d(value, relax.const(weight), padding=[1, 1, 1, 1])
                value = builder.emit(relax.op.nn.relu(builder.emit(called)))
            output = builder.emit_output(value)
        builder.emit_func_output(output)
    return builder.get()


def pair(first: bool = False, last: bool = False) -> Conv2DKernel:
    """Workload of a pair of the chain."""
    both = FusedConv2DWorkload(1, SIZE, SIZE, DENSE, DENSE, plain_data=first, plain_out=last)
    return pair_workload(both)


def report(mod: tvm.IRModule) -> list[dict]:
    return json.loads(mod.attrs["tvm_fusion.fusion_report"])


@pytest.mark.parametrize("form", [FUSED, APART, Form(tile2=4)])
def test_fusion_follows_a_record(form: Form) -> None:
    found = records(form_record(pair(True, True), form, fused=1e-5))
    with recorded() as comparisons:
        mod = FuseConv2D(target=TARGET, records=found)(chain(2))
    (entry,) = report(mod)
    assert entry["fused"] is form.fused
    assert entry["reason"].startswith("by record: ")
    assert entry["record"]["source"] == "forms.jsonl" and entry["record"]["knobs"] == asdict(form)
    (comparison,) = comparisons
    assert comparison.source == "forms.jsonl" and comparison.chosen == form.title(2)


@pytest.mark.parametrize("fuse", ["none", "all", lambda pair, target: True])
def test_only_auto_follows_a_record(fuse: object) -> None:
    found = records(form_record(pair(True, True), FUSED if fuse == "none" else APART))
    mod = FuseConv2D(fuse, TARGET, records=found)(chain(2))
    assert report(mod)[0]["fused"] is (fuse != "none")


def test_without_winograd_the_fastest_of_the_others_counts() -> None:
    times = {"fused": 3e-5, "apart: direct, direct": 2e-5}
    winner = replace(form_record(pair(True, True), Form(False, False, 4, 4)), times=times)
    found = FuseConv2D("auto", TARGET, "never", records(winner))(chain(2))
    assert not report(found)[0]["fused"] and "us" in report(found)[0]["reason"]
    slow = replace(winner, times=times | {"apart: direct, direct": 4e-5})
    assert report(FuseConv2D("auto", TARGET, "never", records(slow))(chain(2)))[0]["fused"]
    untimed = records(replace(winner, times={}))
    plain = FuseConv2D("auto", TARGET, "never")(chain(2))
    tvm.ir.assert_structural_equal(FuseConv2D("auto", TARGET, "never", untimed)(chain(2)), plain)


def saved(first: float, second: float, third: float) -> Records:
    """Records of the three pairs of a chain of four layers: microseconds that fusion saves."""
    works = pair(first=True), pair(), pair(last=True)
    return records(
        *(
            replace(
                form_record(work, FUSED, fused=1e-5),
                times={"fused": 1e-5, "apart: direct, direct": 1e-5 + 1e-6 * gain},
            )
            for work, gain in zip(works, (first, second, third), strict=True)
        )
    )


@pytest.mark.parametrize(
    ("gains", "fused"),
    [
        ((3, 4, 3), [True, False, True]),
        ((3, 9, 3), [False, True, False]),
        ((5, 1, 0.5), [True, False, True]),
    ],
)
def test_a_chain_saves_the_most_measured_time(gains: tuple, fused: list[bool]) -> None:
    mod = FuseConv2D(target=TARGET, records=saved(*gains))(chain(4))
    entries = report(mod)
    assert [entry["fused"] for entry in entries] == fused
    refused = [entry["reason"] for entry in entries if not entry["fused"]]
    assert all(reason.endswith("which saves more time by record") for reason in refused)


@pytest.mark.parametrize("tile", TITLES)
def test_winograd_follows_a_record(tile: int) -> None:
    found = records(form_record(LAYER, Form(tile1=tile)))
    packed = PackLayout(TARGET)(FuseEpilogue()(chain(1)))
    with recorded() as comparisons:
        mod = ChooseWinograd("auto", TARGET, found)(packed)
    assert ("winograd_conv2d" in mod.script()) is (tile > 0)
    assert f"tile={tile}" in mod.script() or not tile
    assert [one.chosen for one in comparisons] == [TITLES[tile]]
    named = json.loads(mod.attrs["tvm_fusion.recorded_layers"])
    assert [(one["source"], one["knobs"]["tile1"]) for one in named] == [("forms.jsonl", tile)]
    never = ChooseWinograd("never", TARGET, found)(packed)
    assert "winograd_conv2d" not in never.script()


FOREIGN = [
    {"cpu": "znver3"},
    {"vector_bits": 256},
    {"threads": 1},
    {"version": FORMS.version + 1},
    {"template": "cpu.conv2d"},
    {"knobs": asdict(Form(tile1=3))},
    {"knobs": asdict(Form(tile2=2))},
    {"knobs": asdict(Form(fused=True))},
    {"knobs": asdict(Form(planes=True))},
    {"knobs": {"fused": 1}},
]


@pytest.mark.parametrize("changes", FOREIGN)
def test_a_record_counts_only_if_its_form_is_legal_here(changes: dict) -> None:
    good = form_record(LAYER, Form(tile1=2))
    assert recorded_form(records(good), LAYER, MACHINE) is not None
    assert recorded_form(records(replace(good, **changes)), LAYER, MACHINE) is None


def test_planes_are_legal_where_they_can_be_computed() -> None:
    depthwise = ConvLayer(CHANNELS, CHANNELS, (3, 3), padding=(1, 1, 1, 1), groups=CHANNELS)
    layers = depthwise, ConvLayer(CHANNELS, 64, (1, 1))
    plain = Conv2DKernel(layers, 1, SIZE, SIZE, plain_data=True, plain_out=True)
    legal = set(FORMS.settings(plain, MACHINE))
    assert legal == {APART, FUSED, Form(fused=True, planes=True)}
    inside = replace(plain, plain_data=False, plain_out=False)
    assert set(FORMS.settings(inside, MACHINE)) == {APART, FUSED}
    grouped = replace(plain, layers=(depthwise, depthwise))
    assert set(FORMS.settings(grouped, MACHINE)) == {APART}
    assert len(set(FORMS.settings(pair(), MACHINE))) == 10  # 3 x 3 tiles, and fused
