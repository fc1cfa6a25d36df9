# SPDX-License-Identifier: Apache-2.0
"""Execution traces of each schema, and their links to Kineto's events."""

from __future__ import annotations

import pytest
from small_traces import AUTOGRAD, HOST, Kineto, execution_trace, node

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.traces.chakra import link, read_execution_trace
from tvm_fusion.prediction.traces.kineto import read_kineto

TENSOR = [11, 21, 0, 1024, 4, "cuda:0"]
SCHEMAS = [
    "1.0.1",
    "1.0.2-chakra.0.0.4",
    "1.0.3-chakra.0.0.4",
    "1.0.4-chakra.0.0.4",
    "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4",
]


def nodes(schema: str) -> list[dict]:
    """Nodes in the order of their ends: a child comes before its parent."""
    newer = schema.startswith("1.1")
    more = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 1024}
    inputs = [TENSOR, 7, 0, "allreduce", [], []]
    return [
        node(2, 1, "[pytorch|profiler|execution_trace|thread]", schema),
        node(4, 3, "aten::mm", schema, inputs=[TENSOR, [12, 22, 0, 8, 4, "cuda:0"]],
             outputs=[[13, 23, 0, 8, 4, "cuda:0"]], shapes=[[32, 32]], types=["Tensor(float)"]),
        node(3, 2, "aten::linear", schema),
        node(6, 5, "record_param_comms", schema, inputs=inputs, outputs=[[TENSOR]],
             **(more if newer else {})),
        node(5, 2, "c10d::allreduce_", schema),
    ]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(tmp_path, schema: str) -> None:
    path = execution_trace(tmp_path / "x.et.json", schema, nodes(schema))
    trace = read_execution_trace(path)
    assert trace.schema == schema
    assert [one.id for one in trace.nodes] == [2, 3, 4, 5, 6]
    product = trace.nodes[2]
    assert (product.parent, product.thread, product.record_function) == (3, 1, 4)
    assert (product.reads, product.writes) == ((21, 22), (23,))
    assert (product.shapes, product.types) == (((32, 32),), ("Tensor(float)",))
    reduced = trace.nodes[4].collective
    assert reduced["Collective name"] == "allreduce"
    assert reduced.get("In msg nelems") == (1024 if schema.startswith("1.1") else None)


def kineto(tmp_path, record_functions: bool):
    trace = Kineto()
    names = ["ProfilerStep#3", "aten::linear", "aten::mm", "c10d::allreduce_", "record_param_comms"]
    for at, name in enumerate(names):
        known = {"Record function id": [0, 3, 4, 5, 6][at]} if record_functions else {}
        trace.op(name, 10 * at, 5, **known)
    trace.op("aten::linear", 1, 2, AUTOGRAD)
    return read_kineto(trace.write(tmp_path / "x.kineto.json"))


@pytest.mark.parametrize("record_functions", [False, True])
def test_link(tmp_path, record_functions: bool) -> None:
    execution = read_execution_trace(
        execution_trace(tmp_path / "x.et.json", "1.0.1", nodes("1.0.1"))
    )
    trace = kineto(tmp_path, record_functions)
    found = link(execution, trace)
    assert {id_: (event.name, event.thread) for id_, event in found.items()} == {
        3: ("aten::linear", HOST),
        4: ("aten::mm", HOST),
        5: ("c10d::allreduce_", HOST),
        6: ("record_param_comms", HOST),
    }
    assert found[4].reads == (21, 22)
    assert found[4].shapes == ((32, 32),)
    assert found[6].collective == {"Collective name": "allreduce"}
    assert not trace.warnings()


def test_nodes_without_event_are_counted(tmp_path) -> None:
    more = [*nodes("1.0.1"), node(9, 2, "aten::gone", "1.0.1")]
    execution = read_execution_trace(execution_trace(tmp_path / "x.et.json", "1.0.1", more))
    trace = kineto(tmp_path, False)
    link(execution, trace)
    expected = "1 nodes of x.et.json without their event; the first: aten::gone (id 9)"
    assert trace.warnings() == [f"x.kineto.json: {expected}"]


@pytest.mark.parametrize("schema", ["1.2.0", "0.9", ""])
def test_unknown_schema(tmp_path, schema: str) -> None:
    path = execution_trace(tmp_path / "x.et.json", schema, [])
    with pytest.raises(PredictionError, match="schema .* is unknown; expected 1.0.1, 1.0.2"):
        read_execution_trace(path)


def test_broken_nodes(tmp_path) -> None:
    path = tmp_path / "x.et.json"
    broken = {"id": 4, "name": "aten::mm", "rf_id": 1, "tid": 1}
    execution_trace(path, "1.0.1", [broken])
    with pytest.raises(PredictionError, match=r"node 4 \(aten::mm\): parent is None"):
        read_execution_trace(path)
    execution_trace(path, "1.0.1", [17])
    with pytest.raises(PredictionError, match="a node is 17"):
        read_execution_trace(path)
    execution_trace(path, "1.0.1", [])
    with pytest.raises(PredictionError, match="no nodes"):
        read_execution_trace(path)
    path.write_text('{"nodes": [{}], "schema": "1.0.1"}')
    with pytest.raises(PredictionError, match="no schema before its nodes"):
        read_execution_trace(path)


def test_cycles(tmp_path) -> None:
    ring = [node(3, 5, "a", "1.0.1"), node(4, 3, "b", "1.0.1"), node(5, 4, "c", "1.0.1")]
    path = execution_trace(tmp_path / "x.et.json", "1.0.1", ring)
    with pytest.raises(PredictionError, match=r"node \d .* calls itself through its parents"):
        read_execution_trace(path)
