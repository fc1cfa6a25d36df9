# SPDX-License-Identifier: Apache-2.0
"""The file of a compiled model: written whole, checked before anything of it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from relax_models import WEIGHT, Dense, Identity, assert_dense, compiled, dense, lifted
from tvm import relax
from without_torch import WITHOUT_TORCH

from tvm_fusion.compiler.targets import required_features, resolve
from tvm_fusion.errors import ArtifactError, TargetError
from tvm_fusion.machine import host
from tvm_fusion.runtime import artifact
from tvm_fusion.runtime.artifact import Description, read_artifact
from tvm_fusion.runtime.compiled_model import CompiledModel, load

ROOT = Path(__file__).resolve().parents[3]
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[host.host_arch()]


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return dense()


@pytest.fixture(scope="module")
def saved(model: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.so"
    model.save(path)
    return path


def split(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The library and the description of a file."""
    library, length, *_ = artifact._FOOTER.unpack(data[-artifact._FOOTER.size :])
    return data[:library], json.loads(data[library : library + length])


def join(library: bytes, text: bytes, version: int = artifact.FORMAT) -> bytes:
    """A file whose checksum is right, whatever it holds."""
    digest = hashlib.sha256(library + text).digest()
    footer = artifact._FOOTER.pack(len(library), len(text), digest, version, artifact._MAGIC)
    return library + text + footer


@pytest.fixture
def altered(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a copy of the file whose description was changed."""

    def write(change: Callable[[dict[str, Any]], None], version: int = artifact.FORMAT) -> Path:
        library, about = split(saved.read_bytes())
        change(about)
        path = tmp_path / "altered.so"
        path.write_bytes(join(library, json.dumps(about).encode(), version))
        return path

    return write


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a library fails the test."""
    real = tvm_ffi.get_global_func

    def get(name: str, *args: Any) -> Any:
        assert not name.endswith("load_from_file.so"), (
            "the library was loaded before it was checked"
        )
        return real(name, *args)

    monkeypatch.setattr(tvm_ffi, "get_global_func", get)


def test_what_is_saved_is_loaded(model: CompiledModel, saved: Path) -> None:
    x = np.random.default_rng(1).standard_normal((4, 8), dtype=np.float32)
    again = load(saved, threads=1)
    np.testing.assert_array_equal(again(x), model(x))
    assert_dense(again(x), x)
    for name in ("inputs", "outputs", "features", "fused", "versions", "threads"):
        assert getattr(again, name) == getattr(model, name)
    assert str(again.target) == str(model.target)
    assert read_artifact(saved) == model._about


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        (1, ("weights", "device", "kernel", "fast_math", "records", "lifted", "alignment")),
        (2, ("device", "kernel", "fast_math", "records", "lifted", "alignment")),
        (3, ("kernel", "fast_math", "records", "lifted", "alignment")),
        (4, ("fast_math", "records", "lifted", "alignment")),
        (5, ("records", "lifted", "alignment")),
        (10, ("lifted", "alignment")),
        (11, ()),
    ],
)
def test_earlier_formats_are_still_read(altered, version: int, lacks: tuple[str, ...]) -> None:
    """Their kernels read aligned inputs only, and allocate their outputs."""
    lacks = (*lacks, "library", "places", "others")
    memory = np.random.default_rng(5).standard_normal(48, dtype=np.float32)
    path = altered(lambda about: [about.pop(name) for name in lacks], version=version)
    model = load(path, threads=1)
    for start in range(16):
        x = memory[start : start + 32].reshape(4, 8)
        y = np.full((4, 6), np.nan, np.float32)
        assert model(x, out=y) is y
        assert_dense(y, x)


