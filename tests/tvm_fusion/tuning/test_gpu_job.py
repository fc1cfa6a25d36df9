# SPDX-License-Identifier: Apache-2.0
"""Tuning jobs for GPUs: tasks, programs that agree in OpenCL, records, and what is refused.

Kernels are not timed here: a session that believes in gains checks numbers only. The process that
times them is tested on the host's memory, as if that were a device.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from opencl import compile_opencl
from tvm import tirx
from tvm.script import tirx as T

import tvm_fusion
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import Record
from tvm_fusion.cli import command_line as cli
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.record_reader import choose_records, used_records
from tvm_fusion.compiler.targets import host_of, resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.runtime.tvm_runtime import DeviceInfo
from tvm_fusion.tuning import job
from tvm_fusion.tuning.contest import Outcome
from tvm_fusion.tuning.gpu_worker import DeviceBench
from tvm_fusion.tuning.measure import Session, library
from tvm_fusion.tuning.record_files import verify
from tvm_fusion.tuning.tasks import Task, extract_tasks
from tvm_fusion.tuning.worker import BEACON

DEVICE = DeviceInfo("opencl", "CPU of the tests", "", 256, 16384, 2)
SM_90 = "cuda -arch=sm_90"
TRIALS = 3


def model(rows: int = 24, columns: int = 640) -> onnx.ModelProto:
    """A convolution, its mean over the image, a product, a softmax, and a long sum."""
    rng = np.random.default_rng(7)

    def constant(name: str, *shape: int) -> TensorProto:
        values = (rng.standard_normal(shape) * 0.1).astype("float32")
        return onnx.numpy_helper.from_array(values, name)

    def info(name: str, *shape: int) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node("GlobalAveragePool", ["c"], ["pooled"]),
        helper.make_node("MatMul", ["a", "m"], ["p"]),
        helper.make_node("Softmax", ["p"], ["soft"], axis=1),
        helper.make_node("ReduceSum", ["long", "axes"], ["sums"], keepdims=0),
    ]
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    inputs = [info("x", 1, 16, 12, 12), info("a", rows, 48), info("long", 3, 50_000)]
    outputs = [info("pooled", 1, 32, 1, 1), info("soft", rows, columns), info("sums", 3)]
    weights = [constant("w", 32, 16, 3, 3), constant("m", 48, columns), axes]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


TEMPLATES = {"gpu.conv2d", "gpu.reduce", "gpu.matmul_tiles", "gpu.reduce_chain"}


def outputs_of(task: Task, mod: tvm.IRModule, run: Callable, constants: Any = ()) -> list:
    """Outputs of a program on the task's tensors, which are poisoned before."""
    tensors = task.tensors(np.random.default_rng(3))
    outputs = tensors[len(tensors) - task.outputs :]
    for output in outputs:
        output[...] = np.nan
    run(mod, [*(array.copy() for array in constants), *tensors])
    return outputs


def on_host(mod: tvm.IRModule, arrays: list[np.ndarray]) -> None:
    target = resolve("native", 2)
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(mod, target)["main"](*tensors)
    for array, tensor in zip(arrays, tensors, strict=True):
        array[...] = tensor.numpy()


