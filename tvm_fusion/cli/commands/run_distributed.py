# SPDX-License-Identifier: Apache-2.0
"""``tvm-fusion run --distributed``: one rank of a job that runs a model of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import TVMFusionError
from ...runtime.artifact import describe_artifact
from ..checks import refuse_model_file
from ..output import show
from .run_model import run_model, run_text, save_outputs


def run_distributed(
    path: Path,
    files: Mapping[str, Path],
    output: Path | None,
    seed: int,
    repeat: int,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run a model on all ranks of this job; the first one writes and shows the outputs.

    ``settings`` are those of the session.
    """
    from ...distributed import load, session

    with session(_ranks_of(path), **settings) as world:
        model = load(path).on(world)
        if output is not None and world.rank == 0:
            refuse_model_file(output, path)
        result, outputs = run_model(model, files, {}, seed, repeat)
        if world.rank == 0:
            if output is not None:
                save_outputs(output, outputs)
            result = {"model": str(path), "ranks": world.size, **result}
            show(result, run_text(result), as_json)


def _ranks_of(path: Path) -> int | None:
    """Ranks that a file is for; None if it is no such file, which is told within the session."""
    try:
        plan = describe_artifact(path).ranks
    except TVMFusionError:
        return None
    return None if plan is None else plan.ranks
