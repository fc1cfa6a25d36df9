# SPDX-License-Identifier: Apache-2.0
"""Saved models run without TVM's compiler, as they do beside it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from relax_models import compiled, dense, dependent
from small_onnx import small_model
from tvm.script import ir as I
from tvm.script import relax as R
from without_torch import WITHOUT_TORCH

import tvm_fusion
from tvm_fusion.runtime import tvm_runtime

ROOT = Path(__file__).resolve().parents[3]

HEAD = f"""{WITHOUT_TORCH}
import json, sys
import numpy as np
sys.path[:0] = [{str(ROOT)!r}]

def compiler_is_loaded():
    with open("/proc/self/maps") as maps:
        return "tvm" in sys.modules or "libtvm_compiler" in maps.read()

"""


def run(code: str, *arguments: Path) -> Any:
    """Last output of the code, as JSON, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@I.ir_module
class BFloat:
    @R.function
    def main(x: R.Tensor((3, 5), "bfloat16")):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


@I.ir_module
class NonZero:
    @R.function
    def main(x: R.Tensor((2, 3), "bool")):
        with R.dataflow():
            y = R.match_cast(R.nonzero(x), R.Tensor((2, 3), "int64"))
            R.output(y)
        return y


@I.ir_module
class Sort:
    @R.function
    def main(x: R.Tensor((3, 7), "float32")):
        with R.dataflow():
            y = R.argsort(x, axis=1)
            R.output(y)
        return y


LOAD_AND_RUN = """
import tvm_fusion
path, source, target = sys.argv[1:]
model = tvm_fusion.load(path, threads=2)
x = np.load(source)
if "bfloat" in path:
    import ml_dtypes
    x = x.astype(ml_dtypes.bfloat16)
for _ in range(2):
    y = model(x)
np.save(target, y.astype("float64"))
late = compiler_is_loaded()
print(json.dumps({"compiler": late, "text": repr(model), "threads": model.threads}))
"""


@pytest.mark.slow
def test_a_saved_model_runs_without_the_compiler(tmp_path: Path) -> None:
    model, x = dense(), normal(1, 4, 8)
    model.save(tmp_path / "model.so")
    np.save(tmp_path / "x.npy", x)
    places = [tmp_path / name for name in ("model.so", "x.npy", "y.npy")]
    told = run(LOAD_AND_RUN, *places)
    np.testing.assert_array_equal(np.load(places[2]), model(x))
    assert told == {"compiler": False, "text": repr(model).replace("1 thr", "2 thr"), "threads": 2}


@pytest.mark.slow
def test_types_that_numpy_lacks_need_no_compiler(tmp_path: Path) -> None:
    compiled(BFloat, ["x"], ["y"]).save(tmp_path / "bfloat.so")
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    np.save(tmp_path / "x.npy", x)
    places = [tmp_path / name for name in ("bfloat.so", "x.npy", "y.npy")]
    assert not run(LOAD_AND_RUN, *places)["compiler"]
    np.testing.assert_array_equal(np.load(places[2]), 2 * x)


@pytest.mark.slow
def test_sorting_needs_no_compiler(tmp_path: Path) -> None:
    compiled(Sort, ["x"], ["y"]).save(tmp_path / "sort.so")
    x = normal(2, 3, 7)
    np.save(tmp_path / "x.npy", x)
    places = [tmp_path / name for name in ("sort.so", "x.npy", "y.npy")]
    assert not run(LOAD_AND_RUN, *places)["compiler"]
    np.testing.assert_array_equal(np.load(places[2]), np.argsort(x, axis=1))


@pytest.mark.slow
def test_operators_that_tvm_computes_in_python_still_run(tmp_path: Path) -> None:
    path = tmp_path / "nonzero.so"
    compiled(NonZero, ["x"], ["y"]).save(path)
    x = np.array([[True, False, True], [False, True, False]])
    np.save(tmp_path / "x.npy", x)
    assert run(LOAD_AND_RUN, path, tmp_path / "x.npy", tmp_path / "y.npy")["compiler"]
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.stack(np.nonzero(x)))


FAIL = """
import tvm_fusion
texts = []
for path in sys.argv[2:]:
    try:
        model = tvm_fusion.load(path)
        model(np.ones(3, "float32"), np.ones(7, "float32"))
    except tvm_fusion.errors.TVMFusionError as error:
        texts.append([type(error).__name__, str(error)])
light = not compiler_is_loaded()
print(json.dumps([light, texts]))
"""


