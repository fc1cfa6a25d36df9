# SPDX-License-Identifier: Apache-2.0
"""Whole models for GPUs, without one: their kernels in OpenCL, their machine code, their files."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from gpu_onnx import attention, convolutions, sorting
from onnx_reference import assert_same, random_feed, run_onnx
from relax_on_opencl import RelaxOnOpenCL
from runtime.test_artifact import join, split
from small_onnx import small_model
from tvm import relax, tirx
from tvm.s_tir import dlight
from tvm.script import tirx as T

import tvm_fusion
from relay_passes.conv2d.fusion_report import read_fusion_report
from relay_passes.program import weights as weight_passes
from schedules import attributes, gpu
from tvm_fusion.codegen import nvrtc
from tvm_fusion.codegen.library_bin import compile_kernels, cuda_texts, packed
from tvm_fusion.compiler import compile_model, phases, pipeline
from tvm_fusion.compiler.launches import kernel_uses, launches
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import ArtifactError, CompilationError, TargetError
from tvm_fusion.machine.host import host_arch
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.runtime import artifact, compiled_model
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.tvm_runtime import DeviceNeeds

CUDA, OPENCL = "cuda -arch=sm_90", "opencl"
MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "convolutions": convolutions,
    "attention": attention,
}


@pytest.fixture(scope="module")
def compiled() -> CompiledModel:
    return tvm_fusion.compile(small_model(), CUDA, threads=1)


@pytest.fixture(scope="module")
def saved(compiled: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.so"
    compiled.save(path)
    return path


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_numbers_of_the_reference(name: str) -> None:
    model, target = MODELS[name](), resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(model).mod, target)
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    run = RelaxOnOpenCL(mod, target)
    assert_same(run(*feed.values()), run_onnx(model, feed), limit=1e-5)
    assert len(run.launches) == sum(use.launches for use in kernel_uses(mod))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_becomes_machine_code(name: str) -> None:
    target = resolve(CUDA)
    mod = pipeline.optimize(import_onnx(MODELS[name]()).mod, target)
    executable = pipeline.build_apart(mod, target).executable
    used = compile_kernels(executable, "sm_90")
    names = {use.name for use in kernel_uses(mod)}
    assert names and names == {kernel.rpartition("_kernel")[0] for kernel in used}
    for kernel, resources in used.items():
        assert 0 < resources.registers <= 255, kernel
        assert resources.spill_stores == resources.spill_loads == 0, kernel
        assert resources.shared <= 49152, kernel


@pytest.mark.slow
def test_what_comes_with_its_own_kernels_becomes_machine_code() -> None:
    target = resolve(CUDA)
    mod = pipeline.optimize(import_onnx(sorting()).mod, target)
    assert "none" in {use.rule for use in kernel_uses(mod)}
    executable = pipeline.build_apart(mod, target).executable
    assert compile_kernels(executable, "sm_90")


@pytest.mark.slow
def test_shapes_are_computed_before_the_model_runs() -> None:
    """The model's Shape, Gather and Concat leave no kernel of integers behind."""
    target = resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(attention()).mod, target)
    for func in mod.functions.values():
        if isinstance(func, tirx.PrimFunc):
            assert not any("int" in str(param.ty.dtype) for param in func.params)


def test_the_registered_pipeline_is_for_gpus_too() -> None:
    target = resolve(CUDA)
    chosen = relax.get_pipeline("tvm_fusion", target=target)
    executable = tvm.compile(import_onnx(small_model()).mod, target, relax_pipeline=chosen)
    assert "__global__" in "".join(cuda_texts(executable))


@pytest.mark.slow
def test_phases_have_names_and_dumps(tmp_path: Path) -> None:
    target = resolve(CUDA)
    mod = pipeline.optimize(import_onnx(attention()).mod, target, Options(dump=tmp_path))
    phases = list(pipeline.phases(target, Options()))
    files = [f"{number}-{name}.py" for number, name in enumerate(phases)]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    text = {name: (tmp_path / file).read_text() for name, file in zip(phases, files, strict=True)}
    assert "layer_norm" not in text["simplify"] and "R.nn.softmax" not in text["simplify"]
    assert "R.tvm_fusion.coalesced_reduce" in text["reduce"]
    assert "R.tvm_fusion.coalesced_reduce" not in text["lower"]
    assert "blockIdx.x" not in text["lower"] and "blockIdx.x" in text["schedule"]
    assert text["schedule"] == mod.script()


