# SPDX-License-Identifier: Apache-2.0
"""Worker processes: they answer, stand still when idle, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from small_onnx import small_model

from tvm_fusion.bench.engines import Input
from tvm_fusion.bench.race import available_peers
from tvm_fusion.bench.worker import EngineSpec, EngineWorker
from tvm_fusion.errors import EngineError, InvalidModelError
from tvm_fusion.runtime.host_arrays import random_inputs

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "small.onnx"
    onnx.save(small_model("N"), path)
    return str(path)


@pytest.fixture(scope="module")
def worker() -> Iterator[EngineWorker]:
    with EngineWorker(EngineSpec("onnxruntime"), 1) as one:
        yield one


def process_state(pid: int) -> str:
    """The letter of the process's state; empty if it is gone."""
    if Path("/proc/self/stat").exists():
        stat = Path(f"/proc/{pid}/stat")
        return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:1]


def wait_for_state(pid: int, states: str) -> str:
    state = process_state(pid)
    for _ in range(200):
        if state in states:
            break
        time.sleep(0.05)
        state = process_state(pid)
    return state


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", available_peers())
def test_peer_computes_what_onnx_runtime_computes(engine: str, model_path: str) -> None:
    shapes = {"image": (2, 3, 12, 12)}
    feed = random_inputs([Input("image", shapes["image"], "float32")], [0, 7])
    (want,) = onnxruntime.InferenceSession(model_path).run(None, feed)
    with EngineWorker(EngineSpec(engine), 1) as one:
        loaded = one.call("load", path=model_path, shapes=shapes, threads=1, options={})
        assert loaded["inputs"] == [("image", (2, 3, 12, 12), "float32")]
        (got,) = one.call("outputs", seed=[0, 7])
        times = one.call("turn", seed=[0, 1], runs=3, seconds=10.0)
        assert one.call("peak_bytes") > 10 << 20
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert len(times) == 3 and min(times) > 0


def test_open_dimensions_stay_visible(worker: EngineWorker, model_path: str) -> None:
    loaded = worker.call("load", path=model_path, shapes={}, threads=1, options={})
    assert loaded["inputs"] == [("image", ("N", 3, 12, 12), "float32")]


def test_process_of_a_peer_holds_no_tvm(worker: EngineWorker, model_path: str) -> None:
    worker.call("load", path=model_path, shapes={}, threads=1, options={})
    maps = Path(f"/proc/{worker.pid}/maps")
    listed = maps.read_text() if maps.exists() else "onnxruntime"
    assert "onnxruntime" in listed and "libtvm" not in listed


@pytest.mark.slow
def test_a_process_that_loads_what_another_one_compiled_holds_no_compiler(
    model_path: str, tmp_path: Path
) -> None:
    request = {"path": model_path, "shapes": {"image": (2, 3, 12, 12)}, "threads": 1}
    artifact = str(tmp_path / "model.so")
    feed = random_inputs([Input("image", (2, 3, 12, 12), "float32")], [0, 7])
    (want,) = onnxruntime.InferenceSession(model_path).run(None, feed)
    with (
        EngineWorker(EngineSpec("tvm-fusion"), 1) as one,
        EngineWorker(EngineSpec("tvm-fusion"), 1) as other,
    ):
        assert one.call("compile", options={"fuse": "none"}, output=artifact, **request) > 0
        loaded = other.call("load", options={"artifact": artifact}, **request)
        (got,) = other.call("outputs", seed=[0, 7])
        assert loaded["details"] == {"pairs": 2, "fused": 0}
        # TVM's foreign function interface imports PyTorch where it is installed.
        assert other.call("peak_bytes") < one.call("peak_bytes") * 2 / 3
        maps = Path(f"/proc/{other.pid}/maps")
        listed = maps.read_text() if maps.exists() else "libtvm_runtime"
    assert "libtvm_runtime" in listed and "libtvm_compiler" not in listed
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_idle_process_is_stopped_and_wakes_up(worker: EngineWorker) -> None:
    worker.call("peak_bytes")
    assert wait_for_state(worker.pid, "T") == "T"
    assert worker.call("peak_bytes") > 0


def test_failure_of_a_peer_is_an_engine_error(worker: EngineWorker, tmp_path: Path) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(b"junk")
    with pytest.raises(EngineError, match="ONNX Runtime failed: InvalidProtobuf") as caught:
        worker.call("load", path=str(path), shapes={}, threads=1, options={})
    assert "Traceback" in str(caught.value.__cause__)
    assert worker.call("peak_bytes") > 0


@pytest.mark.slow
def test_our_own_errors_keep_their_class(tmp_path: Path) -> None:
    path = tmp_path / "junk.onnx"
    path.write_bytes(b"junk")
    with (
        EngineWorker(EngineSpec("tvm"), 1) as one,
        pytest.raises(InvalidModelError, match="not ONNX"),
    ):
        one.call("load", path=str(path), shapes={}, threads=1, options={})


def test_death_of_a_worker_is_an_engine_error() -> None:
    with EngineWorker(EngineSpec("onnxruntime"), 1) as one:
        one.call("peak_bytes")
        os.kill(one.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"ONNX Runtime ended with SIGKILL during 'turn'"):
            one.call("turn", seed=[0, 0], runs=1, seconds=1.0)


def test_last_words_of_a_worker_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_fusion.bench.worker._BOOT", "raise SystemExit('out of luck')")
    with EngineWorker(EngineSpec("onnxruntime"), 1) as one:
        with pytest.raises(EngineError, match="exit code 1 during 'peak_bytes'.*out of luck"):
            one.call("peak_bytes")


def test_closed_worker_is_gone() -> None:
    one = EngineWorker(EngineSpec("onnxruntime"), 1)
    one.call("peak_bytes")
    one.close()
    assert process_state(one.pid) == ""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("threads", [1, 3])
def test_thread_pools_get_their_size(threads: int) -> None:
    with EngineWorker(EngineSpec("onnxruntime"), threads) as one:
        one.call("peak_bytes")
        environment = Path(f"/proc/{one.pid}/environ")
        if environment.exists():
            assert f"TVM_NUM_THREADS={threads}".encode() in environment.read_bytes().split(b"\0")


def test_stopped_worker_dies_with_its_parent() -> None:
    program = (
        "import sys, time\n"
        "from tvm_fusion.bench.worker import EngineSpec, EngineWorker\n"
        "worker = EngineWorker(EngineSpec('onnxruntime'), 1)\n"
        "worker.call('peak_bytes')\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert wait_for_state(pid, "T") == "T"
        parent.kill()
    # A container may leave a dead orphan as a zombie.
    assert wait_for_state(pid, "Z") in ("", "Z")


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(EngineError, match="unknown engine 'caffe'; expected one of tvm-fusion"):
        EngineSpec("caffe")
