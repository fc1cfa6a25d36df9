# SPDX-License-Identifier: Apache-2.0
"""Calibration: what is kept, what is measured again, and the figures that samples give."""

import json
import math
from dataclasses import replace

import pytest

from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import load_machine
from tvm_fusion.bench.machine_limits import CacheLevel, MachineLimits
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.calibrate import calibration
from tvm_fusion.prediction.calibrate.calibration import calibrate
from tvm_fusion.prediction.calibrate.cases import Case, cases
from tvm_fusion.prediction.calibrate.library_cases import LibraryCase
from tvm_fusion.prediction.collectives import Collectives, Curve, collectives_of
from tvm_fusion.prediction.machines import native_name

FAMILY = load_machine("znver4")
FIGURES = {name: one for name, one in FAMILY.figures.items() if name != "bandwidth.exchange"}
LIMITS = replace(FAMILY, name=native_name(), figures=FIGURES)
TODO = [Case(f"case {number}", lambda: None) for number in range(4)]


class FakeTimer:
    """Says that a convolution takes twice its cycles; each case takes a second of its clock."""

    def __init__(self, peak=LIMITS["peak_flops.float32"], exchange=2e-11):
        self.now, self.measured, self._peak, self._exchange = 0.0, [], peak, exchange
        self.exchanges = 0

    def sleep(self, seconds):
        self.now += seconds

    def measure(self, case):
        self.now += 1
        self.measured.append(case.name)
        call = KernelCall("cpu.conv2d", {"cycles": 1000 * len(self.measured)}, flops=1.0)
        return [(call, 2 * call.sizes["cycles"] / LIMITS["clock"])]

    def overheads(self):
        return {"fork": 1e-6, "call": 2e-7, "run": 3e-6}

    def peak(self):
        return self._peak

    def exchange(self):
        self.exchanges += 1
        return self._exchange

    def eager(self):
        self.measured.append("eager")
        return 2e-6


def run(path, timer, budget, todo=TODO, threads=2):
    return calibrate(
        path,
        threads,
        budget,
        limits=lambda: LIMITS,
        timer=lambda machine: timer,
        todo=todo,
        clock=lambda: timer.now,
        sleep=timer.sleep,
    )


def test_a_second_call_measures_what_the_budget_left(tmp_path):
    path, first = tmp_path / "new" / "machine.json", FakeTimer()
    run(path, first, 2.5)
    assert first.measured == ["case 0", "case 1", "case 2"]
    assert [sample["case"] for sample in json.loads(path.read_text())["samples"]] == first.measured
    second = FakeTimer()
    machine = run(path, second, 60)
    assert second.measured == ["case 3"]
    assert machine["cpu.conv2d.factor"] == pytest.approx(2)
    assert "4 kernels" in machine.figures["cpu.conv2d.factor"].origin
    assert load_machine(path) == machine
    assert machine["overhead.call"] == 2e-7


def test_a_file_has_what_cores_pass_to_each_other(tmp_path):
    path, first, second = tmp_path / "machine.json", FakeTimer(exchange=4e-11), FakeTimer()
    assert run(path, first, 0.5)["bandwidth.exchange"] == pytest.approx(2.5e10)
    found = load_machine(path).figures["bandwidth.exchange"]
    assert found.value == pytest.approx(2.5e10) and found.origin.startswith("measured: tvm-fusion")
    assert run(path, second, 60)["bandwidth.exchange"] == pytest.approx(2.5e10)
    assert (first.exchanges, second.exchanges) == (1, 0)
    # What an older call wrote is completed.
    data = json.loads(path.read_text())
    del data["figures"]["bandwidth.exchange"]
    path.write_text(json.dumps(data))
    assert run(path, second, 60)["bandwidth.exchange"] == pytest.approx(5e10)
    assert second.exchanges == 1


def test_a_single_thread_passes_nothing(tmp_path):
    timer = FakeTimer(exchange=None)
    assert "bandwidth.exchange" not in run(tmp_path / "machine.json", timer, 60).figures


def test_curves_of_collectives_stay_in_the_file(tmp_path):
    path = tmp_path / "machine.json"
    run(path, FakeTimer(), 0.5)
    curve = Curve("all_reduce", 2, (8.0, 16.0), (1e-6, 2e-6))
    Collectives({("all_reduce", 2): curve}).save(path)
    machine = run(path, FakeTimer(), 60)
    assert collectives_of(path).curves == {("all_reduce", 2): curve}
    assert "4 kernels" in machine.figures["cpu.conv2d.factor"].origin


def test_kernels_of_pytorch_are_fitted_beside_ours(tmp_path):
    class Library(FakeTimer):
        def measure(self, case):
            if not isinstance(case, LibraryCase):
                return super().measure(case)
            self.now += 1
            self.measured.append(case.name)
            return [(case.call, 3 * case.call.flops / LIMITS["peak_flops.float32"])]

    def product(rows):
        call = KernelCall("gemm", {"M": rows, "N": 8, "K": 8}, flops=1e6 * rows, written_bytes=4e3)
        return LibraryCase(f"product {rows}", call, (), (), lambda torch: None)

    todo, path = [TODO[0], product(2), product(3), product(4)], tmp_path / "machine.json"
    first, second = Library(), Library()
    run(path, first, 2.5, todo)
    assert first.measured == ["eager", "case 0", "product 2", "product 3"]
    machine = run(path, second, 60, todo)
    assert second.measured == ["product 4"]
    assert machine["pytorch.gemm.compute"] == pytest.approx(3)
    assert machine["cpu.conv2d.factor"] == pytest.approx(2)
    assert machine["overhead.eager"] == 2e-6
    assert load_machine(path) == machine
    assert "gemm.factor" not in machine.figures