class OnOpenCL:
    """A session that checks numbers in OpenCL, and believes that each setting gains a bit more."""

    def __init__(self, task, target, seed, host) -> None:
        self.task, self.target, self.host = task, target, host
        self.wanted = outputs_of(task, task.reference(host_of(target)).mod, on_host)

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def build(self, numbers) -> None:
        pass

    def end_worker(self) -> None:
        pass

    def race(self, numbers, rounds, seconds):
        return {number: self.outcome(number) for number in {0, *numbers}}, 1e-3

    def outcome(self, number: int) -> Outcome:
        program = self.task.program(number, self.target)
        assert program.calls[0][1] == tuple(
            [*range(len(self.task.func.params), len(program.mod["main"].params))]
            + [*range(len(self.task.func.params))]
        )

        def run(mod: tvm.IRModule, arrays: list[np.ndarray]) -> None:
            compile_opencl(mod, self.target).run(*arrays)

        found = outputs_of(self.task, program.mod, run, program.constants)
        for one, wanted in zip(found, self.wanted, strict=True):
            limit = 1e-4 * float(np.abs(wanted).max())
            np.testing.assert_allclose(one, wanted, rtol=0, atol=limit)
        return Outcome(1.0 if number == 0 else 0.9 - 1e-6 * number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "find_device", lambda kind: DEVICE)


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_a_job_for_opencl(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(job, "Session", OnOpenCL)
    result = tvm_fusion.tune(model(), "opencl", database=tmp_path, trials=TRIALS)
    assert {task.template for task in result.tasks} == TEMPLATES
    assert {task.status for task in result.tasks} == {"tuned"}
    assert not [failure for task in result.tasks for failure in task.failures]
    assert sum(task.share for task in result.tasks) == pytest.approx(1)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"opencl"}
    assert {line["cpu"] for line in lines} == {f"opencl:{DEVICE.name}"}
    assert {line["machine"] for line in lines} == {DEVICE.name}
    assert verify(tmp_path) == (len(result.tasks), [])
    again = tvm_fusion.tune(model(), "opencl", database=tmp_path, trials=TRIALS)
    assert {task.status for task in again.tasks} == {"known"}
    named = {"kind": "opencl", "model": DEVICE.name}
    assert templates_used(named, tmp_path) == TEMPLATES
    assert templates_used({"kind": "opencl", "model": "another"}, tmp_path) == set()
    assert templates_used({"kind": "opencl"}, tmp_path) == set()


def templates_used(target: Any, records: Path) -> set[str]:
    """Templates whose records a compilation follows."""
    resolved = resolve(target)
    options = pipeline.Options(records=choose_records(records, resolved))
    mod = pipeline.optimize(import_onnx(model(), None).mod, resolved, options)
    return {one["template"] for one in used_records(mod)}


