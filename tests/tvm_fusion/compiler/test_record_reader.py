# SPDX-License-Identifier: Apache-2.0
"""Records are data: damaged and foreign ones are skipped, and only legal knobs are used."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from cpu.conv_cases import TARGET, Case, build
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import attributes, cpu
from schedules.cpu.conv2d.conv2d import CONV2D, Conv2D
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.schedule_rule import schedule_function
from schedules.tuning.records import LONGEST_LINE, Record, Records, parse_record
from schedules.workload.conv2d import ConvLayer, to_json
from tvm_fusion.compiler.record_reader import (
    choose_records,
    load_records,
    read_lines,
    read_records,
    record_files,
)
from tvm_fusion.errors import RecordWarning, TuningError

MACHINE = CPUInfo.from_target(TARGET)
CASE = Case((ConvLayer(32, 32, (3, 3), padding=(1, 1, 1, 1)),), height=14, width=14)
VERSIONS = {name: template.version for name, template in cpu.TEMPLATES.items()}
OTHER = CONV2D.space(CASE.kernel, MACHINE)[-1]
DEFAULT = CONV2D.default(CASE.kernel, MACHINE)


def record(**changes: object) -> Record:
    found = Record(
        template="cpu.conv2d",
        version=CONV2D.version,
        workload=json.loads(to_json(CASE.kernel)),
        knobs=vars(OTHER),
        cpu=MACHINE.name,
        vector_bits=MACHINE.vector_bits,
        threads=MACHINE.num_cores,
        default_seconds=2e-4,
        best_seconds=1e-4,
        trials=64,
        machine="a CPU",
        tvm="0.27.0",
        date="2026-01-01T00:00:00+00:00",
    )
    return replace(found, **changes)


LINE = record().to_line()


def applied(found: Records) -> str | None:
    """Text of the record by which the rule schedules the case."""
    func = schedule_function("conv", build(CASE), TARGET, [Conv2D(found)])
    text = func.attrs.get(attributes.RECORD)
    return None if text is None else str(text)


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    )
    return path


def load(path: Path) -> Records:
    return load_records([path], VERSIONS)


def test_a_record_survives_its_line() -> None:
    assert parse_record(LINE.encode()) == record()
    assert record().gain == 2.0


def test_a_record_chooses_the_knobs(tmp_path: Path) -> None:
    assert OTHER != DEFAULT
    about = applied(load(write(tmp_path / "r.jsonl", LINE)))
    assert about is not None
    found = json.loads(about)
    assert found["knobs"] == vars(OTHER)
    assert found["source"] == "r.jsonl"
    assert applied(Records()) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"cpu": "another"},
        {"cpu": replace(MACHINE, unlike=("-avx512vnni",)).name},
        {"vector_bits": MACHINE.vector_bits * 2},
        {"threads": MACHINE.num_cores + 1},
        {"template": "cpu.fused_conv2d"},
        {"workload": json.loads(to_json(replace(CASE.kernel, height=15)))},
        {"knobs": vars(OTHER) | {"pixels": 99}},
        {"knobs": vars(OTHER) | {"pixels": "6"}},
        {"knobs": vars(OTHER) | {"blocks": True}},
        {"knobs": vars(OTHER) | {"more": 1}},
        {"knobs": {}},
    ],
)
def test_a_record_of_anything_else_does_not_count(tmp_path: Path, changes: dict) -> None:
    assert applied(load(write(tmp_path / "r.jsonl", record(**changes).to_line()))) is None


def test_another_version_is_ignored_with_one_warning(tmp_path: Path) -> None:
    old = record(version=CONV2D.version + 1).to_line()
    unknown = record(template="cpu.nothing").to_line()
    path = write(tmp_path / "r.jsonl", old, old, unknown)
    with pytest.warns(RecordWarning, match="3 tuning records are for other versions") as caught:
        assert applied(load(path)) is None
    assert len(caught) == 1


def test_the_user_wins_over_the_package_and_the_last_line_over_the_others(tmp_path: Path) -> None:
    first, last = (vars(knobs) for knobs in CONV2D.space(CASE.kernel, MACHINE)[1:3])
    user = write(
        tmp_path / "user.jsonl", record(knobs=first).to_line(), record(knobs=last).to_line()
    )
    package = write(tmp_path / "package.jsonl", LINE)
    found = json.loads(applied(load_records([user, package], VERSIONS)) or "")
    assert (found["knobs"], found["source"]) == (last, "user.jsonl")


BAD = {
    "empty": b"",
    "binary": bytes(range(256)).replace(b"\n", b""),
    "truncated": LINE[: len(LINE) // 2].encode(),
    "deep": b"[" * 30_000 + b"]" * 30_000,
    "list": b"[1, 2]",
    "null": b"null",
    "string": b'"record"',
    "long": b'{"a": "' + b"x" * LONGEST_LINE + b'"}',
    "NaN": LINE.replace("0.0001", "NaN").encode(),
    "infinite": LINE.replace("0.0001", "1e999").encode(),
    "zero": LINE.replace("0.0001", "0.0").encode(),
    "negative": LINE.replace("0.0001", "-1.0").encode(),
    "text": LINE.replace("0.0001", '"fast"').encode(),
    "extra": LINE.replace('"cpu"', '"cpus"').encode(),
    "version": LINE.replace('"version": 1', '"version": true').encode(),
    "kind": LINE.replace("llvm", "cuda").encode(),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_skipped_and_told(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "r.jsonl", BAD[kind], LINE)
    with pytest.warns(RecordWarning, match=r"r\.jsonl has lines .* line 1: ") as caught:
        found = read_records(path)
    assert found == [record()]
    assert len(caught) == 1


@pytest.mark.slow
def test_a_line_of_a_gigabyte_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # zeros, without taking any disk
        file.seek(0, 2)
        file.write(f"\n{LINE}\n".encode())
    lines = list(read_lines(path))
    assert [line.record for line in lines] == [None, record()]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="no records at 'aaa"):
        record_files(Path("a" * 5000))
    with pytest.raises(TuningError, match="is a bytes; expected a path"):
        choose_records(b"x", TARGET)  # type: ignore[arg-type]
    with pytest.raises(TuningError, match="no records at .*absent"):
        record_files(tmp_path / "absent")
    write(tmp_path / "trials.jsonl", "{}")
    kept = write(tmp_path / "records.jsonl", LINE)
    assert record_files(tmp_path) == [kept]


SPACE = {json.dumps(vars(knobs), sort_keys=True) for knobs in CONV2D.space(CASE.kernel, MACHINE)}


def damaged_by(generator: random.Random, longest: int) -> bytes:
    """The line with some pieces of up to ``longest`` bytes cut out or replaced."""
    line = bytearray(LINE.encode())
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(line) + 1)
        piece = generator.randbytes(generator.randint(0, 3))
        line[at : at + generator.randint(0, longest)] = piece
    return bytes(line).replace(b"\n", b"")


@given(st.data())
@settings(max_examples=300)
def test_damaged_files_never_crash_and_never_apply_foreign_knobs(tmp_path_factory, data) -> None:
    """Each file has some damaged lines around a good one, which is still used."""
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    good = LINE.encode()

    def damaged() -> bytes:
        line = bytearray(good)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(line) - 1))
            piece = data.draw(st.binary(max_size=3))
            line[at : at + data.draw(st.integers(0, 40))] = piece
            line = line or bytearray(b"x")
        return bytes(line).replace(b"\n", b"")

    lines = [damaged() for _ in range(data.draw(st.integers(1, 8)))]
    path.write_bytes(b"\n".join([*lines, good]) + b"\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        found = load(path)
    key = Conv2D().key(CASE.kernel, MACHINE)
    chosen = found.find(key, [CONV2D], CASE.kernel, MACHINE)
    assert chosen is not None and chosen[1] == OTHER
    path.write_bytes(b"\n".join(lines) + b"\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        found = load(path)
    chosen = found.find(key, [CONV2D], CASE.kernel, MACHINE)
    if chosen is not None:
        assert json.dumps(vars(chosen[1]), sort_keys=True) in SPACE


def test_ten_thousand_damaged_lines_hide_no_good_one(tmp_path: Path) -> None:
    generator, good = random.Random(), LINE.encode()
    path = tmp_path / "r.jsonl"
    write(path, *(damaged_by(generator, 9) for _ in range(10_000)), good)
    assert knobs_in(path) == OTHER


def knobs_in(path: Path) -> Conv2DKnobs | None:
    """Knobs that a file of records gives the case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        found = load(path)
    chosen = found.find(Conv2D().key(CASE.kernel, MACHINE), [CONV2D], CASE.kernel, MACHINE)
    return None if chosen is None else chosen[1]


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path: Path) -> None:
    """Each with lines that are damaged, cut or binary; every other one has a good one, too."""
    generator, path = random.Random(), tmp_path / "r.jsonl"
    space = set(CONV2D.space(CASE.kernel, MACHINE))
    for number in range(10_000):
        lines = [damaged_by(generator, 400) for _ in range(generator.randint(1, 6))]
        lines.insert(generator.randint(0, len(lines)), generator.randbytes(40))
        lines += [LINE.encode()] * (number % 2)
        path.write_bytes(b"\n".join(lines))
        chosen = knobs_in(path)
        assert chosen == OTHER if number % 2 else chosen is None or chosen in space
