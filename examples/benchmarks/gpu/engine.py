# SPDX-License-Identifier: Apache-2.0
"""Interface of an engine that can be timed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.benchmarks.reduction_cases import Case
from tvm_fusion.errors import EngineError

Sets = Sequence[Sequence[Any]]
"""Input sets; each holds the inputs of a case as PyTorch tensors on the GPU."""


@dataclass
class Launcher:
    """A case, compiled and bound to its input sets.

    Parameters
    ----------
    launch : Callable[[int], tuple]
        Starts the case on one input set; returns the outputs, which any DLPack reader takes.
    capturable : bool
        Whether launches use the given stream, so that events and graphs see them.
    all_sets : Callable[[], object] | None
        Runs the case once on every input set and waits; for engines with their own stream.
    repeatable : bool
        Whether all runs promise the same bits.
    details : dict
        Facts for the record.
    """

    launch: Callable[[int], tuple[Any, ...]]
    capturable: bool = True
    all_sets: Callable[[], object] | None = None
    repeatable: bool = False
    details: dict[str, Any] = field(default_factory=dict)


class Engine:
    """A way to run cases on the GPU."""

    title = ""
    package = ""
    """Required module, and the name of its version in the record."""

    def check(self) -> None:
        """Do nothing if the engine can run here.

        Raises
        ------
        EngineError
            If its package cannot be imported; the text says why.
        """
        if self.package:
            module(self.package)

    def prepare(self, case: Case, sets: Sets) -> Launcher:
        """Compile a case.

        Raises
        ------
        EngineError
            If the engine cannot express the case.
        """
        raise NotImplementedError

    def release(self) -> None:
        """Release memory of earlier cases; the engine is known to be present."""

    def stream_scope(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Context in which launches go to a CUDA stream, given by its handle."""
        return contextlib.nullcontext()


def module(name: str) -> Any:
    """Import a peer's module.

    Raises
    ------
    EngineError
        If it is absent or broken.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineError(f"{name} cannot be imported: {error}") from None


def check_torch(compiled: bool) -> None:
    """Look for PyTorch, and for Triton, which torch.compile needs; EngineError if one is absent."""
    module("torch")
    if compiled:
        module("triton")


def version(package: str) -> str:
    """The version of an imported module, or an empty text."""
    try:
        return str(getattr(module(package), "__version__", ""))
    except EngineError:
        return ""


def only_one(case: Case, title: str) -> None:
    """Refuse cases with producers or several outputs.

    Raises
    ------
    EngineError
        If the case has either.
    """
    if len(case.reductions) > 1 or case.reductions[0].steps or case.inputs > 1:
        raise EngineError(f"{title} has no producers and one output only")
