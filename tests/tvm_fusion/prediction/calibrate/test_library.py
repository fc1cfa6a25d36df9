# SPDX-License-Identifier: Apache-2.0
"""PyTorch's kernels: what is measured of them, what is fitted, and who is predicted by it."""

import importlib.util
import resource
from dataclasses import replace

import pytest

from schedules.cost.cpu_kernels import family, terms
from schedules.cost.decisions import predict
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import Figure, load_machine
from tvm_fusion.prediction.calibrate.calibration import all_cases, library_figures
from tvm_fusion.prediction.calibrate.library_cases import LibraryCase, library_cases
from tvm_fusion.prediction.model.predict_model import host_costs
from tvm_fusion.prediction.timeline.execution_graph import HOST, ExecutionGraph, Kernel, Launch, Op
from tvm_fusion.prediction.what_if import change

CPU = load_machine("znver4")


def product(m: int, n: int = 256, k: int = 256, op: str = "gemm") -> KernelCall:
    sizes = {"B": 1, "M": m, "N": n, "K": k}
    return KernelCall(op, sizes, "float32", 2.0 * m * n * k, 4.0 * (m * k + k * n), 4.0 * m * n)


def timed(call: KernelCall, latency=3e-6, compute=1.5, memory=2.0) -> tuple[KernelCall, float]:
    each = zip((latency, compute, memory), terms(call, CPU), strict=True)
    return call, sum(factor * size for factor, size in each)


def with_figures(figures: dict[str, float]):
    return replace(CPU, figures={**CPU.figures, **{n: Figure(v, "t") for n, v in figures.items()}})


def test_figures_are_those_of_the_times():
    calls = [product(m, n, k) for m in (2, 64, 512) for n, k in ((16, 4096), (512, 16), (64, 64))]
    found = library_figures(CPU, [timed(call) for call in calls])
    assert found["pytorch.gemm.latency"] == pytest.approx(3e-6)
    assert found["pytorch.gemm.compute"] == pytest.approx(1.5)
    assert found["pytorch.gemm.memory"] == pytest.approx(2.0)
    assert found["pytorch.gemm.low"] == pytest.approx(1 / 1.15)  # exact times, the narrowest
    machine = with_figures(found)
    new = product(128, 128, 128)
    prediction = predict(new, machine)
    assert prediction.seconds == pytest.approx(timed(new)[1]) and prediction.in_range
    assert prediction.model == "pytorch gemm, calibrated"
    huge = predict(product(1 << 16, 512, 512), machine)
    assert not huge.in_range and huge.high / huge.seconds == pytest.approx(1.15**2)
    assert predict(product(128, op="gemm_backward"), machine).model == "roofline"


def test_weights_of_a_layer_come_from_memory():
    layer = product(1, 1024, 1024)
    _, _, moving = terms(layer, CPU)
    weights = 4 * 1024 * 1024 / CPU["bandwidth.memory"]
    assert weights < moving < 1.1 * weights
    _, _, cached = terms(replace(layer, op="gemm_backward"), CPU)
    assert cached < weights / 2


def test_the_interval_is_of_sizes_that_were_left_out():
    calls = [product(m) for m in (8, 16, 32, 64, 128, 256, 512, 1024)]
    noise = [1.5, 0.7, 1.3, 0.8, 1.4, 0.6, 1.2, 0.9]
    found = library_figures(
        CPU, [(c, t * n) for (c, t), n in zip(map(timed, calls), noise, strict=True)]
    )
    assert found["pytorch.gemm.low"] < 0.8 and found["pytorch.gemm.high"] > 1.3


def test_no_factor_is_negative():
    falling = [(product(m, n, k), 1e-3 / m) for m in (8, 64) for n, k in ((64, 64), (256, 16))]
    found = library_figures(CPU, falling)
    assert found["pytorch.gemm.latency"] > 0 and "pytorch.gemm.compute" not in found
    assert all(one > 0 for one in found.values())


