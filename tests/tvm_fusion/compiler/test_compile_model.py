# SPDX-License-Identifier: Apache-2.0
"""Compilation of an ONNX model, saving to a file, and loading."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import relax_models
import tvm
from onnx_reference import run_onnx
from small_onnx import small_model

import tvm_fusion
from tvm_fusion import errors
from tvm_fusion.bench.profiler import profile
from tvm_fusion.compiler.explain import explain
from tvm_fusion.errors import (
    CompilationError,
    InvalidInputError,
    InvalidModelError,
    OpError,
    TargetError,
)
from tvm_fusion.machine import host
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.host_arrays import TensorSpec

ROOT = Path(__file__).resolve().parents[3]


def image(batch: int = 1) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((batch, 3, 12, 12), dtype=np.float32)


def reference(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"image": x})[0]


def assert_close(y: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return tvm_fusion.compile(small_model(), fuse="all", threads=1)


def test_a_model_is_compiled_called_saved_and_loaded(model: CompiledModel, tmp_path: Path) -> None:
    expected = reference(small_model(), image())
    assert_close(model(image()), expected)
    model.save(tmp_path / "small.so")
    loaded = tvm_fusion.load(tmp_path / "small.so", threads=1)
    np.testing.assert_array_equal(loaded(image=image()), model(image()))
    assert loaded.fused == model.fused


def test_nothing_is_printed_of_a_model_that_was_called(
    model: CompiledModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model(image())
    model.save(tmp_path / "model.so")
    tvm_fusion.load(tmp_path / "model.so", threads=1)
    assert capfd.readouterr() == ("", "")


def test_names_shapes_target_and_pairs_are_those_of_the_model(model: CompiledModel) -> None:
    assert model.inputs == (TensorSpec("image", (1, 3, 12, 12), "float32"),)
    assert model.outputs == (TensorSpec("scores", (1, 6, 12, 12), "float32"),)
    assert str(model.target.attrs["mcpu"]) == host.host_cpu()
    assert any(pair["fused"] for pair in model.fused)
    assert all(pair["reason"] for pair in model.fused)


def test_without_fusion_the_numbers_are_the_same(model: CompiledModel) -> None:
    apart = tvm_fusion.compile(small_model(), fuse="none", threads=1)
    assert not any(pair["fused"] for pair in apart.fused)
    assert_close(apart(image()), model(image()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["path", "str", "bytes"])
def test_models_come_as_paths_and_bytes_too(tmp_path: Path, form: str) -> None:
    path = tmp_path / "small.onnx"
    onnx.save(small_model(), path)
    given = {"path": path, "str": str(path), "bytes": path.read_bytes()}[form]
    compiled = tvm_fusion.compile(given, threads=1)
    assert_close(compiled(image()), reference(small_model(), image()))


def test_open_dimensions_get_their_sizes_from_shapes() -> None:
    compiled = tvm_fusion.compile(small_model("N"), shapes={"N": 2}, threads=1)
    assert compiled.inputs[0].shape == (2, 3, 12, 12)
    assert_close(compiled(image(2)), reference(small_model(2), image(2)))


@pytest.mark.slow
def test_height_and_width_stay_open_through_many_pools() -> None:
    """Sizes of poolings with ``ceil_mode`` once took minutes from the third one on."""
    layers = "".join(
        f"""c{layer} = Conv<pads=[1, 1, 1, 1]>(x{layer}, weight)
        x{layer + 1} = MaxPool<kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1>(c{layer})
        """
        for layer in range(4)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        pools (float[1, 8, h, w] x0) => (float[1, 8, oh, ow] x4)
        {{ {layers} }}"""
    )
    weight = np.random.default_rng(3).standard_normal((8, 8, 3, 3), np.float32) / 5
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    compiled = tvm_fusion.compile(model, shapes={"h": "h", "w": "w"}, threads=1)
    for height, width in ((64, 47), (97, 131)):
        x = np.random.default_rng(width).standard_normal((1, 8, height, width), np.float32)
        assert_close(compiled(x), run_onnx(model, {"x0": x})[0])


@pytest.mark.slow
def test_the_code_is_made_for_as_many_cores_as_threads() -> None:
    for threads in {1, host.usable_processors()}:
        compiled = tvm_fusion.compile(small_model(), threads=np.int64(threads))
        assert (compiled.threads, compiled.target.attrs["num-cores"]) == (threads, threads)
    told = tvm_fusion.compile(small_model(), "llvm -num-cores=3", threads=1)
    assert (told.threads, told.target.attrs["num-cores"]) == (1, 3)


def test_progress_is_a_function() -> None:
    with pytest.raises(InvalidInputError, match="progress is 3; expected a function or None"):
        tvm_fusion.compile(small_model(), progress=3)


