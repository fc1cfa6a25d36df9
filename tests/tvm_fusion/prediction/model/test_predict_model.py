# SPDX-License-Identifier: Apache-2.0
"""Predictions of whole models: engines, machines, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_onnx import long_sums
from small_onnx import dense_model, small_model

import tvm_fusion
from examples.transformers import bert_base
from examples.wide_and_deep import wide_and_deep
from schedules.cost.decisions import deciding_for
from schedules.cost.machine import Figure, load_machine, machine_from_json
from schedules.cpu.core.machine import CPUInfo
from tvm_fusion.cli.output import json_text
from tvm_fusion.compiler.explain import explain_kernels
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidModelError, PredictionError, TargetError
from tvm_fusion.prediction import machines
from tvm_fusion.prediction.machines import calibration_path, cpu_target, find_machine
from tvm_fusion.prediction.model.predict_model import SESSIONS


def predict(machine="znver4", model=None, **options):
    return tvm_fusion.predict(model or small_model(), machine=machine, **options)


def changed(machine, **figures):
    more = {name.replace("__", "."): Figure(value, "test") for name, value in figures.items()}
    return replace(machine, figures={**machine.figures, **more})


def test_our_kernels_on_a_cpu_with_their_work():
    found = predict(fuse="none")
    assert [row.operator for row in found.kernels if "conv" in row.operator] == [
        "conv 3x3 3->8 relu on 12x12",
        "dw-conv 3x3 8->8 relu6 on 12x12",
        "conv 1x1 8->6 on 12x12",
    ]
    assert [row.position for row in found.kernels] == list(range(len(found.kernels)))
    for row in found.kernels:
        assert 0 < row.low <= row.seconds <= row.high
        assert 0 < row.roofline_share <= 1 and row.bound in ("compute", "memory", "latency")
        assert row.model.endswith("not calibrated") and not row.in_range
    assert found.kernel_seconds == pytest.approx(sum(row.seconds for row in found.kernels))
    assert found.seconds == pytest.approx(found.kernel_seconds + found.host_seconds)
    assert found.low < found.seconds < found.high


def test_pairs_are_fused_as_they_would_be_compiled():
    apart, fused = (predict(fuse=choice) for choice in ("none", "all"))
    assert len(fused.kernels) < len(apart.kernels)


def test_engines_have_their_own_kernels():
    ours, eager = (predict("v100", engine=engine) for engine in ("tvm_fusion", "pytorch"))
    assert all(row.model.startswith("estimate") for row in ours.kernels)
    assert any("have not been measured" in note for note in ours.notes)
    assert [row.op for row in eager.kernels if row.op == "conv2d"] == ["conv2d"] * 3
    assert len(eager.kernels) > len(ours.kernels)
    assert eager.host_seconds > ours.host_seconds
    assert any("PyTorch" in note for note in eager.notes)


@pytest.mark.slow
def test_halves_move_half_the_bytes():
    single, half, tensor = (
        predict("h200", bert_base(layers=1), engine="pytorch", precision=precision)
        for precision in ("fp32", "bf16", "tf32")
    )
    gemms = [
        [row for row in found.kernels if row.op in ("gemm", "bmm")]
        for found in (single, half, tensor)
    ]
    assert gemms[0] and {row.model for row in gemms[1]} == {"gemm-joint"}
    assert all("type" in row.extrapolated for row in gemms[2])
    attention = [row for row in half.kernels if row.op == "attention"]
    assert [row.model for row in attention] == ["attention-joint"]
    apart = ("attention", "bmm", "softmax", "copy", "div", "add")
    kept = [[row for row in found.kernels if row.op not in apart] for found in (single, half)]
    for one, two in zip(*kept, strict=True):
        if one.bound == two.bound == "memory":
            assert two.roofline_seconds == pytest.approx(one.roofline_seconds / 2)
    ours = predict("h200", dense_model(), precision="bf16").kernels
    assert all(row.model.startswith("estimate") for row in ours)


def test_precisions_that_are_refused():
    with pytest.raises(PredictionError, match="precision is 'int4'; expected one of fp32, tf32"):
        predict("h200", precision="int4")
    with pytest.raises(PredictionError, match="precision fp16 is for GPUs; 'znver4' is a CPU"):
        predict("znver4", precision="fp16")
    with pytest.raises(PredictionError, match="engine 'pytorch' is predicted in fp32: predict a"):
        predict("znver4", engine="pytorch", precision="bf16")


@pytest.mark.slow
def test_a_model_is_shared_by_the_gpus_of_a_node():
    model = bert_base(layers=2, width=1024, heads=16)
    alone, shared = (
        predict("h200", model, engine="pytorch", precision="bf16", ranks=ranks) for ranks in (1, 4)
    )
    reduces = [row for row in shared.kernels if row.op == "all_reduce"]
    assert len(reduces) == 4 and {row.bound for row in reduces} == {"network"}
    assert all(row.model.startswith("nccl") and row.in_range for row in reduces)
    assert shared.memory_bytes < alone.memory_bytes and alone.fits and shared.fits
    work = sum(row.seconds for row in shared.kernels if row.op != "all_reduce")
    assert work < alone.kernel_seconds
    for options in ({"engine": "tvm_fusion"}, {"ranks": 0}, {"machine": "znver4"}):
        with pytest.raises(PredictionError, match="tensor parallelism is predicted for engine"):
            predict(**{"machine": "h200", "engine": "pytorch", "ranks": 2, **options})


@pytest.mark.slow
def test_ranks_of_several_nodes_wait_for_the_links_between(tmp_path):
    file = tmp_path / "nodes.json"
    link = {"bandwidth": 2.5e10, "latency": 5e-6, "origin": "data sheet"}
    nodes = {"name": "nodes", "machine": "h200", "nodes": 4, "gpus_per_node": 2, "link": link}
    file.write_text(json.dumps(nodes))
    model, options = bert_base(layers=1), {"engine": "pytorch", "ranks": 4}
    one, several = (
        predict("h200", model, **options),
        predict("v100", model, cluster=file, **options),
    )
    assert several.machine == "h200"
    for near, far in zip(one.kernels, several.kernels, strict=True):
        assert far.seconds > near.seconds if near.bound == "network" else far == near
    with pytest.raises(PredictionError, match="machine=h100: a cluster has its own machine"):
        predict("h200", model, cluster=file, what_if=["machine=h100"], **options)


@pytest.mark.slow
def test_a_machine_of_ten_figures_as_the_page_shows_it(tmp_path):
    page = (Path(tvm_fusion.__file__).parents[1] / "docs" / "prediction.md").read_text()
    (text,) = re.findall(r"```json\n(\{[^`]*\"figures\"[^`]*)```", page)
    assert len(json.loads(text)["figures"]) == 10
    file = tmp_path / "mine.json"
    file.write_text(text)
    found = predict(file, bert_base(layers=1), engine="pytorch", precision="bf16")
    assert found.title == "My GPU" and found.fits
    assert any("machine" in row.extrapolated for row in found.kernels)
    assert predict(file).seconds > 0
    with pytest.raises(PredictionError, match="no figure 'bandwidth.pcie'"):
        predict(file, bert_base(layers=1), engine="pytorch", ranks=2)


def test_a_model_that_does_not_fit():
    machine = changed(load_machine("h200"), capacity__memory=4e3)
    found = predict(machine, engine="pytorch")
    assert found.fits is False
    assert found.notes[0].startswith("does not fit: it needs 0.0 GB for weights")
    assert predict("h200").fits is None


def test_a_run_on_a_gpu_differs_from_session_to_session():
    eager = predict("v100", engine="pytorch")
    assert eager.low <= eager.seconds / SESSIONS * (1 + 1e-9)
    assert eager.high >= eager.seconds * SESSIONS * (1 - 1e-9)


def test_kernels_of_pytorch_on_a_cpu_take_what_was_calibrated():
    machine = find_machine("znver4")
    terms = {"latency": 1e-3, "low": 0.9, "high": 1.2, "most": 1e9}
    families = ("conv2d", "conv2d_pointwise", "conv2d_grouped", "add")
    figures = {f"pytorch__{op}__{name}": x for op in families for name, x in terms.items()}
    found = predict(changed(machine, overhead__eager=1e-6, **figures), engine="pytorch")
    known = [row for row in found.kernels if row.op in ("conv2d", "add", "relu")]
    assert known and all(row.seconds == pytest.approx(1e-3) for row in known)
    assert {row.model for row in known} >= {"pytorch conv2d, calibrated", "pytorch add, calibrated"}
    assert found.host_seconds < 1e-6 * 2 * len(found.kernels) + 1e-9
    assert not any("H100" in note for note in found.notes)
    assert any("H100" in note for note in predict(machine, engine="pytorch").notes)


def test_our_reductions_on_a_gpu_have_a_model_of_their_own():
    found = predict("h100", long_sums())
    [row] = [row for row in found.kernels if row.op == "gpu.reduce"]
    assert row.model == "estimate, gpu.reduce" and not row.in_range
    assert row.low < row.seconds < row.high and row.bound == "latency"
    machine = find_machine("h100")
    few = {name: one for name, one in machine.figures.items() if name != "latency.L2"}
    [row] = predict(replace(machine, figures=few), long_sums()).kernels
    assert row.model.startswith("estimate, as layer_norm")


def test_gpu_kernels_are_those_that_compile_chooses_for_the_machine():
    report = explain_kernels(long_sums(), "cuda", machine="l4")
    [choice] = [one for one in report["decisions"] if one["decision"] in ("split", "finish")]
    assert choice["seconds"][choice["chosen"]] == min(choice["seconds"].values())
    [row] = [row for row in predict("l4", long_sums()).kernels if row.op == "gpu.reduce"]
    assert row.seconds == pytest.approx(choice["seconds"][choice["chosen"]])
    assert row.seconds < 0.95 * max(choice["seconds"].values())


@pytest.mark.slow
def test_lookups_count_the_rows_that_they_read():
    found = predict(model=wide_and_deep(rows=1000, crosses=4))
    takes = [row for row in found.kernels if row.kernel.startswith("take")]
    assert len(takes) > 20
    assert max(row.roofline_seconds for row in takes) < 1e-6


def test_more_work_is_never_faster():
    times = [predict(model=dense_model(batch, 28, 32)).seconds for batch in (1, 2, 4, 8)]
    assert times == sorted(times)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ["tvm_fusion", "pytorch"])
def test_a_better_machine_is_never_slower(engine):
    for name in ("znver4", "v100"):
        machine = find_machine(name)
        better = changed(
            machine,
            peak_flops__float32=2 * machine["peak_flops.float32"],
            bandwidth__memory=2 * machine["bandwidth.memory"],
            clock=2 * machine["clock"],
        )
        before, after = (predict(one, engine=engine).seconds for one in (machine, better))
        assert after <= before * (1 + 1e-9)


@pytest.mark.slow
def test_threads_share_the_work_of_a_cpu():
    alone, both = (predict("znver4", dense_model(1, 56, 64), threads=n) for n in (1, 2))
    assert 1.5 < alone.kernel_seconds / both.kernel_seconds < 2.2
    assert "scaled from 2 to 1 threads" in alone.figures["peak_flops.float32"]["origin"]
    with pytest.raises(PredictionError, match="'v100' is a GPU; threads are for CPUs"):
        predict("v100", threads=2)


def test_the_json_form_has_every_figure_with_its_origin():
    data = json.loads(json_text(predict().to_json()))
    assert {"machine", "title", "engine", "kernels", "seconds", "low", "high"} <= set(data)
    assert all(figure["origin"] for figure in data["figures"].values())
    want = {"position", "kernel", "operator", "op", "seconds", "low", "high", "bound"}
    assert want <= set(data["kernels"][0])


def test_open_shapes_are_refused_with_the_option_that_binds_them():
    with pytest.raises(InvalidModelError, match="dimension 0 .'n'.*--shape n=1"):
        predict(model=small_model("n"))
    assert predict(model=small_model("n"), shapes={"n": 2}).seconds > 0


def test_unknown_machines_and_engines_are_refused():
    with pytest.raises(PredictionError, match="no machine 'abacus'; expected a100"):
        predict("abacus")
    with pytest.raises(PredictionError, match="engine is 'tensorrt'; expected one of tvm_fusion"):
        predict(engine="tensorrt")
    with pytest.raises(TargetError, match="sm_60"):
        predict("p100")


def test_native_is_the_newest_calibration_or_the_family(tmp_path, monkeypatch, rename_cpu):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rename_cpu("znver3")
    family = find_machine("native", 2)
    assert (family.name, family["multiprocessors"], family.note) == ("znver3", 2, "")
    folder = tmp_path / "tvm-fusion" / "machines"
    folder.mkdir(parents=True)
    own = changed(family, clock=1e9).to_json()
    (folder / "znver3-2.json").write_text(json.dumps(own))
    assert find_machine("native", 2)["clock"] == 1e9
    assert find_machine("native", 1)["peak_flops.float32"] == family["peak_flops.float32"] / 2


def test_types_and_tiles_of_a_cpu():
    """A Xeon with tile registers has a peak for each type, and a model for kernels of these."""
    found = {
        precision: predict("sapphirerapids", dense_model(), threads=2, precision=precision)
        for precision in ("fp32", "bf16")
    }
    assert "figures of 'emeraldrapids'" in found["bf16"].notes[0]
    assert found["bf16"].seconds < found["fp32"].seconds
    tiles = [row for row in found["bf16"].kernels if row.op == "cpu.tile_conv2d"]
    assert tiles and all(0 < row.roofline_share <= 1 for row in tiles)
    machine = find_machine("sapphirerapids", 2)
    assert machine.peak_flops("uint8") > 1.9 * machine.peak_flops("bfloat16")
    assert machine.peak_flops("bfloat16") > 15 * machine.peak_flops("float32")


HIDDEN = "llvm -mcpu=emeraldrapids -mattr=-amx-bf16,-amx-int8,-amx-tile,-avx512bf16"


def test_a_cpu_whose_tiles_are_hidden_is_another_machine(tmp_path, monkeypatch):
    """Peaks of tiles, and what was calibrated with them, are not those of one without; nor back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = {name: resolve(name, 2) for name in ("emeraldrapids", HIDDEN)}
    files = {}
    for name, other in (("emeraldrapids", HIDDEN), (HIDDEN, "emeraldrapids")):
        monkeypatch.setattr(
            machines, "resolve", lambda target, cores=None, name=name: own.get(target, own[name])
        )
        native = find_machine("native", 2)
        assert native.name == name and cpu_target(native) == own[name]
        has_tiles = name == "emeraldrapids"
        assert (native.peak_flops("bfloat16") > 2 * native.peak_flops("float32")) == has_tiles
        assert (native.peak_flops("uint8") > 2 * native.peak_flops("float32")) == has_tiles
        assert bool(native.note) != has_tiles
        assert bool(CPUInfo.from_target(cpu_target(find_machine("emeraldrapids", 2))).tiles)
        assert calibration_path(2) not in files
        files[path := calibration_path(2)] = native
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(changed(native, clock=1e9 + len(files)).to_json()))
        assert find_machine("native", 2)["clock"] == 1e9 + len(files)
        with deciding_for(native), pytest.raises(TargetError, match="family with its features"):
            CPUInfo.from_target(own[other])


