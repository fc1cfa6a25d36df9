# SPDX-License-Identifier: Apache-2.0
"""Asking llvm-mca of a loop, with a program in its place that answers as it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_onnx import small_model

from examples.benchmarks import machine_code, mca, predicted
from examples.benchmarks.assembly import Instruction, Loop
from examples.benchmarks.mca import ModelError, find_mca, predict

# Two multiply-adds a cycle, and a load each; it counts those that it is given.
ANSWER = """#!/bin/sh
cat > "$0.in"; echo "$@" > "$0.args"
fmas=$(grep -c fm "$0.in"); loads=$(grep -c '(' "$0.in")
awk -v f=$fmas -v l=$loads 'BEGIN {
    block = f / 2 > l ? f / 2 : l
    printf "{\\"CodeRegions\\": [{\\"SummaryView\\": {\\"BlockRThroughput\\": %g,", block
    printf "\\"TotalCycles\\": %g, \\"Iterations\\": 200}}]}", 200 * block + 100
}'
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llvm-mca"
    path.write_text(ANSWER)
    path.chmod(0o755)
    return path


def loop_of(*texts: str) -> Loop:
    return Loop("f", [Instruction(text) for text in texts], True)


def test_a_loop_of_loads(program):
    loop = loop_of(
        "vfmadd231ps (%rax), %zmm1, %zmm2", "vmovups (%rcx), %zmm1", "vmovups (%rdx), %zmm3"
    )
    found = predict(str(program), loop, "znver5", "x86_64")
    assert (found.bound, found.block, found.simulated) == (0.5, 3, 3.5)
    assert found.share == pytest.approx(1 / 6)
    arguments = Path(f"{program}.args").read_text()
    assert "-mtriple=x86_64-linux-gnu -mcpu=znver5" in arguments


def test_a_loop_of_multiply_adds_is_at_its_bound(program):
    loop = loop_of("fmla v1.4s, v2.4s, v3.s[0]", "fmla v4.4s, v2.4s, v3.4s", "b.ne .LBB0_1")
    assert predict(str(program), loop, "neoverse-v2", "aarch64").share == 1


def test_a_program_that_does_not_know_the_cpu(program):
    program.write_text("#!/bin/sh\necho \"'x' is not a recognized processor\" >&2\n")
    with pytest.raises(ModelError, match="has no answer for x: 'x' is not a recognized processor"):
        predict(str(program), loop_of("vfmadd231ps %ymm1, %ymm2, %ymm3"), "x", "x86_64")


def test_the_program_is_found_or_asked_for(program, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_mca(str(program)) == str(program)
    with pytest.raises(ModelError, match="llvm-mca was not found: install LLVM's tools"):
        find_mca()
    monkeypatch.setenv("PATH", str(program.parent))
    assert find_mca() == str(program)
    monkeypatch.setattr(sys, "argv", ["machine_code.py", "--llvm-mca", "/nowhere/llvm-mca"])
    assert machine_code.main() == 2
    assert capsys.readouterr().err.startswith("/nowhere/llvm-mca was not found")


def test_the_command_prints_a_table_or_json(program, monkeypatch, capsys):
    tile = machine_code.Tile("znver5", "conv 1x1 8->8 @14", 6, 2, 3, 96, 64, 0, 0, 48, 50, 51, 0.96)
    monkeypatch.setattr(machine_code, "tiles", lambda cpu, found: iter([tile]))
    command = ["machine_code.py", "--llvm-mca", str(program), "--cpu", "znver5"]
    monkeypatch.setattr(sys, "argv", command)
    assert machine_code.main() == 0
    assert "96%" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    assert machine_code.main() == 0
    assert '"share": 0.96' in capsys.readouterr().out


def test_the_newest_program_is_taken(program, monkeypatch):
    newer = program.with_name("llvm-mca-22")
    program.rename(newer)
    monkeypatch.setenv("PATH", str(newer.parent))
    assert find_mca() == str(newer) and 22 in mca.VERSIONS


@pytest.mark.slow
def test_every_kernel_of_a_network_is_predicted(program, monkeypatch, capsys):
    monkeypatch.setattr(predicted, "MODELS", {"tiny": lambda: small_model(size=32, channels=32)})
    command = ["predicted.py", "--only", "tiny", "--llvm-mca"]
    monkeypatch.setattr(sys, "argv", [*command, "/nowhere/llvm-mca", "--json"])
    assert predicted.main() == 0
    shown = capsys.readouterr()
    assert "/nowhere/llvm-mca was not found" in shown.err
    alone = json.loads(shown.out)["seconds"]["tiny"]
    assert all(kernel["model"] == kernel["mca"] > 0 for kernel in alone)
    assert any("conv 1x1" in kernel["operator"] for kernel in alone)
    monkeypatch.setattr(sys, "argv", [*command, str(program), "--json"])
    assert predicted.main() == 0
    both = json.loads(capsys.readouterr().out)["seconds"]["tiny"]
    assert [one["operator"] for one in both] == [one["operator"] for one in alone]
    assert [one["model"] for one in both] == [one["model"] for one in alone]
    shares = [kernel["share"] for kernel in both if kernel["share"] is not None]
    assert shares and all(0 < share <= 1 for share in shares)
    monkeypatch.setattr(sys, "argv", [*command, str(program), "--kernels"])
    assert predicted.main() == 0
    assert "tiny: predicted microseconds" in capsys.readouterr().out
