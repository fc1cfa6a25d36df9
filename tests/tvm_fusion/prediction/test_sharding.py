# SPDX-License-Identifier: Apache-2.0
"""Sharders of Table 5.3, their predictions, and what does not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.cost.machine import Figure, Machine, load_machine
from tvm_fusion.cli import main
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.collectives import Collectives, Curve
from tvm_fusion.prediction.sharding import (
    COSTS,
    EmbeddingTable,
    ShardingTask,
    greedy,
    load_tables,
    shard,
)

V100 = load_machine("v100")
TABLES = tuple(
    EmbeddingTable(f"t{n}", rows, width, lookups)
    for n, (rows, width, lookups) in enumerate(
        [(10**6, 64, 20), (10**4, 128, 2), (10**7, 32, 1), (10**5, 64, 50), (10**3, 64, 5)]
    )
)


def task(tables=TABLES, ranks: int = 2, machine=V100, **more) -> ShardingTask:
    return ShardingTask(tables, 512, machine, ranks, **more)


def test_costs_of_table_5_3() -> None:
    table = TABLES[0]
    assert COSTS["size_greedy"](table) == 10**6
    assert COSTS["lookup_greedy"](table) == 20 * 64
    assert COSTS["norm_lookup_greedy"](table) == 20 / 10**6
    assert COSTS["size_lookup_greedy"](table) == pytest.approx(20 * 64 * 6)


def test_greedy_puts_the_dearest_first() -> None:
    # Rows 10^7 | 10^6 10^5 10^4 10^3: all small ones on the second rank.
    assert greedy(TABLES, 2, COSTS["size_greedy"]) == [1, 1, 0, 1, 1]


def curves_of(seconds_of_a_byte: float) -> Collectives:
    sizes = tuple(float(1 << n) for n in range(10, 28))
    times = tuple(size * seconds_of_a_byte for size in sizes)
    return Collectives({("all_to_all", 2): Curve("all_to_all", 2, sizes, times)})


def cpu() -> Machine:
    memory = {"bandwidth.memory": Figure(2e10, "test")}
    found = load_machine("znver4")
    return replace(found, figures=dict(found.figures) | memory)


def test_a_cpu_joins_the_results_of_its_tables() -> None:
    wide = (EmbeddingTable("t", 1000, 128, 1.0),)
    alone = ShardingTask(wide, 1024, cpu(), 1).sharding("x", [0]).seconds
    shared = ShardingTask(wide, 512, cpu(), 2, curves_of(1e-18)).sharding("x", [0]).seconds
    # 1024 results of 512 bytes are read and written; the lookups are the same.
    assert shared - alone == pytest.approx(2 * 1024 * 512 / 2e10, rel=1e-3)


def exchange_seconds(machine: Machine, ranks: list[int]) -> float:
    """Seconds of an iteration's exchanges, at 10 GB/s."""
    slow, free = (
        task(machine=machine, collectives=curves_of(each)).sharding("x", ranks).seconds
        for each in (1e-10, 1e-16)
    )
    return slow - free


def test_exchange_follows_the_largest_message() -> None:
    # Rank 0 puts in 288 columns of all 1024 samples, rank 1 gets 352 of 512; forward and backward.
    assert exchange_seconds(V100, [0, 0, 0, 0, 1]) == pytest.approx(
        2 * 1024 * 288 * 4 / 1e10, rel=0.01
    )
    by_link = task().sharding("x", [0, 0, 0, 0, 1]).seconds
    free = task(collectives=curves_of(1e-16)).sharding("x", [0, 0, 0, 0, 1]).seconds
    # A half of the message stays on its rank.
    assert by_link - free == pytest.approx(2 * 512 * 288 * 4 / V100["bandwidth.pcie"], rel=0.01)


def test_ranks_of_a_cpu_share_memory_and_caches() -> None:
    # All 352 columns of 1024 samples pass through one memory, whoever holds their tables.
    for ranks in ([0, 0, 0, 0, 1], [0, 1, 0, 1, 0]):
        expected = 2 * 512 * 352 * 4 / 1e10
        assert exchange_seconds(cpu(), ranks) == pytest.approx(expected, rel=0.01)
    # The rank's own table takes longer the more of the caches the other rank's take.
    table, few, many = (EmbeddingTable("t", 10**6, 64, lookups) for lookups in (20, 1, 100))
    times = [
        ShardingTask((table, other), 512, cpu(), 2)._lookup([table], False) for other in (few, many)
    ]
    assert times[0] < times[1]


def test_slowest_rank_decides() -> None:
    one, two = replace(TABLES[0], lookups=80), TABLES[0]
    skewed = task((one, two, two)).sharding("x", [0, 1, 1])
    assert 0.5 < skewed.balance < 1
    assert skewed.memory == (one.bytes, 2 * two.bytes)
    even = task((one, one)).sharding("x", [0, 1])
    assert even.balance == pytest.approx(1)


def test_one_rank_exchanges_nothing() -> None:
    alone = task(ranks=1).sharding("x", [0] * 5)
    assert alone.seconds < task().sharding("x", [0] * 5).seconds
    assert {one.balance for one in shard(task(ranks=1))} == {1.0}


TABLE = st.builds(
    EmbeddingTable,
    st.just("t"),
    st.integers(1, 10**7),
    st.sampled_from([16, 64]),
    st.floats(0.1, 60),
)


