# SPDX-License-Identifier: Apache-2.0
"""Packing for GPU machines without network: which files, which wheels, and the script."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from examples.benchmarks import pack_gpu

ROOT = Path(__file__).resolve().parents[3]
FAKE_PIP = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.mkdir(parents=True); "


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "inner").mkdir(parents=True)
    (root / ".gitignore").write_text("built\n")
    for name in ("built", "kept", "deleted", "inner/named with spaces"):
        (root / name).write_text(name)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    (root / "new").write_text("new")
    (root / "deleted").unlink()
    return root


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes a wheel, or fails where it is asked for the extra ``none``."""

    def command(root: Path, folder: Path, extras: str) -> list[str]:
        last = "sys.exit(1)" if extras == "none" else "(path / 'a.whl').write_bytes(b'12')"
        return [sys.executable, "-c", FAKE_PIP + last, str(folder / pack_gpu.WHEELS)]

    monkeypatch.setattr(pack_gpu, "download_command", command)


def test_files_are_those_of_the_work_tree(checkout: Path) -> None:
    names = {str(path) for path in pack_gpu.checkout_files(checkout)}
    assert names == {".gitignore", "kept", "inner/named with spaces", "new"}


def test_wheels_are_the_locked_ones() -> None:
    command = pack_gpu.download_command(ROOT, Path("/to"), pack_gpu.EXTRAS)
    assert command[-2:] == ["setuptools", f"{ROOT}[cuda,test]"]
    assert command[command.index("--constraint") + 1] == str(ROOT / "requirements.lock")
    assert command[command.index("--only-binary") + 1] == ":all:"


@pytest.mark.usefixtures("fake_pip")
def test_a_packed_folder(
    checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pack_gpu, "ROOT", checkout)
    folder = tmp_path / "packed"
    assert pack_gpu.main([str(folder)]) == 0
    assert "packed: 4 files, 1 wheels of 0 MB" in capsys.readouterr().out
    copied = folder / pack_gpu.CHECKOUT
    assert (copied / "inner" / "named with spaces").read_text() == "inner/named with spaces"
    assert not (copied / "built").exists() and not (copied / ".git").exists()
    script = folder / "install.sh"
    assert script.stat().st_mode & 0o111
    assert f"--find-links {pack_gpu.WHEELS}" in script.read_text()
    with pytest.raises(SystemExit):
        pack_gpu.main([str(folder)])
    assert "packed exists already, and is no empty folder" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_pip")
def test_a_missing_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack_gpu.main([str(tmp_path / "packed"), "--extras", "none"]) == 1
    assert "pip found no wheel of a requirement" in capsys.readouterr().err
    assert not (tmp_path / "packed" / "install.sh").exists()


def test_listing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    assert pack_gpu.main([str(tmp_path / "packed"), "--list", "--extras", "cuda"]) == 0
    *files, command = capsys.readouterr().out.splitlines()
    assert {"Makefile", "requirements.lock", "examples/benchmarks/pack_gpu.py"} <= set(files)
    assert not [name for name in files if name.startswith(".venv")]
    assert command.endswith("[cuda]") and not (tmp_path / "packed").exists()


def test_the_script_refuses_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    text = pack_gpu.install_script("cuda")
    monkeypatch.undo()
    script = tmp_path / "install.sh"
    script.write_text(text)
    found = subprocess.run(["sh", str(script), sys.executable], capture_output=True, text=True)
    version = "{}.{}".format(*sys.version_info[:2])
    assert found.returncode == 1
    assert f"for Python {version} on pdp11, not {version} on {platform.machine()}" in found.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_script_installs_from_the_wheels_alone(tmp_path: Path) -> None:
    """With a Python whose pip writes down what it is asked for."""
    wrapper = tmp_path / "python"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exec {sys.executable} "$@";; esac\n'
        f'mkdir -p .venv/bin; ln -sf {wrapper} .venv/bin/python; echo "$@" >> log\n'
    )
    wrapper.chmod(0o755)
    (tmp_path / "install.sh").write_text(pack_gpu.install_script("cuda,test"))
    found = subprocess.run(
        ["sh", "install.sh", str(wrapper)], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    environment, *installs = (tmp_path / "log").read_text().splitlines()
    assert environment == "-m venv --system-site-packages .venv"
    assert len(installs) == 2 and all("--no-index --find-links wheels" in one for one in installs)
    assert installs[0].endswith("setuptools") and installs[1].endswith("tvm-fusion[cuda,test]")
    assert found.stdout.startswith("make -C tvm-fusion bench-gpu PYTHON=")