def test_kernels_of_pytorch_need_its_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name)
    )
    assert library_cases() == []


def test_element_wise_operators_without_figures_are_like_all_others():
    figures = {f"pytorch.add.{name}": 1.0 for name in ("memory", "low", "high", "most")}
    call = KernelCall("silu", {}, "float32", 0.0, 4e6, 4e6)
    assert predict(call, with_figures(figures)).model.startswith("pytorch add")
    own = {name.replace("add", "silu"): one for name, one in figures.items()}
    assert predict(call, with_figures(figures | own)).model.startswith("pytorch silu")


def test_kinds_of_convolutions_are_fitted_apart():
    sizes = {"FH": 1, "FW": 1, "groups": 1}
    assert family(KernelCall("conv2d", sizes)) == "conv2d_pointwise"
    assert (
        family(KernelCall("conv2d_backward", {**sizes, "groups": 8})) == "conv2d_grouped_backward"
    )
    assert family(KernelCall("conv2d", {"FH": 3, "FW": 3})) == "conv2d"
    assert family(product(1)) == "gemm_vector"


def test_changes_of_a_run_on_a_cpu():
    machine = with_figures(library_figures(CPU, [timed(product(m)) for m in (1, 8, 64, 512)]))
    call = product(512)
    graph = ExecutionGraph((Op("aten::linear", (Launch(Kernel(0, "x", 1e-3, HOST, call=call)),)),))
    after = change([graph], "batch=2", machine)
    ratio = timed(product(1024))[1] / timed(call)[1]
    (kernel,) = after.graphs[0].kernels
    assert kernel.seconds == pytest.approx(1e-3 * ratio, rel=0.1)
    assert "pytorch gemm, calibrated" in after.notes[0]
    work = ExecutionGraph((Op("x", (Launch(Kernel(0, "x", 1e-3, HOST)),)),))
    assert change([work], "batch=2", machine).graphs[0] == work  # no operator: it stays


def test_pytorch_spends_what_was_measured_between_operators():
    costs, notes = host_costs(with_figures({"overhead.eager": 2e-6}), "pytorch")
    assert costs.t1("", Op("aten::relu")) == 2e-6 and not notes
    assert host_costs(CPU, "pytorch")[1]


def test_cases_have_names_of_their_own_and_cover_all_operators():
    pytest.importorskip("torch")
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) > 250
    ops = {case.call.op for kind in library_cases() for case in kind}
    both = "gemm bmm conv2d conv1d batch_norm layer_norm softmax dropout tril embedding_bag relu"
    assert {f"{op}{end}" for op in both.split() for end in ("", "_backward")} <= ops
    assert {"transpose", "concat", "copy", "add", "gather", "pool", "reduce"} <= ops


def test_some_of_each_kind_are_timed():
    torch = pytest.importorskip("torch")
    from tvm_fusion.prediction.calibrate.library_cases import eager_overhead, time_library

    threads = torch.get_num_threads()
    try:
        for kind in library_cases():
            least = {}
            for case in kind:
                one = least.setdefault(case.call.op, case)
                if case.call.moved_bytes < one.call.moved_bytes:
                    least[case.call.op] = case
            for case in least.values():
                assert time_library(case, 1, 1 << 20) > 0
        assert eager_overhead(1) > 0
    finally:
        torch.set_num_threads(threads)


def test_results_of_a_kernel_lie_in_memory_that_was_there():
    torch = pytest.importorskip("torch")
    from tvm_fusion.prediction.calibrate.library_cases import time_library

    faults = []

    def run(torch, x):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.relu(torch.relu(torch.relu(x)))
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    threads = torch.get_num_threads()
    try:
        case = LibraryCase("relu", product(1), ((1 << 20,),), (), run)
        time_library(case, 1, 1 << 20)
    finally:
        torch.set_num_threads(threads)
    assert sorted(faults)[len(faults) // 2] < 64  # There are 3072 pages.