def test_attention_in_tile_registers_has_cycles():
    model = bert_base(layers=1, width=128, heads=2)
    found = predict("emeraldrapids", model, threads=2, precision="bf16")
    [row] = [row for row in found.kernels if row.op == "cpu.tileattention"]
    assert row.operator.startswith("attention, 128x128, 2 heads of 64")
    whole = predict(
        "emeraldrapids", bert_base(layers=1, width=256, heads=4), precision="bf16", threads=2
    )
    [more] = [row for row in whole.kernels if row.op == "cpu.tileattention"]
    assert 1.8 * row.seconds < more.seconds < 2.1 * row.seconds


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["icelake-server", "generic"])
def test_a_cpu_that_nobody_measured_is_estimated_and_says_so(
    tmp_path, monkeypatch, rename_cpu, cpu
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rename_cpu(cpu)
    own = CPUInfo.from_target(resolve("native", 2))
    known = load_machine("znver5" if own.vector_bits == 512 else "znver3")
    found = predict("native", threads=2)
    assert found.machine == cpu and f"({cpu}), estimated from {known.title}" in found.title
    text = f"on a CPU '{cpu}': times are estimated from the figures of '{known.name}'; run "
    assert text + "`tvm-fusion calibrate` on it" in found.notes[0]
    assert found.seconds > 0 and found.figures["bandwidth.memory"]["origin"].startswith("estimated")
    machine = find_machine("native", 2)
    assert machine["bandwidth.memory"] == known["bandwidth.memory"]
    assert machine["capacity.L2"] == 2 * own.l2_bytes
    if own.vector_bits >= 256:
        assert machine["peak_flops.float32"] == pytest.approx(known["peak_flops.float32"], rel=0.01)
    assert machine_from_json(machine.to_json()) == machine
    (tmp_path / "own.json").write_text(json.dumps(replace(machine, note="").to_json()))
    folder = tmp_path / "tvm-fusion" / "machines"
    folder.mkdir(parents=True)
    (tmp_path / "own.json").replace(folder / f"{cpu}-d-2.json")  # The name of the CPU goes on.
    assert predict("native", threads=2).notes[0] == machine.note
    (folder / f"{cpu}-d-2.json").replace(folder / f"{cpu}-2.json")
    assert not any("estimated from" in note for note in predict("native", threads=2).notes)


def test_the_code_of_a_known_cpu_can_be_planned_anywhere():
    assert cpu_target(find_machine("znver3")).attrs["num-cores"] == 2
