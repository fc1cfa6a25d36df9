# SPDX-License-Identifier: Apache-2.0
"""``import tvm`` alone finds the pipeline, the ops and the rules, and imports nothing heavy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
from without_torch import WITHOUT_TORCH

import relay_passes  # noqa: F401
from tvm_fusion import plugin

ROOT = Path(__file__).parents[2]
GROUP = "tvm.backends"

USE = """
import sys
import numpy as np
import tvm
from tvm import relax
heavy = ("relay_passes", "schedules.cpu", "tvm_fusion.compiler.pipeline", "tvm.relax.script")
assert not [name for name in heavy if name in sys.modules]
for name in {ops}:
    assert tvm.ir.Op.get(name).get_attr("FPurity")
rules = tvm.s_tir.dlight.tvm_fusion
mod = tvm.script.from_source('''
# from tvm.script import ir as I, relax as R
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.tvm_fusion.hardswish(x)
            R.output(y)
        return y
''')
assert "tvm_fusion.compiler.pipeline" not in sys.modules
pipeline = relax.get_pipeline("tvm_fusion")
machine = relax.VirtualMachine(tvm.compile(mod, "llvm", relax_pipeline=pipeline), tvm.cpu())
x = np.float32([-4, -1, 1, 4])
y = machine["main"](tvm.runtime.tensor(x)).numpy()
assert all(tvm.ir.Op.get(name).get_attr("tvm_fusion.registered") for name in {ops})
np.testing.assert_allclose(y, x * np.clip(x + 3, 0, 6) / 6, rtol=1e-6)
import schedules.cpu, schedules.gpu
assert rules.cpu.RULES is schedules.cpu.RULES and rules.gpu.RULES is schedules.gpu.RULES
print("used")
"""


def start(folder: Path, entry: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the installed package has this entry point."""
    info = folder / "tvm_fusion-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tvm-fusion\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntvm_fusion = {entry}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code],
        capture_output=True,
        text=True,
        env=environment,
    )


def test_tvm_alone_finds_the_package(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    entry = project.partition(f'[project.entry-points."{GROUP}"]')[2].split('"')[1]
    ended = start(tmp_path, entry, USE.format(ops=plugin.OPS))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "used\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["tvm_fusion.absent:register", "tvm_fusion.plugin:absent"])
def test_a_broken_package_is_one_warning(tmp_path: Path, entry: str) -> None:
    ended = start(tmp_path, entry, "import tvm; print(tvm.relax.get_pipeline('zero'))")
    assert ended.returncode == 0 and "opt_level" in ended.stdout
    assert ended.stderr.count("Warning") == 1 and "autoload tvm backend" in ended.stderr


def test_all_ops_have_stand_ins() -> None:
    ours = {name for name in tvm.ir.Op.list_op_names() if name.startswith("relax.tvm_fusion.")}
    assert ours == set(plugin.OPS)
