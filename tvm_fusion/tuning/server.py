# SPDX-License-Identifier: Apache-2.0
"""Server of tuning jobs on other machines: starts measuring processes, and passes on answers.

It is TVM's RPC server with one more function. A process is forked for each session; what clients
upload lies in a folder of its own, in which that process works. TVM's RPC has no authentication: a
client can run any code here.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import multiprocessing.util
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm.rpc import server as tvm_server
from tvm.target import Target

from schedules import cpu
from schedules.cpu.core.machine import CPUInfo

from ..compiler.targets import resolve
from ..errors import TuningError
from ..machine.host import cpu_name
from ..runtime.thread_pool import choose_threads
from .contest import LostWorker, MeasuringWorker
from .database import require_extra
from .remote import FUNCTION, Tracker

PORT = 9090
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 5}


def describe(target: Target, name: str) -> dict[str, Any]:
    """Return what a job must know of this machine.

    ``tvm`` and ``templates`` are versions, ``target`` and ``cpu`` what is compiled for it,
    ``processor`` and ``name`` are for records and messages.
    """
    return {
        "tvm": str(tvm.__version__),
        "templates": {name: template.version for name, template in cpu.TEMPLATES.items()},
        "target": str(target),
        "cpu": asdict(CPUInfo.from_target(target)),
        "processor": cpu_name(),
        "name": name,
    }


class Desk:
    """The function of a session.

    Parameters
    ----------
    about : dict
        What :func:`describe` has found.
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._worker: MeasuringWorker | None = None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def answer(self, text: str) -> str:
        """Act on a request: the name of a method, and its arguments."""
        request = json.loads(str(text))
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "describe": self.describe,
            "start": self.start,
            "call": self.call,
            "wait": self.wait,
            "end": self.end,
            "clear": self.clear,
        }
        return json.dumps(actions[request.pop("action")](**request))

    def describe(self) -> dict[str, Any]:
        """Return what a job must know."""
        return self._about

    def start(self) -> dict[str, Any]:
        """Start a measuring process, which ends with the session."""
        self.end()
        self._worker = MeasuringWorker(self._about["cpu"]["num_cores"], Path.cwd())
        self._answers = queue.SimpleQueue()
        multiprocessing.util.Finalize(None, self.end, exitpriority=1)
        return {}

    def call(self, patience: float, request: dict[str, Any]) -> dict[str, Any]:
        """Begin to measure; :meth:`wait` has the answer."""
        worker, answers = self._worker, self._answers
        assert worker is not None

        def work() -> None:
            try:
                answers.put({"answer": worker.call(patience, **request)})
            except LostWorker as lost:
                answers.put({"lost": [lost.candidate, lost.failure, lost.reason]})
            except Exception as error:  # the client must not wait for ever
                answers.put({"error": f"{type(error).__name__}: {error}"})

        threading.Thread(target=work, daemon=True).start()
        return {}

    def wait(self, seconds: float) -> dict[str, Any]:
        """Return the answer, or nothing if it does not come in time."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return {}

    def end(self) -> dict[str, Any]:
        """End the measuring process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        return {}

    def clear(self, names: Sequence[str]) -> dict[str, Any]:
        """Remove files of the session's folder."""
        for name in names:
            Path(Path(name).name).unlink(missing_ok=True)
        return {}


def serve(
    tracker: Tracker,
    host: str = "127.0.0.1",
    port: int | None = None,
    threads: int | None = None,
    ready: Callable[[dict[str, Any]], None] = lambda about: None,
) -> None:
    """Serve tuning jobs, one at a time, until Ctrl-C.

    Parameters
    ----------
    tracker : Tracker
        Where to report, and the key.
    host : str
        Address of this machine on which jobs are taken; by default those of this machine alone.
    port : int, optional
        Its port; by default the first free one from 9090 on.
    threads : int, optional
        Threads of a kernel, as for ``compile``.
    ready : callable, optional
        Called with :func:`describe`'s answer when the server is up.

    Raises
    ------
    TuningError
        If there is no tracker, or the address cannot be used.
    """
    require_extra()
    target = resolve("native", cores=choose_threads(threads))
    tracker.servers()
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    about = describe(target, f"{socket.gethostname()}:{port}")
    tvm_ffi.register_global_func(FUNCTION, Desk(about).answer, override=True)
    multiprocessing.set_start_method("fork", force=True)  # sessions inherit the function
    logging.getLogger("RPCServer").setLevel(logging.WARNING)
    ready(about)
    address, folder = (tracker.host, tracker.port), Path.cwd()
    try:
        while True:
            try:
                tvm_server._listen_loop(listening, port, tracker.key, address, None, None)
            except RuntimeError as error:  # a session that died, or the tracker
                logging.getLogger("RPCServer").warning("%s", error)
                os.chdir(folder)  # The session's own folder is gone.
                tracker.servers()
    finally:
        listening.close()
        for session in multiprocessing.active_children():
            session.terminate()


def _listen(host: str, port: int | None) -> socket.socket:
    """Bind a port; connections end when the other machine is gone."""
    last: OSError | None = None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(PORT, PORT + 100) if port is None else [port]:
        try:
            listening = socket.create_server((host, number), family=family, backlog=1)
        except OSError as error:
            last = error
            continue
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # sessions inherit it
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return listening
    assert last is not None
    where = f"{host}:{port}" if port else host
    raise TuningError(f"cannot listen on {where}: {last.strerror or last}") from last
