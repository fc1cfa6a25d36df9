# SPDX-License-Identifier: Apache-2.0
"""Tuning job: searches faster settings for the kernels of a model, and records the winners."""

from __future__ import annotations

import datetime
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from schedules.cpu.conv2d.forms import FORMS
from schedules.cpu.core.machine import CPUInfo, described
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import Key, Record, Records

from ..compiler import pipeline
from ..compiler.registry import rank_compiler
from ..compiler.targets import arch_of, named_after, names_gpu, required_features, resolve
from ..errors import InvalidInputError, TargetError, TuningError
from ..machine.host import check_host, host_cpu
from ..runtime.thread_pool import choose_threads
from ..runtime.tvm_runtime import find_device
from .contest import (
    BATCH_ROUNDS,
    BATCH_SECONDS,
    FINAL_ROUNDS,
    FINAL_SECONDS,
    LEAST_GAIN,
    Outcome,
    finalists,
    winner,
)
from .database import Database, require_extra
from .forms import FormTask, find_forms, form_record
from .measure import DeviceHost, Host, LostHost, Pool, Session
from .search import BATCH, Search
from .tasks import NOTHING_TO_TUNE, Task, extract_tasks, import_model, merged, text_of

LEAST_TRIALS = 5 * BATCH
"""Trials before which the trees promise next to nothing, and are wrong."""
FORM_SECONDS = 10.0
"""Expected time to build and race the forms of a layer or a pair."""
SEEDS = 2
"""Neighbours' winners that are tried first."""

WAITING, SEARCHING, CONFIRMING = "waiting", "searching", "confirming"
TUNED, DEFAULT_STAYS, KNOWN, STOPPED = "tuned", "default stays", "known", "stopped"


@dataclass
class TaskState:
    """Progress and result of one task: a kernel's knobs, or the forms of a layer or a pair.

    Parameters
    ----------
    name, about : str
        Function of the model, or layers, and what is computed.
    calls : int
        Calls in a call of the model.
    share : float
        Share of the predicted time of all kernels; for forms, an equal share of all.
    settings : int
        Size of the space; 0 before it is known.
    status : str
        ``waiting``, ``searching``, ``confirming``; at the end ``tuned``, ``default stays``,
        ``known`` (by an earlier job), or ``stopped`` before it was confirmed.
    trials : int
        Settings tried, those of earlier jobs included.
    default_seconds, best_seconds : float | None
        Times of the default and of the best setting, from the last race.
    template, knobs
        The best setting.
    times : dict
        Seconds of each form by its name; empty for knobs.
    failures : list of dict
        Settings that failed in this job: ``template``, ``knobs``, ``failure`` and ``reason``.
    """

    name: str
    about: str
    calls: int
    share: float
    settings: int = 0
    status: str = WAITING
    trials: int = 0
    default_seconds: float | None = None
    best_seconds: float | None = None
    template: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def gain(self) -> float:
        """Time of the default over that of the best; 1 where nothing is known."""
        if not self.default_seconds or not self.best_seconds:
            return 1.0
        return self.default_seconds / self.best_seconds