def test_progress_counts_the_stages() -> None:
    seen: list[tuple[str, int, int]] = []
    tvm_fusion.compile(small_model(), threads=1, progress=lambda *step: seen.append(step))
    kernels = [step for step in seen if step[0].startswith("build, ")]
    assert {step[1:] for step in kernels} == {next(s for s in seen if s[0] == "build")[1:]}
    counts = [re.fullmatch(r"build, (\d+) of (\d+) kernels", step[0]) for step in kernels]
    assert counts[-1][1] == counts[-1][2] and int(counts[0][1]) > 0
    seen = [step for step in seen if step not in kernels]
    names, done, total = zip(*seen, strict=True)
    assert names[0] == "import"
    assert names[-2:] == ("build", "done")
    assert len(set(names)) == len(names)
    assert done == tuple(range(len(seen)))
    assert set(total) == {len(seen) - 1}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_models_are_compiled_for_other_cpus_and_run_only_where_they_can(
    target: str, tmp_path: Path
) -> None:
    compiled = tvm_fusion.compile(small_model(), target, threads=1)
    compiled.save(tmp_path / "small.so")
    fits = compiled.target.attrs["mtriple"].startswith(host.host_arch()) and (
        set(compiled.features) <= host.host_features()
    )
    if fits:
        assert_close(compiled(image()), reference(small_model(), image()))
        assert_close(tvm_fusion.load(tmp_path / "small.so")(image()), compiled(image()))
    else:
        for run in (lambda: compiled(image()), lambda: tvm_fusion.load(tmp_path / "small.so")):
            with pytest.raises(TargetError, match="the model is compiled for|compiled for aarch64"):
                run()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "vulkan"}, TargetError, "this version compiles for CPUs, CUDA and OpenCL"),
        ({"target": "cuda -arch=sm_91"}, TargetError, "unknown CUDA architecture 'sm_91'"),
        ({"target": "x86-64-v9"}, TargetError, "unknown target 'x86-64-v9'; did you mean"),
        ({"threads": 0}, InvalidInputError, "threads is 0; expected a positive integer"),
        ({"check": "no"}, InvalidInputError, "check is 'no'; expected True or False"),
        ({"fast_math": 0}, InvalidInputError, "fast_math is 0; expected True or False"),
        ({"cuda_graph": None}, InvalidInputError, "cuda_graph is None; expected True or False"),
        ({"threads": 10**6}, InvalidInputError, "threads is 1000000, and this process may use"),
        ({"fuse": "some"}, OpError, "some"),
        ({"shapes": [1, 3, 12, 12]}, InvalidModelError, r"shapes is \[1, 3, 12, 12\]; expected a"),
        ({"winograd": "some"}, OpError, "winograd is 'some'; expected one of auto, always, never"),
    ],
)
def test_wrong_options_are_refused(options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        tvm_fusion.compile(small_model(), **options)


def fail(*_: object, **__: object) -> None:
    raise ValueError("no luck")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("run", "broken", "stage"),
    [
        (tvm_fusion.compile, "tvm_fusion.compiler.phases.PackLayout", "pack"),
        (tvm_fusion.compile, "tvm.tirx.build", "build"),
        (profile, "tvm_fusion.compiler.phases.PackLayout", "pack"),
        (profile, "tvm_fusion.compiler.phases.ApplyRules", "schedule"),
        (profile, "tvm.compile", "build"),
        (explain, "tvm_fusion.compiler.phases.PackLayout", "pack"),
    ],
)
def test_what_tvm_raises_names_the_stage(monkeypatch, run, broken: str, stage: str) -> None:
    module_pass = tvm.transform.module_pass(fail, opt_level=0, name="broken")
    replaced = fail if broken.startswith("tvm.") else lambda *_, **__: module_pass
    monkeypatch.setattr(broken, replaced)
    told = f"the stage '{stage}' failed( on the kernel '.*')?: .*no luck"
    with pytest.raises(CompilationError, match=told) as caught:
        run(small_model())
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_module_that_tvm_prints_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no luck\n\nError in pass: Simplify\n" + "x = R.add(y, z)\n" * 99)

    monkeypatch.setattr("tvm.tirx.build", fails)
    with pytest.raises(
        CompilationError, match="the stage 'build' failed on .*: no luck; its arguments are"
    ):
        tvm_fusion.compile(small_model())


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidModelError, match="cannot read model"):
        tvm_fusion.compile("zero\0byte.onnx")
    with pytest.raises(InvalidModelError):
        tvm_fusion.compile(b"not a model")


def test_a_module_in_which_nobody_looked_for_pairs_has_no_records() -> None:
    from tvm_fusion.compiler.compile_model import _records

    assert _records(relax_models.Dense) == []


def test_the_package_shows_its_names() -> None:
    assert set(tvm_fusion.__all__) == {
        "Arena",
        "Comparison",
        "CompiledModel",
        "EngineSpec",
        "Latency",
        "ModelPrediction",
        "Plan",
        "RaceResult",
        "SpecializedModel",
        "TaskState",
        "TensorErrors",
        "TuneResult",
        "__version__",
        "aligned_empty",
        "compare",
        "compile",
        "errors",
        "explain",
        "explain_kernels",
        "load",
        "predict",
        "profile",
        "race",
        "resolve_target",
        "specialize",
        "tune",
    }
    assert set(tvm_fusion.__all__) <= set(dir(tvm_fusion))
    assert all(getattr(tvm_fusion, name) is not None for name in tvm_fusion.__all__)
    assert tvm_fusion.errors is errors
    text = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "tvm_fusion.version.__version__" }' in text
    assert re.fullmatch(r"\d+\.\d+\.\d+", tvm_fusion.__version__)


def test_the_pipeline_is_registered_by_the_import() -> None:
    from tvm import relax

    assert callable(relax.get_pipeline("tvm_fusion"))
