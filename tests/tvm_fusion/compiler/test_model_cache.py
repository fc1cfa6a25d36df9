# SPDX-License-Identifier: Apache-2.0
"""Models that were compiled before are loaded from the cache, and only those."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_cases import normal, onnx_model

from tvm_fusion import compile as compile_fresh
from tvm_fusion.compiler import compile_model, model_cache
from tvm_fusion.compiler.compile import compile
from tvm_fusion.errors import InvalidInputError, InvalidModelError

X = normal(2, 300)


def scaled(factor: float) -> onnx.ModelProto:
    constants = {"w": np.full(300, factor, "float32")}
    return onnx_model(
        [helper.make_node("Mul", ["x", "w"], ["y"])], {"x": (2, 300)}, ["y"], constants
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were really compiled."""
    found: list[Any] = []
    real = compile_model.compile_model

    def noting(model: Any, *args: Any, **options: Any) -> Any:
        found.append(model)
        return real(model, *args, **options)

    monkeypatch.setattr(compile_model, "compile_model", noting)
    return found


def test_the_second_time_nothing_is_compiled(tmp_path: Path, compiled: list[Any]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(scaled(3).SerializeToString())
    told: list[str] = []
    sources = [path, str(path), path.read_bytes(), scaled(3)]
    for source in sources:
        model = compile(
            source, cache=tmp_path / "cache", threads=1, progress=lambda text, *_: told.append(text)
        )
        np.testing.assert_array_equal(model(X), 3 * X)
    assert compiled == [path]
    assert told.count("build") == 1 and told[-3:] == ["done"] * 3
    model.save(tmp_path / "again.so")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "options", [{"threads": 2}, {"fuse": "none"}, {"target": "x86-64-v2"}, {"records": "none"}]
)
def test_other_options_are_other_models(
    tmp_path: Path, compiled: list[Any], options: dict[str, Any]
) -> None:
    compile(scaled(2), cache=tmp_path, **{"threads": 1} | {})
    compile(scaled(2), cache=tmp_path, **{"threads": 1} | options)
    compile(scaled(2), cache=tmp_path, **{"threads": 1} | options)
    assert len(compiled) == 2


def test_external_data_count(tmp_path: Path, compiled: list[Any]) -> None:
    path = tmp_path / "model.onnx"
    for factor in (2.0, 5.0):
        onnx.save(scaled(factor), path, save_as_external_data=True, location="w", size_threshold=0)
        for _ in range(2):
            np.testing.assert_array_equal(compile(path, cache=tmp_path / "c")(X), factor * X)
    assert len(compiled) == 2
    (tmp_path / "w").unlink()
    with pytest.raises(Exception, match="no such file"):
        compile(path, cache=tmp_path / "c")


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "harm",
    [
        _truncate,
        lambda file: file.chmod(0o666),
        Path.unlink,
        lambda file: file.with_name(next(file.parent.glob("*.json")).name).write_text("{"),
    ],
)
def test_files_that_are_not_as_they_were_written(
    tmp_path: Path, compiled: list[Any], harm: Callable[[Path], Any]
) -> None:
    compile(scaled(2), cache=tmp_path, threads=1)
    harm(next(tmp_path.glob("*.so")))
    np.testing.assert_array_equal(compile(scaled(2), cache=tmp_path, threads=1)(X), 2 * X)
    assert len(compiled) == 2


def test_files_of_others(
    tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile(scaled(2), cache=tmp_path, threads=1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    compile(scaled(2), cache=tmp_path, threads=1)
    assert len(compiled) == 2


def test_the_folder_is_the_users_own(tmp_path: Path) -> None:
    compile(scaled(2), cache=tmp_path / "new" / "cache", threads=1)
    assert stat.S_IMODE((tmp_path / "new" / "cache").stat().st_mode) == 0o700


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("folder", ["file/cache", "/proc/cache"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    np.testing.assert_array_equal(compile(scaled(2), cache=tmp_path / folder, threads=1)(X), 2 * X)


def test_the_environment_says_the_default(
    tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for text, count in (("1", 1), (str(tmp_path / "other"), 1), ("0", 0), ("", 0)):
        monkeypatch.setenv("TVM_FUSION_CACHE", text)
        before = len(list(tmp_path.rglob("*.so")))
        compile_fresh(scaled(2), threads=1)
        assert len(list(tmp_path.rglob("*.so"))) - before == count
    assert (tmp_path / "tvm-fusion" / "models").is_dir()
    monkeypatch.setenv("TVM_FUSION_CACHE", "1")
    compile(scaled(4), threads=1, cache=False)
    assert len(list(tmp_path.rglob("*.so"))) == 2


def test_what_was_used_longest_ago_is_removed(
    tmp_path: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile(scaled(1), cache=tmp_path, threads=1)
    monkeypatch.setattr(
        model_cache, "MOST_BYTES", 5 * next(tmp_path.glob("*.so")).stat().st_size // 2
    )
    compile(scaled(2), cache=tmp_path, threads=1)
    compile(scaled(1), cache=tmp_path, threads=1)
    compile(scaled(3), cache=tmp_path, threads=1)
    assert len(list(tmp_path.glob("*.so"))) == 2
    compile(scaled(1), cache=tmp_path, threads=1)
    assert len(compiled) == 3
    compile(scaled(2), cache=tmp_path, threads=1)
    assert len(compiled) == 4


def test_functions_as_options_are_not_cached(tmp_path: Path) -> None:
    compile(scaled(2), cache=tmp_path, threads=1, fuse=lambda pair: False)
    assert not list(tmp_path.iterdir())


def test_numbers_are_checked_also_of_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    compile(scaled(2), cache=tmp_path, threads=1)
    monkeypatch.setattr("tvm_fusion.compiler.reference.check_numbers", lambda *a: checked.append(a))
    compile(scaled(2), cache=tmp_path, threads=1, check=True)
    assert len(checked) == 1


@pytest.mark.parametrize("cache", [7, [], b"x", ""])
def test_what_is_no_folder(cache: Any) -> None:
    with pytest.raises(
        InvalidInputError, match=r"cache is .*; expected True, False, a folder or None"
    ):
        compile(scaled(2), cache=cache)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="expected a path"):
        compile(42, cache=tmp_path)


@pytest.mark.slow
def test_programs_of_pytorch(tmp_path: Path, compiled: list[Any]) -> None:
    torch = pytest.importorskip("torch")

    class Scaled(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((300,), factor))

        def forward(self, x):
            return torch.relu(x) * self.weight

    x = torch.from_numpy(X)
    for factor in (2.0, 2.0, 3.0):
        program = torch.export.export(Scaled(factor).eval(), (x,))
        found = compile(program, cache=tmp_path, threads=1)(X)
        np.testing.assert_array_equal(found, factor * np.maximum(X, 0))
    assert len(compiled) == 2
