# SPDX-License-Identifier: Apache-2.0
"""Worker process that holds one engine of a benchmark and is stopped between requests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import EngineError
from ..machine.host import how_it_ended
from .engines import ENGINES

_BOOT = """
import runpy, sys
root, program = sys.argv[1:3]
sys.path[:1] = [] if root in sys.path else [root]
del sys.argv[:2]
runpy.run_path(program, run_name="__main__")
"""


@dataclass(frozen=True)
class EngineSpec:
    """An engine with its options.

    Parameters
    ----------
    engine : str
        ``tvm-fusion``, ``tvm``, ``onnxruntime`` or ``openvino``.
    title : str
        The name in tables; by default the engine's own.
    options : dict
        Arguments of ``compile`` for ``tvm-fusion``, as ``target`` and ``precision``, or
        ``artifact``, the path of a compiled model to load; for ``tvm`` the ``target``; for
        ``onnxruntime`` the ``provider``, ``CPU`` or ``CUDA``; for ``openvino`` the ``precision``,
        ``f32`` by default, or ``default`` for what it chooses.
    aligned : bool
        Whether its inputs begin at multiples of 64 bytes, instead of where numpy puts them.
    """

    engine: str
    title: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: bool = False

    def __post_init__(self) -> None:
        """Check the name and fill in the title."""
        if self.engine not in ENGINES:
            raise EngineError(
                f"unknown engine {self.engine!r}; expected one of {', '.join(ENGINES)}"
            )
        if not self.title:
            object.__setattr__(self, "title", ENGINES[self.engine].title)


class EngineWorker:
    """Runs one engine in a separate process.

    Between two calls the process is stopped, so that the threads of its pool, which keep spinning
    for a while after a run, take no time from the engine that runs next.

    ``threads``: number of threads that it may use.
    """

    def __init__(self, spec: EngineSpec, threads: int) -> None:
        self.spec = spec
        self._log = tempfile.TemporaryFile()
        self._pipe, theirs = Pipe()
        program = Path(ENGINES[spec.engine].program).resolve()
        command = [sys.executable, "-c", _BOOT, str(program.parents[2]), str(program)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, spec.engine, str(theirs.fileno())],
                env=_environment(threads),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def __enter__(self) -> EngineWorker:
        """Return the worker, which is already running."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process."""
        self.close()

    def call(self, method: str, **arguments: Any) -> Any:
        """Send one request, wait for its answer, and leave the process stopped.

        Raises TVMFusionError if the engine failed: an error of our own family keeps its class; any
        other error, or the death of the process, is an ``EngineError``.
        """
        self._signal("SIGCONT")
        try:
            self._pipe.send((method, arguments))
            status, *answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            how, last = how_it_ended(self._process, self._log)
            last = f"; its last output: {last}" if last else ""
            raise EngineError(
                f"{self.spec.title} ended with {how} during {method!r}{last}"
            ) from error
        self._signal("SIGSTOP")
        if status == "ok":
            return answer[0]
        kind, message, trace = answer
        raise getattr(errors, kind, EngineError)(message) from RuntimeError(f"worker:\n{trace}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._log.close()

    def _signal(self, name: str) -> None:
        if hasattr(signal, name):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(getattr(signal, name))


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a worker; TVM's pool takes its size only from there."""
    return {**os.environ, "TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