@given(st.lists(TABLE, min_size=1, max_size=7), st.integers(1, 3))
def test_search_is_never_behind(tables, ranks) -> None:
    found = shard(task(tuple(tables), ranks))
    assert sorted(one.sharder for one in found) == sorted([*COSTS, "naive", "random", "search"])
    by_name = {one.sharder: one for one in found}
    assert by_name["search"].seconds <= min(one.seconds for one in found) * (1 + 1e-9)
    for one in found:
        assert sum(one.memory) == sum(table.bytes for table in tables)
        assert set(one.ranks) <= set(range(ranks))
        assert 0 < one.balance <= 1 + 1e-9
        assert math.isfinite(one.seconds)


def test_memory() -> None:
    figures = dict(V100.figures) | {"capacity.memory": Figure(2e9, "test")}
    small = replace(V100, figures=figures)
    found = shard(replace(task(ranks=4), machine=small))
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True) and any(fits)
    tiny = replace(V100, figures=figures | {"capacity.memory": Figure(1e9, "test")})
    expected = "1566976000 bytes of tables do not fit on 2 ranks of v100, .*'t2', has 128000"
    with pytest.raises(PredictionError, match=expected):
        shard(replace(task(), machine=tiny))


def test_file_of_tables(tmp_path, capsys) -> None:
    path = tmp_path / "tables.json"
    entries = [
        {"name": one.name, "rows": one.rows, "width": one.width, "lookups": one.lookups}
        for one in TABLES
    ]
    path.write_text(json.dumps({"batch": 512, "tables": entries}))
    assert load_tables(path) == (TABLES, 512)
    arguments = ["shard", str(path), "--machine", "v100", "--ranks", "2"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tables"] == ["t0", "t1", "t2", "t3", "t4"]
    assert result["shardings"][0]["seconds"] == shard(task())[0].seconds
    assert main(arguments) == 0
    assert "size_lookup_greedy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "expected a list of 'tables'"),
        ({"batch": 1, "tables": []}, "expected a list of 'tables'"),
        ({"tables": [{}]}, "the file: batch is None"),
        ({"batch": 1, "tables": [{"name": "x"}]}, "table 'x': rows is None"),
        ({"batch": 1, "tables": [{"rows": 1, "width": 0, "lookups": 1}]}, "'0': width is 0"),
        ({"batch": 1, "tables": [{"rows": 1, "width": 1, "lookups": math.nan}]}, "lookups is nan"),
        ({"batch": 1, "tables": [3]}, "rows is None; expected a positive integer"),
    ],
)
def test_broken_files(tmp_path, data, reason: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PredictionError, match=f"tables.json: .*{reason}"):
        load_tables(path)
    path.write_text("{")
    with pytest.raises(PredictionError, match="not JSON"):
        load_tables(path)


@pytest.mark.parametrize("machine", ["znver4", "v100"])
def test_tables_beyond_any_memory(tmp_path, machine: str) -> None:
    size = (1 << 53) - 1
    table = {"name": "u", "rows": size, "width": size, "lookups": 5}
    (tmp_path / "t.json").write_text(json.dumps({"batch": 1, "tables": [table]}))
    tables, batch = load_tables(tmp_path / "t.json")
    seconds = ShardingTask(tables, batch, load_machine(machine), 1).sharding("x", [0]).seconds
    assert 0 < seconds < math.inf


def test_the_data_of_a_table_say_which_rows_are_hot(tmp_path) -> None:
    random = np.random.default_rng(0)
    offsets = np.arange(1024) * 20
    shape = {"rows": 10**7, "width": 64}
    for name, most in (("hot", 100), ("cold", 10**7)):
        np.savez(tmp_path / name, indices=random.integers(most, size=20_480), offsets=offsets)
    entries = [{"name": name, **shape, "data": f"{name}.npz"} for name in ("hot", "cold")]
    file = tmp_path / "tables.json"
    file.write_text(json.dumps({"batch": 512, "tables": entries}))
    (hot, cold), batch = load_tables(file)
    assert hot.lookups == cold.lookups == 20 and sum(hot.data.used) == 100
    alone = [ShardingTask((one,), 1024, V100, 1).sharding("x", [0]).seconds for one in (hot, cold)]
    assert alone[0] < alone[1] / 1.5
    assert ShardingTask((hot, cold), batch, V100, 2).sharding("x", [0, 1]).balance < 0.9
    with pytest.raises(PredictionError, match="'hot': its data are of 1024 samples; .* 512"):
        ShardingTask((hot, cold), 256, V100, 2).sharding("x", [0, 1])


def test_bad_data_of_a_table_are_refused(tmp_path) -> None:
    np.savez(tmp_path / "few", indices=np.arange(20))
    np.savez(tmp_path / "high", indices=np.arange(20), offsets=np.zeros(1, int))
    for name, message in (
        ("few.npz", "no array 'offsets'"),
        ("high.npz", "expected rows 0 to 9"),
        ("none.npz", "none.npz"),
        ("../few.npz", "data is '../few.npz'; expected the name of a file in the same folder"),
        (str(tmp_path / "few.npz"), "expected the name of a file in the same folder"),
        (7, "data is 7; expected the name of a file"),
    ):
        file = tmp_path / "tables.json"
        table = {"name": "users", "rows": 10, "width": 4, "data": name}
        file.write_text(json.dumps({"batch": 1, "tables": [table]}))
        with pytest.raises(PredictionError, match=f"tables.json: table 'users': .*{message}"):
            load_tables(file)
