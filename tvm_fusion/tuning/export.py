# SPDX-License-Identifier: Apache-2.0
"""Export of a GPU model's candidates: compiled here, to race where there is no compiler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tvm.target import Target

from ..compiler import pipeline
from ..compiler.targets import host_of, is_gpu, resolve
from ..errors import TargetError, TuningError
from .candidates import TASKS
from .contest import Outcome
from .database import require_extra
from .measure import Host, Session
from .search import Search
from .tasks import NOTHING_TO_TUNE, Task, extract_tasks, import_model


class _Folder(Host):
    """Place of files that are taken along; nothing races there."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix

    def place(self, path: Path) -> str:
        """Copy a file, and return its name there."""
        name = f"{self.prefix}-{path.name}"
        shutil.copyfile(path, self.folder / name)
        return name


def export_candidates(
    model: Any,
    folder: Path,
    target: str | Mapping[str, Any] | Target,
    shapes: Mapping[str, Any] | None = None,
    *,
    trials: int = 64,
    seed: int = 0,
    fuse: Any = "auto",
) -> list[tuple[str, int]]:
    """Compile the default and the most promising settings of every kernel with knobs.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or tvm.IRModule
        The model, as for :func:`tvm_fusion.tune`.
    folder : Path
        New, or empty; gets the libraries and a file that describes them.
    target : str, mapping or tvm.target.Target
        The GPU, such as ``"cuda -arch=sm_90"``; no device is asked.
    shapes : mapping, optional
        Sizes of symbolic dimensions.
    trials : int
        Settings of each kernel beside the default.
    seed : int
        Seed of random choices, and of the tensors there.
    fuse
        As for ``compile``.

    Returns
    -------
    list of (str, int)
        Kernels, and how many of their settings compile.

    Raises
    ------
    TargetError
        If the target is not a GPU.
    TuningError
        If the folder has something in it, the model has nothing to tune, or a default does not
        compile.
    """
    require_extra()
    resolved = resolve(target)
    if not is_gpu(resolved):
        raise TargetError(
            f"candidates are exported for GPUs, and the target is {resolved.kind.name!r}; tune a "
            "CPU on its own machine, or by tvm-fusion serve"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TuningError(f"{str(folder)!r} exists already, and is no empty folder")
    mod = import_model(model, shapes)
    tasks = extract_tasks(mod, resolved, None, pipeline.Options(fuse)) if mod else []
    if not tasks:
        raise TuningError(NOTHING_TO_TUNE)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [_exported(task, resolved, folder, n, trials, seed) for n, task in enumerate(tasks)]
    about = {"kind": resolved.kind.name, "tasks": entries}
    (folder / TASKS).write_text(json.dumps(about, indent=1) + "\n")
    compiled = [sum(one["program"] is not None for one in e["candidates"]) - 1 for e in entries]
    return [(task.about, count) for task, count in zip(tasks, compiled, strict=True)]


def _exported(
    task: Task, target: Target, folder: Path, number: int, trials: int, seed: int
) -> dict[str, Any]:
    """Compile a task, and describe it for :mod:`.candidates`."""
    features, log_predicted, knobs = task.table
    search = Search(features, log_predicted, task.groups, seed, knobs=knobs)
    numbers = [0, *search.propose(trials)]
    with Session(task, target, seed, _Folder(folder, str(number))) as session:
        session.build(numbers)
        programs = [session.program_of(setting) for setting in numbers]
        reference = session.reference_of(host_of(target))
    if isinstance(programs[0], Outcome):
        raise TuningError(f"the default of {task.name} does not compile: {programs[0].reason}")
    return {
        "name": task.name,
        "key": list(task.key),
        "seed": seed,
        "outputs": task.outputs,
        "tensors": _tensors(task.tensors(np.random.default_rng(seed))),
        "reference": reference,
        "candidates": [
            _candidate(task, setting, program)
            for setting, program in zip(numbers, programs, strict=True)
        ],
    }


def _tensors(arrays: Sequence[np.ndarray]) -> list[tuple[list[int], str, float]]:
    """Shape, type and spread of each tensor, from which others are drawn there."""
    return [(list(a.shape), a.dtype.name, float(a.astype("float64").std())) for a in arrays]


def _candidate(task: Task, number: int, program: dict[str, Any] | Outcome) -> dict[str, Any]:
    template, knobs = task.settings[number]
    failed = isinstance(program, Outcome)
    return {
        "template": template.name,
        "version": template.version,
        "knobs": asdict(knobs),
        "program": None if failed else program,
        "reason": program.reason if isinstance(program, Outcome) else "",
    }
