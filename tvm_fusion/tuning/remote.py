# SPDX-License-Identifier: Apache-2.0
"""Machines of a tuning job that are reached by TVM's RPC: those of ``tvm-fusion serve``.

A tracker (``python -m tvm.exec.rpc_tracker``) knows the servers under a key. A job holds its
servers from beginning to end, compiles here, and sends libraries and requests; the measuring
processes that a server starts are those of a job on that machine. TVM's RPC has no time limits and
does not heed Ctrl-C: every call is made on a thread, and waits for no answer longer than it must.
"""

from __future__ import annotations

import json
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import tvm
from tvm import rpc
from tvm.target import Target

from schedules import cpu
from schedules.cpu.core.machine import CPUInfo

from ..compiler.targets import required_features, resolve
from ..errors import InvalidInputError, TargetError, TuningError
from .contest import LostWorker, Worker
from .measure import Host, LostHost, Pool

FUNCTION = "tvm_fusion.tuning.answer"
"""Name of a session's function: from a request to an answer, both JSON."""
PATIENCE = 15.0
"""Seconds without an answer after which a machine counts as lost."""
UPLOAD_PATIENCE = 300.0
BUSY_SECONDS = 30.0
"""Time to wait for a server that is busy; one that an earlier job gave back comes in seconds."""
POLL_SECONDS = 2.0
"""Longest time that a server waits before it answers that a measurement is not done."""
REPLACEMENT_SECONDS = 5.0
"""Time to wait for a server in the place of a lost one, or for the lost one itself."""

Result = TypeVar("Result")


def in_time(function: Callable[[], Result], seconds: float = PATIENCE) -> Result:
    """Call a function that may block for ever.

    Raises
    ------
    LostHost
        If it fails, or takes longer than ``seconds``.
    """
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((function(), None))
        except Exception as error:  # TVM's RPC may raise anything.
            done.put((None, error))

    threading.Thread(target=work, name="tvm_fusion_rpc", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise LostHost(f"no answer for {seconds:g} s") from None
    if error is not None:
        lines = str(error).strip().splitlines() or [""]
        raise LostHost(f"{type(error).__name__}: {lines[-1]}") from error
    return result


@dataclass(frozen=True)
class Tracker:
    """TVM's RPC tracker and a key of it."""

    host: str  # Name or address of its machine.
    port: int  # Its port.
    key: str  # Name under which servers report.

    @classmethod
    def read(cls, address: str, key: str) -> Tracker:
        """Read an address of the form ``HOST:PORT``.

        Raises
        ------
        InvalidInputError
            If the address or the key is of another form.
        """
        match = re.fullmatch(r"\[?([^\s/]+?)\]?:(\d{1,5})", address)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise InvalidInputError(
                f"the tracker's address is {address!r}; expected HOST:PORT, such as localhost:9190"
            )
        if not re.fullmatch(r"[\w.-]+", key):
            raise InvalidInputError(
                f"the key is {key!r}; expected letters, digits, '_', '-' and '.'"
            )
        return cls(match[1], int(match[2]), key)

    @classmethod
    def of_runner(cls, runner: str) -> Tracker:
        """Read ``rpc://HOST:PORT/KEY``.

        Raises
        ------
        InvalidInputError
            If the text is of another form.
        """
        scheme, _, rest = runner.partition("://")
        address, _, key = rest.partition("/")
        if scheme != "rpc":
            raise InvalidInputError(
                f"the runner is {runner!r}; expected 'local' or 'rpc://HOST:PORT/KEY'"
            )
        return cls.read(address, key)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self) -> tuple[int, int]:
        """Return how many servers have the key, and how many of them are free.

        Raises
        ------
        TuningError
            If there is no tracker.
        """
        found = self._ask(lambda session: session.summary())
        own = [one for one in found["server_info"] if one.get("key") == f"server:{self.key}"]
        return len(own), int(found["queue_info"].get(self.key, {}).get("free", 0))

    def take(self) -> RemoteHost:
        """Take the next free server.

        Raises
        ------
        LostHost
            If it does not answer.
        TuningError
            If there is no tracker, or the server is not one of ``tvm-fusion serve``.
        """
        return RemoteHost(self._ask(lambda session: session.request(self.key, max_retry=2)))

    def _ask(self, question: Callable[[rpc.TrackerSession], Any]) -> Any:
        try:  # TVM itself would try for a minute
            socket.create_connection((self.host, self.port), timeout=PATIENCE).close()
        except OSError as error:
            raise TuningError(
                f"there is no RPC tracker at {self}: {error.strerror or error}; start one with "
                "python -m tvm.exec.rpc_tracker"
            ) from error
        try:
            return in_time(lambda: question(rpc.connect_tracker(self.host, self.port)))
        except LostHost as lost:
            raise TuningError(f"the RPC tracker at {self} gives no server: {lost}") from lost