@pytest.mark.slow
def test_errors_are_those_that_the_compiler_would_give(tmp_path: Path) -> None:
    dependent().save(tmp_path / "model.so")
    data = (tmp_path / "model.so").read_bytes()
    (tmp_path / "cut.so").write_bytes(data[:-1])
    (tmp_path / "damaged.so").write_bytes(data[:5000] + b"damage" + data[5006:])
    paths = [tmp_path / name for name in ("model.so", "cut.so", "damaged.so", "missing.so")]
    light, texts = run(FAIL, tmp_path, *paths)
    assert light
    assert [name for name, _ in texts] == ["InvalidInputError"] + ["ArtifactError"] * 3
    assert run("import tvm\n" + FAIL, tmp_path, *paths) == [False, texts]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "bench"])
def test_the_command_line_runs_a_saved_model_without_the_compiler(
    tmp_path: Path, command: str
) -> None:
    onnx.save(small_model(), tmp_path / "model.onnx")
    tvm_fusion.compile(small_model(), threads=1).save(tmp_path / "model.so")
    arguments = {
        "run": ["run", "model.so", "--json"],
        "bench": "bench model.onnx --compiled model.so --against onnxruntime --json".split(),
    }[command]
    arguments += {"run": ["--repeat", "2"], "bench": ["--rounds", "1", "--runs", "2"]}[command]
    code = f"""
import os
os.chdir(sys.argv[1])
from tvm_fusion.cli import main
assert main({arguments!r}) == 0
print(json.dumps(compiler_is_loaded()))
"""
    assert run(code, tmp_path) is False


AFTERWARDS = """
import tvm_fusion
x = np.load(sys.argv[2])
model = tvm_fusion.load(sys.argv[1])
y = model(x)
assert not compiler_is_loaded()
import tvm_fusion.pipeline
from tvm import relax
import tvm
assert callable(relax.get_pipeline("tvm_fusion"))
np.testing.assert_array_equal(model(x), y)
np.testing.assert_array_equal(tvm_fusion.load(sys.argv[1])(tvm.runtime.tensor(x)), y)
assert str(model.target.kind) == "llvm"
print(json.dumps(y.tolist()))
"""


@pytest.mark.slow
def test_the_compiler_can_be_imported_after_a_model_ran(tmp_path: Path) -> None:
    model, x = dense(), normal(3, 4, 8)
    model.save(tmp_path / "model.so")
    np.save(tmp_path / "x.npy", x)
    told = run(AFTERWARDS, tmp_path / "model.so", tmp_path / "x.npy")
    np.testing.assert_array_equal(np.array(told, "float32"), model(x))


@pytest.mark.slow
def test_behind_tvm_the_package_registers_its_pipeline() -> None:
    code = """
import tvm
import tvm_fusion
print(json.dumps(callable(tvm.relax.get_pipeline("tvm_fusion"))))
"""
    assert run(code)


@pytest.mark.slow
def test_the_package_shows_what_it_imports_late() -> None:
    code = """
import tvm_fusion
assert not compiler_is_loaded()
try:
    tvm_fusion.nothing
except AttributeError as error:
    text = str(error)
from tvm_fusion import compile
assert compile is tvm_fusion.compile and tvm_fusion.pipeline.NAME == "tvm_fusion"
print(json.dumps(text))
"""
    assert run(code) == "module 'tvm_fusion' has no attribute 'nothing'"


def test_the_version_is_that_of_tvm() -> None:
    assert tvm_runtime.version() == tvm.__version__
    code = "from tvm_fusion.runtime import tvm_runtime; print(json.dumps(tvm_runtime.version()))"
    assert run(code) == tvm.__version__


def test_a_function_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="tests.nothing"):
        tvm_runtime.get_function("tests.nothing")


def test_a_program_without_its_functions_does_not_start() -> None:
    @I.ir_module
    class Missing:
        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            y = R.call_packed("tests.missing", x, ty_args=R.Tensor((2,), "float32"))
            return y

    library = tvm.compile(Missing, "llvm").jit()
    with pytest.raises(RuntimeError, match="Cannot find .*tests.missing"):
        tvm_runtime.start_machine(library)


def test_without_tvm_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tvm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tvm_runtime._load.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="No module named 'tvm'; install apache-tvm"):
        tvm_runtime.get_function("runtime.NumThreads")
