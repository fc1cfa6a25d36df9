# SPDX-License-Identifier: Apache-2.0
"""Front ends by the types of their models, and back ends, as far as they stand above this family.

``tvm_fusion`` itself enters those, as functions that import them when they are needed: PyTorch
takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .interrupts import interrupts_kept

if TYPE_CHECKING:
    from tvm.ir.transform import Pass
    from tvm.target import Target

    from ..onnx.frontend import ImportedModel
    from ..runtime.compiled_model import CompiledModel
    from .pipeline import Options
    from .reference import Reference


class FrontEnd(Protocol):
    """Interface between the compiler and models of one kind."""

    def import_model(
        self, model: Any, shapes: Mapping[str, Any] | None, outputs: Sequence[str] | None
    ) -> ImportedModel:
        """Import a model as Relax; the parameters are those of :func:`tvm_fusion.compile`."""

    def as_onnx(self, model: Any) -> Any:
        """Return the path, bytes or proto of an ONNX model that computes the same."""

    def digest(self, model: Any) -> str:
        """Return a digest of a model without its external data.

        Raises OSError, RuntimeError, TypeError, ValueError if it has none.
        """

    def reference(self, model: Any, compiled: CompiledModel, seed: int) -> Reference:
        """Return what the compiled model should compute, on random inputs."""


class RankCompiler(Protocol):
    """Compiler of models for several ranks."""

    @property
    def compile_for_ranks(self) -> Callable[..., Any]:
        """Function with the parameters of :func:`tvm_fusion.compile`, some of which it refuses."""

    def resolve_ranks(
        self, ranks: int, target: str | Mapping[str, Any] | Target, threads: int | None = None
    ) -> Target:
        """Return the CPU of each rank."""

    def rank_phases(self, target: Target, options: Options, ranks: int) -> dict[str, list[Pass]]:
        """Return the phases from a model to the scheduled kernels of all ranks."""


FRONT_ENDS: dict[str, Callable[[], FrontEnd]] = {}
"""Functions that import front ends, by packages of the types of their models."""

BACK_ENDS: dict[str, Callable[[], RankCompiler]] = {}
"""Functions that import back ends; there is one, for ``ranks``."""


class _ONNXFrontEnd:
    """Front end of ONNX; a cached model needs its digest and no other import."""

    def import_model(
        self, model: Any, shapes: Mapping[str, Any] | None, outputs: Sequence[str] | None
    ) -> ImportedModel:
        from dataclasses import replace

        from ..onnx.frontend import import_onnx
        from .failures import with_nodes

        imported = import_onnx(model, shapes, outputs=outputs)
        return replace(imported, mod=with_nodes(imported.mod, imported.nodes))

    def as_onnx(self, model: Any) -> Any:
        return model

    def digest(self, model: Any) -> str:
        from hashlib import sha256

        if isinstance(model, str | os.PathLike):
            return digest_of_file(Path(model))
        if not isinstance(model, bytes | bytearray | memoryview):
            if not hasattr(model, "SerializeToString"):
                raise TypeError(f"{type(model).__name__} is no model")
            model = model.SerializeToString(deterministic=True)
        return sha256(model).hexdigest()

    def reference(self, model: Any, compiled: CompiledModel, seed: int) -> Reference:
        from .reference import onnx_reference

        return onnx_reference(model, compiled, seed)


ONNX: FrontEnd = _ONNXFrontEnd()


def front_end_of(model: Any) -> FrontEnd:
    """Front end of a model's type; ``ONNX``, which refuses what is no model, if there is no other.

    ``model``: what a user gives to :func:`tvm_fusion.compile`.
    """
    package = f"{type(model).__module__}."
    with interrupts_kept():  # extensions crash where Ctrl-C ends their own import
        for name, imported in FRONT_ENDS.items():
            if package.startswith(f"{name}."):
                return imported()
    return ONNX


def rank_compiler() -> RankCompiler:
    """Compiler of models for several ranks."""
    with interrupts_kept():
        return BACK_ENDS["ranks"]()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file's contents."""
    from ..runtime.artifact import file_digest

    return file_digest(path, path.stat().st_size).hex()
