# SPDX-License-Identifier: Apache-2.0
"""Models for several CPUs in one file: the best code is taken, equal weights are stored once."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import tvm_fusion
from examples.models import GraphBuilder
from tvm_fusion.cli import main
from tvm_fusion.compiler.targets import required_features, resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.machine.host import TILE_FEATURES, host_arch
from tvm_fusion.runtime import artifact
from tvm_fusion.runtime.artifact import describe_artifact, read_artifact
from tvm_fusion.runtime.compiled_model import CompiledModel

pytestmark = pytest.mark.skipif(host_arch() != "x86_64", reason="runs code for x86-64")

TARGETS = ["sapphirerapids", "x86-64", "neoverse-n1", "x86-64-v4"]
"""Every x86-64 CPU runs one of these."""

NET = GraphBuilder("several", (1, 3, 13, 9), 2)
MODEL = NET.model({"y": (NET.conv(NET.conv(NET.input, 32, 3), 64, 1), [1, 64, 13, 9])})

SMALL_NET = GraphBuilder("small", (2, 3), 5)
SMALL = SMALL_NET.model({"y": (SMALL_NET.op("Exp", SMALL_NET.input), [2, 3])})


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return tvm_fusion.compile(MODEL, TARGETS, threads=1)


@pytest.fixture(scope="module")
def saved(model: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several") / "model.so"
    model.save(path)
    return path


def be(monkeypatch: pytest.MonkeyPatch, listed: Iterable[str], known: Iterable[str] = ()) -> None:
    """Let this CPU have the features that Linux lists, and those that LLVM knows."""
    monkeypatch.setattr(artifact, "flagged_features", lambda: frozenset(listed))
    monkeypatch.setattr(artifact, "host_features", lambda: frozenset(known))


@pytest.mark.slow
def test_the_numbers_are_right_before_and_after_saving(model: CompiledModel, saved: Path) -> None:
    x = np.random.default_rng(3).standard_normal((1, 3, 13, 9), dtype=np.float32)
    session = onnxruntime.InferenceSession(MODEL.SerializeToString())
    [want] = session.run(None, {"input": x})
    again = tvm_fusion.load(saved, threads=1)
    for one in (model, again, pickle.loads(pickle.dumps(again))):
        np.testing.assert_allclose(one(x), want, rtol=1e-4, atol=1e-5)
        assert set(one.targets) == set(TARGETS) and one.targets[0] in ("x86-64", "x86-64-v4")


def test_loads_of_a_file_share_the_code_and_write_no_other_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved, again = tmp_path / "model.so", tmp_path / "again.so"
    tvm_fusion.compile(SMALL, ["x86-64", "x86-64-v2"], threads=1).save(saved)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    x = np.random.default_rng(4).standard_normal((2, 3), dtype=np.float32)
    before = memory_files()
    for count in (1, 2):
        model = tvm_fusion.load(saved, threads=1)
        assert model.targets[0] == "x86-64-v2", "the library at the beginning is not copied"
        np.testing.assert_allclose(model(x), np.exp(x), rtol=1e-6)
        assert len(memory_files() - before) == 1, count
    model.save(again)
    np.testing.assert_array_equal(tvm_fusion.load(again, threads=1)(x), model(x))
    assert len(memory_files() - before) == 2


def memory_files() -> set[str]:
    """Inodes of the files in memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:" in line}


@pytest.mark.parametrize(
    ("here", "best"),
    [
        ("x86-64-v2", "x86-64"),
        ("x86-64-v3", "x86-64"),
        ("znver4", "x86-64-v4"),
        ("sapphirerapids", "sapphirerapids"),
        ("graniterapids", "sapphirerapids"),
    ],
)
def test_the_best_target_that_the_machine_has_is_taken(
    saved: Path, monkeypatch: pytest.MonkeyPatch, here: str, best: str
) -> None:
    features = required_features(resolve(here))
    be(monkeypatch, features)
    assert read_artifact(saved).cpu == best
    be(monkeypatch, (), features)  # Linux lists nothing.
    assert read_artifact(saved).cpu == best


