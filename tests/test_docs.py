# SPDX-License-Identifier: Apache-2.0
"""The examples of the documentation run as they stand, and its commands exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_onnx import small_decoder, small_model
from small_traces import training_step

from tvm_fusion import cli
from tvm_fusion.cli import command_line
from tvm_fusion.tuning import job

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("tvm_fusion", "relay_passes", "schedules")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """The blocks of a language, each with the number of lines before it."""
    found = BLOCK.finditer(text)
    return [
        (text[: block.start(2)].count("\n"), block[2]) for block in found if block[1] == language
    ]


def commands(text: str) -> list[list[str]]:
    """The lines of blocks of commands, as words; a line may go on behind a backslash."""
    whole = (re.sub(r"\\\n *", "", block) for _, block in blocks(text, "sh"))
    lines = [line for block in whole for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all Python of a page as one module, whose lines have the page's numbers."""
    lines: list[str] = []
    for before, block in blocks(page.read_text(), "python"):
        lines += [""] * (before - len(lines)) + block.splitlines()
    path = folder / f"page_{page.stem}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models and traces that the pages name, where everything runs.

    Tuning jobs measure for a moment.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(job, "FINAL_SECONDS", 0.05)
    onnx.save(small_model(size=32, channels=16), "model.onnx")
    image = small_model(size=224)
    image.graph.input[0].name = image.graph.node[0].input[0] = "input"
    onnx.save(image, "mobilenet_v2.onnx")
    np.save("x.npy", np.zeros((1, 3, 224, 224), "float32"))
    onnx.save(small_model("batch", size=32, channels=16), "open.onnx")
    onnx.save(small_decoder(), "step.onnx")
    for page in PAGES:  # files that they show, under their names
        for _, block in blocks(page.read_text(), "json"):
            (tmp_path / f"{json.loads(block)['name']}.json").write_text(block)
    (tmp_path / "traces").mkdir()
    table = {"rows": 1000, "width": 64, "lookups": 20}
    (tmp_path / "tables.json").write_text(json.dumps({"batch": 512, "tables": [table] * 3}))
    for rank in range(2):
        training_step(rank, late=40).write(tmp_path / "traces" / f"rank{rank}.json")
    return tmp_path


def resolved(node: ast.AST, imported: dict[str, Any]) -> Any:
    """Object that a name, or an attribute of one, stands for; None if it is not ours."""
    if isinstance(node, ast.Name):
        return imported.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = resolved(node.value, imported)
    return None if owner is None else getattr(owner, node.attr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_names_what_exists(page: Path) -> None:
    """Our modules, their attributes, and arguments of calls by name exist."""
    imported: dict[str, Any] = {}
    tree = ast.parse("\n".join(block for _, block in blocks(page.read_text(), "python")))
    if page.stem == "pytorch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if alias.name.startswith(OURS)):
                importlib.import_module(name)
                imported[name.partition(".")[0]] = sys.modules[name.partition(".")[0]]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            for name in node.names:
                found = pkgutil.resolve_name(f"{node.module}.{name.name}")
                imported[name.asname or name.name] = found
    for node in ast.walk(tree):
        called = resolved(node.func if isinstance(node, ast.Call) else node, imported)
        if isinstance(node, ast.Call) and called is not None:
            inspect.signature(called).bind_partial(
                **{keyword.arg: None for keyword in node.keywords if keyword.arg}
            )


@pytest.mark.quick_cases(
    *("README", "index", "operators", "devices", "traces", "prediction", "targets")
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "pytorch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    run_page(page, folder, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path, folder: Path) -> None:
    """Their arguments are understood, too; what one writes, later ones may read."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    group = command_line.cli
    for program, *arguments in filter(None, commands(page.read_text())):
        if program == "tvm-fusion":
            with group.make_context("tvm-fusion", list(arguments)) as context:
                name, command, rest = group.resolve_command(context, arguments)
                options = command.make_context(name, rest, parent=context).params
            for path in options.values():
                if isinstance(path, str | Path) and Path(path).suffix:
                    Path(path).touch()
        elif program == "make":
            assert arguments[0] in targets
        elif program == "python":
            assert (ROOT / arguments[0]).is_file()
        else:
            assert (program, arguments[0]) in (("git", "clone"), ("pip", "install"))


@pytest.mark.quick_cases("index", "traces")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page: Path, folder: Path, capfd: Any) -> None:
    for program, *arguments in filter(None, commands(page.read_text())):
        if "--trials" in arguments:  # each takes a second or two
            arguments[arguments.index("--trials") + 1] = "2"
        if importlib.util.find_spec("openvino") is None:  # none of the extras of the tests has it
            arguments = [argument.replace(",openvino", "") for argument in arguments]
        if program == "tvm-fusion":
            assert cli.main(arguments) == 0, capfd.readouterr().err


def test_a_wrong_example_fails_at_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = folder / "wrong.md"
    page.write_text("A page.\n\n```python\nx = 1\n```\n\nMore.\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as error:
        run_page(page, folder, monkeypatch)
    assert error.traceback[-1].lineno == 9  # counted from 0: the tenth line of the page
