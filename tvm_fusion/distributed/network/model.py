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

from schedules.distribute.rows.rank_plan import RankPlan

from ...errors import ArtifactError
from ...runtime.artifact import (
    Description,
    read_artifact,
    read_artifact_weights,
)
from ...runtime.compiled_model import load_library
from ...runtime.described_model import DescribedModel
from ..local_program import Ranks, check_ranks
from .explain_network import segments_table
from .rank_model import RankModel


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
