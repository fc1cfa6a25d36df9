# SPDX-License-Identifier: Apache-2.0
"""Inside a worker: random inputs, timed turns, and the description of failures."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_fusion.bench import engines
from tvm_fusion.bench.engines import (
    ENGINES,
    Engine,
    EngineKind,
    Input,
    Service,
    failure,
)
from tvm_fusion.errors import InvalidModelError, TVMFusionError


class Sleeper(Engine):
    """An engine that remembers what it was fed."""

    version = "1"

    def __init__(self) -> None:
        self.inputs = [Input("x", (2, 3), "float32")]
        self.fed: list[np.ndarray] = []
        self.pause = 0.0

    def load(self, path: str, shapes: Any, threads: int, options: Any) -> None:
        if path == "bad":
            raise InvalidModelError("no model")
        if path == "broken":
            raise KeyError("first line\nsecond line")

    def run(self, feed: Any) -> list[np.ndarray]:
        self.fed.append(feed["x"])
        time.sleep(self.pause)
        return [feed["x"] * 2]


def test_a_turn_rotates_inputs() -> None:
    engine = Sleeper()
    times = Service(engine).turn(seed=[5, 1], runs=6, seconds=100)
    assert len(times) == 6
    timed = engine.fed[-6:]
    assert all(np.array_equal(a, b) for a, b in zip(timed[:2], timed[4:], strict=True))
    assert len({array.tobytes() for array in timed}) == engines.INPUT_SETS


def test_a_turn_ends_after_its_time_but_has_one_run() -> None:
    engine = Sleeper()
    engine.pause = 0.02
    assert len(Service(engine).turn(seed=[0, 0], runs=50, seconds=0.0)) == 1


def test_every_round_has_fresh_inputs() -> None:
    engine = Sleeper()
    service = Service(engine)
    for number in range(3):
        service.turn(seed=[0, number], runs=1, seconds=1)
    assert len({array.tobytes() for array in engine.fed}) == 3


def test_outputs_are_copies() -> None:
    (output,) = Service(Sleeper()).outputs(seed=[1, 2])
    assert output.base is None and output.shape == (2, 3)


def test_load_reports_inputs_version_and_time() -> None:
    loaded = Service(Sleeper()).load(path="m", shapes={}, threads=1, options={})
    assert loaded["inputs"] == [("x", (2, 3), "float32")]
    assert loaded["version"] == "1" and loaded["seconds"] >= 0


def test_peak_memory_grows_with_what_is_held() -> None:
    # A process of its own has no peak that other tests have left behind.
    program = """
import numpy as np
from tvm_fusion.bench.engines import Engine, Service
service = Service(Engine())
before = service.peak_bytes()
held = np.ones(2 * before, np.uint8)
assert service.peak_bytes() >= 2 * before and held[0] == 1
"""
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def test_failures_of_peers_are_engine_errors_and_ours_keep_their_class() -> None:
    kind = EngineKind(Sleeper, "Sleeper")
    _, name, text, _ = failure(KeyError("one\ntwo"), kind)
    assert name == "EngineError" and text.startswith("Sleeper failed: KeyError: ")
    _, name, text, _ = failure(InvalidModelError("not a model"), kind)
    assert (name, text) == ("InvalidModelError", "not a model")
    _, name, _, _ = failure(TVMFusionError("x"), kind)
    assert name == "TVMFusionError"


def test_serve_answers_until_the_pipe_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "sleeper", EngineKind(Sleeper, "Sleeper"))
    mine, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=engines.serve, args=("sleeper", theirs))
    thread.start()
    load = {"shapes": {}, "threads": 1, "options": {}}
    mine.send(("load", {"path": "m", **load}))
    assert mine.recv()[0] == "ok"
    mine.send(("load", {"path": "bad", **load}))
    assert mine.recv()[:3] == ("error", "InvalidModelError", "no model")
    mine.send(("load", {"path": "broken", **load}))
    status, kind, text, trace = mine.recv()
    assert (status, kind) == ("error", "EngineError") and "\n" not in text
    assert "KeyError" in trace
    mine.close()
    thread.join(10)
    assert not thread.is_alive()
