# SPDX-License-Identifier: Apache-2.0
"""Threads of a model: those of this project, or TVM's for libraries that cannot use them.

Behaviour of TVM 0.27's pools, found by experiment:

- Every thread of the program that calls a parallel kernel gets its own pool, made at that first
  call, as large as ``TVM_NUM_THREADS`` or half the processors. A pool never grows, its workers are
  pinned to the first processors of the machine (whatever the affinity of the process), and its pool
  may outlive the thread.
- ``runtime.config_threadpool(mode, threads, processors, largest)``, called first, changes that: the
  calling thread's pool is made with ``largest`` workers, of which ``threads`` work from then on,
  and the mode -3 lets them move among ``processors``. Within ``largest`` the number of threads can
  be lowered and raised at any time. ``largest`` holds for the whole process; while it is 1, every
  kernel runs serially.

So no environment variable has to be set, and each model has exactly the threads that it requests.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import tvm_ffi

from ..errors import InvalidInputError
from ..machine.host import physical_cores, usable_processors
from .tvm_runtime import get_function
from .worker_pool import WorkerPool, unbind, use_pools

_SHARE_PROCESSORS = -3
_DEAD = -1  # threads of a pool in a process that was forked after the thread's first call
_this_thread = threading.local()
_starting = threading.Lock()
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_idle: list[WorkerPool] = []
_main_thread = threading.main_thread().ident


def choose_threads(threads: int | None, elsewhere: bool = False) -> int:
    """Check a number of threads, or choose it.

    Parameters
    ----------
    threads : int or None
        None means ``TVM_NUM_THREADS`` if the environment has it, else one a physical core.
    elsewhere : bool
        Whether it may be for another machine; then this one has no more than its processors.

    Raises
    ------
    InvalidInputError
        If it is no positive integer, or more than the processors that this process may use, and not
        for another machine.
    """
    usable = usable_processors()
    if threads is None:
        wish = os.environ.get("TVM_NUM_THREADS", "")
        return min(int(wish), usable) if wish.isdecimal() and int(wish) else physical_cores()
    if isinstance(threads, bool) or not isinstance(threads, Integral) or threads < 1:
        raise InvalidInputError(f"threads is {threads!r}; expected a positive integer or None")
    if threads > usable and not elsewhere:
        raise InvalidInputError(
            f"threads is {threads}, and this process may use {usable} processors; "
            f"ask for at most {usable}, or widen the process's affinity (taskset, cpuset)"
        )
    return min(int(threads), usable)


class Crew:
    """Runs the calls of one model, one at a time, with a fixed number of threads.

    On this project's threads, the calling thread computes, too. On TVM's, only the program's main
    thread does. Any other thread passes its calls to a thread of the crew: so TVM makes one pool a
    model and not one for each thread of a server. The same holds in a process that was forked after
    a call, since no pool of TVM's survives a fork.

    Parameters
    ----------
    threads : int
        Threads of each parallel kernel, the calling one included.
    library : tvm_ffi.Module, optional
        Library of the kernels, if it is loaded already.
    """

    def __init__(self, threads: int, library: tvm_ffi.Module | None = None) -> None:
        self.threads = threads
        self._turn = threading.Lock()
        self._jobs: queue.SimpleQueue[_Call | None] | None = None
        self._is_on_tvm = library is None or not use_pools(library)
        _crews.add(self)

    def start(self, load: Callable[[], tvm_ffi.Module]) -> None:
        """Load the library of the model, whose kernels run on this project's threads if they can.

        Calls of this method wait for each other.
        """
        with self._turn:
            self._is_on_tvm = not use_pools(load())

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function and return its result; other calls wait."""
        if self._is_on_tvm:
            return self._run_on_tvm(function, args)
        with self._turn:
            if getattr(_this_thread, "bound", 0) == self.threads:
                return function(*args)
            if threading.get_ident() == _main_thread:
                _bind_main_thread(self.threads)
                return function(*args)
            with _borrowed_pool(self.threads):
                return function(*args)

    def _run_on_tvm(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if getattr(_this_thread, "threads", 0) == self.threads:  # all is prepared
            with self._turn:
                return function(*args)
        if threading.get_ident() == _main_thread and not _pool_is_dead():
            return _work(self._turn, self.threads, function, args)
        job = _Call(function, args)
        with _starting:
            if self._jobs is None:
                self._jobs = self._start_thread()
            self._jobs.put(job)
        job.done.acquire()
        if job.error is not None:
            raise job.error
        return job.result

    def renew(self) -> None:
        """Start again in a forked process, which has neither the thread nor the lock's holder."""
        self._turn = threading.Lock()
        self._jobs = None

    def _start_thread(self) -> queue.SimpleQueue[_Call | None]:
        jobs: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # The thread must not reference the crew: its deletion ends the thread.
        threading.Thread(
            target=_serve, args=(jobs, self._turn, self.threads), name="tvm_fusion", daemon=True
        ).start()
        weakref.finalize(self, jobs.put, None).atexit = False
        return jobs


def _bind_main_thread(threads: int) -> None:
    """Give the main thread a pool that it keeps."""
    pool = getattr(_this_thread, "pool", None)
    if pool is None or pool.most < threads:
        pool = _this_thread.pool = _idle_pool(threads)
    pool.bind(threads)
    _this_thread.bound = threads


@contextmanager
def _borrowed_pool(threads: int) -> Iterator[None]:
    pool = _idle_pool(threads)
    try:
        pool.bind(threads)
        yield
    finally:
        unbind()
        _idle.append(pool)


def _idle_pool(threads: int) -> WorkerPool:
    """The pool that was used last and is idle, or a new one."""
    with contextlib.suppress(IndexError):
        pool = _idle.pop()
        if pool.most >= threads:
            return pool
    return WorkerPool(max(usable_processors(), threads))


class _Call:
    """A call made by another thread; it keeps its result until that is fetched."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self, turn: threading.Lock, threads: int) -> None:
        """Make the call, and wake the waiting thread."""
        try:
            self.result = _work(turn, threads, self.function, self.args)
        except BaseException as error:  # every exception belongs to the waiting thread
            self.error = error
        finally:
            self.done.release()


def _serve(jobs: queue.SimpleQueue[_Call | None], turn: threading.Lock, threads: int) -> None:
    for job in iter(jobs.get, None):
        job.run(turn, threads)
        del job  # its result may be large, and the next job may come late


def _work(
    turn: threading.Lock, threads: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Call the function on this thread, in turn with other calls."""
    with turn:
        _set_threads(threads)
        return function(*args)


def _set_threads(threads: int) -> None:
    """Set the number of threads in this thread's pool."""
    if getattr(_this_thread, "threads", 0) == threads:
        return
    processors = [str(cpu) for cpu in _processors()]
    largest = max(len(processors), threads)
    configure = get_function("runtime.config_threadpool")
    configure(_SHARE_PROCESSORS, threads, processors, largest)
    _this_thread.threads = threads


def _pool_is_dead() -> bool:
    """Return whether this thread's pool was lost in a fork of the process."""
    return getattr(_this_thread, "threads", 0) == _DEAD


def _processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _after_fork() -> None:
    global _starting, _main_thread
    _starting = threading.Lock()
    _main_thread = threading.get_ident()  # only the forking thread exists
    if hasattr(_this_thread, "threads"):
        _this_thread.threads = _DEAD
    _idle.clear()
    _this_thread.bound, _this_thread.pool = 0, None
    unbind()
    for crew in _crews:
        crew.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
