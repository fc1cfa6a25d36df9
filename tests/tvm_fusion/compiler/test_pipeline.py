# SPDX-License-Identifier: Apache-2.0
"""The pipeline by itself: as a Relax pipeline, phase by phase, and for other CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tvm
from onnx_reference import assert_same, random_feed, relative_error, run_onnx
from small_onnx import dense_model, small_model
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from without_torch import WITHOUT_TORCH

import tvm_fusion
from examples.models import MODELS
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import OpError, TargetError
from tvm_fusion.machine import host
from tvm_fusion.onnx.frontend import import_onnx

ROOT = Path(__file__).resolve().parents[3]


@I.ir_module
class Pair:
    """A depthwise convolution, ReLU, a pointwise one and a residual sum, weights as arguments."""

    @R.function
    def main(
        x: R.Tensor((1, 20, 28, 28), "float32"),
        w1: R.Tensor((20, 1, 3, 3), "float32"),
        w2: R.Tensor((20, 20, 1, 1), "float32"),
    ):
        with R.dataflow():
            a = R.nn.conv2d(x, w1, padding=[1, 1, 1, 1], groups=20)
            b = R.nn.relu(a)
            c = R.nn.conv2d(b, w2)
            d = R.add(c, x)
            R.output(d)
        return d


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(8)
    shapes = [(1, 20, 28, 28), (20, 1, 3, 3), (20, 20, 1, 1)]
    return [generator.standard_normal(shape, dtype=np.float32) for shape in shapes]


def reference(x: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> np.ndarray:
    """The numbers of ``Pair`` in double precision."""
    x, w1, w2 = (array.astype("float64") for array in (x, w1, w2))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    middle = np.maximum(np.einsum("nchwij,cij->nchw", windows, w1[:, 0]), 0)
    return (np.einsum("nchw,oc->nohw", middle, w2[:, :, 0, 0]) + x).astype("float32")


def call(executable: relax.VMExecutable, *arrays: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


def report(mod: tvm.IRModule) -> list[dict]:
    return json.loads(str(mod.attrs["tvm_fusion.fusion_report"]))


def kernels(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    return [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]


@pytest.mark.slow
def test_the_import_registers_it() -> None:
    code = (
        "from tvm import relax\nimport tvm_fusion\n"
        "print(relax.get_pipeline('tvm_fusion').info.name)"
    )
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "tvm_fusion"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fuse", "given"), [("auto", False), ("auto", True), ("all", True), ("none", True)]
)
def test_a_hand_written_module_is_compiled_with_it(fuse: str, given: bool) -> None:
    target = resolve("native")
    chosen = relax.get_pipeline("tvm_fusion", target=target if given else None, fuse=fuse)
    executable = tvm.compile(Pair, target, relax_pipeline=chosen)
    assert relative_error(call(executable, *arguments()), reference(*arguments())) <= 1e-5


def test_a_callable_decides() -> None:
    asked = []

    def decide(workload, target) -> bool:
        asked.append((workload.layer1.in_channels, workload.residual, target.kind.name))
        return False

    target = resolve("native")
    mod = pipeline.optimize(Pair, target, pipeline.Options(fuse=decide))
    assert set(asked) == {(20, True, "llvm")}
    assert [record["fused"] for record in report(mod)] == [False]


def operators(mod: tvm.IRModule) -> list[str]:
    return [str(f.attrs["tvm_fusion.op"]) for f in kernels(mod) if "tvm_fusion.op" in f.attrs]


def test_the_options_choose_what_is_fused() -> None:
    target = resolve("native")
    for fuse, count in (("all", 1), ("none", 0)):
        mod = pipeline.optimize(Pair, target, pipeline.Options(fuse=fuse))
        assert [record["fused"] for record in report(mod)] == [bool(count)]
        assert operators(mod).count("fused_conv2d") == count
        assert all(f.attrs["tirx.is_scheduled"] for f in kernels(mod))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("fuse", "winograd", "expected"),
    [
        ("auto", "auto", {"winograd_conv2d", "conv2d"}),
        ("auto", "always", {"winograd_conv2d", "conv2d"}),
        ("none", "never", {"conv2d"}),
        ("all", "always", {"fused_conv2d"}),
    ],
)
def test_the_options_choose_what_winograd_computes(fuse, winograd, expected) -> None:
    imported = import_onnx(dense_model(channels=64, size=56)).mod
    options = pipeline.Options(fuse=fuse, winograd=winograd)
    mod = pipeline.optimize(imported, resolve("native", cores=2), options)
    assert set(operators(mod)) - {"pack", "unpack"} == expected
    assert all(f.attrs["tirx.is_scheduled"] for f in kernels(mod))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("winograd", "size"),
    [("always", 9), ("always", 30), ("never", 9)],
)
def test_models_are_the_same_with_winograd_and_without(winograd: str, size: int) -> None:
    model = dense_model(batch=3, size=size, channels=20)
    compiled = tvm_fusion.compile(model, fuse="none", winograd=winograd)
    for seed in range(2):
        feed = random_feed(model, seed)
        assert_same(compiled(**feed), run_onnx(model, feed), limit=1e-5)


@pytest.mark.slow
def test_optimize_and_build_are_the_pipeline() -> None:
    target = resolve("native")
    executable = pipeline.build(pipeline.optimize(Pair, target), target)
    whole = tvm.compile(Pair, target, relax_pipeline=relax.get_pipeline("tvm_fusion"))
    np.testing.assert_array_equal(call(executable, *arguments()), call(whole, *arguments()))


def test_the_input_stays_as_it_is() -> None:
    for mod in (Pair, import_onnx(small_model()).mod):
        text, kept = mod.script(show_meta=True), mod["main"]
        optimized = pipeline.optimize(mod, resolve("native"), pipeline.Options(fuse="all"))
        assert mod.script(show_meta=True) == text
        assert mod["main"].same_as(kept)
        assert not mod.attrs
        assert optimized.attrs


def test_dump_writes_a_file_for_each_phase(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    mod = pipeline.optimize(Pair, resolve("native"), pipeline.Options("all", folder))
    phases = ["simplify", "fuse", "pack", "reduce", "lower", "schedule"]
    names = [f"{number}-{phase}.py" for number, phase in enumerate(phases)]
    assert sorted(path.name for path in folder.iterdir()) == names
    texts = [(folder / name).read_text() for name in names]
    assert "fused_conv2d" not in texts[0]
    assert ["NCHW8c" in text or "NCHW16c" in text or "NCHW4c" in text for text in texts] == [
        False, False, True, True, True, True
    ]  # fmt: skip
    assert "fused_conv2d" in texts[1]
    assert ["T.prim_func" in text for text in texts] == [
        False, False, False, False, True, True
    ]  # fmt: skip
    assert texts[-1] == mod.script()


def test_nothing_is_dumped_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline.optimize(Pair, resolve("native"))
    assert list(tmp_path.iterdir()) == []


def test_progress_names_each_phase() -> None:
    seen = []
    target = resolve("native")
    pipeline.optimize(Pair, target, progress=lambda *step: seen.append(step))
    names = list(pipeline.phases(target, pipeline.Options()))
    assert seen == [(name, number, len(names)) for number, name in enumerate(names)]


@pytest.mark.parametrize("kind", ["c", "vulkan"])
def test_other_kinds_are_refused(kind: str) -> None:
    message = f"target kind is '{kind}'; expected 'llvm', a CPU, or 'cuda' or 'opencl'"
    with pytest.raises(TargetError, match=message):
        pipeline.optimize(Pair, tvm.target.Target(kind))


def test_without_any_target_it_is_refused() -> None:
    with pytest.raises(TargetError, match="no target for the pipeline 'tvm_fusion'"):
        relax.get_pipeline("tvm_fusion")(Pair)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(OpError, match="some"):
        pipeline.optimize(Pair, resolve("native"), pipeline.Options(fuse="some"))


@pytest.mark.slow
def test_mobilenet_is_compiled_for_avx2() -> None:
    model = MODELS["mobilenet_v2"]()
    compiled = tvm_fusion.compile(model, "x86-64-v3", fuse="all")
    feed = random_feed(model, 1)
    if host.host_arch() == "x86_64" and set(compiled.features) <= host.host_features():
        assert_same(compiled(**feed), run_onnx(model, feed))
    else:
        with pytest.raises(TargetError, match="compiled for"):
            compiled(**feed)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "lanes"), [("x86-64-v3", 8), ("x86-64-v4", 16), ("aarch64", 4), ("cortex-a72", 4)]
)
def test_activations_are_packed_by_the_vectors_of_the_target(name: str, lanes: int) -> None:
    target = resolve(name)
    mod = pipeline.optimize(import_onnx(small_model()).mod, target)
    text = mod.script()
    assert [width for width in (4, 8, 16) if f"NCHW{width}c" in text] == [lanes]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x86-64-v4", "aarch64"])
def test_mobilenet_is_compiled_for_other_vectors(name: str, tmp_path: Path) -> None:
    compiled = tvm_fusion.compile(MODELS["mobilenet_v2"](), name, fuse="all")
    assert sum(record["fused"] for record in compiled.fused) == 17
    compiled.save(tmp_path / "model.so")
    machine = int.from_bytes((tmp_path / "model.so").read_bytes()[18:20], "little")
    assert machine == {"x86-64-v4": 62, "aarch64": 183}[name]


def test_weights_that_are_built_apart_give_the_same_numbers() -> None:
    model, target = small_model(channels=48), resolve("native")
    mod = pipeline.optimize(import_onnx(model).mod, target)
    executable, weights, kernel, lifted, alignment = pipeline.build_apart(mod, target)
    assert kernel is None and lifted == (True,) and alignment == 1
    (x,) = random_feed(model, 2).values()
    assert weights and all(weight.numpy().nbytes >= 4096 for weight in weights)
    wanted = call(pipeline.build(mod, target), x)
    apart = call(executable, x, np.empty_like(wanted), *(weight.numpy() for weight in weights))
    np.testing.assert_array_equal(apart, wanted)


@pytest.mark.slow
def test_a_module_without_weights_is_built_apart_too() -> None:
    target = resolve("native")
    executable, weights, *_ = pipeline.build_apart(pipeline.optimize(Pair, target), target)
    assert weights == []
    wanted = reference(*arguments())
    output = np.empty(wanted.shape, "float32")
    assert relative_error(call(executable, *arguments(), output), wanted) <= 1e-5
