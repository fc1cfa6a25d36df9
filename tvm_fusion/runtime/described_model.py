# SPDX-License-Identifier: Apache-2.0
"""Base of compiled models: what their description says of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .artifact import Description, Program, copy_artifact, write_artifact
from .host_arrays import TensorSpec
from .tvm_runtime import DeviceNeeds

if TYPE_CHECKING:
    from tvm.target import Target


class DescribedModel:
    """A model with a description, which is saved with it."""

    _about: Description
    _executable: Any
    _weights: Sequence[Any]
    _origin: Path | None
    _programs: Sequence[Program] = ()
    """The model for each of several targets, this one among them."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs in the order of the call."""
        return self._about.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs in the order in which they are returned."""
        return self._about.outputs

    @property
    def target(self) -> Target:
        """The target that the model is compiled for; accessing it imports TVM."""
        from tvm.target import Target

        return Target(self._about.target)

    @property
    def targets(self) -> tuple[str, ...]:
        """CPUs that the model is compiled for; it runs the code of one.

        LLVM's names, and the features in which the code differs from LLVM's models of them.
        """
        return tuple(about.title for about in self._about.all)

    @property
    def needs(self) -> DeviceNeeds | None:
        """Requirements of the kernels on a GPU; None if they run on the CPU."""
        return self._about.device

    @property
    def features(self) -> tuple[str, ...]:
        """CPU features that the code needs."""
        return self._about.features

    @property
    def versions(self) -> dict[str, str]:
        """Versions of tvm_fusion, tvm and tvm_ffi that compiled the model."""
        return dict(self._about.versions)

    @property
    def fused(self) -> list[dict[str, Any]]:
        """One record for each pair of neighbouring convolutions: whether it is fused, and why.

        ``first`` and ``second`` are names, ``fused`` is a bool, ``reason`` a text; FLOPs, bytes and
        arithmetic intensity of both ways come with them.
        """
        return [dict(record) for record in self._about.fused]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Tuning records that the kernels follow.

        ``function``, ``template``, ``knobs``, ``gain`` (time of the default over that of the
        knobs), ``source`` (name of the file) and ``date``.
        """
        return [dict(record) for record in self._about.records]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file for :func:`load`.

        It is a shared library that TVM itself can load too: ``tvm_fusion.runtime.artifact``
        describes it. No compiler is needed, whatever the target. The file is written atomically.

        ``path``: destination; an existing file is replaced. Raises ArtifactError if it cannot be
        written; or if this model was loaded from a file, which is copied then, and that file is
        gone or damaged.
        """
        if self._origin is not None:
            copy_artifact(self._origin, path)
        else:
            own = Program(self._executable, self._about, self._weights)
            write_artifact(path, self._programs or [own])

    def _signature(self) -> str:
        inputs, outputs = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"({inputs}) -> ({outputs})"
