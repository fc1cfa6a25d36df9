# SPDX-License-Identifier: Apache-2.0
"""Models compiled for several ranks: running, saving and loading, without TVM's compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm_ffi

from schedules.distribute.rows.row_plan import RankPlan, Segment

from ...errors import ArtifactError
from ...runtime.artifact import Description, read_artifact, read_artifact_weights
from ...runtime.compiled_model import load_library
from ...runtime.described_model import DescribedModel
from ..local_program import Ranks, check_ranks
from .rank_model import RankModel

_MOST_RANKS = 8  # whose rows are shown


def segments_table(segments: Sequence[Segment]) -> str:
    """Return a table with a line for each segment; times are predicted."""
    lines = [
        f"rows over {len(segments[0].rows)} ranks; {sum(s.bytes for s in segments)} bytes in "
        f"{sum(s.messages for s in segments)} messages a run; times are predicted",
        f"{'stages':<24}{'recomputed':>11}{'compute':>11}  {'then':<9}{'halo':>5}{'messages':>9}"
        f"{'bytes':>10}{'exchange':>11}  rows or blocks of channels",
    ]
    lines += [_line(segment) for segment in segments]
    compute = sum(segment.compute for segment in segments)
    exchange = sum(segment.exchange for segment in segments)
    lines.append(f"{'all':<24}{'':>11}{_time(compute):>11}{'':>35}{_time(exchange):>11}")
    return "\n".join(lines)


def _line(segment: Segment) -> str:
    stages = f"{segment.first} to {segment.last}, {segment.stages}"
    return (
        f"{stages:<24}{100 * segment.recomputed:>9.1f} %{_time(segment.compute):>11}  "
        f"{segment.end:<9}{segment.halo:>5}{segment.messages:>9}{segment.bytes:>10}"
        f"{_time(segment.exchange):>11}  {_rows(segment)}"
    )


def _rows(segment: Segment) -> str:
    busy = [(rank, rows) for rank, rows in enumerate(segment.rows) if rows[0] < rows[1]]
    shown = ", ".join(f"{rank}: {begin}:{end}" for rank, (begin, end) in busy[:_MOST_RANKS])
    shown = f"channels {shown}" if segment.split == "channels" else shown
    return shown + (f" and {len(busy) - _MOST_RANKS} more" if len(busy) > _MOST_RANKS else "")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


class DistributedModel(DescribedModel):
    """A model for several ranks; :func:`.compile_network` or :func:`load` makes it.

    ``model.on(world)`` is one rank's share::

        with distributed.session(model.ranks) as world:
            y = model.on(world)(x)       # None on all ranks but the first
    """

    def __init__(
        self,
        executable: Any,
        about: Description,
        weights: Sequence[Any],
        origin: Path | None = None,
    ) -> None:
        assert about.ranks is not None, "only distributed models have ranks"
        self.plan: RankPlan = about.ranks
        self._about, self._weights, self._origin = about, list(weights), origin
        self._executable = executable

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.plan.ranks

    def __repr__(self) -> str:
        """Inputs, outputs, CPU and ranks."""
        return f"DistributedModel({self._signature()}, {self._about.cpu}, {self.ranks} ranks)"

    def explain(self) -> str:
        """Return a table of rows, halos, messages, bytes and predicted times of each segment."""
        return segments_table(self.plan.segments)

    def on(self, world: Ranks) -> RankModel:
        """Share of one rank; called by all ranks together.

        Parameters
        ----------
        world : World
            The ranks: of MPI (``distributed.session()``), or of one process
            (:mod:`.local_world`).

        Raises
        ------
        InvalidInputError
            If there are more or fewer ranks than the model was compiled for.
        DistributedError
            If ranks have different models.
        TargetError
            If this machine lacks what the code needs.
        """
        check_ranks(world, self.ranks, "model")
        self._about.check_machine()
        world.agree(json.dumps(asdict(self._about)), "models")
        return RankModel(self._about, self._library(), self._weights, world)

    def _library(self) -> tvm_ffi.Module:
        module = self._executable
        if not isinstance(module, tvm_ffi.Module):
            module = module.jit(fcompile=self._about.linker(module))
        return module


def load(path: str | os.PathLike[str]) -> DistributedModel:
    """Load a model that :meth:`DistributedModel.save` wrote; it runs code of the file.

    Parameters
    ----------
    path : path
        The file.

    Raises
    ------
    ArtifactError
        If the file cannot be read, is damaged, of another version, or is not for several ranks.
    TargetError
        If this machine cannot run its code.
    """
    about = read_artifact(path)
    if about.ranks is None:
        raise ArtifactError(
            f"{os.fspath(path)!r} is not compiled for ranks; compile it with ranks=, or "
            "tvm-fusion compile --ranks, or run it without --distributed"
        )
    weights = read_artifact_weights(Path(path), about)
    origin = Path(path).resolve()
    return DistributedModel(load_library(origin), about, weights, origin)