@dataclass
class TuneResult:
    """A tuning job.

    Parameters
    ----------
    tasks : list of TaskState
        Kernels, the largest share of the predicted time first; then forms.
    database : str
        Its folder.
    target : str
        The TVM target as JSON.
    seconds : float
        Seconds since it began.
    minutes : float | None
        Its limit.
    interrupted : bool
        Whether it was stopped before the end.
    notes : list of str
        Servers that were refused or lost.
    """

    tasks: list[TaskState]
    database: str
    target: str
    seconds: float = 0.0
    minutes: float | None = None
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The result as plain dictionaries and lists."""
        found = asdict(self)
        for entry, state in zip(found["tasks"], self.tasks, strict=True):
            entry["gain"] = state.gain
        return found


AnyTask = Task | FormTask
LOCAL = "local"
SPACES = ("default", "wide")
Progress = Callable[[TuneResult], None]


def tune(
    model: Any,
    target: str | Mapping[str, Any] | Target = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    database: str | os.PathLike[str],
    trials: int = 64,
    minutes: float | None = None,
    threads: int | None = None,
    runner: str = LOCAL,
    seed: int = 0,
    space: str = "default",
    fuse: Any = "auto",
    winograd: str = "auto",
    forms: bool = True,
    ranks: int | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """Search faster settings for a model's kernels on a CPU or a GPU, and record the winners.

    Each kernel with knobs is a task; equal ones are tuned once. A batch of settings and the default
    take turns in a process of their own, and only ratios of times within a round count. The best
    ones meet the default again in a fresh process: a winner is recorded if it gains 1 % there, else
    the record says that the default stays. Then the forms of each convolution and each pair (one
    kernel for both, in blocks or on planes; separate ones, direct or by Winograd's algorithm in
    tiles of 2 or 4) race each other with their best knobs in the same way. Ctrl-C keeps all trials,
    and the next job with the same database repeats none of them.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or tvm.IRModule
        The model, or a Relax module.
    target : str, mapping or tvm.target.Target
        This machine's CPU, or its GPU (``"cuda"``), as for ``compile``; with servers,
        ``"native"`` is theirs.
    shapes : mapping, optional
        Sizes of symbolic dimensions, as for ``compile``.
    database : path
        Folder of the records, for ``compile(records=...)``.
    trials : int
        Settings to try for each task, those of earlier jobs included.
    minutes : float, optional
        Time limit; tasks get theirs by their share of the model's predicted time.
    threads : int, optional
        Threads of a call, as for ``compile``; records count for that number only. With servers,
        what they were started with.
    runner : str
        Where settings race: ``"local"``, or ``"rpc://HOST:PORT/KEY"`` on the machines that
        ``tvm-fusion serve`` has reported to TVM's RPC tracker there. Each tunes a task at a time;
        the tasks of one that dies are done by the others.
    seed : int
        Seed of random choices; the same seed and measurements give the same trials.
    space : str
        ``"default"``, the settings that the cost models compare, or ``"wide"``: fused pairs on CPUs
        also have rows in pieces or shared by the cores, sums in parts, any order of loops and place
        of layer one, and no prefetch of weights, some hundred times as many.
    fuse, winograd
        As for ``compile``.
    forms : bool
        Whether forms race, with the kernels of all forms as tasks: of pairs where ``fuse`` is
        ``"auto"``, of layers where ``winograd`` is. On a GPU, and with ranks, there are none.
    ranks : int, optional
        Ranks that compute the model together, as for ``compile``: the kernels of all are tuned,
        for ``threads`` of each.
    progress : callable, optional
        Called with the state of the job when it changes.

    Raises
    ------
    TuningError
        If the extra ``tune`` is not installed, the database cannot be written, the model has no
        task, all candidates of a batch fail, or there is no tracker or no server that can be used.
    TargetError
        If the target is not this machine's CPU or GPU, or the CPU of the servers.
    InvalidInputError
        If ``trials`` or ``minutes`` is not positive, ``space`` is unknown, ``runner`` is of
        another form, or the number of ranks is not possible.
    OpError
        If the model cannot be distributed over ranks.
    """
    require_extra()
    _check_limits(trials, minutes, space)
    store = Database(Path(database))
    if ranks is not None:
        each = rank_compiler().resolve_ranks(ranks, target, threads)
        threads, forms = CPUInfo.from_target(each).num_cores, False
    pool = _open_pool(runner, target, threads)
    with closing(pool), described(pool.target, pool.cpu) if pool.cpu else nullcontext():
        options = pipeline.Options(fuse, winograd=winograd)
        mod = import_model(model, shapes)
        contests = find_forms(mod, pool.target, options) if forms and pool.cpu else []
        tasks = _tasks(mod, pool.target, options, contests, space == "wide", ranks)
        every: list[AnyTask] = [*tasks, *contests]
        states = [TaskState(task.name, task.about, task.calls, task.share) for task in every]
        result = TuneResult(states, str(database), str(pool.target), minutes=minutes)
        job = _Job(pool, store, trials, seed, result, progress or (lambda _: None))
        try:
            job.run(tasks, states, later=FORM_SECONDS * len(contests))
            job.run(contests, states[len(tasks) :])
        except KeyboardInterrupt:
            result.interrupted = True
        job.tell()
    return result


def _check_limits(trials: int, minutes: float | None, space: str) -> None:
    """Refuse numbers that are not positive, and unknown spaces."""
    if trials < 1:
        raise InvalidInputError(f"trials is {trials}; expected at least 1")
    if minutes is not None and not minutes > 0:
        raise InvalidInputError(f"minutes is {minutes}; expected a positive number")
    if space not in SPACES:
        raise InvalidInputError(f"space is {space!r}; expected {' or '.join(map(repr, SPACES))}")


def _tasks(
    mod: tvm.IRModule,
    target: Target,
    options: pipeline.Options,
    contests: Sequence[FormTask],
    wide: bool,
    ranks: int | None,
) -> list[Task]:
    """Kernels to tune: those of the model as it is compiled, and those of the forms that race."""
    kernels = [kernel for contest in contests for kernel in contest.kernels(target)]
    tasks = merged([*extract_tasks(mod, target, None, options, wide, ranks), *kernels])
    if not tasks:
        raise TuningError(NOTHING_TO_TUNE)
    return tasks


def _open_pool(runner: str, target: Any, threads: int | None) -> Pool:
    """Return the machines of a job."""
    if names_gpu(target):
        return _open_gpu(runner, target, threads)
    if runner != LOCAL:
        from .remote import RemotePool

        return RemotePool(runner, target, threads)
    resolved = resolve(target, cores=choose_threads(threads))
    _check_target(resolved)
    return Pool(resolved, CPUInfo.from_target(resolved), [Host()])


def _open_gpu(runner: str, target: Any, threads: int | None) -> Pool:
    """Return this machine with its GPU."""
    if runner != LOCAL:
        raise TargetError(
            f"the runner is {runner!r}, whose servers tune CPUs; for a GPU run the job on its "
            "machine, with the runner 'local'"
        )
    resolved = resolve(target, cores=choose_threads(threads))
    kind = resolved.kind.name
    try:
        device = find_device(kind)
    except TargetError as error:
        raise TargetError(
            f"a tuning job measures on the GPU, and {error}; run it on a machine that has the GPU, "
            "and take its records to this one"
        ) from error
    resolved = named_after(resolved, device)
    machine = GPUInfo.from_target(resolved)
    if kind == "opencl" and machine.model != device.name:
        raise TargetError(
            f"the target is the OpenCL device {machine.model!r} and this machine has "
            f"{device.name!r}; records count for the device on which they are made: use "
            "target='opencl'"
        )
    if kind == "cuda":
        own = GPUInfo.named(device.arch, device.multiprocessors)
        if (own.name, own.multiprocessors) != (machine.name, machine.multiprocessors):
            raise TargetError(
                f"the target is {machine.name} with {machine.multiprocessors} multiprocessors and "
                f"this machine's GPU ({device.name}) {own.name} with {own.multiprocessors}; "
                "records count for the GPU on which they are made: use target='cuda'"
            )
    return Pool(resolved, None, [DeviceHost(device)])


def _check_target(target: Target) -> None:
    check_host(required_features(target), arch_of(target))
    named = str(target.attrs["mcpu"])
    if named != host_cpu():
        raise TargetError(
            f"the target is a {named} and this machine a {host_cpu()}; records count for the CPU "
            "on which they are made: run the job there, with target='native'"
        )


class _Job:
    """The loop over tasks and batches."""

    def __init__(
        self,
        pool: Pool,
        database: Database,
        trials: int,
        seed: int,
        result: TuneResult,
        progress: Progress,
    ) -> None:
        self.pool, self.database, self.result = pool, database, result
        self.trials, self.seed, self.progress = trials, seed, progress
        self.begin = time.monotonic()
        self.end = self.limit = self.begin + 60 * (result.minutes or math.inf)
        self.waiting: deque[tuple[AnyTask, TaskState]] = deque()
        self.running = 0
        self.stopped = False
        self.retuned = False  # a kernel, whose forms race again then
        self.changed = threading.Condition()

    def tell(self) -> None:
        """Report the state."""
        with self.changed:
            self.result.seconds = time.monotonic() - self.begin
            self.result.notes = list(self.pool.notes)
            self.progress(self.result)

    def run(
        self, tasks: Sequence[AnyTask], states: Sequence[TaskState], later: float = 0.0
    ) -> None:
        """Tune the tasks, each in its share of the time that is left; a machine takes one a time.

        At most half of that time is left for what comes ``later``, in seconds.

        Raises
        ------
        TuningError
            If no machine is left.
        """
        self.tell()
        self.end = self.limit - min(later, (self.limit - time.monotonic()) / 2)
        self.waiting = deque(zip(tasks, states, strict=False))
        if len(self.pool.hosts) == 1:
            self._work(self.pool.hosts[0])  # here Ctrl-C ends it at once
        else:
            self._work_on_all()
        if self.waiting and not self.result.interrupted:
            left = len(self.waiting)
            raise TuningError(
                f"no server is left, and {left} of {len(tasks)} tasks are not done; what was "
                f"measured is kept: {'; '.join(self.pool.notes)}"
            )

    def _work_on_all(self) -> None:
        """Work on all machines, a thread each."""
        with ThreadPoolExecutor(len(self.pool.hosts)) as threads:
            workers = [threads.submit(self._work, host) for host in self.pool.hosts]
            try:
                for worker in as_completed(workers):
                    worker.result()
            finally:  # an error of one, or Ctrl-C, ends the others
                with self.changed:
                    self.stopped = True
                    self.changed.notify_all()
                self.pool.stop()

    def _work(self, first: Host) -> None:
        """Tune tasks on one machine, and on others that take its place."""
        host: Host | None = first
        while host is not None and (found := self._next()) is not None:
            task, state, until = found
            lost: LostHost | None = None
            try:
                self._tune(task, state, host, until)
            except LostHost as error:
                lost = error
            finally:
                with self.changed:
                    self.running -= 1
                    if lost is not None:
                        state.status = WAITING
                        self.waiting.appendleft((task, state))
                    elif state.status in (SEARCHING, CONFIRMING):
                        state.status = STOPPED
                    self.changed.notify_all()
            host = self.pool.replace(host, lost) if lost is not None else host
            self.tell()

    def _next(self) -> tuple[AnyTask, TaskState, float] | None:
        """Take the next task, with the end of its time; None if there is nothing left to do."""
        with self.changed:
            while not self.waiting and self.running and not self.stopped:
                self.changed.wait()  # a task comes back if its machine is lost
            if self.stopped or not self.waiting:
                return None
            now = time.monotonic()
            if now >= self.end:
                self.result.interrupted = True
                return None
            left = sum(task.share for task, _ in self.waiting) / len(self.pool.hosts)
            task, state = self.waiting.popleft()
            self.running += 1
            return task, state, now + (self.end - now) * min(1.0, task.share / left)

    def _tune(self, task: AnyTask, state: TaskState, host: Host, until: float) -> None:
        if isinstance(task, FormTask):
            self._race_forms(task, state, host)
        else:
            self._tune_knobs(task, state, host, until)

    def _tune_knobs(self, task: Task, state: TaskState, host: Host, until: float) -> None:
        known = self.database.records()
        search = self._search(task, known)
        state.settings, state.trials = len(task.settings), search.trials
        record = known.get(task.key)
        if record is not None and self._is_done(task, search, record):
            _tell_known(state, record)
            return
        with Session(task, self.pool.target, self.seed, host) as session:
            state.status = SEARCHING
            self._explore(session, task, search, state, until)
            state.status = CONFIRMING
            self.tell()
            self._confirm(session, task, search, state)
            self.retuned = True

    def _is_done(self, task: Task, search: Search, record: Record) -> bool:
        """Return whether an earlier job left nothing to do."""
        if task.number_of(record.template, record.version, record.knobs) is None:
            return not task.wide and task.is_in_wide_space(record)
        enough = max(search.trials, record.trials) >= min(self.trials, len(task.settings) - 1)
        return enough or (_promises_little(search) and not search.neighbours())

    def _search(self, task: Task, known: Mapping[Key, Record]) -> Search:
        """The search, with what the log has of earlier trials."""
        features, log_predicted, knobs = task.table
        first = [
            number
            for record in known.values()
            if record.gain > 1 + LEAST_GAIN and record.key != task.key
            if (number := task.number_of(record.template, record.version, record.knobs))
        ]
        search = Search(features, log_predicted, task.groups, self.seed, first[-SEEDS:], knobs)
        search.add(0, 0.0)
        for trial in self.database.trials(task.key):
            number = task.number_of(trial["template"], trial["version"], trial["knobs"])
            if number:
                ratio = trial.get("ratio")
                search.fail(number) if ratio is None else search.add(number, math.log(ratio))
        return search

    def _explore(
        self, session: Session, task: Task, search: Search, state: TaskState, until: float
    ) -> None:
        """Try batches until the trials, the time, or what is left to gain run out."""
        hopeless = 0
        while search.trials < self.trials:
            room = min(BATCH, self.trials - search.trials)
            batch = search.neighbours()[:room] if hopeless > 1 else search.propose(room)
            if not batch or (search.trials and time.monotonic() >= until):
                return
            session.build([0, *batch])
            racers = list(dict.fromkeys([search.best, *batch]))
            outcomes, default = session.race(racers, BATCH_ROUNDS, BATCH_SECONDS)
            for number in batch:
                self._note(task, search, state, number, outcomes[number])
            if all(outcomes[number].failure for number in batch):
                failed = outcomes[batch[0]]
                raise TuningError(
                    f"all {len(batch)} candidates of {state.name} failed; the first one with "
                    f"{text_of(*task.settings[batch[0]])} ({failed.failure}): "
                    f"{failed.reason}"
                )
            state.trials, state.default_seconds = search.trials, default
            state.best_seconds = default * math.exp(search.measured[search.best])
            self._name_best(task, state, search.best)
            self.tell()
            hopeless = hopeless + 1 if _promises_little(search) else 0

    def _note(
        self, task: Task, search: Search, state: TaskState, number: int, outcome: Outcome
    ) -> None:
        """Take in a trial and log it."""
        template, knobs = task.settings[number]
        about = {"template": template.name, "version": template.version, "knobs": asdict(knobs)}
        if outcome.ratio is None:
            search.fail(number)
            failure = {"failure": outcome.failure, "reason": outcome.reason}
            state.failures.append({"template": template.name, "knobs": asdict(knobs)} | failure)
            self.database.add_trial(task.key, about | failure)
        else:
            search.add(number, math.log(outcome.ratio))
            self.database.add_trial(task.key, about | {"ratio": outcome.ratio})

    def _confirm(self, session: Session, task: Task, search: Search, state: TaskState) -> None:
        """Race the best settings again in a fresh process, and record the winner or the default."""
        outcomes, default = _second_race(session, search.measured)
        best, ratio = winner(outcomes)
        _tell_winner(state, best, default, default * ratio)
        self._name_best(task, state, best)
        self.database.add_record(_record(session, task, best, default, default * ratio, search))

    def _race_forms(self, task: FormTask, state: TaskState, host: Host) -> None:
        """Race all forms with their best knobs, then the best of them in a fresh process."""
        known = self.database.records()
        state.settings, state.trials = len(task.forms), len(task.forms) - 1
        task.choose_knobs(known, self.database.trials)
        record = known.get(task.key)
        if record is not None and not self.retuned and _is_usable(task, record):
            _tell_known(state, record)
            return
        with Session(task, self.pool.target, self.seed, host) as session:
            state.status = SEARCHING
            self.tell()
            outcomes, _ = session.race(range(1, len(task.forms)), BATCH_ROUNDS, FINAL_SECONDS)
            for number, outcome in outcomes.items():
                if outcome.failure:
                    about = {"template": FORMS.name, "knobs": asdict(task.forms[number])}
                    about |= {"failure": outcome.failure, "reason": outcome.reason}
                    state.failures.append(about)
            ratios = {n: raced.ratio for n, raced in outcomes.items() if raced.ratio is not None}
            state.status = CONFIRMING
            self.tell()
            logs = {number: math.log(ratio) for number, ratio in ratios.items()}
            second, default = _second_race(session, logs)
            best, ratio = winner(second)
            again = {
                number: raced.ratio for number, raced in second.items() if raced.ratio is not None
            }
            ratios = {0: 1.0} | ratios | again
            state.times = {task.title(n): default * raced for n, raced in sorted(ratios.items())}
            _tell_winner(state, best, default, default * ratio)
            state.template, state.knobs = FORMS.name, asdict(task.forms[best])
            for knobs in task.knobs.get(task.forms[best], []):
                if known.get(knobs.key, knobs).template != knobs.template:
                    times = {"default_seconds": default, "best_seconds": default * ratio}
                    won = replace(knobs, **(_origin(session) | times))
                    # It may be of another nest than the kernel's best.
                    self.database.add_record(won)
            self.database.add_record(
                form_record(
                    task.workload,
                    task.forms[best],
                    task.machine,
                    (default, default * ratio),
                    trials=state.trials,
                    times=state.times,
                    **_origin(session),
                )
            )

    def _name_best(self, task: Task, state: TaskState, number: int) -> None:
        template, knobs = task.settings[number]
        state.template, state.knobs = template.name, asdict(knobs)


def _second_race(
    session: Session, measured: Mapping[int, float]
) -> tuple[dict[int, Outcome], float]:
    """Race the best settings and the default again, in a fresh process.

    Parameters
    ----------
    session : Session
        Session of the first race.
    measured : mapping
        Logarithms of the times, in units of the default's, by setting.

    Returns
    -------
    tuple[dict[int, Outcome], float]
        Outcomes of the best ones, and the default's seconds.
    """
    session.end_worker()
    chosen = finalists(measured)
    session.build([0, *chosen])
    outcomes, default = session.race(chosen, FINAL_ROUNDS, FINAL_SECONDS)
    return {number: outcomes[number] for number in chosen}, default


def _tell_winner(state: TaskState, best: int, default: float, seconds: float) -> None:
    state.status = TUNED if best else DEFAULT_STAYS
    state.default_seconds, state.best_seconds = default, seconds


def _tell_known(state: TaskState, record: Record) -> None:
    state.status, state.trials = KNOWN, record.trials
    state.default_seconds, state.best_seconds = record.default_seconds, record.best_seconds
    state.template, state.knobs = record.template, dict(record.knobs)
    state.times = dict(record.times)


def _is_usable(task: FormTask, record: Record) -> bool:
    """Return whether an earlier job has raced all forms."""
    legal = Records([("", record)]).lookup(task.key, (FORMS,), task.workload, task.machine)
    return legal is not None and record.trials >= len(task.forms) - 1


def _promises_little(search: Search) -> bool:
    """Return whether the trees, once they have seen enough, expect next to no gain."""
    return search.trials >= LEAST_TRIALS and search.expected_gain() < LEAST_GAIN


def _record(
    session: Session, task: Task, best: int, default: float, seconds: float, search: Search
) -> Record:
    template, knobs = task.settings[best]
    times = default, seconds
    return Record.of_key(task.key, template, knobs, times, search.trials, **_origin(session))


def _origin(session: Session) -> dict[str, Any]:
    """Machine, version and date of a record."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "machine": session.host.processor,
        "tvm": str(tvm.__version__),
        "date": now.isoformat(timespec="seconds"),
    }
