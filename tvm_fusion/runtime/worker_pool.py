# SPDX-License-Identifier: Apache-2.0
"""Threads that share the parallel loops of kernels; their code is in each compiled library.

TVM's own threads yield their processor while they wait for the next kernel. Beside other work that
costs a time slice of the system, some milliseconds, for each kernel of a model. These ones spin
without yielding, sleep soon, and a kernel does not wait for a thread that has not begun its part.
A thread that calls kernels has at most one pool at a time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from functools import cache
from typing import Any

import tvm_ffi

from ..errors import TargetError

_SPINS = 4000  # before a thread looks whether other work needs its processor: about 0.1 ms
_LOOKS = 10  # before it sleeps in any case
_PATIENCE = 100  # spins of the caller before it does the tasks that nobody has begun
_CLAIMED = 1  # a round without a task

_code: list[tuple[int, tvm_ffi.Module]] = []
"""Address of the function that the threads of all pools run, and the library that it lies in."""

_pools: list[WorkerPool] = []


def use_pools(library: tvm_ffi.Module) -> bool:
    """Let the kernels of a library run their loops on the pool of the thread that calls them.

    Returns
    -------
    bool
        Whether they do; libraries of older versions, and of other linkers, cannot.
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
    """Threads for one caller at a time; it is never deleted, since its threads never end.

    Parameters
    ----------
    most : int
        The most threads of a loop, the caller included.
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

        Raises
        ------
        TargetError
            If the system has no further thread.
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
