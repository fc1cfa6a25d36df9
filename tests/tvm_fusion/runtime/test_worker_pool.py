# SPDX-License-Identifier: Apache-2.0
"""Parallel loops of kernels on this project's threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import ir as I
from tvm.script import tirx as T
from without_torch import WITHOUT_TORCH

from tvm_fusion.codegen.linker import SharedLinker
from tvm_fusion.errors import TargetError
from tvm_fusion.machine.host import host_arch
from tvm_fusion.runtime import thread_pool
from tvm_fusion.runtime.thread_pool import Crew, WorkerPool, unbind, use_pools

ROOT = Path(__file__).resolve().parents[3]
TRIPLE = f"{host_arch()}-linux-gnu"
SIZE = 1000

tvm_ffi.register_global_func("tests.note_task", lambda task: seen.append((task, thread())))
tvm_ffi.register_global_func("tests.fail_at", lambda task: 1 // 0 if task == failing else 0)
seen: list[tuple[int, int]] = []
failing = -1
thread = threading.get_native_id


@I.ir_module
class Kernels:
    @T.prim_func
    def count(a: T.Buffer((SIZE,), "int32")):
        T.func_attr({"global_symbol": "count"})
        for i in T.parallel(SIZE):
            a[i] = a[i] + i

    @T.prim_func
    def note(a: T.Buffer((64,), "int32")):
        T.func_attr({"global_symbol": "note"})
        for i in T.parallel(64):
            T.evaluate(T.call_packed("tests.note_task", i))
            a[i] = a[i] + 1

    @T.prim_func
    def fail(a: T.Buffer((64,), "int32")):
        T.func_attr({"global_symbol": "fail"})
        for i in T.parallel(64):
            T.evaluate(T.call_packed("tests.fail_at", i))
            a[i] = a[i] + 1

    @T.prim_func
    def chain(a: T.Buffer((64,), "int32"), b: T.Buffer((64,), "int32")):
        # Each step needs what other threads have written in the one before.
        T.func_attr({"global_symbol": "chain"})
        with T.attr(0, "pragma_parallel_launch_point", 1):
            for step in range(50):
                with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
                    for i in T.parallel(64):
                        b[i] = a[63 - i] + step
                with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
                    for j in T.parallel(64):
                        a[j] = b[63 - j] + 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    tvm.compile(Kernels, "llvm").export_library(str(path), fcompile=SharedLinker(TRIPLE))
    return path


def counted(crew: Crew, kernel, times: int) -> bool:
    """Whether each element of a loop was computed once in each of some calls."""
    memory = np.zeros(SIZE, "int32")
    argument = tvm_ffi.from_dlpack(memory)
    for _ in range(times):
        crew.run(kernel, argument)
    return bool((memory == times * np.arange(SIZE)).all())


@pytest.mark.quick_cases("2", "3")
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_each_part_of_a_loop_is_computed_once(library: Path, threads: int) -> None:
    module = tvm_ffi.load_module(str(library))
    assert counted(Crew(threads, module), module["count"], 2000)


def test_parts_that_no_thread_begins_are_the_callers(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tvm_ffi.load_module(str(library))
    assert use_pools(module)
    monkeypatch.setattr(thread_pool, "_start_thread", lambda task: None)
    WorkerPool(3).bind(3)
    try:
        memory = np.zeros(64, "int32")
        seen.clear()
        module["note"](tvm_ffi.from_dlpack(memory))
    finally:
        unbind()
        thread_pool._this_thread.bound = 0
    assert sorted(seen) == [(task, thread()) for task in range(64)]
    assert (memory == 1).all()


def test_threads_take_part(library: Path) -> None:
    module = tvm_ffi.load_module(str(library))
    seen.clear()
    for _ in range(1000):  # a busy machine may leave a loop to its caller
        Crew(2, module).run(module["note"], tvm_ffi.from_dlpack(np.zeros(64, "int32")))
        if len({by for _, by in seen}) == 2:
            break
    assert {by for _, by in seen} > {thread()}


@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_barriers(library: Path, threads: int) -> None:
    module = tvm_ffi.load_module(str(library))
    crew, other = Crew(threads, module), Crew(3, module)
    for _ in range(20):
        a, b = np.arange(64, dtype="int32"), np.zeros(64, "int32")
        crew.run(module["chain"], *map(tvm_ffi.from_dlpack, (a, b)))
        assert (a == np.arange(64) + 50 + sum(range(50))).all()
        assert counted(other, module["count"], 1)  # another number of threads in between
        a, b = np.arange(64, dtype="int32"), np.zeros(64, "int32")
        other.run(module["chain"], *map(tvm_ffi.from_dlpack, (a, b)))
        assert (a == np.arange(64) + 50 + sum(range(50))).all()


@pytest.mark.parametrize("task", [0, 63])
def test_a_failure_in_any_thread_is_an_error_once(library: Path, task: int) -> None:
    global failing
    module = tvm_ffi.load_module(str(library))
    crew, argument = Crew(2, module), tvm_ffi.from_dlpack(np.zeros(64, "int32"))
    failing = task
    for _ in range(20):
        with pytest.raises((ZeroDivisionError, RuntimeError), match=r"by zero|has failed"):
            crew.run(module["fail"], argument)
    failing = -1
    crew.run(module["fail"], argument)


@pytest.mark.slow
def test_callers_at_once_with_the_same_file(library: Path) -> None:
    """They share its variables: a file that is loaded twice is mapped once."""

    def call(threads: int) -> bool:
        module = tvm_ffi.load_module(str(library))
        return counted(Crew(threads, module), module["count"], 3000)

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, [1, 2, 3, 2, 1, 3, 2, 2]))


def test_callers_of_one_model_share_a_pool(library: Path) -> None:
    module = tvm_ffi.load_module(str(library))
    crew = Crew(2, module)
    with ThreadPoolExecutor(1) as caller:
        caller.submit(counted, crew, module["count"], 1).result()
    before = len(thread_pool._pools)
    for _ in range(5):
        with ThreadPoolExecutor(1) as caller:
            assert caller.submit(counted, crew, module["count"], 10).result()
    assert len(thread_pool._pools) == before


def test_threads_without_a_pool_run_on_those_of_tvm(library: Path) -> None:
    module = tvm_ffi.load_module(str(library))
    assert use_pools(module)

    def call() -> np.ndarray:
        memory = np.zeros(SIZE, "int32")
        module["count"](tvm_ffi.from_dlpack(memory))
        a, b = np.arange(64, dtype="int32"), np.zeros(64, "int32")
        module["chain"](*map(tvm_ffi.from_dlpack, (a, b)))
        assert (a == np.arange(64) + 50 + sum(range(50))).all()
        return memory

    with ThreadPoolExecutor(1) as caller:
        assert (caller.submit(call).result() == np.arange(SIZE)).all()


def test_a_library_of_another_linker_is_left_alone() -> None:
    module = tvm.compile(Kernels, "llvm").jit()
    assert not use_pools(module)
    assert counted(Crew(2, module), module["count"], 10)


def test_a_refused_thread_is_an_error(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_pools(tvm_ffi.load_module(str(library)))

    class System:
        pthread_create = staticmethod(lambda *_: 11)

    monkeypatch.setattr(thread_pool, "_system", System)
    with pytest.raises(TargetError, match=r"refuses a thread.*load the model with fewer threads"):
        WorkerPool(3).bind(3)


FORK = """
import os, sys, threading
import numpy as np, tvm_ffi
import tvm_fusion
from tvm_fusion.runtime.thread_pool import Crew

