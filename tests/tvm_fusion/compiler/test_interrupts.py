# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C during compilation, and compilation in several threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest
from onnx import parser
from small_onnx import small_model

import tvm_fusion
from tvm_fusion.compiler.interrupts import interrupts_at_once, interrupts_kept
from tvm_fusion.errors import UnsupportedOperatorError


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which jobs in the background of a shell do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: object) -> bool:
    signal.raise_signal(signal.SIGINT)
    return False


def test_an_interrupt_within_tvm(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # a pass of TVM's calls this function
        tvm_fusion.compile(small_model(), fuse=interrupt, threads=1)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr() == ("", "")  # TVM prints of blocks that an exception leaves


def test_an_interrupt_waits_for_the_end_and_replaces_an_error() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        interrupt()
        reached.append(1)
    assert reached
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_kept():
        interrupt()
        raise RuntimeError("of TVM")
    assert caught.value.__suppress_context__
    with pytest.raises(RuntimeError, match="another"), interrupts_kept():
        raise RuntimeError("another")


def test_a_second_interrupt_does_not_wait() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_a_part_that_waits_outside_of_tvm_is_interrupted_at_once() -> None:
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), interrupts_kept(), interrupts_kept():
        with interrupts_at_once():
            assert signal.getsignal(signal.SIGINT) is before
            interrupt()
        reached.append(1)
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        interrupt()
        with interrupts_at_once():  # a signal that came before ends it, too
            reached.append(2)
    assert not reached
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_of_the_program() -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    calls: list[int] = []
    before = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(Stop), interrupts_kept():
            interrupt()
        signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
        with interrupts_kept():  # a handler that raises nothing interrupts nothing
            interrupt()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts_kept():
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls == [signal.SIGINT]


@pytest.mark.slow
def test_threads_that_compile_at_once() -> None:
    filters, output, error = list(warnings.filters), sys.stdout, sys.stderr
    start = threading.Barrier(4)
    x = np.random.default_rng(4).standard_normal((1, 3, 12, 12), dtype=np.float32)

    def compiled(_: int) -> np.ndarray:
        start.wait()
        return tvm_fusion.compile(small_model(), threads=1)(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiled, range(4)))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    assert list(warnings.filters) == filters
    assert (sys.stdout, sys.stderr) == (output, error)


def test_nothing_is_printed_of_a_node_that_tvm_cannot_import(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2,3,4] x) => (float[a,b,c] y) { y = LSTM(x, x, x) }"""
    )
    with pytest.raises(UnsupportedOperatorError, match="cannot be imported"):
        tvm_fusion.compile(model, threads=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_an_interrupt_waits_for_the_end_of_imports() -> None:
    code = """
import signal, sys
import tvm_fusion
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(name, *_):
        if name == "onnx":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder)
try:
    tvm_fusion.compile(b"")
except KeyboardInterrupt:
    print("tvm_fusion.compiler.compile_model" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