@pytest.mark.slow
def test_records_count_for_their_own_architecture(tmp_path: Path) -> None:
    target = resolve(SM_90)
    tasks = extract_tasks(model(), target)
    assert {task.templates[0].name for task in tasks} == TEMPLATES
    assert [task.share for task in tasks] == sorted((t.share for t in tasks), reverse=True)
    lines = []
    for task in tasks:
        template, knobs = task.settings[len(task.settings) // 2]
        assert task.number_of(template.name, template.version, json_of(knobs)) is not None
        lines.append(Record.of_key(task.key, template, knobs, (2e-5, 1e-5), 8).to_line())
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert verify(tmp_path) == (len(tasks), [])
    assert templates_used(SM_90, tmp_path) == TEMPLATES
    assert templates_used("cuda -arch=sm_80", tmp_path) == set()
    assert templates_used(f"{SM_90} -model=multiprocessors=114", tmp_path) == set()


def json_of(knobs: Any) -> dict:
    return json.loads(json.dumps(asdict(knobs)))


def test_equal_kernels_of_a_gpu_are_one_task() -> None:
    tasks = extract_tasks(twice(), resolve(SM_90))
    assert [task.calls for task in tasks] == [2]


def twice() -> onnx.ModelProto:
    """Two products of the same extents, one after the other."""
    rng = np.random.default_rng()
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((64, 64)).astype("float32"), name)
        for name in ("first", "second")
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["between"]),
        helper.make_node("MatMul", ["between", "second"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (24, 64)) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


@pytest.mark.slow
def test_features_of_gpu_tasks_are_numbers() -> None:
    for task in extract_tasks(model(), resolve(SM_90)):
        table, cycles, knobs = task.table
        assert table.shape[0] == len(task.settings) == len(cycles)
        assert np.isfinite(cycles).all() and 0 < knobs < table.shape[1]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (SM_90, {}, "a tuning job measures on the GPU, and .*; run it on a machine that has"),
        ("cuda", {}, "means this machine's GPU, and"),
        ("opencl", {}, "a tuning job measures on the GPU, and the installed TVM"),
        (SM_90, {"runner": "rpc://localhost:9190/key"}, "whose servers tune CPUs; for a GPU run"),
    ],
)
def test_without_the_gpu_the_error_says_so(
    tmp_path: Path, target: str, options: dict, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        tvm_fusion.tune(model(), target, database=tmp_path, **options)


def test_the_command_says_that_there_is_no_gpu(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "model.onnx")
    assert cli.main(["tune", "model.onnx", "--database", "db", "--target", SM_90]) == 1
    [told] = capsys.readouterr().err.splitlines()
    assert "a tuning job measures on the GPU" in told


def test_another_gpu_than_the_target_is_an_error(tmp_path: Path, monkeypatch) -> None:
    found = DeviceInfo("cuda", "A100", "sm_80", 1024, 49152, 108)
    monkeypatch.setattr(job, "find_device", lambda kind: found)
    text = "the target is sm_90 with 132 multiprocessors and this machine's GPU .A100. sm_80 with"
    with pytest.raises(TargetError, match=text):
        tvm_fusion.tune(model(), SM_90, database=tmp_path)


@pytest.mark.slow
def test_a_library_for_cuda_holds_machine_code(tmp_path: Path) -> None:
    target = resolve(SM_90)
    task = next(t for t in extract_tasks(model(), target) if t.templates[0].name == "gpu.reduce")
    path = library(task.program(0, target).mod, target, tmp_path / "kernel.so")
    assert b"\x7fELF" in path.read_bytes()[64:]
    assert b"__global__" not in path.read_bytes()


# The measuring process, on the host as if it were a device.

CPU = resolve("native", 1)


def scaled(factor: float, repeats: int = 1, workspace: bool = False) -> tvm.IRModule:
    """``out = factor * data`` and ``other = -data``, computed ``repeats`` times."""

    @T.prim_func(private=True)
    def plain(
        data: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
        other: T.Buffer((64, 64), "float32"),
    ):
        for _ in range(repeats):
            for row in range(64):
                for column in range(64):
                    out[row, column] = data[row, column] * T.float32(factor)
                    other[row, column] = T.float32(0) - data[row, column]

    @T.prim_func(private=True)
    def counted(
        ticket: T.Buffer((2,), "int32"),
        data: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
        other: T.Buffer((64, 64), "float32"),
    ):
        for row in range(64):
            for column in range(64):
                out[row, column] = data[row, column] * T.float32(factor) + T.Cast(
                    "float32", ticket[0]
                )
                other[row, column] = T.float32(0) - data[row, column]

    func: tirx.PrimFunc = counted if workspace else plain
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


@pytest.fixture
def bench(tmp_path: Path) -> DeviceBench:
    found = DeviceBench("cpu", mmap.mmap(-1, BEACON.size))
    rng, arrays = np.random.default_rng(), []
    for number in range(3):
        arrays.append(str(tmp_path / f"{number}.npy"))
        np.save(arrays[-1], rng.standard_normal((64, 64), dtype="float32"))
    about = {"library": built(scaled(2.0), tmp_path / "reference.so"), "calls": CALLS}
    assert found.answer(
        {"action": "prepare", "arrays": arrays, "outputs": 2, "reference": about}
    ) == {"finite": True}
    return found


CALLS = [("main", [0, 1, 2])]


def built(mod: tvm.IRModule, path: Path) -> str:
    return str(library(mod, CPU, path))


def candidate(mod: tvm.IRModule, path: Path, constants: tuple[str, ...] = ()) -> dict:
    own = len(mod["main"].params) - 3
    calls = [("main", [*range(3, 3 + own), 0, 1, 2])]
    return {"library": built(mod, path), "calls": calls, "constants": constants, "buffers": []}


@pytest.mark.slow
def test_candidates_take_turns_on_a_device(bench: DeviceBench, tmp_path: Path) -> None:
    ticket = str(tmp_path / "ticket.npy")
    np.save(ticket, np.zeros(2, "int32"))
    racers = [
        candidate(scaled(2.0, 300), tmp_path / "slow.so"),
        candidate(scaled(2.01), tmp_path / "wrong.so"),
        candidate(scaled(2.0), tmp_path / "fast.so"),
        candidate(scaled(2.0, workspace=True), tmp_path / "counted.so", (ticket,)),
    ]
    found = bench.answer(
        {"action": "race", "candidates": racers, "rounds": (3, 4), "seconds": 0.0, "seed": 1}
    )
    assert found["wrong"].keys() == {"1"}
    assert "relative error 0.005" in found["wrong"]["1"]
    assert len(found["times"]) == 3
    for slow, wrong, fast, counted in found["times"]:
        assert wrong is None and min(slow, fast, counted) > 0
    assert math.isfinite(sum(turn[0] for turn in found["times"]))


def test_outputs_that_are_not_written_are_wrong(bench: DeviceBench, tmp_path: Path) -> None:
    @T.prim_func(private=True)
    def half(
        data: T.Buffer((64, 64), "float32"),
        out: T.Buffer((64, 64), "float32"),
        other: T.Buffer((64, 64), "float32"),
    ):
        for row in range(64):
            for column in range(64):
                out[row, column] = data[row, column] * T.float32(2)
        for column in range(63):
            other[0, column] = T.float32(0) - data[0, column]

    mod = tvm.IRModule({"main": half.with_attr("global_symbol", "main")})
    found = bench.answer(
        {
            "action": "race",
            "candidates": [candidate(mod, tmp_path / "half.so")],
            "rounds": (1, 1),
            "seconds": 0.0,
            "seed": 1,
        }
    )
    assert found["wrong"] == {"0": "relative error nan"}
    assert found["times"] == []


def test_a_session_prepares_a_device(monkeypatch, tmp_path: Path) -> None:
    """Arrays, outputs, and a reference for the host are sent to the process of a GPU."""
    target = resolve(SM_90)
    task = next(t for t in extract_tasks(model(), target) if t.templates[0].name == "gpu.reduce")
    sent: list[dict] = []

    class Answers:
        def call(self, patience: float, **request: Any) -> dict[str, Any]:
            sent.append(request)
            if request["action"] == "prepare":
                tensors = [tvm.runtime.tensor(np.load(path)) for path in request["arrays"]]
                module = tvm.runtime.load_module(request["reference"]["library"])
                module["main"](*tensors)
                sums = np.load(request["arrays"][0]).astype("float64").sum(1)
                np.testing.assert_allclose(tensors[-1].numpy(), sums, atol=0.1)
                return {"finite": True}
            racers = len(request["candidates"])
            return {"times": [[1.0] * racers], "wrong": {}, "states": 1}

        def close(self) -> None:
            pass

    class AnyHost(job.DeviceHost):
        def start(self, threads: int, folder: Path) -> Any:
            return Answers()

    host = AnyHost(DeviceInfo("cuda", "H100", "sm_90", 1024, 49152, 132))
    assert host.processor == "H100"
    with Session(task, target, 0, host) as session:
        numbers = [n for n, (_, knobs) in enumerate(task.settings) if knobs.finish == "last_block"]
        outcomes, seconds = session.race(numbers[:1], (1, 1), 0.0)
    assert outcomes[numbers[0]].ratio == seconds == 1.0
    prepare, race = sent
    assert prepare["outputs"] == 1 and "writer" not in prepare
    default, other = race["candidates"]
    assert default["constants"] == [] and len(other["constants"]) == 1
    assert other["calls"] == (("main", (2, 0, 1)),)


def test_gpu_machines_have_names() -> None:
    assert GPUInfo.from_target(resolve(SM_90)).name == "sm_90"
    assert GPUInfo.from_target(resolve("opencl")).name == "opencl"
    named = GPUInfo.from_target(resolve({"kind": "opencl", "model": "a device"}))
    assert GPUInfo.named(named.name, named.multiprocessors).name == named.name