class RemoteHost(Host):
    """A server, held until :meth:`close`.

    Parameters
    ----------
    session : rpc.RPCSession
        The connection.

    Attributes
    ----------
    name : str
        Name of its machine, and its port.
    about : mapping
        What it says of itself (:func:`.server.describe`).

    Raises
    ------
    LostHost
        If it does not answer.
    TuningError
        If it is not one of ``tvm-fusion serve``.
    """

    def __init__(self, session: rpc.RPCSession) -> None:
        self._session: rpc.RPCSession | None = session
        self._placed: set[str] = set()
        self.stopped = threading.Event()
        try:
            self._function = in_time(lambda: session.get_function(FUNCTION))
        except LostHost as lost:
            raise TuningError(
                "the tracker gives a server that tvm-fusion serve has not started"
            ) from lost
        self.about: Mapping[str, Any] = self.ask("describe")
        self.name = str(self.about["name"])

    @property
    def processor(self) -> str:
        """Name of its processor."""
        return str(self.about["processor"])

    def ask(self, action: str, **request: Any) -> dict[str, Any]:
        """Make the server act, and return its answer."""
        text = json.dumps({"action": action, **request})
        return json.loads(str(in_time(lambda: self._function(text))))

    def start(self, threads: int, folder: Path) -> Worker:
        """Start a measuring process there."""
        self.ask("start")
        return RemoteWorker(self)

    def place(self, path: Path) -> str:
        """Send a file, once, to the folder in which the measuring process works."""
        session = self._session
        if path.name not in self._placed and session is not None:
            in_time(lambda: session.upload(str(path)), UPLOAD_PATIENCE)
            self._placed.add(path.name)
        return f"./{path.name}"  # Libraries without a slash are looked for elsewhere.

    def clear(self) -> None:
        """Remove the files there."""
        self.ask("clear", names=sorted(self._placed))
        self._placed.clear()

    def close(self) -> None:
        """Give the server back."""
        self._session = self._function = None