module = tvm_ffi.load_module(sys.argv[1])
crew = Crew(2, module)

def call():
    memory = np.zeros(1000, "int32")
    for _ in range(100):
        crew.run(module["count"], tvm_ffi.from_dlpack(memory))
    assert (memory == 100 * np.arange(1000)).all()

def call_elsewhere():
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

call()
call_elsewhere()
child = os.fork()
call_elsewhere()
call()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_has_threads_of_its_own(library: Path) -> None:
    import_runtime = "import tvm_ffi\nfrom tvm_fusion.runtime.tvm_runtime import get_function\n"
    load = 'get_function("runtime.config_threadpool")\n'
    command = [sys.executable, "-c", WITHOUT_TORCH + import_runtime + load + FORK, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SLEEP = """
import os, sys, threading, time
import numpy as np, tvm_ffi
from tvm_fusion.runtime.thread_pool import Crew
from tvm_fusion.runtime.tvm_runtime import get_function

get_function("runtime.config_threadpool")
module = tvm_ffi.load_module(sys.argv[1])
before = set(os.listdir("/proc/self/task"))
Crew(3, module).run(module["count"], tvm_ffi.from_dlpack(np.zeros(1000, "int32")))
workers = set(os.listdir("/proc/self/task")) - before
assert len(workers) == 2, workers

def state(worker):
    with open(f"/proc/self/task/{worker}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]

while any(state(worker) != "S" for worker in workers):
    time.sleep(0.01)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="not told by this system")
def test_idle_threads_sleep_and_never_delay_the_end(library: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH + SLEEP, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
