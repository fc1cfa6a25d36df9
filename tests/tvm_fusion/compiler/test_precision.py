# SPDX-License-Identifier: Apache-2.0
"""Models of float32 in float16 on GPUs: which ops become float16, the kernels, the numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import opencl
import pytest
import tvm
from gpu_onnx import attention, bottlenecks, convolutions, grouped
from onnx_reference import random_feed, relative_error, run_onnx
from relax_on_opencl import RelaxOnOpenCL
from small_onnx import small_model
from tensor_core_emulation import emulate_tensor_cores
from tvm import ir, relax

import tvm_fusion
from examples.transformers import bert_base
from schedules import attributes
from schedules.tir.expression_walk import op_name
from schedules.workload.conv2d import from_json
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.phases import gpu_phases
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.onnx.frontend import import_onnx

CUDA, OPENCL = "cuda -arch=sm_90", "opencl"


@pytest.fixture(scope="module")
def bert() -> tvm.IRModule:
    return import_onnx(bert_base(layers=1, vocabulary=100)).mod


def clipped() -> onnx.ModelProto:
    """ReLU6 between convolutions."""
    return small_model(size=9, channels=8)


def calls(mod: tvm.IRModule) -> list[relax.Call]:
    found: list[relax.Call] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            found.append(expr)

    relax.analysis.post_order_visit(mod["main"].body, visit)
    return found


def dtypes(call: relax.Call) -> set[str]:
    types = [argument.ty for argument in call.args]
    return {str(ty.dtype) for ty in types if isinstance(ty, relax.TensorType)}


def test_products_are_float16_summed_in_float32_and_norms_float32(bert: tvm.IRModule) -> None:
    target = resolve(CUDA)
    passes = gpu_phases(target, precision="fp16")["simplify"]
    found = calls(pipeline.run_phases(bert, target, {"simplify": passes}))
    products = [call for call in found if op_name(call) == "relax.matmul"]
    assert len(products) == 5  # attention is one function, its projections are one product
    assert all(dtypes(call) == {"float16"} for call in products)
    assert all(str(call.ty.dtype) == "float32" for call in products)
    sums = [call for call in found if "softmax" in op_name(call) or "mean" in op_name(call)]
    assert sums and all("float16" not in dtypes(call) for call in sums)
    casts = [call for call in found if op_name(call) == "relax.astype"]
    assert not any(isinstance(call.args[0], ir.Constant) for call in casts)


@pytest.mark.slow
def test_kernels_of_tensor_cores_and_one_more_launch(bert: tvm.IRModule) -> None:
    """The norm between products of float32 is no kernel of its own."""
    target = resolve(CUDA)
    whole, half = (
        pipeline.optimize(bert, target, Options(precision=name)) for name in ("fp32", "fp16")
    )
    launches = [sum(use.launches for use in kernel_uses(mod)) for mod in (half, whole)]
    assert launches[0] - launches[1] == 1
    products = [use.name for use in kernel_uses(half) if use.rule == "Matmul"]
    on_tensor_cores = [name for name in products if "ptx.mma" in half[name].script()]
    assert len(products) - len(on_tensor_cores) == 1  # the pooler has one row
    main = half["main"]
    assert [str(ty.dtype) for ty in main.ret_ty.fields] == ["float32", "float32"]


@pytest.mark.quick_cases("convolutions")
@pytest.mark.parametrize("make", [attention, convolutions, clipped])
def test_numbers(make: Callable[..., onnx.ModelProto], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl, "refuse_half_arithmetic", lambda kernel: None)
    model, target = make(), resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(precision="fp16"))
    halves = [use.name for use in kernel_uses(mod) if "float16" in mod[use.name].script()]
    assert halves
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    [expected] = run_onnx(model, feed)
    [actual] = RelaxOnOpenCL(mod, target)(*feed.values())
    assert 1e-6 < relative_error(actual, expected) < 1e-2


@pytest.mark.slow
def test_products_of_a_model_are_tf32(bert: tvm.IRModule) -> None:
    """Those of more than eight rows; nothing is converted."""
    target, found = resolve("cuda -arch=sm_80"), {}
    for precision in ("fp32", "tf32"):
        mod = pipeline.optimize(bert, target, Options(precision=precision))
        texts = [mod[use.name].script() for use in kernel_uses(mod) if use.rule == "Matmul"]
        found[precision] = sum("tf32" in text for text in texts)
        assert not any("float16" in text for text in texts)
    assert found["fp32"] == 0 and found["tf32"] >= 4


@pytest.mark.slow
def test_convolutions_of_a_model_are_tf32() -> None:
    """The dense ones; they and the depthwise one between them are in blocks of 16 bytes."""
    target, found = resolve("cuda -arch=sm_80"), {}
    for precision in ("fp32", "tf32"):
        mod = pipeline.optimize(
            import_onnx(convolutions()).mod, target, Options(precision=precision)
        )
        texts = [mod[use.name].script() for use in kernel_uses(mod)]
        found[precision] = [
            sum(part in text for text in texts) for part in ("round_tf32", "NCHW4c")
        ]
    assert found["fp32"][0] == 0 and found["fp32"][1] > 0
    assert found["tf32"] == [2, found["fp32"][1]]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_numbers_of_convolutions_on_tensor_cores(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated kernels compute them; every pair that can be is one kernel."""
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(opencl, "refuse_half_arithmetic", lambda kernel: None)
    model, target = bottlenecks(), resolve(OPENCL)
    options = Options(fuse="all", precision=precision)
    mod = pipeline.optimize(import_onnx(model).mod, target, options)
    rules = [use.rule for use in kernel_uses(mod)]
    assert rules.count("FusedConv2D") == 2, rules
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    [expected] = run_onnx(model, feed)
    [actual] = RelaxOnOpenCL(mod, target)(*feed.values())
    assert 1e-6 < relative_error(actual, expected) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["none", "all"])
def test_networks_with_groups_are_packed(fuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated kernels compute them; each layer has its channels in blocks, pairs included."""
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(opencl, "refuse_half_arithmetic", lambda kernel: None)
    model, target = grouped(), resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse=fuse, precision="fp16"))
    attrs = [mod[use.name].attrs for use in kernel_uses(mod)]
    kernels = [from_json(str(a[attributes.WORKLOAD])) for a in attrs if attributes.WORKLOAD in a]
    assert {kernel.out_layout for kernel in kernels} == {"NCHW8c"}
    assert any(len(kernel.layers) == 2 for kernel in kernels) is (fuse == "all")
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    [expected] = run_onnx(model, feed)
    [actual] = RelaxOnOpenCL(mod, target)(*feed.values())
    assert 1e-6 < relative_error(actual, expected) < 1e-2


def test_where_it_has_no_effect() -> None:
    with pytest.raises(TargetError, match="precision='fp16' is for GPUs"):
        tvm_fusion.compile(small_model(), precision="fp16")
    for target in (OPENCL, "cuda -arch=sm_75"):
        with pytest.raises(TargetError, match="precision='tf32' has no effect on"):
            pipeline.phases(resolve(target), Options(precision="tf32"))
    with pytest.raises(TargetError, match="precision='bf16' is for CPUs"):
        pipeline.phases(resolve("cuda -arch=sm_90"), Options(precision="bf16"))
    for target in (CUDA, "native"):
        with pytest.raises(TargetError, match="precision is 'int8'; expected 'fp32' or"):
            tvm_fusion.compile(small_model(), target, precision="int8")
