# SPDX-License-Identifier: Apache-2.0
"""Tuning jobs on servers: a tracker and two of them on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from small_onnx import dense_model
from without_torch import python

import tvm_fusion
from schedules.cpu.conv2d.conv2d import Conv2DTemplate
from schedules.cpu.core.machine import CPUInfo, described
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidInputError, TargetError, TuningError
from tvm_fusion.prediction.machines import native_name
from tvm_fusion.tuning import job, remote
from tvm_fusion.tuning.remote import RemotePool, Tracker

ROOT = Path(__file__).resolve().parents[3]
KEY, TRIALS, THREADS = "cpus", 2, 1
DEADLINE = 60.0


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ports = ["--port", str(port), "--port-end", str(port + 1)]
    process = start(python("tvm.exec.rpc_tracker", "--silent", "--host", "127.0.0.1", *ports))
    yield Tracker("127.0.0.1", port, KEY)
    end(process)


@pytest.fixture(scope="module")
def started(tracker: Tracker) -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        end(process)


@pytest.fixture
def servers(tracker: Tracker, started: list[subprocess.Popen]) -> list[subprocess.Popen]:
    """Two servers that wait for work; those that another test has ended are started again."""
    alive = [process for process in started if process.poll() is None]
    wait_for(lambda: tracker.servers() == (len(alive), len(alive)))
    options = ["--tracker", str(tracker), "--key", KEY, "--threads", str(THREADS)]
    new = [start(python("tvm_fusion.cli", "serve", *options)) for _ in range(2 - len(alive))]
    started[:] = alive + new
    wait_for(lambda: tracker.servers() == (2, 2))
    return started


def start(command: list[str]) -> subprocess.Popen:
    """Start a process that Ctrl-C ends, even where jobs in the background of a shell ignore it."""

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=listen)


def end(process: subprocess.Popen) -> None:
    """Kill a process with those that it has forked."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition) -> None:
    begin = time.monotonic()
    while True:
        try:
            if condition():
                return
        except TuningError:
            pass
        assert time.monotonic() - begin < DEADLINE
        time.sleep(0.2)


def runner(tracker: Tracker, key: str = KEY) -> str:
    return f"rpc://{tracker}/{key}"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "x86-64"}, TargetError, "the target is a x86-64 .* and the servers are"),
        ({"target": "opencl"}, TargetError, "whose servers tune CPUs; for a GPU run the job"),
        ({"threads": 2}, TargetError, "threads is 2, and the servers measure with 1"),
        ({"runner": "none"}, TuningError, "knows no server with the key 'none'"),
    ],
)
def test_servers_that_do_not_fit_are_errors(
    tracker: Tracker, servers, tmp_path: Path, options: dict, error: type, message: str
) -> None:
    options = {"runner": KEY} | options
    options["runner"] = runner(tracker, options["runner"])
    with pytest.raises(error, match=message):
        tvm_fusion.tune(dense_model(size=20, channels=32), database=tmp_path, **options)
    wait_for(lambda: tracker.servers() == (2, 2))  # all were given back


@pytest.mark.slow
def test_servers_listen_on_loopback_alone(tracker: Tracker, servers) -> None:
    for server in servers:
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)]
        sockets = [one for member in family for one in member.net_connections("tcp")]
        listening = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_servers_of_other_versions_are_refused(tracker: Tracker, servers, monkeypatch) -> None:
    monkeypatch.setattr(Conv2DTemplate, "version", 99)
    with pytest.raises(TuningError, match="no server .* can be used: .* is refused: .*cpu.conv2d"):
        RemotePool(runner(tracker), "native", None)
    monkeypatch.undo()
    wait_for(lambda: tracker.servers() == (2, 2))
    monkeypatch.setattr(remote.tvm, "__version__", "0.1")
    with pytest.raises(TuningError, match="it has TVM 0.27.*, and this job 0.1"):
        RemotePool(runner(tracker), "native", None)
    wait_for(lambda: tracker.servers() == (2, 2))


