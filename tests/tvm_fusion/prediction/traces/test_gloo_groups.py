# SPDX-License-Identifier: Apache-2.0
"""Groups of gloo's collectives, from the threads that run them and from what traces name."""

from __future__ import annotations

import json

import pytest
from small_traces import Kineto, execution_trace, node

from tvm_fusion.prediction.api import load_traces, predict_traces

WORLD = {"pg_name": "0", "ranks": [0, 1]}
SECOND = {"pg_name": "1", "ranks": [0, 1]}
THREAD = {"0": 310, "1": 320, "own": 330}
"""First of the two threads of each group."""


def own(rank: int) -> dict:
    return {"pg_name": f"own {rank}", "ranks": [rank]}


def trace(folder, rank: int, calls: list[tuple[str, int]], groups: list[dict], **more) -> Kineto:
    """All-reduces of so many elements in groups, on the threads of a group in turn; none waits."""
    found = Kineto(rank, device="")
    found.data["distributedInfo"]["pg_config"] = groups
    end = 100 * len(calls)
    for at, (group, size) in enumerate(calls):
        ids = {"Record function id": 2 * at + 1}
        found.op("c10d::allreduce_", 100 * at, 20, **ids, **more)
        args = {"Input type": ["float"], "Input Dims": [[size]], "Record function id": 2 * at + 2}
        thread = THREAD[group] + rank + calls[:at].count((group, size)) % 2
        begin = 100 * at + 10
        found.event("user_annotation", "gloo:all_reduce", begin, end - begin, thread, **args)
    found.op("aten::add", end + 50, 10)
    found.write(folder / f"rank{rank}.json")
    return found


def collectives(run) -> list[list[tuple[str, float]]]:
    parts = [[kernel.collective for kernel in graph.kernels] for graph in run.graphs]
    return [[(part.group, part.bytes / 4) for part in each if part] for each in parts]


def test_ranks_that_call_their_groups_in_other_orders(tmp_path) -> None:
    calls = [("1", 8), ("0", 16), ("1", 8), ("0", 16)]
    trace(tmp_path, 0, calls, [WORLD, SECOND])
    trace(tmp_path, 1, [calls[1], calls[0], calls[3], calls[2]], [WORLD, SECOND])
    (run,) = load_traces(tmp_path)
    assert not run.warnings
    assert collectives(run) == [
        [("1", 8), ("0", 16), ("1", 8), ("0", 16)],
        [("0", 16), ("1", 8), ("0", 16), ("1", 8)],
    ]
    ranks = {kernel.collective.ranks for kernel in run.graphs[0].kernels if kernel.collective}
    assert ranks == {(0, 1)}
    assert predict_traces(run).report.seconds > 0


def test_a_group_of_one_rank_meets_nobody(tmp_path) -> None:
    shared = [("1", 8), ("1", 8)]
    trace(tmp_path, 0, [*shared, ("own", 8), ("own", 8)], [WORLD, SECOND, own(0)])
    trace(tmp_path, 1, shared, [WORLD, SECOND, own(1)])
    (run,) = load_traces(tmp_path)
    (first, second) = collectives(run)
    assert second in ([("0", 8)] * 2, [("1", 8)] * 2)  # groups of the same ranks
    assert first == [*second, ("own 0", 8), ("own 0", 8)]
    predict_traces(run)


def test_ranks_that_do_not_agree(tmp_path) -> None:
    for rank in (0, 1):
        trace(tmp_path, rank, [("1", 8 + rank)], [WORLD, SECOND])
    (run,) = load_traces(tmp_path)
    assert run.warnings[0].startswith("rank0.json: 1 collectives of gloo of unknown groups")
    assert collectives(run)[0] == [("", 8)]


@pytest.mark.parametrize("schema", ["1.0.3", "1.0.4", "1.1.0-chakra.0.0.4", "1.1.1"])
def test_named_groups(tmp_path, schema: str) -> None:
    """A group by the arguments of a collective, its ranks by the trace's groups."""
    for rank in (0, 1):
        found = trace(tmp_path, rank, [("1", 8)], [])
        found.op("record_param_comms", 5, 3, **{"Record function id": 9})
        found.write(tmp_path / f"rank{rank}.json")
        named: dict = {"collective_name": "allreduce", "pg_name": "tables", "dtype": "Float"}
        inputs: list = []
        if schema < "1.1":
            named, inputs = {}, [["tables", "of embeddings"], rank, "allreduce", [], []]
        groups = json.dumps([{"pg_name": "tables", "ranks": [0, 1]}])
        nodes = [
            node(3, 2, "## process_group:init ##", schema, inputs=[groups]),
            node(4, 2, "c10d::allreduce_", schema, rf_id=1),
            node(5, 4, "record_param_comms", schema, rf_id=9, inputs=inputs, **named),
        ]
        execution_trace(tmp_path / f"rank{rank}.et.json", schema, nodes)
    (run,) = load_traces(tmp_path)
    assert not run.warnings
    assert collectives(run) == [[("tables", 8)]] * 2
    parts = [kernel.collective for kernel in run.graphs[1].kernels]
    assert [part.ranks for part in parts if part] == [(0, 1)]
