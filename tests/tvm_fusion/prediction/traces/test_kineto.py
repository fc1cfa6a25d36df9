# SPDX-License-Identifier: Apache-2.0
"""Kineto traces: events of CPU, NVIDIA and AMD, and what cannot be used, counted and named."""

from __future__ import annotations

import pytest
from small_traces import AUTOGRAD, Kineto, training_step

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.traces.kineto import read_kineto


@pytest.mark.parametrize("device", ["Tesla V100", "AMD Instinct MI300X"])
@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
def test_events(tmp_path, device: str, name: str) -> None:
    trace = read_kineto(training_step(1, 5, device).write(tmp_path / name))
    assert (trace.rank, trace.world, trace.device) == (1, 2, device)
    assert trace.base == 1005
    assert [event.start for event in trace.host] == sorted(event.start for event in trace.host)
    first = trace.host[0]
    assert (first.name, first.start, first.end) == ("aten::linear", 0, 30)
    assert first.shapes == ((32, 64), (64, 16))
    assert {event.stream for event in trace.device_events.values()} == {7, 9}
    assert not trace.warnings()
    collective = next(event for event in trace.host if event.collective)
    assert (collective.thread, collective.collective["In msg nelems"]) == (AUTOGRAD, 1024)


def test_cpu_alone(tmp_path) -> None:
    trace = Kineto(device="")
    trace.op("aten::add", 5, 10)
    read = read_kineto(trace.write(tmp_path / "x.json"))
    assert (read.device, len(read.device_events)) == ("", 0)


def test_values_of_other_kinds_are_no_shapes(tmp_path) -> None:
    trace = Kineto()
    trace.op("aten::add", 5, 10, tid={"x": 1}, **{"Input Dims": [{"x": 1}, [2, {}]]})
    (event,) = read_kineto(trace.write(tmp_path / "x.json")).host
    assert event.shapes == (None, (2, None))


def test_calls_of_python_functions(tmp_path) -> None:
    trace = Kineto()
    trace.op("aten::add", 10, 10)
    trace.event("python_function", "f", 14, 1, 100)
    trace.event("python_function", "g", 12, 1, 100)
    assert list(read_kineto(trace.write(tmp_path / "x.json")).python[100]) == [2, 4]


def test_what_cannot_be_used_is_counted(tmp_path) -> None:
    trace = Kineto()
    trace.op("aten::add", 10, 10)
    trace.event("cpu_op", "aten::bad", 30, -4, 100)
    trace.event("cpu_op", "aten::worse", 31, -1, 100)
    trace.event("kernel", "orphan", 12, 3, 7, stream=7, correlation=99)
    trace.event("kernel", "nameless", 12, 3, 7, stream=7)
    trace.event("cpu_op", "aten::nan", float("nan"), 1, 100)
    trace.data["traceEvents"].append("text")
    warnings = read_kineto(trace.write(tmp_path / "x.json")).warnings()
    assert [
        "x.json: 2 events of negative duration; the first: aten::bad at 30 us: -4 us",
        "x.json: 1 kernels without correlation; the first: nameless at 12.0 us",
        "x.json: 1 events without name, start or duration; the first: aten::nan at nan us",
        "x.json: 1 entries that are not events; the first: 'text'",
        "x.json: 1 kernels without their launch, taken as launched before the trace began; the "
        "first: orphan at 12.0 us (correlation 99)",
    ] == warnings


def test_other_files(tmp_path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"schema": "1.0.1", "nodes": []}')
    with pytest.raises(PredictionError, match="x.json: no field 'traceEvents'"):
        read_kineto(path)
    trace = Kineto()
    trace.event("kernel", "k", 1, 1, 7, stream=7, correlation=1)
    with pytest.raises(PredictionError, match="no operators among 1 events; expected .*cpu_op"):
        read_kineto(trace.write(path))