@pytest.mark.slow
def test_work_of_a_server_that_dies_is_done_by_the_other(
    tracker: Tracker, servers, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(job, "BATCH_SECONDS", 0.02)
    monkeypatch.setattr(job, "FINAL_SECONDS", 0.05)
    monkeypatch.setattr(job, "BATCH", 1)
    before: list[dict] = []

    def kill(result: tvm_fusion.TuneResult) -> None:
        if any(task.trials for task in result.tasks) and servers[0].poll() is None:
            end(servers[0])
            before.extend(lines(tmp_path / "trials.jsonl"))

    model = dense_model(size=20, channels=32)
    options = {"fuse": "none", "winograd": "never"}
    result = tvm_fusion.tune(
        model,
        database=tmp_path,
        trials=TRIALS,
        runner=runner(tracker),
        progress=kill,
        **options,
    )
    assert before and servers[0].poll() is not None
    assert [note for note in result.notes if "is lost" in note]
    assert {task.status for task in result.tasks} <= {"tuned", "default stays"}
    trials = lines(tmp_path / "trials.jsonl")
    assert trials[: len(before)] == before
    seen = Counter((trial["task"], json.dumps(trial["knobs"])) for trial in trials)
    assert max(seen.values()) == 1 and len(trials) == 2 * TRIALS
    assert all("ratio" in trial for trial in trials)
    records = lines(tmp_path / "records.jsonl")
    assert len(records) == 2
    assert {(one["cpu"], one["threads"]) for one in records} == {(native_name(), THREADS)}
    compiled = tvm_fusion.compile(model, threads=THREADS, records=tmp_path, **options)
    assert len(compiled.records) == 2


@pytest.mark.slow
def test_a_lost_session_is_opened_again_and_a_lost_server_ends_the_job(
    tracker: Tracker, servers, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(job, "BATCH", 1)
    sessions: list[int] = []

    def kill(result: tvm_fusion.TuneResult) -> None:
        if servers[1].poll() is not None:
            return
        found = [child.pid for child in psutil.Process(servers[1].pid).children()]
        if result.tasks[0].trials == 1 and not sessions:
            sessions.extend(found)
            os.kill(found[0], signal.SIGKILL)
        elif result.tasks[0].trials == TRIALS:
            sessions.extend(found)
            servers[1].send_signal(signal.SIGINT)
            assert servers[1].wait(20) == 130

    end(servers[0])
    wait_for(lambda: tracker.servers() == (1, 1))
    with pytest.raises(TuningError, match="no server is left, and 2 of 2 .* is lost .* is lost"):
        tvm_fusion.tune(
            dense_model(size=20, channels=32),
            database=tmp_path,
            trials=TRIALS,
            runner=runner(tracker),
            progress=kill,
            fuse="none",
            winograd="never",
        )
    assert len(set(sessions)) == 2
    assert len(lines(tmp_path / "trials.jsonl")) == TRIALS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ssh://localhost:9190/k", "expected 'local' or 'rpc://HOST:PORT/KEY'"),
        ("rpc://localhost/k", "the tracker's address is 'localhost'; expected HOST:PORT"),
        ("rpc://localhost:99999/k", "the tracker's address is 'localhost:99999'"),
        ("rpc://localhost:9190", "the key is ''"),
        ("rpc://localhost:9190/a b", "the key is 'a b'"),
    ],
)
def test_runners_of_another_form_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Tracker.of_runner(text)


def test_commands_without_a_tracker_say_so(tmp_path: Path, capsys) -> None:
    import onnx

    path = tmp_path / "model.onnx"
    onnx.save(dense_model(size=20, channels=32), path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["tune", str(path), "--database", str(tmp_path / "db"), "--runner"]
    assert cli.main([*command, f"rpc://{address}/k"]) == 1
    assert f"Error: there is no RPC tracker at {address}" in capsys.readouterr().err
    assert cli.main(["serve", "--tracker", address, "--key", "k"]) == 1
    assert f"Error: there is no RPC tracker at {address}" in capsys.readouterr().err


def test_a_port_that_is_no_tracker_is_named(monkeypatch) -> None:
    monkeypatch.setattr(remote, "in_time", lambda function: original(function, 0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker("127.0.0.1", silent.getsockname()[1], KEY)
        with pytest.raises(TuningError, match="gives no server: no answer for 0.5 s"):
            tracker.servers()


original = remote.in_time


def test_a_described_cpu_has_the_caches_that_were_given() -> None:
    target = resolve("znver3", 2)
    own = CPUInfo.from_target(target)
    other = CPUInfo(256, 16, True, 2, 1 << 15, 1 << 19, 1 << 28, "znver3")
    with described(target, other):
        assert CPUInfo.from_target(resolve("znver3", 2)) is other
    assert CPUInfo.from_target(target) == own != other
