# SPDX-License-Identifier: Apache-2.0
"""Records of tuning jobs that a compilation uses: the user's own, and those of the package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from relay_passes.conv2d.fusion_report import recorded_forms
from schedules import cpu, gpu
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import RECORD, AnySpace, Records

from ..errors import TuningError
from ..paths import as_path
from .record_reader import load_records, record_files
from .targets.target import is_gpu

SHIPPED = Path(__file__).resolve().parents[1] / "database"
"""Folder of the package's own records: one file a CPU, named after it."""

NONE = "none"

SPACES: dict[str, AnySpace] = {**cpu.SPACES, **gpu.TEMPLATES}
"""All that a record can choose from, by name."""


def choose_records(records: str | os.PathLike[str] | None, target: Target) -> Records:
    """Load the records for a target.

    Parameters
    ----------
    records : str, path or None
        A file of records, the folder of a tuning job, ``"none"`` for no records at all, or None for
        those of the package only.
    target : Target
        A resolved target.

    Returns
    -------
    Records
        The user's own win over the package's.

    Raises
    ------
    TuningError
        If there is no such file or folder.
    """
    if records == NONE:
        return Records()
    files = [] if records is None else record_files(as_path(records, TuningError))
    name = GPUInfo.from_target(target).name if is_gpu(target) else target.attrs["mcpu"]
    shipped = SHIPPED / f"{name}.jsonl"
    files += [shipped] if shipped.exists() else []
    return load_records(files, {name: one.version for name, one in SPACES.items()})


def record_of(func: tirx.PrimFunc) -> dict[str, Any] | None:
    """Return the record that chose the knobs of a scheduled function, if one did.

    It has ``template``, ``knobs``, ``gain``, ``source`` (the name of its file) and ``date``.
    """
    text = func.attrs.get(RECORD) if func.attrs else None
    return None if text is None else json.loads(str(text))


def used_records(mod: tvm.IRModule) -> list[dict[str, Any]]:
    """Return the records that an optimised module follows.

    Each with the name of its ``function``; those of forms with the layers instead.
    """
    found = recorded_forms(mod)
    for variable, func in mod.functions.items():
        record = record_of(func) if isinstance(func, tirx.PrimFunc) else None
        if record is not None:
            found.append({"function": str(variable.name_hint)} | record)
    return sorted(found, key=lambda record: record["function"])
