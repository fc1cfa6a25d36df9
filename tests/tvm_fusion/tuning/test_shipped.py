# SPDX-License-Identifier: Apache-2.0
"""The records that come with the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedules import cpu, gpu
from schedules.tuning.records import Record, Records
from tvm_fusion.compiler.record_reader import SHIPPED, choose_records, read_lines
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TuningError
from tvm_fusion.machine.host import host_cpu
from tvm_fusion.tuning.record_files import verify

FILES = sorted(SHIPPED.glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_record_of_its_cpu(path: Path) -> None:
    records = []
    for line in read_lines(path):
        assert line.record is not None, line
        records.append(line.record)
    assert len({record.key for record in records}) == len(records) > 0
    for record in records:
        template = cpu.TEMPLATES[record.template]
        assert (record.cpu, record.version) == (path.stem, template.version)
        template.read_workload(record.key.workload)
        template.read_knobs(record.knobs)


def test_settings_of_one_thread_keep_the_order_of_sums() -> None:
    """Ranks of one thread follow them, and have the bits of one rank that has none."""
    for path in FILES:
        for line in read_lines(path):
            if line.record is not None and line.record.threads == 1:
                assert line.record.template.endswith(("conv2d", "pooling"))


@pytest.mark.skipif(not (SHIPPED / f"{host_cpu()}.jsonl").exists(), reason="no records of this CPU")
def test_records_of_this_cpu_are_usable_on_it() -> None:
    good, bad = verify(SHIPPED / f"{host_cpu()}.jsonl")
    assert good >= 0.9 * (good + len(bad)), bad  # caches of another size have another space


def test_records_are_chosen_by_the_target(tmp_path: Path) -> None:
    assert FILES, "the package has no records"
    target = resolve(FILES[0].stem)
    assert len(choose_records(None, target)) > 0
    assert len(choose_records("none", target)) == 0
    assert len(choose_records(None, resolve("x86-64-v3"))) == 0
    with pytest.raises(TuningError, match="no records at"):
        choose_records(tmp_path / "absent", target)
    assert isinstance(choose_records(None, resolve("opencl")), Records)
    version = gpu.TEMPLATES["gpu.matmul_tiles"].version
    record = Record("gpu.matmul_tiles", version, {}, {}, "sm_90", 1024, 132, 2e-5, 1e-5, 8)
    (tmp_path / "mine.jsonl").write_text(record.to_line() + "\n")
    assert len(choose_records(tmp_path, resolve("cuda -arch=sm_90"))) == 1
    assert verify(tmp_path)[0] == 0  # its workload is none
