# SPDX-License-Identifier: Apache-2.0
"""Tests of the number and the places of the threads that run a model's calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from without_torch import WITHOUT_TORCH

from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime import thread_pool
from tvm_fusion.runtime.thread_pool import Crew, choose_threads

ROOT = Path(__file__).resolve().parents[3]


def on_another_thread(function):
    """Result of the function, or its exception, on a new thread."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch):
    def have(usable: int, cores: int) -> None:
        monkeypatch.setattr(thread_pool, "usable_processors", lambda: usable)
        monkeypatch.setattr(thread_pool, "physical_cores", lambda: cores)
        monkeypatch.delenv("TVM_NUM_THREADS", raising=False)

    return have


def test_by_default_there_is_one_thread_a_core(processors) -> None:
    processors(usable=8, cores=4)
    assert choose_threads(None) == 4
    assert choose_threads(8) == 8


@pytest.mark.parametrize(
    ("wish", "threads"), [("3", 3), ("99", 8), ("0", 4), ("many", 4), ("", 4), ("-2", 4)]
)
def test_the_environment_may_say_another_default(
    processors, monkeypatch: pytest.MonkeyPatch, wish: str, threads: int
) -> None:
    processors(usable=8, cores=4)
    monkeypatch.setenv("TVM_NUM_THREADS", wish)
    assert choose_threads(None) == threads
    assert choose_threads(2) == 2


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_only_positive_integers_are_numbers_of_threads(threads) -> None:
    with pytest.raises(InvalidInputError, match="expected a positive integer or None"):
        choose_threads(threads)


def test_no_more_threads_than_processors(processors) -> None:
    processors(usable=2, cores=2)
    with pytest.raises(InvalidInputError, match="threads is 3, and this process may use 2"):
        choose_threads(3)
    assert choose_threads(3, elsewhere=True) == 2
    with pytest.raises(InvalidInputError, match="expected a positive integer or None"):
        choose_threads(0, elsewhere=True)


KERNEL = """
import os, threading, time
import tvm
from tvm.script import ir as I
from tvm.script import tirx as T
from tvm_fusion.runtime.thread_pool import Crew

threads = set()

@tvm.register_global_func("tests.record_thread")
def record():
    threads.add(threading.get_native_id())
    return 0

@I.ir_module
class Parallel:
    @T.prim_func
    def main(a: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "main"})
        for i in T.parallel(64):
            T.evaluate(T.call_packed("tests.record_thread"))
            a[i] = T.float32(1)

kernel = tvm.compile(Parallel, "llvm")["main"]
memory = tvm.runtime.empty((64,), "float32")

def call(crew):
    threads.clear()
    crew.run(kernel, memory)
    assert len(threads) == crew.threads, (threads, crew.threads)

"""
COUNT = """
most = len(os.sched_getaffinity(0))
crews = [Crew(1), Crew(most), Crew(1)]
for crew in [*crews, *reversed(crews)]:
    call(crew)
    other = threading.Thread(target=call, args=(crew,))
    other.start()
    other.join()
print("counted")
"""


def test_each_crew_has_its_threads_whoever_calls_in_whatever_order(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(WITHOUT_TORCH + KERNEL + COUNT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "counted\n" and "Error" not in done.stderr, done.stderr


def test_the_main_thread_runs_itself_and_keeps_its_affinity() -> None:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    assert Crew(1).run(threading.current_thread) is threading.main_thread()
    after = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    assert after == before


def test_other_threads_share_the_thread_of_the_crew() -> None:
    crew, other = Crew(1), Crew(1)
    first, second = (
        on_another_thread(lambda: crew.run(threading.current_thread)) for _ in range(2)
    )
    assert first is second
    assert first.name == "tvm_fusion"
    assert on_another_thread(lambda: other.run(threading.current_thread)) is not first


def test_arguments_results_and_errors_pass_from_thread_to_thread() -> None:
    crew = Crew(1)
    assert on_another_thread(lambda: crew.run(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        on_another_thread(lambda: crew.run(divmod, 7, 0))
    assert on_another_thread(lambda: crew.run(divmod, 9, 2)) == (4, 1)


def test_calls_of_one_crew_never_overlap() -> None:
    crew, inside, worst = Crew(1), [0], [0]

    def call() -> None:
        inside[0] += 1
        worst[0] = max(worst[0], inside[0])
        time.sleep(0.002)
        inside[0] -= 1

    threads = [
        threading.Thread(target=lambda: [crew.run(call) for _ in range(10)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in range(10):
        crew.run(call)
    for thread in threads:
        thread.join()
    assert worst == [1]


def test_the_thread_of_a_crew_ends_with_it() -> None:
    crews = [Crew(1)]
    thread = on_another_thread(lambda: crews[0].run(threading.current_thread))
    assert thread.is_alive()
    crews.clear()
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


FORK = """
import os, sys, threading
import tvm
from tvm_fusion.runtime.thread_pool import Crew

size = tvm.get_global_func("runtime.NumThreads")
crew, most = Crew(1), Crew(len(os.sched_getaffinity(0)))
expected = [1, most.threads]
assert [c.run(size) for c in (crew, most)] == expected
thread = threading.Thread(target=crew.run, args=(size,))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    assert [c.run(size) for c in (crew, most)] == expected
    assert crew.run(threading.current_thread) is not threading.main_thread()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert [c.run(size) for c in (crew, most)] == expected
"""


@pytest.mark.slow
def test_a_forked_process_has_threads_of_its_own() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH + FORK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
