# SPDX-License-Identifier: Apache-2.0
"""A compilation that fails names the nodes of the model, and says what to do."""

from __future__ import annotations

import re
from typing import Any

import onnx
import pytest
import tvm
from between_onnx import Between, between
from onnx_cases import normal, onnx_model
from tvm import relax

import tvm_fusion
from schedules.cpu.loops.softmax import Softmax
from schedules.errors import reason
from schedules.schedule_rule import STRICT
from tvm_fusion.compiler import build_kernels, failures
from tvm_fusion.errors import CompilationError, OpError, TVMFusionError, UnsupportedOperatorError

ADVICE = "please report the model; until then try fuse='none'"


def middle(build: Between, x: str) -> tuple[str, int]:
    total = build.node("Add", f"{x} {build.node('Relu', build.conv(x, 8, 8, 3))}")
    scores = build.node("Softmax", total, axis=1)
    return build.node("Mul", f"{build.node('ReduceMean', scores, axes=[2, 3])} {total}"), 8


def named_model() -> onnx.ModelProto:
    """Every node is called after its operator, and numbered."""
    model = between(middle, 8)
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type.lower()}_{number}"
    return model


def fail_on(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Let the generation of the kernel's code fail."""
    compiled = build_kernels._compiled

    def fail(group: Any, target: tvm.target.Target) -> tvm.runtime.Module:
        if any(var.name_hint == kernel for var in group):
            raise ValueError("LLVM ERROR: Cannot select: t3")
        return compiled(group, target)

    monkeypatch.setattr(build_kernels, "_compiled", fail)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kernel", "shape", "nodes"),
    [
        ("softmax", "float32[1, 8, 9, 9], ", "node 'softmax_5' (Softmax)"),
        ("coalesced_mean", "float32[1, 8, 1, 1]", "node 'reducemean_6' (ReduceMean)"),
        ("conv2d2", "float32[3, 8], ", "node 'conv_8' (Conv)"),
        (
            "fused_pack_multiply",
            "float32[1, 1, 9, 9, 8]",
            "node 'reducemean_6' (ReduceMean), node 'mul_7' (Mul)",
        ),
    ],
)
def test_code_that_cannot_be_generated(
    monkeypatch: pytest.MonkeyPatch, kernel: str, shape: str, nodes: str
) -> None:
    fail_on(monkeypatch, kernel)
    with pytest.raises(CompilationError) as caught:
        tvm_fusion.compile(named_model(), "x86-64-v3", threads=1)
    text = str(caught.value)
    assert f"failed on the kernel {kernel!r}: LLVM ERROR: Cannot select: t3; its arg" in text
    assert shape in text.partition(" it comes from ")[0]
    found = re.search("it comes from (.*); the model is valid", text)
    assert found and found[1].endswith(nodes)
    assert text.count(ADVICE) == 1


@pytest.mark.parametrize("error", [IndexError("no such loop"), OpError("too long: use less")])
def test_a_schedule_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setenv(STRICT, "1")
    monkeypatch.setattr(Softmax, "schedule", fail)
    is_ours = isinstance(error, TVMFusionError)
    with pytest.raises(OpError if is_ours else CompilationError, match=str(error)) as caught:
        tvm_fusion.compile(named_model(), threads=1)
    assert str(caught.value).count("it comes from node 'softmax_5' (Softmax)") == 1
    assert (ADVICE in str(caught.value)) != is_ours


def test_a_pass_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise tvm.error.InternalError("Check failed: a == b\nError in pass: ...")

    monkeypatch.setattr(failures, "_note", fail)
    message = f"^the stage 'lower' failed: Check failed: a == b; the model is valid, .*{ADVICE}"
    with pytest.raises(CompilationError, match=message):
        tvm_fusion.compile(named_model(), threads=1)


def test_nodes_of_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay_passes.program.lowering.schedule_function", _failing)
    with pytest.raises(OpError, match="it comes from node .*_"):
        tvm_fusion.compile(named_model(), "cuda -arch=sm_80", threads=1)


def _failing(name: str, *_: object) -> None:
    raise OpError(f"no such loop, in the kernel {name!r}")


def test_the_importer_tells_of_ops_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that do not fit, as TVM words it, in a node that ONNX accepts."""
    printed = str(tvm.ir.Op.get("relax.add"))
    assert printed.startswith("ir.Op(span=None")
    error = ValueError(f"In {printed},\n the shape is R.shape([2, 3]) and T.int64(4)")
    assert reason(error) == "In add, the shape is [2, 3] and 4"
    assert reason(ValueError("ab " * 1000), 50).endswith("ab ab ab")
    assert len(reason(ValueError("ab " * 1000), 50)) <= 51

    def fail(*_: object) -> relax.Expr:
        raise error

    monkeypatch.setattr("tvm_fusion.onnx.translate.translate_sizes", fail)
    node = onnx.helper.make_node("Add", ["x", "c"], ["y"], name="sum")
    model = onnx_model([node], {"x": (2, 3)}, ["y"], {"c": normal(3)})
    message = r"^node 'sum' \(Add\) cannot be imported: In add, the shape is \[2, 3\] and 4$"
    with pytest.raises(UnsupportedOperatorError, match=message):
        tvm_fusion.compile(model, threads=1)
