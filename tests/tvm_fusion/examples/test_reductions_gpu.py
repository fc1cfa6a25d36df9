# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark without a GPU: cases, protocol, verdicts, tables, CUDA text to machine code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_fakes import FakeClock, FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from examples.benchmarks import reduction_cases, reductions_gpu
from examples.benchmarks.gpu import (
    array_steps,
    compare,
    cupy_cub,
    machine,
    report,
    torch_mv,
)
from examples.benchmarks.gpu.protocol import (
    Plan,
    Summary,
    Verdict,
    interleave,
    quantile,
    reason,
    rotation,
    warm_up,
)
from examples.benchmarks.gpu.report import Result
from examples.benchmarks.gpu.with_tvm import relax_build, variants
from examples.benchmarks.reduction_cases import Case, Reduction, all_cases, select
from schedules.workload.reduce import OPERATORS
from tests.selection import one_test
from tvm_fusion.cli.output import json_text
from tvm_fusion.errors import EngineError

CASES = {case.name: case for case in all_cases()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock, with inputs and references that need no PyTorch: the error is the result."""
    monkeypatch.setattr(compare, "make_inputs", lambda case, seed, device: [seed])
    monkeypatch.setattr(compare, "deviation", lambda case, inputs, outputs: (outputs[0], 0.5))
    monkeypatch.setattr(compare, "fingerprint", lambda outputs: repr(outputs).encode())
    return FakeClock()


def some_case(elements: int = 100) -> Case:
    return Case("test/one", (elements,), "float32", (Reduction("sum", (0,)),))


def test_cases_are_those_of_the_tables() -> None:
    assert len(CASES) == len(all_cases()), "names are unique"
    sums = {case.shape: case.form for case in reduction_cases.paper4()}
    assert sums == {
        (16226304,): "all",
        (1024, 131072): "x",
        (131072, 1024): "x",
        (1048576, 512): "x",
    }
    forms = [case.form for case in reduction_cases.paper2()]
    assert forms == ["y", "y", "y", "x", "all", "all", "y", "y", "y", "y", "y", "all"]
    assert [case.inputs for case in reduction_cases.paper2()][3:9] == [2, 2, 3, 3, 6, 2]
    dtypes = {case.dtype for case in reduction_cases.sweep()}
    assert dtypes == set(reduction_cases.BYTES)
    sizes = [case.elements for case in reduction_cases.sweep() if case.dtype == "float32"]
    assert sizes == [1 << power for power in range(12, 31)]
    operators = {case.reductions[0].operator for case in reduction_cases.operators()}
    assert operators == {"sum", "prod", "min", "max", "and", "or"} <= set(OPERATORS)


@one_test(sorted(CASES))
def test_every_case_is_whole(name: str) -> None:
    case = CASES[name]
    outputs = 0
    for reduction in case.reductions:
        workload = case.workload(reduction)  # raises where operator, axes or types do not fit
        shape = case.reduced_shape(reduction)
        assert math.prod(shape) == case.elements
        kept = [size for axis, size in enumerate(shape) if axis not in reduction.axes]
        assert tuple(kept) == case.output_shape(reduction)
        outputs += math.prod(kept) * np.dtype(_numpy(workload.out_dtype)).itemsize
        used = {reduction.source} | {
            int(step.split()[1]) for step in reduction.steps if step[:3] in ("add", "mul")
        }
        assert max(used) < case.inputs
    itemsize = np.dtype(_numpy(case.dtype)).itemsize
    assert case.bytes == case.inputs * math.prod(case.shape) * itemsize + outputs


def test_selection() -> None:
    quick = select(quick=True)
    assert {case.group for case in quick} >= {"paper2", "paper4", "network", "sweep", "odd"}
    assert all(case.bytes <= reduction_cases.QUICK_BYTES for case in quick)
    assert [case.name for case in select(only=["paper2/1*"])] == [
        f"paper2/{number}" for number in (1, 10, 11, 12)
    ]
    assert {case.group for case in select(only=["odd", "paper4"])} == {"odd", "paper4"}
    assert select(only=["nothing"]) == []


@given(st.integers(1, 1 << 34), st.integers(1 << 20, 1 << 27), st.integers(1 << 20, 1 << 36))
def test_rotation_is_cold_or_flushed(size: int, cache: int, memory: int) -> None:
    if size > memory:
        with pytest.raises(ValueError, match="do not fit in"):
            rotation(size, cache, memory)
        return
    turns = rotation(size, cache, memory)
    assert 1 <= turns.sets <= 50 and turns.sets * size <= memory
    assert 20 <= turns.launches <= 50 and turns.launches % turns.sets == 0
    assert turns.flush == (turns.sets * size < 4 * cache)


def test_rotation_of_an_h100() -> None:
    turns = rotation(16226304 * 4, 50 << 20, 16 << 30)
    assert (turns.sets, turns.launches, turns.flush) == (4, 20, False)
    turns = rotation(4096, 50 << 20, 16 << 30)
    assert (turns.sets, turns.launches, turns.flush) == (50, 50, True)


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=60))
def test_summary_agrees_with_numpy(seconds: list[float]) -> None:
    summary = Summary.of(seconds)
    expected = np.quantile(seconds, [0.5, 0.2, 0.8])
    np.testing.assert_allclose((summary.median, summary.p20, summary.p80), expected, rtol=1e-12)
    assert quantile(seconds, 0) == min(seconds) and quantile(seconds, 1) == max(seconds)
    assert summary.samples == len(seconds)


def test_turns_start_with_another_engine_each_round() -> None:
    order: list[str] = []

    def turn(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or float(len(order))  # type: ignore[func-returns-value]

    taken, failed = interleave({name: turn(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab" and not failed
    assert [len(times) for times in taken.values()] == [3, 3, 3]


def test_an_engine_that_raises_is_left_out() -> None:
    def broken() -> float:
        raise RuntimeError("no memory\nmore text")

    taken, failed = interleave({"good": lambda: 1.0, "bad": broken}, 4)
    assert taken == {"good": [1.0] * 4} and failed == {"bad": "RuntimeError: no memory"}
    assert len(reason(ValueError("x" * 1000))) == 300 and reason(KeyError()) == "KeyError"


def test_warm_up_leaves_the_first_run_out() -> None:
    clock = FakeClock()
    runs: list[float] = []

    def run() -> None:
        runs.append(100.0 if not runs else 0.01)
        clock.time += runs[-1]

    assert warm_up(run, clock.now, 0.0249) == pytest.approx(0.01)
    assert len(runs) == 4


def test_short_cases_run_from_graphs_over_all_sets(clock: FakeClock) -> None:
    fast, slow = FakeEngine(clock, "fast", 1e-6), FakeEngine(clock, "slow", 3e-6)
    plan = Plan(samples=3, warmup_seconds=0)
    first, second = compare.compare(some_case(), [fast, slow], clock, plan)
    assert first.device is not None and second.device is not None and first.host is not None
    assert first.how == "graph" and clock.log.count("capture") == 2
    assert first.device.median == pytest.approx(1e-6) and second.device.median == pytest.approx(
        3e-6
    )
    assert first.bandwidth(400) == pytest.approx(4e8)
    assert second.stream is not None and second.stream.median == pytest.approx(3e-6)
    assert set(fast.launched) == set(range(10)), "4000 bytes of cold data in sets of 400"
    assert clock.log.count("flush") == 2 * (1 + 3 + 3), "before every sample, and not timed"


def test_long_cases_run_one_by_one_behind_a_flush(clock: FakeClock) -> None:
    slow = FakeEngine(clock, "slow", 0.5)
    (verdict,) = compare.compare(some_case(), [slow], clock, Plan(samples=2, warmup_seconds=0))
    assert verdict.how == "events" and verdict.host is None and "capture" not in clock.log
    assert verdict.stream is None
    assert verdict.device == Summary(0.5, 0.5, 0.5, 2), "the flush is not timed"
    timed = [clock.log[place + 1] for place, word in enumerate(clock.log) if word == "flush"]
    assert timed == ["slow"] * 3


def test_an_engine_with_its_own_stream_is_timed_until_ready(clock: FakeClock) -> None:
    other = FakeEngine(clock, "other", 2e-6, own_stream=True)
    (verdict,) = compare.compare(some_case(), [other], clock, Plan(samples=2, warmup_seconds=0))
    assert verdict.how == "ready" and verdict.device is not None and verdict.stream is None
    assert verdict.device.median == pytest.approx(2e-6)


def test_wrong_absent_and_failing_engines_have_no_time(clock: FakeClock) -> None:
    class Absent(FakeEngine):
        package = "no_such_module_here"

    engines = [
        FakeEngine(clock, "right", 1e-6, value=0.99),
        FakeEngine(clock, "wrong", 1e-6, value=1.5),
        FakeEngine(clock, "nan", 1e-6, value=math.nan),
        Absent(clock, "absent", 1e-6),
        FakeEngine(clock, "lost", 1e-6, breaks_after=5),
        FakeEngine(clock, "varies", 1e-6, varies=True, repeatable=True),
    ]
    plan = Plan(samples=2, warmup_seconds=0, repeats=3)
    verdicts = {v.engine: v for v in compare.compare(some_case(), engines, clock, plan)}
    assert verdicts["right"].device is not None and verdicts["right"].problem == ""
    assert verdicts["right"].repeatable is None, "not promised, so not asked"
    assert verdicts["wrong"].problem == "EngineError: wrong: off by 1.5 times what is allowed"
    assert "off by nan" in verdicts["nan"].problem and verdicts["nan"].device is None
    assert "no_such_module_here cannot be imported" in verdicts["absent"].problem
    assert verdicts["lost"].problem == "RuntimeError: device lost"
    assert verdicts["varies"].repeatable is False
    result = Result(some_case(), tuple(verdicts.values()), {"name": "fake"})
    assert clock.log[0] == "release", "memory is given back before engines allocate"
    cells = {name: report.cell(verdict, 400, 1e9) for name, verdict in verdicts.items()}
    assert cells["right"] == "1.0 (40%) host 1" and cells["wrong"] == "wrong"
    assert cells["absent"] == "none" and cells["varies"].endswith("NOT REPEATABLE")
    assert report.failures([result], "varies") == ["test/one: varies: other bits in another run"]
    assert len(report.failures([result], "")) == 5
    assert any(line.startswith("absent: EngineError") for line in report.problems([result]))


@pytest.mark.slow
def test_results_survive_the_file_and_are_drawn(clock: FakeClock, tmp_path: Path) -> None:
    cases = [replace(some_case(size), name=f"test/{size}") for size in (100, 120, 400)]
    engines = [FakeEngine(clock, "ours", 1e-6), FakeEngine(clock, "theirs", 1e-6, value=2.0)]
    plan = Plan(samples=2, warmup_seconds=0)
    results = [Result(c, tuple(compare.compare(c, engines, clock, plan)), {}) for c in cases]
    settings = {"machine": {"gpu": {"name": "fake", "temperature.gpu": "30"}}, "plan": {"a": 1}}
    path = tmp_path / "deep" / "gpu.json"
    report.save(path, {"settings": settings, "results": [r.to_json() for r in results]})
    loaded = reductions_gpu.load(path, settings, cases)
    assert [result.verdicts[0] for result in loaded] == [r.verdicts[0] for r in results]
    assert loaded[0].verdicts[1].problem == results[0].verdicts[1].problem
    stored = json.loads(path.read_text())["results"][0]
    assert stored["verdicts"][0]["bytes_per_second"] == pytest.approx(404 / 1e-6)
    warmer = {"machine": {"gpu": {"name": "fake", "temperature.gpu": "60"}}, "plan": {"a": 1}}
    assert len(reductions_gpu.load(path, warmer, cases)) == 3
    other = {"machine": {"gpu": {"name": "other"}}, "plan": {"a": 1}}
    assert reductions_gpu.load(path, other, cases) == []
    assert report.results_table(results, 1e9, "Test").row_count == 3
    report.draw(results, 1e9, "Test", path.with_suffix(".png"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_percents_and_medians_of_powers() -> None:
    verdict = Verdict("ours", device=Summary(1e-6, 1e-6, 1e-6, 1))
    results = [Result(some_case(size), (verdict,), {}) for size in (249, 255, 1023)]
    points = report.percents(results, "all", "ours", 1e9)
    assert [size for size, _ in points] == [1000.0, 1024.0, 4096.0]
    assert [percent for _, percent in points] == pytest.approx([100.0, 102.4, 409.6])
    line = report.power_medians(points)
    assert line == [(1012.0, pytest.approx(101.2)), (4096.0, pytest.approx(409.6))]
    assert report.percents(results, "x", "ours", 1e9) == []


def test_forced_decisions_reach_the_configuration() -> None:
    case = next(case for case in variants.threshold_cases() if case.name == "finish/16777216")
    own = variants.chosen(case, "last_block", "sm_90")
    with variants.forced(variants.Variant("last_block", splits=7, unroll=2, threads=128)):
        config = variants.chosen(case, "last_block", "sm_90")
    assert (config.splits, config.unroll, config.threads) == (7, 2, 128)
    assert config.finish == "last_block"
    assert variants.chosen(case, "last_block", "sm_90") == own != config


@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_clusters_are_forced_and_forbidden(cluster: int) -> None:
    case = next(case for case in variants.threshold_cases() if case.name == "finish/32768")
    assert variants.chosen(case, "auto", "sm_90").finish == "cluster"
    with variants.forced(variants.Variant("one_block", cluster=cluster)):
        config = variants.chosen(case, "one_block", "sm_90")
    assert (config.cluster, config.splits) == (cluster, cluster)
    assert variants.Variant("one_block", cluster=cluster) in (
        replace(variant, splits=None) for variant in variants.variants(case, "sm_90")
    )
    assert all(v.cluster in (None, 1) for v in variants.variants(case, "sm_80"))


def test_variants_leave_no_block_without_work() -> None:
    for case in variants.threshold_cases():
        found = variants.variants(case, "sm_90")
        assert found[0] == variants.Variant(), "the rule's own choice comes first"
        assert len(set(found)) == len(found)
        for variant in found:
            assert variant.splits is None or variant.splits <= case.elements
    tiny = next(c for c in variants.threshold_cases() if c.name == "finish/4096")
    most = max(v.splits or 1 for v in variants.variants(tiny, "sm_90"))
    assert most == 4, "4096 elements are four steps of 256 threads with four floats"
    assert variants.Variant("atomic", 4, 2).title == "atomic splits 4 unroll 2"


def test_gain() -> None:
    assert variants.gain([("auto", 3.0), ("atomic", 2.0), ("last", 4.0)]) == ("atomic", 1.5)
    assert variants.gain([("auto", 3.0), ("atomic", 5.0)]) == ("auto", 1.0)


@pytest.mark.parametrize("operator", ["sum", "prod", "min", "max", "and", "or", "mean"])
def test_array_steps_on_numpy(operator: str) -> None:
    case = Case(
        "test/steps",
        (3, 5, 7),
        "float32",
        (Reduction(operator, (0, 2), ("neg", "mul 1", "abs", "add 0")),),
        2,
    )
    x, y = np.random.default_rng().standard_normal((2, 3, 5, 7)).astype("float32")
    (found,) = array_steps.run_case(case, [x, y], np, array_steps.reduce_numpy)
    wide = np.abs(-x.astype("float64") * y) + x
    function = {"and": np.all, "or": np.any}.get(operator) or getattr(np, operator)
    np.testing.assert_allclose(found, function(wide, axis=(0, 2)), rtol=1e-4, atol=1e-4)
    assert found.dtype == (bool if operator in ("and", "or") else np.float32)


@pytest.mark.parametrize("name", ["paper2/1", "paper2/8", "network/layer_norm", "network/finite"])
def test_stock_relax_functions_have_the_types_of_the_case(name: str) -> None:
    case = CASES[name]
    for reduce in (relax_build.our_reduce, relax_build.stock_reduce):
        function = relax_build.relax_module(case, reduce)["main"]
        assert len(function.params) == case.inputs
        fields = function.ret_ty.fields
        expected = [case.workload(reduction).out_dtype for reduction in case.reductions]
        assert [str(field.dtype) for field in fields] == expected


def test_a_version_without_rules_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relax_build.gpu, "RULES", (), raising=False)
    with pytest.raises(EngineError, match="schedules.gpu has no RULES in this version"):
        relax_build.our_passes()


def test_dry_run_lists_cases_engines_and_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reductions_gpu, "our_reduce", relax_build.stock_reduce)
    monkeypatch.setattr(reductions_gpu, "our_passes", relax_build.stock_passes)
    arguments = ["--dry-run", "--only", "paper2/12", "--engines", "cupy", "tvm"]
    assert reductions_gpu.main(arguments) == 0
    output = capsys.readouterr().out
    assert "1 x float16[64, 20]" in output and "1 cases, 0.0 GB" in output
    assert "CuPy CUB: " in output and "TVM dlight: " in output and "XLA" not in output

    def no_passes() -> None:
        raise EngineError("no rules")

    monkeypatch.setattr(reductions_gpu, "our_passes", no_passes)
    assert reductions_gpu.main(arguments) == 1
    assert "FAILED paper2/12: EngineError: no rules" in capsys.readouterr().out


def test_thresholds_table_names_the_fastest(clock: FakeClock) -> None:
    engines = [FakeEngine(clock, "auto", 3e-6), FakeEngine(clock, "atomic splits 4", 2e-6)]
    plan = Plan(samples=2, warmup_seconds=0)
    result = Result(some_case(), tuple(compare.compare(some_case(), engines, clock, plan)), {})
    broken = Result(some_case(), (Verdict("auto", "no memory"), result.verdicts[1]), {})
    columns = reductions_gpu.thresholds_table([result, broken]).columns
    rows = list(zip(*(column.cells for column in columns), strict=True))
    assert rows == [
        ("test/one", "3.0", "atomic splits 4", "2.0", "1.50x"),
        ("test/one", "none", "", "", "no memory"),
    ]


def test_sub_graphs_are_shown_with_and_without_graphs(clock: FakeClock, tmp_path: Path) -> None:
    engines = [FakeEngine(clock, "ours", 2e-6), FakeEngine(clock, "XLA", 3e-6, own_stream=True)]
    plan = Plan(samples=2, warmup_seconds=0)
    cases = [replace(some_case(), name="paper2/1"), replace(some_case(), name="odd/1")]
    found = [Result(case, tuple(compare.compare(case, engines, clock, plan)), {}) for case in cases]
    console = Console(width=200, record=True)
    reductions_gpu.show_sub_graphs(found, console, "fake", tmp_path)
    lines = [line.split("│") for line in console.export_text().splitlines() if "paper2/1" in line]
    assert [cell.strip() for cell in lines[0][1:-1]] == ["paper2/1", "2.0", "2.0", "3.0", ""]
    assert (tmp_path / "subgraphs_gpu.png").read_bytes().startswith(b"\x89PNG")
    again = Result.from_json(json.loads(json_text(found[0].to_json())), cases[0])
    assert again.verdicts == found[0].verdicts


def test_race_writes_after_each_case_and_resumes(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "gpu_state", lambda: {"clocks.sm": "1980"})
    cases = [replace(some_case(size), name=f"test/{size}") for size in (100, 1 << 20)]
    ours = FakeEngine(clock, "ours", 1e-6)
    settings = {"machine": {"gpu": {"name": "fake"}}, "plan": {}}
    plan = Plan(samples=2, warmup_seconds=0)
    path = tmp_path / "gpu.json"
    options = reductions_gpu.parser().parse_args(["--output", str(path), "--resume"])

    def race() -> list[Result]:
        return reductions_gpu.race(cases, lambda case: [ours], clock, plan, settings, options)

    results = race()
    assert [bool(result.verdicts[0].problem) for result in results] == [False, True]
    assert "do not fit in" in results[1].verdicts[0].problem
    assert json.loads(path.read_text())["results"][0]["state"] == {"clocks.sm": "1980"}
    before = len(ours.launched)
    assert len(race()) == 2 and len(ours.launched) == before
    options.resume, options.minutes = False, 1e-12
    assert race() == []


def test_engines_are_chosen_by_words() -> None:
    titles = [engine.title for engine in reductions_gpu.engines("sm_90", False, None)]
    ours = ["tvm-fusion", *(f"tvm-fusion {name}" for name in ("one_block", "atomic", "last_block"))]
    assert titles[:4] == ours
    assert titles[4:] == [
        "TVM dlight",
        "PyTorch",
        "torch.compile",
        "torch.compile cooperative",
        "CuPy CUB",
        "XLA",
        "torch.mv",
    ]
    some = reductions_gpu.engines("sm_90", True, ["FUSION", "xla"])
    assert [engine.title for engine in some] == ["tvm-fusion", "XLA"]


def test_stock_kernels_become_cuda_text() -> None:
    case = replace(CASES["paper2/3"], shape=(64, 33))
    module = relax_build.relax_module(case, relax_build.stock_reduce)
    executable = relax_build.build(module, relax_build.stock_passes(), "sm_90")
    (text,) = relax_build.cuda_texts(executable)
    assert "__global__" in text and relax_build.kernel_count(executable) >= 1


def test_engines_refuse_what_they_cannot_express(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mv, "module", lambda name: None)
    monkeypatch.setattr(cupy_cub, "module", lambda name: None)
    with pytest.raises(EngineError, match="no producers and one output only"):
        torch_mv.TorchMV().prepare(CASES["paper2/3"], [])
    for name in ("paper4/16226304", "operator/max x float32", "network/grouped query"):
        with pytest.raises(EngineError, match="sums rows or columns of floats only"):
            torch_mv.TorchMV().prepare(CASES[name], [])
    with pytest.raises(EngineError, match="no bfloat16"):
        cupy_cub.CupyCub().prepare(CASES["odd/all"], [])


def test_no_gpu_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: "no CUDA GPU was found")
    assert reductions_gpu.main(["--only", "odd"]) == 2
    output = capsys.readouterr()
    assert output.err == "bench-gpu: no CUDA GPU was found; --dry-run needs none\n"
    assert output.out == ""
    assert reductions_gpu.main(["--only", "nothing"]) == 2
    assert "no case matches nothing" in capsys.readouterr().err


def test_gpu_state_is_read_from_the_driver() -> None:
    state = machine.parse_state("NVIDIA H100, 580.1, 1980, 2619, 41, 120.5\n")
    assert state["name"] == "NVIDIA H100" and state["clocks.sm"] == "1980"
    assert state["temperature.gpu"] == "41" and len(state) == len(machine.QUERIES)


def _numpy(dtype: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