def test_activations_of_convolutions_are_packed_by_four() -> None:
    target = resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(convolutions()).mod, target)
    assert "NCHW4c" in mod.script()
    rules = {use.rule for use in kernel_uses(mod)}
    assert {"Conv2D", "DepthwiseConv2D"} <= rules


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["all", "none"])
def test_pairs_of_convolutions_are_fused_if_asked(fuse: str) -> None:
    model, target = small_model(), resolve(OPENCL)
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(fuse=fuse))
    assert any(entry["fused"] for entry in read_fusion_report(mod)) is (fuse == "all")
    feed = random_feed(model, int(np.random.default_rng().integers(1 << 30)))
    assert_same(RelaxOnOpenCL(mod, target)(*feed.values()), run_onnx(model, feed), limit=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ours", [True, False])
def test_every_function_tells_its_rule(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ours:
        monkeypatch.setattr(phases.gpu, "RULES", ())
    mod = pipeline.optimize(import_onnx(small_model()).mod, resolve(OPENCL))
    uses = kernel_uses(mod)
    assert uses and all(str(mod[use.name].attrs[attributes.RULE]) == use.rule for use in uses)
    names = {type(rule).__name__ for rule in gpu.RULES}
    assert all((use.rule in names) is ours for use in uses)
    assert all(use.rule.startswith("dlight.") is not ours for use in uses)


def test_winograd_is_refused() -> None:
    with pytest.raises(TargetError, match="winograd='always' has no effect on 'opencl'"):
        options = Options(winograd="always")
        pipeline.optimize(import_onnx(small_model()).mod, resolve(OPENCL), options)


def float_model(
    nodes: list[onnx.NodeProto],
    shape: list[int],
    dtype: type = np.float16,
    **weights: tuple[int, ...],
) -> Any:
    """A model of one type from ``x`` to ``y``, of one shape."""
    rng = np.random.default_rng()
    tensors = [
        onnx.numpy_helper.from_array(rng.uniform(0.5, 2, size).astype(dtype), name)
        for name, size in weights.items()
    ]
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ends = [onnx.helper.make_tensor_value_info(name, kind, shape) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "floats", ends[:1], ends[1:], tensors)
    opsets = [onnx.helper.make_opsetid("", 22)]  # the first with convolutions of bfloat16
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.slow
def test_layers_of_float16_run_on_tensor_cores() -> None:
    node = onnx.helper.make_node
    residual = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"], kernel_shape=[1, 1]),
        node("Add", ["c", "x"], ["y"]),
    ]
    feed_forward = [
        node("MatMul", ["x", "w1"], ["a"]),
        node("Erf", ["a"], ["b"]),
        node("MatMul", ["b", "w2"], ["c"]),
        node("Add", ["c", "x"], ["y"]),
    ]
    convolutions = float_model(residual, [1, 64, 28, 28], w1=(64, 64, 3, 3), w2=(64, 64, 1, 1))
    products = float_model(feed_forward, [1, 127, 768], w1=(768, 3072), w2=(3072, 768))
    for model, fuse, layers, repacked in (
        (convolutions, "all", 1, 0),  # A pair of both layers.
        (convolutions, "auto", 2, 2),  # Channels are in blocks, as in a network.
        (products, "auto", 2, 0),
    ):
        compiled = tvm_fusion.compile(model, "cuda -arch=sm_90", fuse=fuse)
        (text,) = cuda_texts(compiled._executable)
        kernels = [part for part in text.split('extern "C" __global__') if ") {" in part][1:]
        assert len(kernels) == layers + repacked, fuse
        assert sum("mma_sync_aligned" in kernel for kernel in kernels) == layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options", "product"),
    [
        (ml_dtypes.bfloat16, {}, "f32_bf16_bf16_f32"),
        (np.float32, {"precision": "tf32"}, "f32_tf32_tf32_f32"),
    ],
    ids=["bfloat16", "tf32"],
)
def test_a_pair_is_one_kernel_on_tensor_cores(
    dtype: type, options: dict[str, str], product: str
) -> None:
    """The pair has the norm and the bounds of PyTorch's models."""
    node = onnx.helper.make_node
    nodes = [
        node("Conv", ["x", "w1"], ["a"], kernel_shape=[3, 3], pads=[1] * 4),
        node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Conv", ["c", "w2", "shift"], ["d"], kernel_shape=[1, 1]),
        node("Add", ["d", "x"], ["e"]),
        node("Clip", ["e", "low", "high"], ["y"]),
    ]
    norm = dict.fromkeys(("scale", "shift", "mean", "variance"), (64,))
    weights = {"w1": (64, 64, 3, 3), "w2": (64, 64, 1, 1), **norm}
    model = float_model(nodes, [8, 64, 28, 28], dtype, **weights)
    bounds = {"low": 0, "high": 6}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value, dtype), name) for name, value in bounds.items()
    )
    compiled = tvm_fusion.compile(model, "cuda -arch=sm_90", **options)
    (text,) = cuda_texts(compiled._executable)
    kernels = [part for part in text.split('extern "C" __global__') if ") {" in part][1:]
    assert len(kernels) == 1 and f"row_col_{product}" in kernels[0]