def test_weights_of_an_earlier_format_are_found_before_the_description(tmp_path: Path) -> None:
    """They lie one after the other, behind a library of any length."""
    model, again = large(tmp_path)
    data, about = split((tmp_path / "large.so").read_bytes())
    begin = about["places"][0]
    for name in ("library", "places", "others"):
        del about[name]
    path = tmp_path / "earlier.so"
    path.write_bytes(join(data[:begin] + bytes(5) + data[begin:], json.dumps(about).encode(), 11))
    earlier = load(path, threads=1)
    assert all(weight.data_ptr() % 64 == 0 for weight in earlier._weights)
    x = np.random.default_rng(7).standard_normal((3, 70), dtype=np.float32)
    for y, want in zip(earlier(x), again(x), strict=True):
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    ("lifted", "sizes"), [([True, True], [4, 6]), ([1], [4, 6]), ([True], ["n", 6])]
)
def test_outputs_that_cannot_be_arguments(altered, lifted: list, sizes: list) -> None:
    def alter(about: dict[str, Any]) -> None:
        about["lifted"] = lifted
        about["outputs"][0]["shape"] = sizes

    with pytest.raises(ArtifactError, match="is not valid"):
        load(altered(alter))


def large(tmp_path: Path) -> tuple[CompiledModel, CompiledModel]:
    """relu(x @ w0) @ w1 of weights that lie apart, and the same loaded from a file."""
    rng = np.random.default_rng(6)
    names = {"x": (3, 70), "w0": (70, 65), "w1": (65, 33)}
    types = {name: relax.TensorType(shape, "float32") for name, shape in names.items()}
    builder = relax.BlockBuilder()
    x, w0, w1 = (relax.Var(name, ty) for name, ty in types.items())
    with builder.function("main", [x, w0, w1]):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(relax.op.matmul(x, w0)))
            result = builder.emit_output(relax.op.matmul(hidden, w1))
        builder.emit_func_output((result, w0))
    weights = {
        name: tvm.runtime.tensor(rng.standard_normal(names[name]).astype("float32"))
        for name in ("w0", "w1")
    }
    mod = relax.transform.BindParams("main", weights)(builder.get())
    model = lifted(mod, ["x"], ["y", "w0"])
    model.save(tmp_path / "large.so")
    return model, load(tmp_path / "large.so", threads=1)


def test_weights_lie_in_the_file_once(tmp_path: Path) -> None:
    model, again = large(tmp_path)
    assert [spec.shape for spec in again._about.weights] == [(70, 65), (65, 33)]
    data = (tmp_path / "large.so").read_bytes()
    for weight in model._weights:
        content = weight.numpy().tobytes()
        assert data.count(content) == 1 and data.count(content[:64]) == 1


def test_a_model_with_weights_computes_the_same_when_it_is_loaded(tmp_path: Path) -> None:
    model, again = large(tmp_path)
    first, second = (weight.numpy().astype("float64") for weight in model._weights)
    x = np.random.default_rng(7).standard_normal((3, 70), dtype=np.float32)
    y, w0 = again(x)
    np.testing.assert_allclose(y, np.maximum(x @ first, 0) @ second, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(y, model(x)[0])
    np.testing.assert_array_equal(w0, first.astype("float32"))
    assert all(weight.data_ptr() % 64 == 0 for weight in again._weights)


def test_a_weight_that_is_a_result_is_the_callers_copy(tmp_path: Path) -> None:
    for one in large(tmp_path):
        x = np.ones((3, 70), np.float32)
        y, w0 = one(x)
        w0[...] = np.nan
        np.testing.assert_array_equal(one(x)[0], y)


def test_tvm_alone_takes_outputs_and_weights_as_arguments(tmp_path: Path) -> None:
    model, _ = large(tmp_path)
    x = np.random.default_rng(8).standard_normal((3, 70), dtype=np.float32)
    library = tvm.runtime.load_module(str(tmp_path / "large.so"))
    machine = relax.VirtualMachine(library, tvm.cpu())
    assert model._about.lifted == (True, False)
    y = tvm.runtime.empty(model.outputs[0].shape, "float32")
    machine["main"](tvm.runtime.tensor(x), y, *model._weights)
    np.testing.assert_array_equal(y.numpy(), model(x)[0])


def test_a_file_that_shrinks_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    large(tmp_path)
    path = tmp_path / "large.so"
    about = read_artifact(path)
    path.write_bytes(path.read_bytes()[-3000:])
    with pytest.raises(ArtifactError, match=r"cannot read '.*large\.so': "):
        artifact.read_artifact_weights(path, about)


def test_a_file_that_replaces_a_loaded_one_is_loaded(tmp_path: Path) -> None:
    """The system would give the same name the library that it loaded before."""
    x = np.random.default_rng(3).standard_normal((4, 8), dtype=np.float32)
    loaded = []
    for factor in (1.0, 2.0, 3.0):
        mod = relax.transform.BindParams("main", {"w": tvm.runtime.tensor(factor * WEIGHT)})(Dense)
        compiled(mod, ["x"], ["y"]).save(tmp_path / "same.so")
        loaded.append(load(tmp_path / "same.so", threads=1))
    for factor, one in zip((1.0, 2.0, 3.0), loaded, strict=True):
        assert_dense(one(x) / np.float32(factor), x)


def test_results_outlive_the_model(saved: Path) -> None:
    x = np.random.default_rng(2).standard_normal((4, 8), dtype=np.float32)
    again = load(saved, threads=1)
    y = again(x)
    del again
    assert_dense(y, x)


def test_tvm_alone_can_load_the_library(saved: Path) -> None:
    x = np.random.default_rng(3).standard_normal((4, 8), dtype=np.float32)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(saved)), tvm.cpu())
    y = machine["main"](tvm.runtime.tensor(x)).numpy()
    assert_dense(y, x)


