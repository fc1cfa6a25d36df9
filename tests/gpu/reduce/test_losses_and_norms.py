# SPDX-License-Identifier: Apache-2.0
"""Losses and RMS norms of models: numbers, and kernels that read their rows once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx_reference import run_onnx
from relax_on_opencl import RelaxOnOpenCL
from tvm import tirx
from tvm.target import Target

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.configure import read_configured
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options, optimize, phases, run_phases
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

OPENCL = resolve("opencl")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Shape = tuple[int, int]
FEW, MANY = (18, 17_003), (70, 70_003)  # rows of the first are long for OpenCL


def model(
    nodes: list, inputs: dict[str, tuple[int, ...]], outputs: str, constants: dict[str, np.ndarray]
) -> ModelProto:
    infos = [
        helper.make_tensor_value_info(name, INT64 if name == "labels" else FLOAT, shape)
        for name, shape in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", infos, results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def loss(**attributes: object) -> list:
    return [helper.make_node("SoftmaxCrossEntropyLoss", ["x", "labels"], ["y"], **attributes)]


def labels(shape: Shape) -> np.ndarray:
    return np.arange(shape[0]) * 20011 % shape[1]


def inputs(shape: Shape) -> dict[str, tuple[int, ...]]:
    return {"x": shape, "labels": shape[:1]}


LOSSES: dict[str, Callable[[Shape], ModelProto]] = {
    "input labels": lambda shape: model(loss(reduction="none"), inputs(shape), "y", {}),
    "constant labels": lambda shape: model(
        loss(reduction="mean"), {"x": shape}, "y", {"labels": labels(shape)}
    ),
    "two operators": lambda shape: model(
        [
            helper.make_node("LogSoftmax", ["x"], ["p"], axis=-1),
            helper.make_node("NegativeLogLikelihoodLoss", ["p", "labels"], ["y"], reduction="sum"),
        ],
        inputs(shape),
        "y",
        {},
    ),
}


@pytest.mark.quick_cases("input labels")
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str, rng: np.random.Generator) -> None:
    graph = LOSSES[name](FEW)
    imported = import_onnx(graph)
    run = RelaxOnOpenCL(run_phases(imported.mod, OPENCL, phases(OPENCL, Options())), OPENCL)
    logits = rng.standard_normal(FEW, dtype="float32") * 20
    logits[1, 5:], logits[2, 7] = -np.inf, 3e38
    feed = {"x": logits, "labels": labels(FEW)}
    feed = {spec.name: feed[spec.name] for spec in imported.inputs}
    exact = logits.astype("float64")
    most = exact.max(1)
    each = (
        np.log(np.exp(exact - most[:, None]).sum(1)) + most - exact[np.arange(FEW[0]), labels(FEW)]
    )
    kept = np.isfinite(each)
    assert not kept.all()
    [found] = run(*feed.values())
    if name == "input labels":
        np.testing.assert_allclose(found, each.astype("float32"), 1e-5)
    else:
        assert np.isinf(found)
        feed["x"] = logits = np.where(np.isfinite(logits), logits, -50)
        logits[2, 7] = 0
        np.testing.assert_allclose(run(*feed.values())[0], run_onnx(graph, feed)[0], 1e-5)
    assert len(run.launches) == (1 if name == "input labels" else 2)


def of_torch() -> tvm.IRModule:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from tvm_fusion.torch.exported_program import import_exported_program

    class Loss(torch.nn.Module):
        def forward(self, x: Any, labels: Any) -> Any:
            return torch.nn.functional.cross_entropy(x, labels, reduction="none")

    given = torch.zeros(MANY), torch.zeros(MANY[0], dtype=torch.int64)
    return import_exported_program(torch.export.export(Loss(), given), None).mod


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_rows_of_logits_are_read_once(arch: str) -> None:
    """They are kept, on sm_90 by a cluster, or maximum and sum come from one pass."""
    target = resolve(f"cuda -arch={arch}")
    mods = [import_onnx(build(MANY)).mod for build in LOSSES.values()]
    mods.append(of_torch())
    for mod in mods:
        plan = phases(target, Options())
        del plan["schedule"]
        [group] = [
            found
            for func in run_phases(mod, target, plan).functions.values()
            if isinstance(func, tirx.PrimFunc)
            and (found := read_configured(func, GPUInfo.from_target(target))) is not None
            and found[0].reduced == MANY[1]
        ]
        assert group[1].kept or group[1].is_online
        assert (arch == "sm_80") == group[1].is_online


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [OPENCL, resolve("cuda -arch=sm_90")], ids=str)
def test_rms_norm_with_its_residual_is_one_kernel(target: Target, rng: np.random.Generator) -> None:
    nodes = [
        helper.make_node("Add", ["x", "residual"], ["z"]),
        helper.make_node("RMSNormalization", ["z", "gain"], ["y"], axis=-1),
    ]
    gain = rng.standard_normal(1000).astype("float32")
    graph = model(nodes, dict.fromkeys(("x", "residual"), (37, 1000)), "yz", {"gain": gain})
    mod = optimize(import_onnx(graph).mod, target)
    assert [use.rule for use in kernel_uses(mod)] == ["CoalescedReduce"]
    if target is OPENCL:
        x, residual = rng.standard_normal((2, 37, 1000)).astype("float32")
        x[3] *= 1e15
        total = x.astype("float64") + residual
        exact = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-5) * gain
        found, kept = RelaxOnOpenCL(mod, target)(x, residual)
        np.testing.assert_allclose(found, exact, 1e-5, 1e-5)
        np.testing.assert_array_equal(kept, x + residual)