class RemoteWorker:
    """A measuring process that a server has started."""

    def __init__(self, host: RemoteHost) -> None:
        self._host = host

    def call(self, patience: float, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer, as :meth:`.measure.MeasuringWorker.call`."""
        self._host.ask("call", patience=patience, request=request)
        while not (reply := self._host.ask("wait", seconds=POLL_SECONDS)):
            if self._host.stopped.is_set():
                raise KeyboardInterrupt
        if "lost" in reply:
            raise LostWorker(*reply["lost"])
        if "error" in reply:
            raise TuningError(f"{self._host.name}: {reply['error']}")
        return reply["answer"]

    def close(self) -> None:
        """End the process."""
        self._host.ask("end")


class RemotePool(Pool):
    """The free servers under a key that are like the first one.

    Parameters
    ----------
    runner : str
        ``rpc://HOST:PORT/KEY``.
    target : str, mapping or Target
        Their CPU; ``"native"`` asks them.
    threads : int or None
        Threads of a kernel; None asks them.

    Raises
    ------
    TuningError
        If there is no tracker, or no server with the key that can be used.
    TargetError
        If the target is not the servers' CPU, or its threads are others.
    """

    def __init__(self, runner: str, target: Any, threads: int | None) -> None:
        self.tracker = Tracker.of_runner(runner)
        self.notes = []
        self._first: Mapping[str, Any] | None = None
        self._held: list[RemoteHost] = []
        self.hosts = self._take_all()
        if self._first is None:
            raise TuningError(
                f"no server with the key {self.tracker.key!r} can be used: {'; '.join(self.notes)}"
            )
        try:
            self.target, self.cpu = _target_of(self._first, target, threads)
        except TargetError:
            self.close()
            raise

    def _take_all(self) -> list[RemoteHost]:
        """Take all free servers, at least one; refused ones stay taken until all are seen."""
        known, free = self._wait_for_free(BUSY_SECONDS)
        if not known:
            raise TuningError(
                f"the RPC tracker at {self.tracker} knows no server with the key "
                f"{self.tracker.key!r}; start one with tvm-fusion serve"
            )
        if not free:
            raise TuningError(
                f"all {known} servers with the key {self.tracker.key!r} are busy; try again later"
            )
        taken = [host for _ in range(free) if (host := self._take()) is not None]
        return [host for host in taken if self._accepts(host)]

    def _wait_for_free(self, seconds: float) -> tuple[int, int]:
        """Wait for a free server while there are busy ones; return how many there are of both."""
        end = time.monotonic() + seconds
        while True:
            known, free = self.tracker.servers()
            if free or not known or time.monotonic() >= end:
                return known, free
            time.sleep(0.5)

    def _take(self) -> RemoteHost | None:
        try:
            host = self.tracker.take()
        except (LostHost, TuningError) as error:
            self.notes.append(str(error))
            return None
        self._held.append(host)
        return host

    def _accepts(self, host: RemoteHost) -> bool:
        reason = _refusal(host.about, self._first)
        if reason:
            self.notes.append(f"{host.name} is refused: {reason}")
            host.close()
        elif self._first is None:
            self._first = host.about
        return not reason

    def replace(self, host: Host, error: LostHost) -> Host | None:
        """Take another free server for a lost one, if there is one."""
        name = host.name if isinstance(host, RemoteHost) else ""
        self.notes.append(f"{name} is lost ({error}); its task goes back")
        try:
            if self._wait_for_free(REPLACEMENT_SECONDS)[1]:
                other = self._take()
                return other if other is not None and self._accepts(other) else None
        except TuningError as lost:
            self.notes.append(str(lost))
        return None

    def stop(self) -> None:
        """End all calls that wait for an answer."""
        for host in self._held:
            host.stopped.set()

    def close(self) -> None:
        """Give all servers back."""
        for host in self._held:
            host.close()


def _refusal(theirs: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Return why a server cannot be used, or nothing."""
    if theirs["tvm"] != str(tvm.__version__):
        return f"it has TVM {theirs['tvm']}, and this job {tvm.__version__}"
    ours = {name: template.version for name, template in cpu.TEMPLATES.items()}
    if theirs["templates"] != ours:
        names = sorted(
            name
            for name in {*theirs["templates"], *ours}
            if theirs["templates"].get(name) != ours.get(name)
        )
        return f"its versions of the templates {', '.join(names)} are others than this job's"
    same = first is None or all(theirs[name] == first[name] for name in ("target", "cpu"))
    return "" if same else f"it is another CPU ({_cpu_text(theirs)}) than the first server's"


def _cpu_text(about: Mapping[str, Any]) -> str:
    info = about["cpu"]
    return f"{info['family']}, {info['vector_bits']} bits, {info['num_cores']} threads"


def _target_of(
    about: Mapping[str, Any], target: Any, threads: int | None
) -> tuple[Target, CPUInfo]:
    """Return the target and the CPU to compile for; a user's own target may have less features."""
    theirs, info = Target(about["target"]), CPUInfo(**about["cpu"])
    if threads not in (None, info.num_cores):
        raise TargetError(
            f"threads is {threads}, and the servers measure with {info.num_cores}: start them "
            "with another number"
        )
    if target == "native":
        return theirs, info
    resolved = resolve(target, cores=info.num_cores)
    named = str(resolved.attrs["mcpu"])
    more = sorted(set(required_features(resolved)) - set(required_features(theirs)))
    described = CPUInfo.from_target(resolved)
    if named != info.family or more or described.num_cores != info.num_cores:
        lacking = f" without {', '.join(more)}" if more else ""
        raise TargetError(
            f"the target is a {named} with {described.num_cores} threads and the servers are "
            f"{_cpu_text(about)}{lacking}; use target='native', which is their CPU"
        )
    caches = {name: value for name, value in asdict(info).items() if name.endswith("_bytes")}
    return resolved, replace(described, **caches)