BARE = """
import sys
import numpy as np
sys.path[:0] = {paths!r}
from relax_models import assert_dense, dense
from tvm_fusion.runtime.compiled_model import load

x = np.load({folder!r} + "/x.npy")
assert_dense(load({saved!r})(x), x)
model = dense()
assert_dense(model(x), x)
model.save({folder!r} + "/again.so")
np.testing.assert_array_equal(load({folder!r} + "/again.so")(x), model(x))
"""


@pytest.mark.slow
def test_a_fresh_process_without_any_compiler_loads_compiles_and_saves(
    saved: Path, tmp_path: Path
) -> None:
    x = np.random.default_rng(4).standard_normal((4, 8), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    paths = [str(ROOT), str(Path(__file__).parents[1])]
    code = BARE.format(paths=paths, folder=str(tmp_path), saved=str(saved))
    bare = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code],
        env={**bare, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_model_without_kernels_is_saved_and_loaded(tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    model = compiled(Identity, ["x"], ["x"])
    model.save(tmp_path / "identity.so")
    for one in (model, load(tmp_path / "identity.so")):
        y = one(x)
        np.testing.assert_array_equal(y, x)
        assert not np.shares_memory(x, y)


def test_a_file_that_is_there_is_replaced_also_while_it_is_in_use(
    saved: Path, tmp_path: Path
) -> None:
    path, link = tmp_path / "model.so", tmp_path / "link.so"
    link.symlink_to(path)
    path.write_text("something else")
    x = np.ones((4, 8), np.float32)
    dense().save(link)
    first = load(path, threads=1)
    dense("llvm").save(path)
    second = load(path, threads=1)
    for one in (first, second):
        assert_dense(one(x), x)
    assert str(second.target) != str(first.target)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/model.so", "cannot write '.*missing/model.so': No such file or directory"),
        ("file/model.so", "cannot write '.*file/model.so': Not a directory"),
        ("folder", "cannot write '.*folder': it exists and is not a file"),
        ("/", "cannot write '/': it is a folder"),
        ("x" * 300, "cannot write '.*': File name too long"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(
    model: CompiledModel, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match=message):
        model.save(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broken")])
def test_a_failed_save_leaves_what_was_there(
    model: CompiledModel, saved: Path, tmp_path: Path, monkeypatch, error: Exception
) -> None:
    path = tmp_path / "model.so"
    path.write_bytes(b"precious")

    def fail(*args: Any) -> bytes:
        raise error

    monkeypatch.setattr(artifact, "file_digest", fail)
    with pytest.raises(ArtifactError, match=f"cannot write .*: {error.args[-1]}"):
        model.save(path)
    assert path.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    model: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.so"
    synced: list[tuple[int, bool]] = []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    model.save(path)
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_folder_that_cannot_be_written_through_is_no_error(
    model: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    model.save(tmp_path / "model.so")
    assert load(tmp_path / "model.so").inputs == model.inputs


def test_saving_a_loaded_model_copies_its_file(saved: Path, tmp_path: Path) -> None:
    source, copy = tmp_path / "source.so", tmp_path / "copy.so"
    source.write_bytes(saved.read_bytes())
    loaded = load(source)
    for path in (copy, source):
        loaded.save(path)
        assert path.read_bytes() == saved.read_bytes()
    source.unlink()
    with pytest.raises(ArtifactError, match=r"cannot read '.*source\.so': No such file"):
        loaded.save(copy)
    assert list(tmp_path.iterdir()) == [copy]


def test_a_zero_byte_in_a_path(model: CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write .*null byte"):
        model.save(f"{tmp_path}/a\0b.so")
    with pytest.raises(ArtifactError, match="cannot read .*null byte"):
        load(f"{tmp_path}/a\0b.so")
    for path in (None, b"model.so", 3):
        for refused in (load, model.save):
            with pytest.raises(ArtifactError, match="; expected a path"):
                refused(path)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.3, 0.9, 0.9999])
def test_a_file_that_is_cut_off_is_refused(saved: Path, tmp_path: Path, keep: float) -> None:
    data = saved.read_bytes()
    path = tmp_path / "cut.so"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ArtifactError, match="is not a compiled model|or one that is cut off"):
        load(path)


@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_any_wrong_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, saved: Path, place: int, bit: int
) -> None:
    data = bytearray(saved.read_bytes())
    # Half of the places fall into the description and the footer, which are short.
    place = place // 2 % len(data) if place % 2 else len(data) - 1 - place // 2 % 2500
    data[place] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.so"
    path.write_bytes(data)
    with pytest.raises(ArtifactError):
        read_artifact(path)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a compiled model; expected a file written by CompiledModel.save, or by tvm"),
        (b"\x7fELF" + bytes(500), "is a shared library which tvm_fusion did not save, or one"),
        (b"\x08\x07\x12\x04onnx" * 50, "is not a compiled model"),
        (join(b"", b"{"), r"the description in '.*' is not valid \(JSONDecodeError"),
        (join(b"", b"\xff\xff"), "is not valid"),
        (join(b"", b"[" * 100_000), r"is not valid \(RecursionError|is not valid \(JSONDecode"),
        (join(b"", b"{}"), r"is not valid \(KeyError"),
        (join(b"", b"[]"), r"is not valid \(TypeError"),
        (join(b"", b"{}", version=0), "is damaged: its checksum does not fit; save again"),
        (join(b"", b"{}", version=13), r"has format 13, .* reads up to 12; install a newer"),
    ],
)
def test_files_that_are_not_ours_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "foreign.so"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        load(path)


