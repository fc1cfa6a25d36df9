# SPDX-License-Identifier: Apache-2.0
"""Files of machines: what they hold, and what is refused."""

import json

import pytest

from schedules.cost.decisions import predict
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import known_machines, load_machine, machine_from_json
from schedules.errors import PredictionError
from tests.selection import one_test

ORIGIN = {"origin": "data sheet"}


def toy(**figures):
    entries = {name: {"value": value, **ORIGIN} for name, value in figures.items()}
    return {"name": "toy", "kind": "gpu", "title": "Toy", "figures": entries}


@one_test(known_machines())
def test_machines_of_the_package(name):
    machine = load_machine(name)
    assert machine.name == name
    assert machine["peak_flops.float32"] > 1e10
    assert machine_from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_a_file(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(toy(clock=1e9)))
    assert load_machine(path)["clock"] == 1e9
    with pytest.raises(PredictionError, match="'toy' has no figure 'peak'; it has clock"):
        load_machine(path)["peak"]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_figures_that_are_refused(tmp_path, value):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(toy(clock=value)))
    with pytest.raises(PredictionError, match=r"toy.json: figure 'clock' is .*positive finite"):
        load_machine(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"name": 3}'])
def test_damaged_files(tmp_path, text):
    path = tmp_path / "toy.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match="toy.json: "):
        load_machine(path)


def test_unknown_machine():
    with pytest.raises(PredictionError, match="machine is 3; expected a name or a path"):
        load_machine(3)
    with pytest.raises(PredictionError, match="no machine 'aaa"):
        load_machine("a" * 5000)
    with pytest.raises(PredictionError, match="no machine 'v1000'; expected .*v100"):
        load_machine("v1000")


def test_roofline_by_hand():
    machine = machine_from_json(toy(**{"peak_flops.float32": 1e12, "bandwidth.memory": 1e9}))
    memory = predict(KernelCall("odd", {}, flops=1e6, read_bytes=6e3, written_bytes=4e3), machine)
    compute = predict(KernelCall("odd", {}, flops=1e9, read_bytes=6e3), machine)
    assert (memory.seconds, memory.bound, memory.in_range) == (1e-5, "memory", False)
    assert (compute.seconds, compute.bound) == (1e-3, "compute")
    assert compute.roofline_share == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("cpu", "float32", 1e12),
        ("cpu", "float16", 1e12),
        ("cpu", "float64", 5e11),
        ("cpu", "int64", 5e11),
        ("gpu", "int64", 5e11),
        ("gpu", "int8", 2e12),
    ],
)
def test_peaks_of_types_without_figures(kind, dtype, expected):
    figures = {"peak_flops.float32": 1e12, "peak_flops.int8": 2e12}
    assert machine_from_json({**toy(**figures), "kind": kind}).peak_flops(dtype) == expected


def test_a_gpu_has_no_peak_of_a_float_without_a_figure():
    machine = machine_from_json({**toy(**{"peak_flops.float32": 1e12}), "kind": "gpu"})
    with pytest.raises(PredictionError, match="no figure 'peak_flops.float64'"):
        machine.peak_flops("float64")


def test_the_least_launch_of_a_gpu_that_nobody_timed():
    assert machine_from_json(toy(clock=1e9)).launch_floor == 2e-6
    assert machine_from_json(toy(launch_floor=5e-6)).launch_floor == 5e-6
    assert machine_from_json({**toy(clock=1e9), "kind": "cpu"}).launch_floor == 0
