# SPDX-License-Identifier: Apache-2.0
"""Collectives over nodes, and trainings on them: limits by hand, and files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.cost.machine import load_machine
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.cluster import KINDS, Cluster, load_cluster
from tvm_fusion.prediction.collectives import bus_factor, node_collectives
from tvm_fusion.prediction.training import GPTTraining, predict_training

NODES = Cluster("two", load_machine("h100"), 4, 8, 5e10, 5e-6, "data sheet")
LINK = {"bandwidth": 5e10, "latency": 5e-6, "origin": "data sheet"}
FILE: dict[str, Any] = {"name": "two", "machine": "h100", "nodes": 4, "gpus_per_node": 8}


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps({**FILE, "link": LINK}))
    assert load_cluster(path) == NODES
    own = {**load_machine("h100").to_json(), "name": "own"}
    (tmp_path / "own.json").write_text(json.dumps(own))
    path.write_text(json.dumps({**FILE, "machine": "own.json", "link": LINK}))
    assert load_cluster(path).machine.name == "own"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nodes": 0}, "'nodes' is 0; expected a positive number"),
        ({"nodes": True}, "'nodes' is True; expected int"),
        ({"name": None}, "'name' is None; expected str"),
        ({"machine": "znver4"}, "'machine' 'znver4' is a CPU"),
        ({"machine": "h1"}, "no machine 'h1'"),
        ({"machine": "h" * 5000}, "no machine 'hhh"),
        ({"link": {**LINK, "bandwidth": -1.0}}, "'bandwidth' is -1.0; expected a positive"),
        ({"link": {**LINK, "latency": -1.0}}, "'latency' is -1.0; expected seconds"),
        ({"link": {"bandwidth": 1.0, "latency": 0}}, "'origin' is None; expected str"),
        ({"link": []}, r"'link' is \[\]; expected dict"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps({**FILE, "link": LINK, **changes}))
    with pytest.raises(PredictionError, match=f"two.json: .*{message}"):
        load_cluster(path)


def test_within_a_node_the_curves_of_its_machine_count() -> None:
    curves, _ = node_collectives(NODES.machine)
    for kind in KINDS[:-1]:
        found = NODES.predict(kind, range(8, 16), 1e7)
        assert found == curves.predict(kind, 8, 1e7)
    sent = NODES.predict("send_recv", (0, 1), 1e7)
    assert sent.seconds == pytest.approx(curves.predict("all_to_all", 2, 2e7).seconds)


def test_one_gpu_a_node_is_a_ring_of_links() -> None:
    ranks = range(0, 32, 8)
    found = NODES.predict("all_reduce", ranks, 1e9)
    assert found.seconds == pytest.approx(2 * 3 / 4 * 1e9 / 5e10 + 6 * 5e-6)
    assert (found.model, found.in_range) == ("ring", False)
    gathered = NODES.predict("all_gather", ranks, 1e9)
    assert gathered.seconds == pytest.approx(3 / 4 * 1e9 / 5e10 + 3 * 5e-6)
    sent = NODES.predict("send_recv", (0, 8), 1e9)
    assert sent.seconds == pytest.approx(1e9 / 5e10 + 5e-6)
    exchanged = NODES.predict("all_to_all", ranks, 1e9)
    assert exchanged.seconds == pytest.approx(3 / 4 * 1e9 / 5e10 + 5e-6)


def test_small_messages_go_up_and_down_a_tree() -> None:
    many = replace(NODES, nodes=64)
    found = many.predict("all_reduce", range(0, 512, 8), 1e3)
    assert found.model == "tree"
    assert found.seconds == pytest.approx(2 * 6 * 5e-6 + 2 * 1e3 / 5e10)


@given(st.sampled_from(KINDS[:-1]), st.integers(1, 4), st.floats(1e3, 1e9))
def test_no_collective_beats_its_links(kind: str, each: int, message: float) -> None:
    """Whole nodes use the links of all their GPUs, and a faster link never takes longer."""
    ranks = [8 * node + place for node in range(4) for place in range(each)]
    found = NODES.predict(kind, ranks, message)
    outside = message * bus_factor(kind, 4) / 5e10 / each
    assert found.seconds >= outside * (1 / each if kind == "all_to_all" else 0.99)
    faster = replace(NODES, bandwidth=1e11).predict(kind, ranks, message)
    assert faster.seconds <= found.seconds
    assert found.low <= found.seconds <= found.high
    assert NODES.predict(kind, ranks[::-1], message) == found


def test_groups_that_are_refused() -> None:
    with pytest.raises(PredictionError, match="collective 'scan'; expected one of all_reduce"):
        NODES.predict("scan", (0, 1), 1.0)
    for ranks in ((0, 0), (0, 32), (-1, 0)):
        with pytest.raises(PredictionError, match="expected different ones of 0 to 31"):
            NODES.predict("all_reduce", ranks, 1.0)
    with pytest.raises(PredictionError, match="message is nan bytes"):
        NODES.predict("all_reduce", (0, 1), float("nan"))
    assert NODES.predict("all_reduce", (3,), 1e9).seconds == 0


GPT = GPTTraining(4096, 32, 32, 2048, 64, 1, tensor=4, data=2, pipeline=4, recompute=True)


def test_a_training_adds_up() -> None:
    found = predict_training(GPT, NODES)
    parts = found.compute + found.tensor + found.pipeline + found.data + found.optimizer
    assert found.seconds == pytest.approx(parts + 5e-3)
    assert min(found.compute, found.tensor, found.pipeline, found.data, found.optimizer) > 0
    # 6 FLOP a weight and token, and 2 for what is computed again, at most at the peak.
    weights = 12 * 4096**2 * 32
    least = 8 * weights * 64 * 2048 / 32 / NODES.machine["peak_flops.float16"]
    assert 1 < found.compute / least < 4
    twice = predict_training(replace(GPT, global_batch=128), NODES)
    assert 1.7 < twice.seconds / found.seconds < 2


def test_a_training_alone_exchanges_nothing() -> None:
    alone = replace(GPT, tensor=1, data=1, pipeline=1)
    found = predict_training(alone, NODES)
    assert (found.tensor, found.pipeline, found.data) == (0, 0, 0)
    # 18 bytes of each of 6.7e9 weights.
    assert not found.fits and found.memory_bytes > 18 * 6.6e9
    assert predict_training(GPT, NODES).fits


def test_activations_that_are_kept_take_memory() -> None:
    kept = replace(GPT, recompute=False)
    assert kept.memory_bytes > GPT.memory_bytes
    assert predict_training(kept, NODES).seconds < predict_training(GPT, NODES).seconds


def test_trainings_that_are_refused() -> None:
    with pytest.raises(PredictionError, match="64 ranks; cluster 'two' has 32"):
        predict_training(replace(GPT, pipeline=8), NODES)
    with pytest.raises(PredictionError, match="heads of tensor: 32 is no multiple of 3"):
        replace(GPT, tensor=3)
    with pytest.raises(PredictionError, match="global_batch of micro_batch x data: 64 is no mult"):
        replace(GPT, micro_batch=3)
