# SPDX-License-Identifier: Apache-2.0
"""Pairs of packed convolutions in tile registers: which become one call, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import tvm
from tvm import IRModule, relax
from tvm.target import Target

from relay_passes import PairInTiles
from relay_passes.op import conv2d, conv2d_pair
from schedules.cpu.core.machine import CPUInfo, described
from schedules.errors import OpError
from schedules.workload.conv2d import FusedConv2DWorkload
from tvm_fusion.compiler.targets import resolve


@pytest.fixture
def target() -> Iterator[Target]:
    """This CPU with tile registers."""
    found = resolve("native", 2)
    tiles = {"tiles": ("bfloat16",), "emulates_tiles": True}
    with described(found, replace(CPUInfo.from_target(found), **tiles)):
        yield found


def layer(data: relax.Expr, *parameters: relax.Expr, groups: int = 1, size: int = 1) -> relax.Call:
    return conv2d(
        data,
        *parameters,
        padding=[size // 2] * 4,
        groups=groups,
        activation="relu",
        data_layout="NCHW32c",
        out_layout="NCHW32c",
        in_channels=64,
        out_channels=64,
        out_dtype="bfloat16",
    )


def network(form: str = "plain", joined: bool = False) -> IRModule:
    """A depthwise layer, a 1x1 one, and another 1x1 one that also reads the former if asked to."""
    shapes = {
        "x": ((1, 2, 56, 56, 32), "bfloat16"),
        "w1": ((2, 3, 3, 32), "bfloat16"),
        "b1": ((2, 32), "float32"),
        "w2": ((2, 2, 1, 1, 16, 32, 2), "bfloat16"),
        "b2": ((2, 32), "float32"),
    }
    params = [relax.Var(n, relax.TensorType(s, dtype)) for n, (s, dtype) in shapes.items()]
    x, w1, b1, w2, b2 = params
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            start = layer(x, w1, b1, groups=64, size=3)
            mid = builder.emit(start, "mid")
            end = layer(mid, w2, b2)
            if joined:
                end = conv2d_pair(start, end)
            out = [builder.emit(end, "out")]
            out += [mid] if form == "read twice" else []
            found = builder.emit_output(out if len(out) > 1 else out[0])
        builder.emit_func_output(found)
    mod = builder.get()
    mod["main"] = relax.analysis.remove_all_unused(mod["main"])
    return mod


def report(mod: IRModule) -> list[dict]:
    return json.loads(str(mod.attrs["tvm_fusion.fusion_report"]))


def test_a_pair_becomes_one_call(target):
    before = network()
    found = PairInTiles("all", target)(before)
    tvm.ir.assert_structural_equal(found["main"], network(joined=True)["main"])
    tvm.ir.assert_structural_equal(before, network())
    tvm.ir.assert_structural_equal(PairInTiles("all", target)(found), found)
    [entry] = report(found)
    assert (entry["first"], entry["second"], entry["fused"]) == ("mid", "out", True)
    assert entry["layer1"] == "dw-conv 3x3 64->64 relu"
    assert entry["bytes_unfused"] - entry["bytes_fused"] == 2 * 2 * 64 * 56 * 56


def test_the_choice_is_the_users_or_that_of_the_cost_model(target):
    seen: list[FusedConv2DWorkload] = []

    def choose(workload: FusedConv2DWorkload, _: Target) -> bool:
        seen.append(workload)
        return False

    for fuse in ("none", choose):
        found = PairInTiles(fuse, target)(network())
        tvm.ir.assert_structural_equal(found["main"], network()["main"])
        assert not report(found)[0]["fused"]
    assert seen[0].dtype == "bfloat16" and seen[0].mid_size == (56, 56)
    reason = report(PairInTiles("auto", target)(network()))[0]["reason"]
    assert reason.startswith("predicted ")
    with pytest.raises(OpError, match="PairInTiles: fuse is 'some'; expected one of auto, all"):
        PairInTiles("some", target)


def test_what_is_left_alone(target):
    for mod in (network("read twice"), IRModule()):
        tvm.ir.assert_structural_equal(PairInTiles("all", target)(mod), mod)
    plain = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
    tvm.ir.assert_structural_equal(PairInTiles("all", plain)(network()), network())


def test_calls_that_are_no_pair_are_refused():
    mod = network()
    first, second = (binding.value for binding in mod["main"].body.blocks[0].bindings[:2])
    with pytest.raises(OpError, match="conv2d_pair: the calls are no pair; expected packed"):
        conv2d_pair(second, first)