def test_tile_registers_are_used_where_linux_allows_them(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of floats does not need them; one that needs them is passed over."""
    first, *others, best = describe_artifact(saved).all
    assert best.cpu == "sapphirerapids" and not TILE_FEATURES.intersection(best.features)
    tiled = replace(best, features=(*best.features, *TILE_FEATURES))
    about = replace(first, others=(*others, tiled))
    be(monkeypatch, tiled.features, tiled.features)
    for allowed, cpu in ((True, "sapphirerapids"), (False, "x86-64-v4")):
        monkeypatch.setattr(artifact, "may_use_tiles", lambda allowed=allowed: allowed)
        assert about.for_this_machine().cpu == cpu
    assert tiled.missing() == "tile registers (AMX), which Linux does not let this process use"


@pytest.mark.slow
def test_a_machine_that_has_none_of_them_is_told_all(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be(monkeypatch, ["sse"], ["sse"])
    with pytest.raises(TargetError, match="none of the targets") as error:
        tvm_fusion.load(saved)
    assert "; neoverse-n1 needs aarch64; " in str(error.value)
    assert all(f"{name} needs" in str(error.value) for name in TARGETS)
    model = tvm_fusion.compile(MODEL, ["neoverse-n1", "x86-64-v4"], threads=1)
    with pytest.raises(TargetError, match="none of the targets"):
        model(np.zeros((1, 3, 13, 9), np.float32))


def test_targets_of_one_name_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = "llvm -mcpu=znver4 -mtriple=x86_64-linux-gnu -mattr=-avx512bf16,+avxvnni,-avx512vnni"
    title = "znver4 with avxvnni and without avx512bf16, avx512vnni"
    path, saved = tmp_path / "net.onnx", str(tmp_path / "net.so")
    path.write_bytes(SMALL.SerializeToString())
    model = tvm_fusion.compile(SMALL, ["znver4", changed], threads=1)
    assert set(model.targets) == {"znver4", title}
    assert main(["compile", str(path), "-o", saved, "--target", f"znver4,{changed}"]) == 0
    assert f" for {title}; znver4, " in capsys.readouterr().out
    assert main(["inspect", saved]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"{title}, x86_64-linux-gnu" in shown and f"{title}: avx, " in shown
    be(monkeypatch, ["sse"], ["sse"])
    with pytest.raises(TargetError, match=f"{title} needs .*; znver4 needs .*avx512bf16"):
        describe_artifact(saved).for_this_machine()


def test_equal_weights_of_targets_lie_in_the_file_once(saved: Path) -> None:
    """Blocks of 16 channels are those of both CPUs with AVX-512, and of no other one here."""
    about = {one.cpu: one for one in describe_artifact(saved).all}
    shapes = {name: [spec.shape for spec in one.weights] for name, one in about.items()}
    assert shapes["x86-64-v4"] == shapes["sapphirerapids"] != shapes["x86-64"]
    assert about["x86-64-v4"].places == about["sapphirerapids"].places
    assert not set(about["x86-64-v4"].places) & set(about["x86-64"].places)


@pytest.mark.slow
def test_the_command_line_takes_a_list_and_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").write_bytes(MODEL.SerializeToString())
    output = str(tmp_path / "net.so")
    arguments = ["compile", str(tmp_path / "net.onnx"), "-o", output, "--json"]
    assert main([*arguments, "--target", "x86-64, x86-64-v4"]) == 0
    assert set(json.loads(capsys.readouterr().out)["targets"]) == {"x86-64", "x86-64-v4"}
    assert main(["inspect", output]) == 0
    shown = capsys.readouterr().out
    assert "x86-64, x86_64-" in shown and "x86-64-v4: avx, " in shown
    assert main(["run", output, "--iterations", "1"]) == 0
    assert main([*arguments, "--target", "x86-64,"]) == 2
    assert "is not like x86-64-v3,x86-64-v4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        ([], {}, "the list of targets is empty"),
        (["x86-64", "opencl -host=x86-64"], {}, "'opencl' is a GPU: compile for it alone"),
        (["x86-64", "x86-64-v3"], {"machine": "znver4"}, "the figures of one CPU"),
        (["x86-64", "x86-64-v3"], {"ranks": 2}, "a model for ranks is for one target"),
    ],
)
def test_lists_that_make_no_sense_are_refused(targets: list, options: dict, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        tvm_fusion.compile(MODEL, targets, **options)


def test_a_target_that_is_named_twice_is_compiled_once() -> None:
    assert tvm_fusion.compile(MODEL, ("x86-64", "x86-64"), threads=1).targets == ("x86-64",)
