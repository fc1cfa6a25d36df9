# SPDX-License-Identifier: Apache-2.0
"""``explain``: every candidate pair, with numbers that add up, and as a table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console
from small_onnx import dense_model, small_model

from schedules.cost.machine import load_machine
from schedules.workload.conv2d import Activation, ConvLayer, FusedConv2DWorkload
from tvm_fusion.compiler.explain import explain, explain_table
from tvm_fusion.errors import InvalidModelError, OpError, TargetError

DEPTHWISE = ConvLayer(8, 8, (3, 3), padding=(1,) * 4, groups=8, activation=Activation("relu6"))
POINTWISE = ConvLayer(8, 6, (1, 1))


def table_text(report: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explain_table(report, "title"))
    return capture.get()


def test_every_pair_comes_with_its_costs() -> None:
    first, second = explain(small_model(), fuse="none")["pairs"]
    assert (first["layer1"], first["layer2"]) == ("conv 3x3 3->8 relu", "dw-conv 3x3 8->8 relu6")
    assert (second["layer1"], second["layer2"]) == (str(DEPTHWISE), str(POINTWISE))
    assert not first["fused"] and not second["fused"]
    workload = FusedConv2DWorkload(1, 12, 12, DEPTHWISE, POINTWISE)
    assert second["input_shape"] == [1, 8, 12, 12]
    assert second["flops"] == workload.flops()
    assert second["bytes_unfused"] == workload.bytes_unfused()
    assert second["bytes_fused"] == workload.bytes_fused()
    assert second["intensity_fused"] == pytest.approx(workload.flops() / workload.bytes_fused())


def test_fuse_and_target_decide() -> None:
    pairs = explain(small_model(), fuse="all")["pairs"]
    assert [pair["fused"] for pair in pairs] == [False, True]
    chosen = explain(small_model(), "x86-64-v3", fuse=lambda workload, target: True)["pairs"]
    assert chosen[1]["fused"] and "caller" in chosen[1]["reason"]


def test_the_reason_names_winograd_where_it_decides() -> None:
    model = dense_model(channels=64, size=56)
    (chosen,), (direct,) = explain(model)["pairs"], explain(model, winograd="never")["pairs"]
    assert "separate, layer 1 can use Winograd's algorithm" in chosen["reason"]
    assert "Winograd" not in direct["reason"]


def test_shapes_bind_open_dimensions() -> None:
    pairs = explain(small_model("N"), shapes={"N": 3})["pairs"]
    assert [pair["input_shape"][0] for pair in pairs] == [3, 3]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidModelError, match="not ONNX"):
        explain(b"junk")
    with pytest.raises(TargetError, match="nonsense"):
        explain(small_model(), "nonsense")
    with pytest.raises(OpError, match="fuse is 'some'"):
        explain(small_model(), fuse="some")
    with pytest.raises(OpError, match="winograd is 'some'"):
        explain(small_model(), winograd="some")


def test_table_has_a_row_a_pair_and_the_sum() -> None:
    report = explain(small_model(), fuse="all")
    pairs, text = report["pairs"], table_text(report)
    row = next(line for line in text.splitlines() if "conv 1x1 8->6" in line)
    assert "1x8x12x12" in row and "yes" in row and f"{pairs[1]['flops'] / 1e6:.2f}" in row
    saved = pairs[1]["bytes_unfused"] - pairs[1]["bytes_fused"]
    assert f"1 of 2 pairs fused; that saves {saved / 1e6:.2f} MB of memory traffic a run" in text


def test_table_of_nothing_and_of_unknown_costs() -> None:
    assert "0 of 0 pairs fused" in table_text({"pairs": [], "functions": []})
    names = ("flops", "bytes_unfused", "bytes_fused", "intensity_unfused", "intensity_fused")
    report = explain(small_model(), fuse="none")
    unknown = report["pairs"][0] | dict.fromkeys(names)
    assert table_text(report | {"pairs": [unknown]}).count(" ? ") == len(names)


def test_a_model_without_pairs_has_no_rows() -> None:
    model = small_model()
    del model.graph.node[1:]
    model.graph.node[0].output[0] = "scores"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 8
    assert explain(model)["pairs"] == []


def measured(tmp_path, fused: float):
    """A Zen 4 whose fused kernels take so many times what is predicted, and Winograd's nine."""
    data = load_machine("znver4").to_json()
    for op, factor in (("fused_conv2d", fused), ("winograd_conv2d", 9.0)):
        data["figures"][f"cpu.{op}.factor"] = {"value": factor, "origin": "test"}
    path = tmp_path / f"{fused}.json"
    path.write_text(json.dumps(data))
    return path


def test_measured_ratios_decide_and_are_shown(tmp_path) -> None:
    model, target = dense_model(channels=64, size=56), "llvm -mcpu=znver4 -num-cores=2"
    slow = explain(model, target, machine=measured(tmp_path, fused=9.0))
    quick = explain(model, target, machine=measured(tmp_path, fused=0.1))
    assert [report["pairs"][0]["fused"] for report in (slow, quick)] == [False, True]
    fuse, winograd = (
        [one for one in slow["decisions"] if one["decision"] == name]
        for name in ("fuse", "winograd")
    )
    assert fuse[0]["chosen"] == "separate" and {one["chosen"] for one in winograd} == {"direct"}
    assert fuse[0]["seconds"]["fused"] > 5 * fuse[0]["seconds"]["separate"]
    text = table_text(slow)
    assert f"{fuse[0]['seconds']['separate'] * 1e6:.1f}" in text and "Zen 4" in text


@pytest.mark.slow
def test_decisions_without_a_machine_are_at_a_nominal_clock() -> None:
    report = explain(dense_model(channels=64, size=56), "llvm -mcpu=znver4 -num-cores=2")
    assert report["machine"] is None
    assert {one["decision"] for one in report["decisions"]} == {"fuse", "winograd"}
    assert "nominal clock" in table_text(report)


def test_a_machine_of_another_cpu_is_refused() -> None:
    with pytest.raises(TargetError, match="the machine is 'znver3', and the target for 'znver4'"):
        explain(small_model(), "llvm -mcpu=znver4", machine="znver3")
    with pytest.raises(TargetError, match="'znver3' is a CPU, and the target is of kind 'cuda'"):
        explain(small_model(), "cuda -arch=sm_80", machine="znver3")
