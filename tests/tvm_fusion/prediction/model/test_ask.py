# SPDX-License-Identifier: Apache-2.0
"""Changes of models: what they bring, as text and as methods, and what is refused."""

import pytest
from small_onnx import small_decoder, small_model

import tvm_fusion
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.model.ask import phase_shapes
from tvm_fusion.prediction.timeline.execution_graph import Kernel, Launch, Op


def ask(*changes, machine="v100", engine="pytorch", shapes=None, **options):
    model = small_model("batch")
    shapes = shapes or {"batch": 2}
    return tvm_fusion.predict(model, machine, engine, shapes, what_if=changes, **options)


@pytest.mark.slow
def test_settings_are_predicted_anew():
    found = ask("machine=p4", "batch=4", "engine=tvm_fusion", "machine=p4 and batch=4")
    slower, larger, ours, both = found.answers
    assert slower.seconds == pytest.approx(ask(machine="p4").seconds)
    assert larger.seconds == pytest.approx(ask(shapes={"batch": 8}).seconds)
    assert ours.seconds == pytest.approx(ask(engine="tvm_fusion").seconds)
    assert both.seconds == pytest.approx(ask(machine="p4", shapes={"batch": 8}).seconds)
    assert slower.gain == pytest.approx(found.seconds - slower.seconds)
    assert any("have not been measured" in note for note in ours.notes)


def test_another_precision():
    (half,) = ask("precision=bf16 and machine=h100").answers
    assert half.seconds == pytest.approx(ask(machine="h100", precision="bf16").seconds)


def test_more_ranks():
    (two,) = ask("ranks=2 and machine=h100").answers
    assert two.seconds == pytest.approx(ask(machine="h100", ranks=2).seconds)
    with pytest.raises(PredictionError, match="ranks=two: expected a number of GPUs"):
        ask("ranks=two")


@pytest.mark.slow
def test_our_own_fusions():
    options = {"machine": "znver4", "engine": "tvm_fusion", "fuse": "all"}
    (apart, direct) = ask("fusion=none", "winograd=never", **options).answers
    assert apart.seconds == pytest.approx(ask(**options | {"fuse": "none"}).seconds)
    assert direct.seconds == pytest.approx(ask(**options, winograd="never").seconds)


def test_edits_of_the_run():
    found = ask("graph", "resize=conv2d:3", "remove=conv2d", "fuse=relu|clamp|clip|conv2d")
    graph, resized, removed, _ = found.answers
    assert graph.gain > 0 and removed.gain > 0
    assert resized.seconds >= found.seconds
    assert ask("graph and machine=p4").answers[0].seconds < ask("machine=p4").answers[0].seconds
    assert found.to_json()["answers"][0]["change"] == "graph"
    assert "scenario" not in found.to_json()


def test_methods_of_the_scenario():
    scenario = ask().scenario
    seconds = scenario.simulate().seconds
    long = Op("long", (Launch(Kernel(10**6, "long", 1e-2)),))
    assert scenario.insert(0, long).simulate().seconds > 1e-2
    assert scenario.remove("conv2d").simulate().seconds < seconds
    assert scenario.replace("conv2d", lambda op: ()).simulate().seconds < seconds
    assert scenario.resize("conv2d", 1e4).simulate().seconds > seconds
    assert scenario.parallelize("conv2d").simulate().seconds <= seconds
    assert scenario.change("graph").simulate().seconds < seconds
    with pytest.raises(PredictionError, match="replace=warp: matches no operator"):
        scenario.replace("warp", lambda op: ())


@pytest.mark.parametrize(
    "change, told",
    [
        ("bucket=25:link.json", "is for traces of several ranks"),
        ("colour=red", "unknown change 'colour=red'; expected machine, batch"),
        ("engine=jax", "engine is 'jax'; expected one of tvm_fusion, pytorch"),
        ("fusion=some", "fusion is 'some'; expected one of auto, all, none"),
        ("winograd=some", "winograd is 'some'; expected one of"),
        ("batch=0.3", "'0.3' times 2 is no positive integer"),
        ("batch=x", "'x' times 2 is no positive integer"),
        ("machine=abacus", "no machine 'abacus'"),
        ("remove=warp", "remove=warp: matches no operator"),
    ],
)
def test_wrong_changes(change, told):
    with pytest.raises(PredictionError, match=told):
        ask(change)


def test_a_fixed_batch_has_no_other():
    with pytest.raises(PredictionError, match="an open dimension 'batch', and its size"):
        tvm_fusion.predict(small_model(), "v100", "pytorch", what_if=["batch=2"])


def sizes(**options):
    found = tvm_fusion.predict(small_decoder(), "h200", "pytorch", {"batch": 2}, **options)
    return [
        dict(kernel.call.sizes)
        for graph in found.scenario.graphs
        for kernel in graph.kernels
        if kernel.call.op in ("gemm", "bmm", "attention")
    ]


def test_a_step_of_a_small_decoder():
    linear, scores, mixed = sizes(phase="decode", step=511)
    assert linear == {"B": 1, "M": 2, "N": 64, "K": 64}
    assert scores == {"B": 2, "M": 1, "N": 512, "K": 64}
    assert mixed == {"B": 2, "M": 1, "N": 64, "K": 512}
    half, attention = sizes(phase="decode", step=511, precision="bf16")
    assert half == linear
    assert attention == {"B": 2, "L": 1, "S": 512, "H": 1, "KV": 1, "D": 64}
    found = tvm_fusion.predict(
        small_decoder(),
        "h200",
        "pytorch",
        {"batch": 2},
        phase="decode",
        step=8,
        what_if=["step=65536", "precision=bf16 and step=65536"],
    )
    longer, half = found.answers
    assert half.seconds < longer.seconds and longer.gain < 0


def test_the_prompt_of_a_small_decoder():
    model = small_decoder("", "seq_len")
    found = tvm_fusion.predict(model, "h200", "pytorch", {"batch": 1}, phase="prefill", step=128)
    (scores, _) = (row for row in found.kernels if row.op == "bmm")
    assert "M=128 N=128" in scores.operator


def test_phases_that_are_refused():
    with pytest.raises(PredictionError, match="'past_sequence_length' would be 0; expected a mode"):
        phase_shapes(small_decoder().graph, "prefill", 16)
    with pytest.raises(PredictionError, match="called like 'past'; the model has batch, seq_len"):
        phase_shapes(small_decoder("", "seq_len").graph, "decode", 16)
    with pytest.raises(PredictionError, match="called like 'sequence'; the model has batch, a"):
        phase_shapes(small_decoder("", "a").graph, "prefill", 16)
    with pytest.raises(PredictionError, match="phase is 'train'; expected one of prefill, decode"):
        phase_shapes(small_decoder().graph, "train", 16)
    with pytest.raises(PredictionError, match="step is 0; expected a number of tokens from 1 on"):
        phase_shapes(small_decoder().graph, "decode", 0)
    with pytest.raises(PredictionError, match="step=4: expected a number of tokens, and a phase"):
        ask("step=4")
