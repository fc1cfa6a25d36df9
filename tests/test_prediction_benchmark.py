# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of predicted times, against numbers worked by hand."""

import gzip
import json
import math

import numpy as np
import pytest

from examples.benchmarks.predict import harness_growth
from examples.benchmarks.prediction.choices import choices
from examples.benchmarks.prediction.data import (
    Sweep,
    conv2d_sweep,
    errors,
    gemm_sweep,
    row_sweeps,
    without_drift,
)
from examples.benchmarks.prediction.fit_streaming import fit, model
from examples.benchmarks.prediction.intervals import Timed, held_out, spreads
from examples.benchmarks.prediction.train import growth
from examples.benchmarks.prediction.whole_models import (
    Predictor,
    Run,
    interpolated_transfers,
    kernel_call,
    session_spread,
)


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(text)


def test_errors_by_hand():
    found = errors(np.array([1.0, 2.0]), np.array([1.1, 2.0]))
    assert found == {
        "gmae": round(100 * math.sqrt(0.1004 * 0.0004), 2),
        "mape": 5.0,
        "count": 2,
    }


def test_sweeps_are_read(tmp_path):
    assert gemm_sweep(tmp_path) is None
    assert row_sweeps(tmp_path) == {}
    lines = "Tesla T4,linear,1,2,3,4,0.5\nNVIDIA A100 80GB PCIe,bmm,5,2,3,4,0.25\n"
    write(tmp_path / "gpu_kernels" / "gemm.csv.gz", "device,op,B,M,N,K,ms\n" + lines)
    sweep = gemm_sweep(tmp_path)
    assert sweep.machine.tolist() == ["t4", "a100-80"]
    assert sweep.seconds.tolist() == [0.5e-3, 0.25e-3]
    assert sweep.sizes["batched"].tolist() == [0, 1]
    assert sweep[sweep.machine == "t4"].sizes["K"].tolist() == [4]


def test_a_fifth_of_the_sizes_is_held_out_on_all_machines():
    sizes = {"B": np.tile(np.arange(500.0), 2), "H": np.tile(np.arange(500.0) % 7, 2)}
    times = np.ones(1000)
    held = Sweep("x", "float32", times, sizes, times, times, "").held_out()
    assert 70 < held[:500].sum() < 130
    assert (held[:500] == held[500:]).all()


def test_a_harness_that_slows_down_is_taken_out():
    rng = np.random.default_rng(0)
    true = 1e-4 * (1 + rng.exponential(5, 4000))
    drift = 7e-4 * np.arange(4000) / 4000
    taught = rng.random(4000) < 0.8
    found, middle = without_drift(true + drift, taught)
    assert middle == pytest.approx(3.5e-4, rel=0.1)
    assert np.abs(found / (true + 3.5e-4) - 1).mean() < 0.03
    steady, none = without_drift(true, taught)
    assert none < 2e-5
    np.testing.assert_allclose(steady, true, rtol=0.2)
    few = true[:100] + drift[:100]
    assert without_drift(few, taught[:100])[0] is few


def test_times_as_measured_follow_from_the_place_in_the_sweep(tmp_path):
    rng = np.random.default_rng(0)
    count = 2000
    sizes = rng.integers(4, 200, (count, 4))
    true = 0.1 * (1 + rng.exponential(5, count))
    names = "device,B,in_channels,out_channels,size,kernel,stride,padding,ms\n"
    rows = [
        f"Tesla T4,{b},{ic},{oc},{size},3,1,1,{ms + 0.7 * at / count}\n"
        for at, ((b, ic, oc, size), ms) in enumerate(zip(sizes, true, strict=True))
    ]
    write(tmp_path / "gpu_kernels" / "conv2d.csv.gz", names + "".join(rows))
    sweep = conv2d_sweep(tmp_path)
    late = growth(sweep)["harness_growth_seconds"]
    assert late == pytest.approx(7e-4, rel=0.1)
    held = sweep[sweep.held_out()]
    assert held.place[:2] == pytest.approx(np.flatnonzero(sweep.held_out())[:2] / count)
    as_measured = held.seconds + late * (held.place - 0.5)
    assert np.abs(as_measured / held.measured - 1).mean() < 0.03


def test_a_report_says_how_the_harness_grew():
    assert 2e-4 < harness_growth("conv2d-float32-a100") < harness_growth("conv2d-float32-p100")
    assert harness_growth("gemm-float32-p100") == 0


def test_streams_are_fitted():
    moved = np.geomspace(1e3, 1e9, 200)
    truth = np.log([30e-6, 12e-6, 5e11])
    assert fit(moved, model(truth, moved)) == pytest.approx(truth, rel=1e-2)


def test_calls_of_a_graph():
    copy = kernel_call("MEM", [[2, 3], [4], [5]])
    assert (copy.read_bytes, copy.written_bytes) == (40, 20)
    assert dict(kernel_call("Linear", [8, 16, 32]).sizes) == {"B": 1, "M": 8, "N": 32, "K": 16}
    product = kernel_call("BMM", [2, 8, 16, 32])
    assert (product.op, product.sizes["K"], product.sizes["N"]) == ("bmm", 16, 32)
    add = kernel_call("VECadd", [2, 8])
    assert (add.op, add.read_bytes, add.written_bytes) == ("add", 128, 64)
    assert kernel_call("VECln", [2, 8]).op == "layer_norm"


class Ones(Predictor):
    """A second for each kernel, and for each element of a transfer."""

    def entry(self, entry):
        op, sizes = entry
        return np.full(3, float(sizes[0])) if op.startswith(("ALL", "SEND")) else np.ones(3)


