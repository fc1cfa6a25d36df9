# SPDX-License-Identifier: Apache-2.0
"""Models on a real NVIDIA GPU: numbers, files, tensors that stay there. Only where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from gpu_onnx import attention, convolutions, long_softmax, long_sums
from onnx_reference import assert_same, random_feed, run_onnx
from reduce_cases import Case, check, check_workspace, random_data, reference
from small_onnx import small_model
from tvm.target import Target

import tvm_fusion
from examples.benchmarks.gpu.offline.kernel_cases import (
    KernelCase,
    pair,
    product,
    small_cases,
)
from examples.benchmarks.gpu.offline.kernel_cases import (
    attention as attention_case,
)
from examples.benchmarks.gpu.offline.stages import random_arrays
from examples.benchmarks.gpu.with_tvm.onnx_case import onnx_model
from schedules.workload.workspace_layout import PLACES
from tvm_fusion.codegen.nvrtc import tvm_compiler
from tvm_fusion.errors import TargetError
from tvm_fusion.runtime.tvm_runtime import device_of, find_device


def has_gpu() -> bool:
    try:
        find_device("cuda")
    except TargetError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("build", [small_model, convolutions, attention])
def test_models_run_and_are_loaded(build: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    model = build()
    compiled = tvm_fusion.compile(model, "cuda")
    compiled.save(tmp_path / "model.so")
    loaded = tvm_fusion.load(tmp_path / "model.so")
    for seed in np.random.default_rng().integers(1 << 30, size=2):
        feed = random_feed(model, int(seed))
        for one in (compiled, loaded):
            assert_same(one(**feed), run_onnx(model, feed), limit=1e-5)


@pytest.mark.parametrize("build", [attention, long_softmax])
def test_graphs_are_replayed(build: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    """Calls of the same kernels without a graph come between; their outputs have the same
    addresses.
    """
    model = build()
    compiled = tvm_fusion.compile(model, "cuda", cuda_graph=True)
    compiled.save(tmp_path / "model.so")
    plain = tvm_fusion.compile(model, "cuda")
    for one in (compiled, tvm_fusion.load(tmp_path / "model.so")):
        for seed in np.random.default_rng().integers(1 << 30, size=4):
            feed = random_feed(model, int(seed))
            assert_same(one(**feed), run_onnx(model, feed), limit=1e-5)
            assert_same(plain(**feed), run_onnx(model, feed), limit=1e-5)


@pytest.mark.parametrize("build", [long_softmax, long_sums])
def test_rows_of_several_blocks(build: Callable[[], onnx.ModelProto]) -> None:
    """The blocks are a cluster from sm_90 on, with a fixed order."""
    model = build()
    compiled = tvm_fusion.compile(model, "cuda")
    for seed in np.random.default_rng().integers(1 << 30, size=3):
        feed = random_feed(model, int(seed))
        first = compiled(**feed)
        assert_same(first, run_onnx(model, feed), limit=1e-5)
        for _ in range(20):
            np.testing.assert_array_equal(compiled(**feed), first)


KERNELS = [
    *(case for case in small_cases() if case.flops),
    product("odd product float16", 257, 200, 136),
    product("one row float16", 1, 264, 128),
    attention_case("attention of width 128", 2, 3, 65, 128),
    pair("odd pair", 3, (32, 64, 128), 7),
    pair("pair float32", 1, (32, 32, 64), 9, dtype="float32"),
]


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_products_attention_and_pairs(case: KernelCase, tmp_path: Path) -> None:
    """Tensor cores multiply float16 and TF32; each call has the same bits."""
    model = onnx_model(case)
    compiled = tvm_fusion.compile(model, "cuda", **case.options)
    compiled.save(tmp_path / "model.so")
    loaded = tvm_fusion.load(tmp_path / "model.so")
    for _ in range(3):
        feed = dict(zip(case.inputs, random_arrays(case), strict=True))
        found = compiled(**feed)
        assert_same(found, run_onnx(model, feed), limit=2 * case.tolerance)
        for one in (compiled, loaded):
            np.testing.assert_array_equal(one(**feed), found)


def test_tensors_stay_on_the_device() -> None:
    model = small_model()
    compiled = tvm_fusion.compile(model, "cuda")
    feed = random_feed(model, 3)
    first = compiled.tensors(**feed)
    again = compiled.tensors(**feed)
    compiled.synchronize()
    assert first.device == compiled.device and first.data_ptr() != again.data_ptr()
    wide = tvm_fusion.compile(small_model(size=12, channels=16), "cuda")
    with pytest.raises(tvm_fusion.errors.InvalidInputError, match="has the shape"):
        wide.tensors(first)
    assert compiled.benchmark(repeat=3, warmup=1).min_ms > 0


@pytest.mark.parametrize("streams", [2, PLACES, 2 * PLACES])
@pytest.mark.parametrize(("shape", "axis"), [((3, 2_000_003), 1), ((100_000, 70), 0)])
def test_calls_on_several_streams(
    shape: tuple[int, int], axis: int, streams: int, rng: np.random.Generator
) -> None:
    """One kernel and one workspace; as many calls as there are places, fewer and more."""
    arch = find_device("cuda").arch
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "float32", shape, [axis], "last_block", target)
    assert case.config.splits > 1
    with tvm_compiler(arch):
        function = tvm.compile(case.func, target=target)
    device = device_of("cuda")
    workspace = tvm.runtime.tensor(np.zeros(case.words, "int32"), device)
    inputs = [random_data(rng, "sum", "float32", shape) for _ in range(streams)]
    outputs = [tvm.runtime.empty((shape[1 - axis],), "float32", device) for _ in inputs]
    calls = [
        (device.create_raw_stream(), tvm.runtime.tensor(data, device), output)
        for data, output in zip(inputs, outputs, strict=True)
    ]
    device.sync()
    try:
        for _ in range(50):
            for stream, data, output in calls:
                device.set_raw_stream(stream)
                function(workspace, data, output)
        for stream, _, _ in calls:
            device.sync(stream)
    finally:
        device.set_raw_stream(0)
        for stream, _, _ in calls:
            device.free_raw_stream(stream)
    for data, output in zip(inputs, outputs, strict=True):
        check("sum", output.numpy(), data, reference("sum", data, [axis]))
    check_workspace(case.config, case.loops, workspace.numpy())
