# SPDX-License-Identifier: Apache-2.0
"""Threads of a model, on TVM's thread pools.

Behaviour of TVM 0.27, found by experiment:

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

import os
import queue
import threading
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any

from ..errors import InvalidInputError
from ..machine.host import physical_cores, usable_processors
from .tvm_runtime import get_function

_SHARE_PROCESSORS = -3
_SPINS = "TVM_THREAD_POOL_SPIN_COUNT", "1000"
_DEAD = -1  # threads of a pool in a process that was forked after the thread's first call
_this_thread = threading.local()
_starting = threading.Lock()
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_main_thread = threading.main_thread().ident


def choose_threads(threads: int | None) -> int:
    """Check a number of threads, or choose it.

    Parameters
    ----------
    threads : int or None
        None means ``TVM_NUM_THREADS`` if the environment has it, else one a physical core.

    Raises
    ------
    InvalidInputError
        If it is no positive integer, or more than the processors that this process may use.
    """
    usable = usable_processors()
    if threads is None:
        wish = os.environ.get("TVM_NUM_THREADS", "")
        return min(int(wish), usable) if wish.isdecimal() and int(wish) else physical_cores()
    if isinstance(threads, bool) or not isinstance(threads, Integral) or threads < 1:
        raise InvalidInputError(f"threads is {threads!r}; expected a positive integer or None")
    if threads > usable:
        raise InvalidInputError(
            f"threads is {threads}, and this process may use {usable} processors; "
            f"ask for at most {usable}, or widen the process's affinity (taskset, cpuset)"
        )
    return int(threads)


class Crew:
    """Runs the calls of one model, one at a time, with a fixed number of threads.

    The program's main thread runs them itself. Any other thread passes them to a thread of the
    crew: so TVM makes one pool a model and not one for each thread of a server. The same holds in a
    process that was forked after a call, since no pool survives a fork.

    Parameters
    ----------
    threads : int
        Threads of each parallel kernel, the calling one included.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._turn = threading.Lock()
        self._jobs: queue.SimpleQueue[_Call | None] | None = None
        _crews.add(self)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function and return its result; other calls wait."""
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
    os.environ.setdefault(*_SPINS)
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
    for crew in _crews:
        crew.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
