# SPDX-License-Identifier: Apache-2.0
"""Engine of models that were compiled elsewhere: loaded, never compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tvm_ffi

import tvm_fusion
from tvm_fusion.errors import EngineError

from ..engine import Engine, Launcher, Sets


class Loaded(Engine):
    """Files of ``CompiledModel.save`` in a folder.

    Parameters
    ----------
    folder : Path
        The folder; the file of a case has its attribute ``file`` as name.
    """

    title = "tvm-fusion"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: Any = None

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Load the library of a case.

        Raises
        ------
        EngineError
            If there is none.
        """
        path = self.folder / case.file
        if not path.exists():
            raise EngineError(f"{case.name} was not packed")
        self._model = model = tvm_fusion.load(path)

        def launch(number: int) -> tuple[Any, ...]:
            outputs = model.tensors(*sets[number])
            return (outputs,) if isinstance(outputs, tvm_ffi.Tensor) else tuple(outputs)

        return Launcher(launch, repeatable=True)

    @contextlib.contextmanager
    def stream_scope(self, stream: int) -> Iterator[None]:
        """Launch on this stream.

        A model whose blocks meet looks at times whether they did, which waits for the device: here,
        since nothing may wait while a graph is captured.
        """
        if self._model is not None:
            self._model.synchronize()
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            yield

    def release(self) -> None:
        """Forget the last case."""
        self._model = None