@pytest.mark.parametrize("path", [b"model.so", 3, None])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ArtifactError, match="expected a path"):
        load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read '.*nothing.so': No such file"):
        load(tmp_path / "nothing.so")
    with pytest.raises(ArtifactError, match="cannot read '.*': it is not a file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe.so")
    with pytest.raises(ArtifactError, match="cannot read '.*pipe.so': it is not a file"):
        load(tmp_path / "pipe.so")


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda about: about.pop(name)


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda about: about.update({name: value})


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    "change",
    [
        *(drop(name) for name in Description.__dataclass_fields__),
        put("target", 3),
        put("target", "no target"),
        put("target", '{"kind": "llvm"}'),
        put("target", '["llvm"]'),
        put("target", '{"kind": "cuda", "mcpu": "znver3", "mtriple": "x86_64-linux-gnu"}'),
        put(
            "target",
            '{"kind": "llvm", "mcpu": "znver3", "mtriple": "x86_64-linux-gnu", "mattr": [3]}',
        ),
        put("target", '{"kind": "llvm", "mcpu": 3, "mtriple": "x86_64-linux-gnu"}'),
        put("arch", OTHER),
        put("features", "avx2"),
        put("features", [1]),
        put("inputs", {}),
        put("inputs", [{"name": "x", "shape": [1.5], "dtype": "float32"}]),
        put("inputs", [{"name": "x", "shape": [True], "dtype": "float32"}]),
        put("inputs", [{"name": 3, "shape": [1], "dtype": "float32"}]),
        put("inputs", [["x"]]),
        put("outputs", []),
        put("fresh", [1]),
        put("fused", [3]),
        put("weights", 3),
        put("weights", [{"name": "w", "shape": ["n"], "dtype": "float32"}]),
        put("weights", [{"name": "w", "shape": [-1], "dtype": "float32"}]),
        put("weights", [{"name": "w", "shape": [-3, -5], "dtype": "float32"}]),
        put("weights", [{"name": "w", "shape": [1], "dtype": "object"}]),
        put("weights", [{"name": "w", "shape": [1], "dtype": ">f4"}]),
        put("weights", [{"name": "w", "shape": [1], "dtype": "no type"}]),
        put("weights", [{"name": "w", "shape": [1 << 70], "dtype": "float32"}]),
        put("places", [0]),
        put("places", 0),
        put("library", [0, 1 << 40]),
        put("library", [9, 3]),
        put("library", [0.0, 3]),
        put("library", [0]),
        put("others", [3]),
        put("others", [{"target": "llvm"}]),
        put("kernel", 3),
        put("kernel", {"name": 3, "arguments": [0]}),
        put("kernel", {"name": "matmul", "arguments": [1]}),
        put("kernel", {"name": "matmul", "arguments": [0, 0]}),
        put("kernel", {"name": "matmul", "arguments": []}),
        put("kernel", {"name": "matmul", "arguments": ["x"]}),
        put("versions", {"tvm": "0.27.0"}),
        put("versions", {"tvm": 1, "tvm_ffi": "0.1.14", "tvm_fusion": "0.1.0"}),
    ],
)
def test_a_description_of_another_form_is_refused(altered, change) -> None:
    with pytest.raises(ArtifactError, match="the description in '.*' is not valid"):
        load(altered(change))


