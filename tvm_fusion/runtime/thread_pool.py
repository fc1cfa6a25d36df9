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
import ctypes
import mmap
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from typing import Any

import tvm_ffi

from ..errors import InvalidInputError, TargetError
from ..machine.host import physical_cores, usable_processors
from .tvm_runtime import get_function

_SPINS = 4000  # Spins before a thread looks whether other work needs its processor: about 0.1 ms.
_LOOKS = 10  # Looks before it sleeps in any case.
_PATIENCE = 100  # spins of the caller before it does the tasks that nobody has begun
_CLAIMED = 1  # a round without a task

_code: list[tuple[int, tvm_ffi.Module]] = []
"""Address of the function that the threads of all pools run, and the library that it lies in."""

_pools: list[WorkerPool] = []


def use_pools(library: tvm_ffi.Module) -> bool:
    """Let the kernels of a library run their loops on the pool of the thread that calls them.

    Returns whether they do; libraries of older versions, and of other linkers, cannot.
    """
    try:
        use = library.get_function("tvm_fusion_use_pools", query_imports=True)
    except AttributeError:
        return False
    work = use(_key())
    if not _code:
        _code.append((work, library))
    return True


class _Task(ctypes.Structure):
    """Part of a thread in the current loop, alone in its cache lines."""

    _fields_ = (
        ("round", ctypes.c_int32),
        ("asleep", ctypes.c_int32),
        ("barriers", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("pool", ctypes.c_void_p),
        ("_", ctypes.c_char * 104),
    )


class _State(ctypes.Structure):
    """Memory that the threads and their caller share, followed by the tasks."""

    _fields_ = (
        ("pending", ctypes.c_int32),
        ("waits", ctypes.c_int32),
        ("failed", ctypes.c_int32),
        ("_", ctypes.c_int32 * 13),
        ("round", ctypes.c_int32),
        ("spins", ctypes.c_int32),
        ("patience", ctypes.c_int32),
        ("looks", ctypes.c_int32),
        ("function", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("group_pool", ctypes.c_void_p),
        ("group_tasks", ctypes.c_int64),
        ("raise_error", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("__", ctypes.c_int32),
    )


class WorkerPool:
    """Threads that share the parallel loops of kernels; their code is in each compiled library.

    TVM's own threads yield their processor while they wait for the next kernel. Beside other work
    that costs a time slice of the system, some milliseconds, for each kernel of a model. These ones
    spin without yielding, sleep soon, and a kernel does not wait for a thread that has not begun
    its part. A thread that calls kernels has at most one pool at a time.
    """

    def __init__(self, most: int) -> None:
        size = ctypes.sizeof(_State) + most * ctypes.sizeof(_Task)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._state = state = _State.from_buffer(self._memory)
        self._tasks = (_Task * most).from_buffer(self._memory, ctypes.sizeof(_State))
        self._address = state.group_pool = ctypes.addressof(state)
        self._started = 1  # the caller
        state.spins, state.looks, state.patience = _SPINS, _LOOKS, _PATIENCE
        raise_error = tvm_ffi.LIB.TVMFFIErrorSetRaisedFromCStr
        state.raise_error = ctypes.cast(raise_error, ctypes.c_void_p).value
        for index, task in enumerate(self._tasks):
            task.round, task.index, task.pool = _CLAIMED, index, self._address
        _pools.append(self)

    @property
    def most(self) -> int:
        """The most threads that it can have."""
        return len(self._tasks)

    def bind(self, threads: int) -> None:
        """Run the kernels that the calling thread calls from now on, on that many threads.

        Raises TargetError if the system has no further thread.
        """
        if self._state.threads != threads:
            for task in self._tasks:
                task.barriers = 0
            for task in self._tasks[self._started : threads]:
                _start_thread(task)
                self._started += 1
            self._state.threads = threads
        _system().pthread_setspecific(_key(), ctypes.c_void_p(self._address))


def unbind() -> None:
    """Let the calling thread have no pool."""
    _system().pthread_setspecific(_key(), None)


def _start_thread(task: _Task) -> None:
    """Start the thread of a task; signals of the process go to other threads."""
    (work, _), thread = _code[0], ctypes.c_ulong()
    signals = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        error = _system().pthread_create(
            ctypes.byref(thread), None, ctypes.c_void_p(work), ctypes.byref(task)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    if error:
        raise TargetError(
            f"the system refuses a thread for kernels: {os.strerror(error)}; "
            "load the model with fewer threads"
        )
    _system().pthread_detach(thread)


@cache
def _system() -> Any:
    return ctypes.CDLL(None)


@cache
def _key() -> int:
    """Key of a thread's pool, as the system knows it."""
    key = ctypes.c_uint()
    error = _system().pthread_key_create(ctypes.byref(key), None)
    if error:
        raise TargetError(
            f"the system refuses a key for the threads of kernels: {os.strerror(error)}"
        )
    return key.value


_SHARE_PROCESSORS = -3
_DEAD = -1  # threads of a pool in a process that was forked after the thread's first call
_this_thread = threading.local()
_starting = threading.Lock()
_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_idle: list[WorkerPool] = []
_main_thread = threading.main_thread().ident


def choose_threads(threads: int | None, elsewhere: bool = False) -> int:
    """Check a number of threads, or choose it.

    ``threads``: None means ``TVM_NUM_THREADS`` if the environment has it, else one a physical core.
    ``elsewhere``: whether it may be for another machine; then this one has no more than its
    processors. Raises InvalidInputError if it is no positive integer, or more than the processors
    that this process may use, and not for another machine.
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

    ``threads``: threads of each parallel kernel, the calling one included. ``library``: library of
    the kernels, if it is loaded already.
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