def node(op="Linear", in_layer=True, **directions):
    entries = {name: [["Linear", [1, 1, 1]]] * count for name, count in directions.items()}
    return {"op": op, "in_layer": in_layer, **entries}


def transfer(kind, name, seconds, in_layer=True, direction="backward"):
    return {"op": name, "in_layer": in_layer, direction: [[kind, [seconds]]]}


def run(mode, option, layers, nodes):
    found = Ones("v100", lambda *_: 0.0).run(Run("v100", "g", mode, option, layers, 1.0), nodes)
    return found[0]


def test_whole_runs_by_hand():
    nodes = [node(in_layer=False, forward=1, backward=2), node(forward=3, backward=4, accumulate=1)]
    assert run("inf", "", 5, nodes) == 1 + 5 * 3
    assert run("train", "", 5, nodes) == 1 + 2 + 5 * (3 + 4 + 1)
    assert run("inf", "", 5, [*nodes, node("getitem", forward=7)]) == 16


def test_sessions_differ_by_the_errors_of_whole_runs():
    assert session_spread({"a": [0.0, 0.0], "b": [0.0]}) == 1.0
    alike = session_spread({"a": [0.1] * 50, "b": [-0.1]})
    assert alike == pytest.approx(math.exp(0.1))  # Its sign is gone.
    # One run of b weighs as much as all of a: of 0 and 0.2 nine tenths.
    assert session_spread({"a": [0.0] * 50, "b": [0.2]}) == pytest.approx(math.exp(0.18))


def test_gradients_overlap_the_backward_pass():
    nodes = [
        transfer("ALLREDUCE_ASYNC", "allreduce", 5),
        node(forward=1, backward=2),
        transfer("ALLREDUCE_ASYNC", "allreduce", 1, in_layer=False),
        node(in_layer=False, forward=1, backward=2),
    ]
    # Backward: 2, its transfer until 3; layer by layer 4 and 6, transfers from 4 to 9 and to 14.
    assert run("train", "dp4", 2, nodes) == 3 + 14


def test_a_pipeline_by_hand():
    nodes = [
        node(forward=4, backward=8),
        transfer("SENDRECV", "sendrecv", 1, in_layer=False, direction="forward"),
    ]
    # One micro-batch: all stages and three transfers; each further one adds a stage and a transfer.
    assert run("train", "pp4_1", 4, nodes) == 16 + 32 + 3
    assert run("train", "pp4_4", 4, nodes) == 16 + 32 + 3 + 3 * (4 + 8 + 1)


def test_transfers_are_interpolated(tmp_path):
    rows = ["a100_dgx,all_reduce,4,4,100,10", "a100_dgx,all_reduce,4,4,10000,1000"]
    rows += ["a100_dgx,send_recv,2,2,100,1", "a100_dgx,all_reduce,2,2,100,7"]
    head = "source,node,collective,ranks,per_node,bytes,us\n"
    text = head + "\n".join("x," + row for row in rows) + "\n"
    write(tmp_path / "collectives" / "collectives.csv.gz", text)
    transfers = interpolated_transfers(tmp_path, "a100")
    assert transfers("all_reduce", 1000.0) == pytest.approx(100e-6)
    assert transfers("all_reduce", 20000.0) == pytest.approx(2000e-6)
    assert transfers("all_reduce", 1.0) == pytest.approx(10e-6)


def kernels(network, ratios, op="cpu.conv2d"):
    return [Timed(network, op, 1e-5, 1e-5 * ratio) for ratio in ratios]


def test_networks_weigh_the_same_in_an_interval():
    many = kernels("a", [1.2] * 98 + [1.1, 1.3]) + kernels("b", [0.5, 2.0])
    low, high = spreads(many)["convolutions"]
    assert low < 0.7 and high > 1.6
    assert "cpu.conv2d" not in spreads(many)  # two networks
    assert spreads(many + kernels("c", [1.0]))["cpu.conv2d"][0] < 0.9
    assert spreads(kernels("a", [1.2, 1.4]))["convolutions"][0] == 1.0  # the prediction is inside


def test_an_interval_holds_what_differs_between_networks():
    found = [kernels(name, [ratio] * 20) for name, ratio in (("a", 0.5), ("b", 1.0), ("c", 2.0))]
    low, high = spreads([one for each in found for one in each])["cpu.conv2d"]
    assert low == pytest.approx(0.5 * 2**0.2) and high == pytest.approx(2 / 2**0.2)


def test_a_network_is_held_out_of_its_own_interval():
    spread = np.linspace(0.8, 1.25, 50)
    alike = kernels("a", spread) + kernels("b", spread) + kernels("c", spread)
    assert 75 <= held_out(alike)["all"] <= 85
    odd = held_out(alike + kernels("d", [5.0] * 50))
    assert odd["d"] == 0 and odd["a"] > 75


def test_the_faster_alternative_is_named_if_it_is_the_predicted_one(tmp_path):
    folder = tmp_path / "znver3"
    folder.mkdir()
    engines = [[{"ratio": 1.0}, {"ratio": fused}, {"ratio": 1.0}] for fused in (0.5, 2.0, 1.01)]
    pairs = {f"mv1_{n}": {"engines": each} for n, each in enumerate(engines, 1)}
    stored = {"settings": {"threads": 2}, "results": pairs}
    (folder / "pairs.json").write_text(json.dumps(stored))
    found = choices(folder)
    assert list(found) == ["fused or not"]
    assert found["fused or not"]["different"] == 2
    assert found["fused or not"]["named"] == 1  # both are predicted to gain
    assert found["fused or not"]["wrong"] == ["mv1_2"]