def test_an_interrupt_loses_nothing_that_was_measured(tmp_path):
    class Interrupted(FakeTimer):
        def measure(self, case):
            if len(self.measured) == 2:
                raise KeyboardInterrupt
            return super().measure(case)

    path = tmp_path / "machine.json"
    with pytest.raises(KeyboardInterrupt):
        run(path, Interrupted(), 60)
    rest = FakeTimer()
    run(path, rest, 60)
    assert rest.measured == ["case 2", "case 3"]
    assert [found.name for found in tmp_path.iterdir()] == ["machine.json"]


def test_a_machine_that_is_slowed_down_is_waited_for(tmp_path):
    peak = LIMITS["peak_flops.float32"]
    timer = FakeTimer(peak=0.5 * peak)
    machine = run(tmp_path / "machine.json", timer, 60)
    assert "cpu.conv2d.factor" not in machine.figures
    assert not timer.measured and timer.now >= 60
    timer.peak = lambda: peak if timer.now > 100 else 0.5 * peak
    run(tmp_path / "machine.json", timer, 60)
    assert timer.measured == [case.name for case in TODO]


def test_a_kernel_that_other_work_slowed_is_measured_again(tmp_path):
    peak = LIMITS["peak_flops.float32"]
    timer = FakeTimer()
    # Other work begins with the first attempt at the first kernel and ends with its second one.
    timer.peak = lambda: 0.5 * peak if len(timer.measured) == 1 else peak
    run(tmp_path / "machine.json", timer, 60)
    assert timer.measured == ["case 0", "case 0", *(case.name for case in TODO)]


def test_intervals_are_percentiles_of_the_ratios():
    samples = [
        {
            **{"case": str(n), "op": "cpu.conv2d", "sizes": {"cycles": 36650}, "dtype": "float32"},
            **{"flops": 1.0, "read_bytes": 0, "written_bytes": 0, "seconds": n * 1e-5},
        }
        for n in range(1, 12)
    ]
    machine = calibration.fitted(LIMITS, samples)
    assert machine["cpu.conv2d.factor"] == pytest.approx(6)
    assert machine["cpu.conv2d.low"] == pytest.approx(2 / 6)
    assert machine["cpu.conv2d.high"] == pytest.approx(10 / 6)


@pytest.mark.parametrize(
    "text, why",
    [
        ("[]", "not a calibration file"),
        ("{", "not a calibration file"),
        (" " * (5 << 20), "not a calibration file .*larger than any file of a calibration"),
        (json.dumps(LIMITS.to_json()), "not a calibration file .'samples'"),
        (json.dumps({**LIMITS.to_json(), "samples": [{"case": "x"}]}), "not a calibration file"),
    ],
)
def test_files_of_others_are_neither_used_nor_overwritten(tmp_path, text, why):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match=why):
        run(path, FakeTimer(), 60)
    assert path.read_text() == text


def test_a_sample_without_a_time_is_refused(tmp_path):
    path = tmp_path / "machine.json"
    run(path, FakeTimer(), 0.5)
    data = json.loads(path.read_text())
    data["samples"][0]["seconds"] = float("nan")
    path.write_text(json.dumps(data))
    with pytest.raises(PredictionError, match="'case 0' has no finite positive numbers"):
        run(path, FakeTimer(), 60)


def test_a_file_of_another_machine_is_refused(tmp_path):
    path = tmp_path / "machine.json"
    run(path, FakeTimer(), 0.5)
    with pytest.raises(PredictionError, match="with 2 threads, and this is .* with 1: name"):
        run(path, FakeTimer(), 60, threads=1)


def limits(peak, *bandwidths):
    sizes = zip(("L2", "L3", "memory"), (1e6, 1e7, math.inf), bandwidths, strict=True)
    return MachineLimits(2, peak, tuple(CacheLevel(*one) for one in sizes))


def test_limits_are_measured_until_none_gets_better(monkeypatch):
    found = [limits(1e11, 4e10, 3e10, 1e10), limits(2e11, 5e10, 2e10, 3e10)]
    found += [limits(1e11, 5e10, 3e10, 2e10), limits(1.5e11, 1e10, 1e10, 2e10)] + 9 * [None]
    monkeypatch.setattr(calibration, "measure_limits", lambda *_: found.pop(0))
    machine = calibration.measured_limits(2)
    assert found == 9 * [None]
    assert machine["peak_flops.float32"] == 2e11
    bandwidths = [machine[f"bandwidth.{level}"] for level in ("L2", "L3", "memory")]
    assert bandwidths == [5e10, 3e10, 2e10]  # The last is the median of memory.
    per_cycle = machine["peak_flops.float32"] / machine["clock"]
    assert per_cycle in (2 * 2 * lanes * n for lanes in (4, 8, 16) for n in (1, 2))


def test_cases_have_names_of_their_own():
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) > 60