def test_fast_math_is_for_cuda() -> None:
    with pytest.raises(TargetError, match="fast_math=True has no effect on 'llvm'"):
        tvm_fusion.compile(small_model(), fast_math=True)


def test_graphs_are_for_cuda() -> None:
    for target in ("native", "opencl"):
        with pytest.raises(TargetError, match="cuda_graph=True is for CUDA, not for"):
            tvm_fusion.compile(small_model(), target, cuda_graph=True)


def test_kernels_between_the_first_and_the_last_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are arguments; what is captured launches kernels and allocates nothing."""
    monkeypatch.setattr(weight_passes, "LEAST_BYTES", 0)
    target = resolve(CUDA)
    mod = pipeline.optimize(import_onnx(attention()).mod, target)
    with target:
        lowered = pipeline.lower_to_vm(target, ["main"])(mod)
    captured = [
        func for var, func in lowered.functions_items() if "cuda_graph_capture" in var.name_hint
    ]
    called = [_kernels_of(lowered, func) for func in [lowered["main"], *captured]]
    assert captured and sum(map(len, called[1:])) >= 2
    assert sum(map(len, called)) == sum(use.calls for use in kernel_uses(mod))
    names = {name for kernels in called[1:] for name in kernels}
    assert all(launches(lowered[name].body) for name in names)
    assert not any(_allocations(lowered[name].body) for name in names)
    assert "run_or_capture" in lowered["main"].script()
    assert not any(map(_constants, captured))
    weights = len(lowered.attrs[attributes.WEIGHTS])
    assert weights == len(lowered["main"].params) - int(lowered["main"].attrs["num_input"]) > 0


def _kernels_of(mod: tvm.IRModule, func: relax.Function) -> list[str]:
    found: list[str] = []

    def visit(node: relax.Expr) -> None:
        if isinstance(node, relax.Call) and isinstance(node.op, tvm.ir.GlobalVar):
            if isinstance(mod[node.op], tirx.PrimFunc) and launches(mod[node.op].body):
                found.append(node.op.name_hint)

    relax.analysis.post_order_visit(func, visit)
    return found


def _constants(func: relax.Function) -> list[tvm.runtime.Tensor]:
    found: list[tvm.runtime.Tensor] = []

    def visit(node: relax.Expr) -> None:
        if isinstance(node, tvm.ir.GenericConst) and isinstance(node.value, tvm.runtime.Tensor):
            found.append(node.value)

    relax.analysis.post_order_visit(func, visit)
    return found


def _allocations(body: tirx.Stmt) -> list[str]:
    """Scopes of the memory that a function allocates outside of its kernels."""
    found: list[str] = []

    def visit(block: tvm.s_tir.SBlock) -> None:
        found.extend(str(b.scope()) for b in block.alloc_buffers if b.scope() == "global")

    tvm_ffi.structural_walk(body, (tvm.s_tir.SBlock, visit))
    return found


@pytest.mark.slow
def test_a_model_with_graphs_is_saved(tmp_path: Path) -> None:
    model = attention()
    compiled = tvm_fusion.compile(model, CUDA, cuda_graph=True)
    compiled.save(tmp_path / "graph.so")
    data = (tmp_path / "graph.so").read_bytes()
    assert b"vm.builtin.cuda_graph.run_or_capture" in data
    plain = tvm_fusion.compile(model, CUDA)
    kernels = [sorted(cuda_texts(one._executable)) for one in (compiled, plain)]
    assert kernels[0] == kernels[1]


def test_a_gpu_without_a_host_is_refused() -> None:
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    with pytest.raises(TargetError, match="the target 'cuda' has no host; expected one"):
        pipeline.optimize(import_onnx(small_model()).mod, target)


class _Nothing(dlight.ScheduleRule):
    """A rule that takes nothing."""

    def apply(self, func: tirx.PrimFunc, target: tvm.target.Target, tunable: bool) -> None:
        return None


def test_a_function_that_no_rule_takes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.gpu, "RULES", (_Nothing(),))
    monkeypatch.setattr(phases, "STOCK_RULES", ())
    message = r"no schedule rule for GPUs takes the function '\w*conv2d"
    with pytest.raises(CompilationError, match=message):
        pipeline.optimize(import_onnx(small_model()).mod, resolve(OPENCL))


def test_functions_of_the_host_need_no_threads() -> None:
    @T.prim_func(s_tir=True)
    def double(a: T.handle, b: T.handle):
        A, B = T.match_buffer(a, (4,), "int64"), T.match_buffer(b, (4,), "int64")
        for i in range(4):
            with T.sblock("double"):
                v = T.axis.spatial(4, i)
                B[v] = A[v] * T.int64(2)

    check = phases.RequireKernels()
    mod = tvm.IRModule({"double": double.with_attr("tirx.is_host_func", True)})
    tvm.ir.assert_structural_equal(check(mod), mod)
    with pytest.raises(CompilationError, match="takes the function 'double'"):
        check(tvm.IRModule({"double": double}))


def test_the_file_holds_machine_code_and_no_text(compiled: CompiledModel, saved: Path) -> None:
    data = saved.read_bytes()
    (text,) = cuda_texts(compiled._executable)
    assert b"__global__" not in data and text.encode() not in data
    assert packed(nvrtc.compile_cuda(text, "sm_90").cubin) in data


def test_fast_math_is_kept_in_the_file(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Tanh", ["x"], ["y"])
    types = [onnx.helper.make_tensor_value_info(name, 1, [64, 64]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "tanh", types[:1], types[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    fast = tvm_fusion.compile(model, "cuda -arch=sm_90", fast_math=True)
    fast.save(tmp_path / "fast.so")
    (text,) = cuda_texts(fast._executable)
    data = (tmp_path / "fast.so").read_bytes()
    accurate, quick = (nvrtc.compile_cuda(text, "sm_90", way).cubin for way in (False, True))
    assert packed(quick) in data and packed(accurate) not in data


def test_the_file_tells_what_it_needs(compiled: CompiledModel, saved: Path) -> None:
    _, about = split(saved.read_bytes())
    assert about["device"] == {
        "kind": "cuda",
        "arch": "sm_90",
        "max_threads": 1024,
        "shared_bytes": 49152,
    }
    assert about["arch"] == host_arch() and about["features"]
    assert compiled.needs == DeviceNeeds(**about["device"])


@pytest.fixture
def any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a model needs of a GPU is there."""
    monkeypatch.setattr(artifact, "check_device", lambda needs: None)


