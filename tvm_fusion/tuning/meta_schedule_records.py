# SPDX-License-Identifier: Apache-2.0
"""Records in the JSON database of MetaSchedule (``tvm.s_tir.meta_schedule`` of TVM 0.27).

A database is a folder of two files. A line of ``database_workload.json`` is a function, and a line
of ``database_tuning_record.json`` a measurement of it: number of the function, trace, seconds,
target and types of the arguments. Our traces are those of :mod:`schedules.tuning.tunable`, which
name the template and its workload, so that the second file alone is read back, as data: TVM's own
reader trusts its input.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir
from tvm.target import Target

from schedules import attributes, cpu
from schedules.cpu.core.machine import CPUInfo
from schedules.tuning.records import Key, Record, canonical, parse_json
from schedules.tuning.tunable import read_setting, sample_knobs

from ..compiler.record_reader import bounded_lines
from ..compiler.targets import resolve
from ..errors import RecordWarning, TuningError, TVMFusionError
from .database import LOCKS, Database, require_extra
from .record_files import all_records, cpu_of, fault
from .tasks import Task

WORKLOADS, MEASUREMENTS = "database_workload.json", "database_tuning_record.json"
FAILED_SECONDS = 1e9
"""MetaSchedule notes 1e10 seconds for what did not run."""
_OPTIONS = ("kind", "mcpu", "mattr", "mtriple", "num-cores")
_SHOWN = 3


def export_records(database: Path, folder: Path, tasks: Sequence[Task], target: Target) -> int:
    """Write the usable records of a model's tasks, with the default's times; return how many.

    Raises
    ------
    TuningError
        If the folder cannot be written.
    """
    known = {record.key: record for record in all_records(database) if not fault(record)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            count = _write(Path(aside), tasks, known, target)
            for name in (WORKLOADS, MEASUREMENTS):
                os.replace(Path(aside, name), folder / name)
    except OSError as error:
        raise TuningError(f"cannot write {str(folder)!r}: {error.strerror or error}") from error
    return count


def _write(folder: Path, tasks: Sequence[Task], known: Mapping[Key, Record], target: Target) -> int:
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(folder))
    for name in (WORKLOADS, MEASUREMENTS):
        Path(folder, name).touch()
    count = 0
    for task in tasks:
        record = known.get(task.key)
        if record is None:
            continue
        count += 1
        best = cpu.TEMPLATES[record.template]
        usual = task.templates[0], task.templates[0].default(task.workload, task.machine)
        times = {usual: record.default_seconds}
        times[best, best.read_knobs(record.knobs)] = record.best_seconds
        mod = tvm.IRModule({"main": task.func})
        for (template, knobs), seconds in times.items():
            sch = s_tir.Schedule(mod)
            space = template.space(task.workload, task.machine)
            if knobs not in space:
                space = template.space(task.workload, task.machine, wide=True)
            sample_knobs(sch, template, task.key.workload, space, knobs)
            arguments = ms.arg_info.ArgInfo.from_prim_func(task.func)
            workload = database.commit_workload(mod)
            database.commit_tuning_record(
                ms.database.TuningRecord(sch.trace, workload, [seconds], target, arguments)
            )
    return count


def import_records(database: Path, inputs: Iterable[Path]) -> tuple[int, int]:
    """Append the fastest setting of each workload; return how many, and how many lines are refused.

    Parameters
    ----------
    database : Path
        Folder of our records.
    inputs : iterable of Path
        Databases of MetaSchedule: folders, or their files of measurements.

    Raises
    ------
    TuningError
        If there is no such file.
    """
    require_extra(LOCKS)
    store = Database(database)
    taken = refused = 0
    for path in inputs:
        found, bad = read_measurements(path / MEASUREMENTS if path.is_dir() else path)
        refused += bad
        for record in _winners(found):
            store.add_record(record)
            taken += 1
    return taken, refused


def read_measurements(path: Path) -> tuple[list[Record], int]:
    """Read the usable lines, each as a record without a default; return how many are not usable.

    One :class:`RecordWarning` names some of those, with the reasons.
    """
    records: list[Record] = []
    bad: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(bounded_lines(file), 1):
                try:
                    record = parse_measurement(line)
                    reason = fault(record)
                except ValueError as error:
                    reason = str(error)
                if reason:
                    bad.append(f"line {number}: {reason}")
                else:
                    records.append(record)
    except OSError as error:
        raise TuningError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if bad:
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        warnings.warn(
            f"{path} has lines that are refused: {'; '.join(bad[:_SHOWN])}{more}", RecordWarning, 2
        )
    return records, len(bad)


def parse_measurement(line: bytes) -> Record:
    """Read a line of the measurements as a record whose default has the same time.

    Raises
    ------
    ValueError
        If it is no measurement of one of our templates; the message says why.
    """
    value = parse_json(line)
    try:
        _, (trace, seconds, config, _) = value
        decisions = _decisions(*trace)
        mean = statistics.fmean(map(float, seconds))
        options = {key: config[key] for key in _OPTIONS if key in config}
        cores = options["num-cores"]
        workload = json.loads(decisions[attributes.WORKLOAD])
    except (LookupError, TypeError, ArithmeticError, RecursionError, ValueError) as error:
        kind = type(error).__name__
        raise ValueError(f"it is not a measurement of a template ({kind}: {error})") from error
    if not 0 < mean < FAILED_SECONDS or not isinstance(workload, dict) or type(cores) is not int:
        raise ValueError("its seconds, workload or cores are not those of a measurement")
    try:
        template, knobs = read_setting(decisions, list(cpu.TEMPLATES.values()))
        machine = CPUInfo.from_target(resolve(options))
    except TVMFusionError as error:
        raise ValueError(str(error)) from error
    return Record(
        template=template.name,
        version=template.version,
        workload=workload,
        knobs=knobs,
        cpu=machine.name,
        vector_bits=machine.vector_bits,
        threads=machine.num_cores,
        default_seconds=mean,
        best_seconds=mean,
        trials=1,
    )


def _decisions(instructions: Sequence[Any], decided: Sequence[Any]) -> dict[str, Any]:
    """Annotations of a trace, with the decisions of its samplings."""
    choices = {int(number): choice for number, choice in decided}
    sampled: dict[str, Any] = {}
    decisions: dict[str, Any] = {}
    for number, (kind, inputs, arguments, outputs) in enumerate(instructions):
        if kind == "SampleCategorical":
            choice = choices[number]
            if type(choice) is not int or not 0 <= choice < len(arguments[0]):
                raise IndexError(f"decision {choice!r} of instruction {number}")
            sampled[outputs[0]] = arguments[0][choice]
        elif kind == "Annotate":
            value = inputs[1]
            if isinstance(value, str):  # a name of a sampled number, or a text in quotes
                value = value[1:-1] if value.startswith('"') else sampled[value]
            decisions[arguments[0]] = value
    return decisions


def _winners(measured: Iterable[Record]) -> list[Record]:
    """The fastest record of each workload and CPU, against the default if it was measured."""
    by_key: dict[Key, list[Record]] = {}
    for record in measured:
        by_key.setdefault(record.key, []).append(record)
    winners = []
    for group in by_key.values():
        best = min(group, key=lambda record: record.best_seconds)
        usual = [record.best_seconds for record in group if _is_default(record)]
        slowest = max(usual, default=best.best_seconds)
        winners.append(replace(best, default_seconds=slowest, trials=len(group)))
    return winners


def _is_default(record: Record) -> bool:
    template = cpu.TEMPLATES[record.template]
    workload = template.read_workload(canonical(record.workload))
    return template.read_knobs(record.knobs) == template.default(workload, cpu_of(record))
