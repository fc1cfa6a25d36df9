# SPDX-License-Identifier: Apache-2.0
"""``explain`` for GPUs: kernels with our passes and without, reductions, resources."""

from __future__ import annotations

import io

import pytest
from gpu_onnx import attention, convolutions, long_sums
from rich.console import Console
from small_onnx import small_model

from tvm_fusion.compiler.explain import explain, explain_kernels, explain_kernels_table
from tvm_fusion.errors import TargetError


def text_of(table: object) -> str:
    console = Console(width=250, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.slow
def test_launches_are_those_of_the_functions_and_fewer_than_without_us() -> None:
    report = explain_kernels(convolutions(), "opencl")
    functions = report["functions"]
    assert report["launches"] == sum(use["launches"] for use in functions)
    assert report["launches"] < report["stock_launches"]
    assert all(use["launches"] >= use["calls"] >= 1 for use in functions)
    assert len({use["name"] for use in functions}) == len(functions)
    assert "none" not in {use["rule"] for use in functions}


@pytest.mark.slow
def test_reductions_are_counted() -> None:
    reductions = explain_kernels(attention(), "opencl")["reductions"]
    # The layer norm has two reductions; softmax has a maximum and a sum.
    assert (reductions["rewritten"], reductions["fused"]) == (4, 4)
    assert [group["kind"] for group in reductions["groups"]] == ["chain", "chain"]
    none = explain_kernels(small_model(), "opencl")["reductions"]
    assert none == {"fused": 0, "rewritten": 0, "groups": []}


@pytest.mark.slow
def test_resources_belong_to_the_kernels_of_their_functions() -> None:
    report = explain_kernels(convolutions(), "cuda -arch=sm_90", resources=True)
    for use in report["functions"]:
        assert len(use["kernels"]) * use["calls"] == use["launches"]
        for name, kernel in use["kernels"].items():
            assert name.startswith(use["name"]) and kernel["registers"] > 0
    text = text_of(explain_kernels_table(report, "net"))
    assert "registers" in text and "spilled B" in text


def test_the_table_has_a_row_for_each_function() -> None:
    report = explain_kernels(small_model("n"), "opencl", {"n": 2})
    text = text_of(explain_kernels_table(report, "small"))
    for use in report["functions"]:
        assert any(use["name"] in line and use["rule"] in line for line in text.splitlines())
    assert f"{report['launches']} kernels a call, {report['stock_launches']} by TVM's own" in text
    assert "registers" not in text


@pytest.mark.parametrize(
    ("target", "resources", "message"),
    [
        ("native", False, "expected a GPU; got a target of kind 'llvm'"),
        ("opencl", True, "resources of kernels are known for 'cuda'; got .* 'opencl'"),
    ],
)
def test_other_targets_are_refused(target: str, resources: bool, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        explain_kernels(small_model(), target, resources=resources)


@pytest.mark.slow
def test_pairs_of_convolutions_are_listed() -> None:
    report = explain_kernels(small_model(), "opencl", fuse="all")
    assert any(pair["fused"] for pair in report["pairs"])
    assert report["pairs"] == explain(small_model(), "opencl", fuse="all")["pairs"]
    apart = explain_kernels(small_model(), "opencl", fuse="none")
    assert not any(pair["fused"] for pair in apart["pairs"])
    assert apart["launches"] > report["launches"]


@pytest.mark.slow
def test_a_machine_decides_and_its_times_are_shown() -> None:
    """No GPU is needed: the architecture is that of the machine."""
    report = explain_kernels(long_sums(), "cuda", machine="l4")
    assert "sm_89" in report["target"] and report["machine"] == "NVIDIA L4"
    found = [one for one in report["decisions"] if one["decision"] in ("split", "finish")]
    assert found and all("float32, M 3, N 60000" in one["subject"] for one in found)
    assert all(len(one["seconds"]) >= 2 and one["source"] == "model" for one in found)
    text = text_of(explain_kernels_table(report))
    assert found[0]["chosen"] in text and "no time was measured on a GPU" in text
    plain = explain_kernels(long_sums(), "cuda -arch=sm_89")
    assert plain["decisions"] == [] and plain["machine"] is None