@pytest.mark.usefixtures("no_loading")
def test_missing_features_are_found_before_anything_is_loaded(altered) -> None:
    path = altered(lambda about: about["features"].append("avx999"))
    with pytest.raises(TargetError, match="has no avx999, which the model is compiled for"):
        load(path)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("package", ["tvm", "tvm_ffi"])
def test_a_model_of_another_tvm_is_refused(altered, package: str) -> None:
    path = altered(lambda about: about["versions"].update({package: "7.5.3"}))
    with pytest.raises(ArtifactError, match=f"compiled with {package} 7.5.3, and .* is installed"):
        load(path)


def test_a_patch_release_of_tvm_does_not_matter(altered) -> None:
    version = ".".join([*str(tvm.__version__).split(".")[:2], "999"])
    path = altered(lambda about: about["versions"].update(tvm=version))
    assert load(path).versions["tvm"] == version


def test_a_library_that_does_not_load_is_refused(saved: Path, tmp_path: Path) -> None:
    library, about = split(saved.read_bytes())
    path = tmp_path / "broken.so"
    path.write_bytes(join(library[:100] + bytes(len(library) - 100), json.dumps(about).encode()))
    with pytest.raises(ArtifactError, match="cannot load '.*broken.so': .*Failed to load"):
        load(path)


@pytest.mark.usefixtures("no_loading")
def test_a_model_for_another_architecture_is_saved_here_and_runs_elsewhere(
    tmp_path: Path,
) -> None:
    model = dense(OTHER)
    model.save(tmp_path / "other.so")
    message = f"compiled for {OTHER} and this machine is {host.host_arch()}"
    for run in (lambda: load(tmp_path / "other.so"), lambda: model(np.ones((4, 8), np.float32))):
        with pytest.raises(TargetError, match=message):
            run()


def test_a_model_for_a_better_cpu_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense()
    model._about = replace(model._about, features=("avx999",))
    with pytest.raises(TargetError, match="has no avx999"):
        model(np.ones((4, 8), np.float32))


def test_features_in_the_file_are_those_that_the_target_needs(tmp_path: Path) -> None:
    dense("x86-64-v4" if OTHER == "aarch64" else "neoverse-v1").save(tmp_path / "model.so")
    _, about = split((tmp_path / "model.so").read_bytes())
    assert tuple(about["features"]) == required_features(resolve(about["target"]))
    assert len(about["features"]) > 3