@pytest.mark.usefixtures("any_gpu")
def test_the_loader_finds_the_machine_code(compiled: CompiledModel, saved: Path) -> None:
    """Intercept the code that TVM's CUDA runtime would get."""
    caught: list[bytes] = []

    def load_from_bytes(content: bytes) -> tvm_ffi.Module:
        caught.append(bytes(content))
        raise ValueError("no GPU here")

    name = "ffi.Module.load_from_bytes.cuda"
    before = tvm_ffi.get_global_func(name, allow_missing=True)
    tvm_ffi.register_global_func(name, load_from_bytes, override=True)
    try:
        with pytest.raises(ArtifactError, match=r"cannot load '.*model\.so': .*no GPU here"):
            tvm_fusion.load(saved)
    finally:
        if before is None:
            tvm_ffi.registry.remove_global_func(name)
        else:
            tvm_ffi.register_global_func(name, before, override=True)
    (content,) = caught
    (text,) = cuda_texts(compiled._executable)
    code = nvrtc.compile_cuda(text, "sm_90").cubin
    assert content.startswith(packed(b"cubin")) and content.endswith(packed(code))
    (kernels,) = struct.unpack_from("<Q", content, len(packed(b"cubin")))
    assert kernels == len(nvrtc.resources(nvrtc.compile_cuda(text, "sm_90"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA, OPENCL])
def test_without_a_gpu_nothing_of_the_file_is_loaded(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(needs: DeviceNeeds) -> None:
        raise TargetError(f"{needs} is not here")

    monkeypatch.setattr(artifact, "check_device", refuse)
    model = tvm_fusion.compile(small_model(), target, threads=1)
    model.save(tmp_path / "model.so")
    monkeypatch.setattr(compiled_model, "get_function", lambda name: pytest.fail(name))
    x = np.zeros((1, 3, 12, 12), np.float32)
    for run in (
        lambda: tvm_fusion.load(tmp_path / "model.so"),
        lambda: model(x),
        lambda: model.tensors(x),
        model.benchmark,
    ):
        with pytest.raises(TargetError, match=f"{model.needs} is not here"):
            run()


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(
    "change",
    [
        {"device": None},
        {"device": {}},
        {"device": ["cuda"]},
        {"device": {"kind": "opencl", "arch": "", "max_threads": 1, "shared_bytes": 1}},
        {"device": {"kind": "cuda", "arch": 90, "max_threads": 1, "shared_bytes": 1}},
        {"device": {"kind": "cuda", "arch": "sm_90", "max_threads": "1", "shared_bytes": 1}},
        {"target": '{"kind": "cuda", "arch": "sm_90"}'},
        {"target": '{"kind": "cuda", "arch": "sm_90", "host": {"kind": "cuda"}}'},
        {"target": '{"kind": "cuda", "arch": "sm_90", "host": 3}'},
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    saved: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    library, about = split(saved.read_bytes())
    path = tmp_path / "altered.so"
    path.write_bytes(join(library, json.dumps(about | change).encode()))
    with pytest.raises(ArtifactError, match="the description in '.*' is not valid"):
        tvm_fusion.load(path)


@pytest.mark.slow
def test_opencl_stays_text(tmp_path: Path) -> None:
    model = tvm_fusion.compile(small_model(), OPENCL, threads=1)
    model.save(tmp_path / "model.so")
    assert b"__kernel void" in (tmp_path / "model.so").read_bytes()
    _, about = split((tmp_path / "model.so").read_bytes())
    assert about["device"]["kind"] == "opencl" and model.needs == DeviceNeeds(**about["device"])


@pytest.mark.slow
def test_without_a_compiler_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compile_cuda.cache_clear()
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: None)
    with pytest.raises(TargetError, match=r"neither NVRTC .* pip install 'tvm-fusion\[cuda\]'"):
        tvm_fusion.compile(small_model(), CUDA, threads=1)


def test_progress_counts_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_model, "compile_kernels", lambda *_: {})
    seen: list[tuple[str, int, int]] = []
    tvm_fusion.compile(small_model(), CUDA, progress=lambda *step: seen.append(step))
    seen = [step for step in seen if not step[0].startswith("build, ")]
    names, done, total = zip(*seen, strict=True)
    assert names[-3:] == ("build", "machine code", "done")
    assert done == tuple(range(len(seen))) and set(total) == {len(seen) - 1}


@pytest.mark.slow
def test_a_gpu_model_is_compiled_for_another_host(tmp_path: Path) -> None:
    model = tvm_fusion.compile(small_model(), "opencl -host=aarch64", threads=1)
    model.save(tmp_path / "model.so")
    machine = int.from_bytes((tmp_path / "model.so").read_bytes()[18:20], "little")
    assert machine == 183 and sys.byteorder == "little"
    assert str(model) == repr(model) and "opencl" in repr(model)
