# SPDX-License-Identifier: Apache-2.0
"""Rows over ranks: what is read and sent, against sets of rows; choices and their costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.distribute.cost import CALL_SECONDS, Network, Processor
from schedules.distribute.rows import row_cost as row_cost_module
from schedules.distribute.rows.row_cost import (
    KERNEL_SECONDS,
    PYTHON_SECONDS,
    choose_exchanges,
    row_cost,
    segments,
)
from schedules.distribute.rows.row_plan import (
    Enlargement,
    NetworkStage,
    RankPart,
    RankPlan,
    RowExchange,
    RowPlacement,
    RowWindow,
    StageOperand,
    heighten,
    place,
    plan_from_json,
    transfers,
)
from schedules.errors import OpError

PROCESSOR = Processor(rate=1e9, bandwidth=1e10)
FAST, SLOW = Network(1e-7, 1e11), Network(1.0, 1e3)


@st.composite
def windows(draw: st.DrawFn, extent: int) -> RowWindow:
    reach = draw(st.integers(1, min(5, extent)))
    return RowWindow(extent, draw(st.integers(1, 3)), reach, draw(st.integers(0, reach - 1)))


@st.composite
def networks(draw: st.DrawFn) -> list[NetworkStage]:
    """A chain of windows and enlargements, some of whose results are added to the input's."""
    stages = [NetworkStage("x", "input", draw(st.integers(1, 40)), 8)]
    for number in range(draw(st.integers(1, 5))):
        rows = stages[-1].rows
        if draw(st.booleans()):
            factor = draw(st.sampled_from([1, 2]))
            one: RowWindow | Enlargement = Enlargement(rows, factor, draw(st.integers(0, 1)))
            made = rows * factor
        else:
            one = draw(windows(rows))
            bottom = draw(st.integers(0, one.reach - 1))
            made = (rows + one.top + bottom - one.reach) // one.stride + 1
        read = [StageOperand(len(stages) - 1, (one,))]
        same = [place for place, stage in enumerate(stages) if stage.rows == made]
        if same and draw(st.booleans()):
            read.append(StageOperand(draw(st.sampled_from(same)), ()))
        grain = draw(st.sampled_from([1, 1, 4]))
        stages.append(NetworkStage(f"y{number}", "window", made, 8, tuple(read), 100.0, 16, grain))
    return stages


def rows_read(operand: StageOperand, source: NetworkStage, row: int) -> set[int]:
    """Rows that one row of a reader needs, by the definitions."""
    rows = {row}
    for one in operand.maps or ():
        if isinstance(one, RowWindow):
            reached = {one.stride * r - one.top + k for r in rows for k in range(one.reach)}
        else:
            near = range(-one.halo, one.halo + 1)
            reached = {r // one.factor + k for r in rows for k in near}
        rows = {r for r in reached if 0 <= r < one.extent}  # type: ignore[attr-defined]
    return set(range(source.rows)) if operand.maps is None else rows


def as_set(rows: np.ndarray) -> set[int]:
    return set(range(*rows))


@given(networks(), st.integers(1, 9), st.data())
def test_every_rank_holds_what_it_reads_and_no_row_more(
    stages: list[NetworkStage], ranks: int, data: st.DataObject
) -> None:
    inner = range(1, len(stages))
    split = [index for index in inner if stages[index].is_split]
    exchanged = data.draw(st.sets(st.sampled_from(split)) if split else st.just(set()))
    heights = sorted({stages[index].rows for index in split})
    aligned = data.draw(st.sets(st.sampled_from(heights)) if heights else st.just(set()))
    placement = place(stages, ranks, exchanged, aligned)
    for rank in range(ranks):
        needed: list[set[int]] = [set() for _ in stages]
        needed[-1] = set(range(stages[-1].rows)) if rank == 0 else set()
        for index in reversed(inner):
            for operand in stages[index].operands:
                for row in as_set(placement.computed[index][rank]):
                    needed[operand.stage] |= rows_read(operand, stages[operand.stage], row)
        for index, rows in enumerate(needed):
            hull = set(range(min(rows), max(rows) + 1)) if rows else set()
            assert as_set(placement.held[index][rank]) == hull
            if index not in exchanged:
                begin, end = placement.computed[index][rank]
                assert hull <= set(range(begin, end))
                assert begin % stages[index].grain == 0 and len(hull) + 8 > end - begin
    for index in exchanged:
        own = [as_set(rows) for rows in placement.computed[index]]
        assert set().union(*own) == set(range(stages[index].rows))
        assert sum(map(len, own)) == stages[index].rows
        for begin, _ in placement.computed[index]:
            assert begin % stages[index].grain == 0


@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_messages_bring_each_missing_row_once(rows: int, ranks: int, data: st.DataObject) -> None:
    bounds = np.arange(ranks + 1) * rows // ranks
    own = np.stack([bounds[:-1], bounds[1:]], axis=1)
    ends = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(sorted)
    held = np.array([data.draw(ends) for _ in range(ranks)])
    received: list[list[int]] = [[] for _ in range(ranks)]
    for source, dest, begin, end in transfers(own, held).tolist():
        assert source != dest and begin < end
        assert set(range(begin, end)) <= as_set(own[source])
        received[dest] += range(begin, end)
    for rank in range(ranks):
        assert sorted(received[rank]) == sorted(as_set(held[rank]) - as_set(own[rank]))


def by_channels(blocks: int = 5) -> list[NetworkStage]:
    """Two 3x3 layers that may be split by channels, a sum of both, a 3x3 layer, and one number."""
    window = (RowWindow(8, 1, 3, 1),)
    first = NetworkStage("a", "conv2d", 8, 400, (StageOperand(0, window),), 1e3, 10**6, 4, blocks)
    second = replace(first, name="b", operands=(StageOperand(1, window), StageOperand(1, ())))
    plain: dict[str, Any] = {"flops": 1e6, "fixed_bytes": 0, "grain": 1, "blocks": 1}
    third = replace(first, name="c", operands=(StageOperand(2, window),), **plain)
    head = NetworkStage("sum", "sum", 1, 4, (StageOperand(3, None),), grain=1)
    return [NetworkStage("x", "input", 8, 80), first, second, third, head]


def test_channels_need_all_rows_and_are_exchanged() -> None:
    stages = by_channels()
    placement = place(stages, 2, [3], by_channels=[1, 2])
    assert placement.exchanged == (1, 2, 3)
    assert placement.computed[1].tolist() == placement.computed[2].tolist() == [[0, 2], [2, 5]]
    assert placement.held[0].tolist() == placement.held[1].tolist() == [[0, 8], [0, 8]]
    assert placement.held[2].tolist() == [[0, 5], [3, 8]]  # a halo of the third's rows
    assert placement.transfers(2).tolist() == [[1, 0, 0, 5], [0, 1, 3, 8]]
    assert placement.sent_bytes(stages, 2).tolist() == [5 * 240, 5 * 160]
    many = place(stages, 7, [3], by_channels=[2])  # more ranks than blocks
    assert many.computed[2].tolist()[0] == [0, 0]
    assert many.held[1].tolist()[0] == [0, 0] and many.held[1].tolist()[1] == [0, 8]
    assert len(many.transfers(2)) == 7 * 5 - 5


def test_what_is_added_to_channels_is_theirs() -> None:
    """The second layer's residual is not exchanged where it is split alike."""
    stages = by_channels()
    residual = replace(stages[2], operands=(StageOperand(0, ()), StageOperand(1, ())))
    network = [*stages[:2], residual, *stages[3:]]
    assert place(network, 2, [3], by_channels=[1, 2]).held[1].tolist() == [[0, 0], [0, 0]]
    assert place(network, 2, [1, 3], by_channels=[2]).held[1].tolist() == [[0, 8], [0, 8]]


def test_channels_are_chosen_where_weights_take_longest() -> None:
    stages = by_channels()
    placement = choose_exchanges(stages, 2, FAST, replace(PROCESSOR, only_read=1e8))
    assert placement.by_channels == {1, 2}
    cost = row_cost(stages, placement, FAST, replace(PROCESSOR, only_read=1e8))
    assert cost.compute[1] == pytest.approx(
        [share * (8e3 / 1e9 + 1e6 / 1e8) + CALL_SECONDS for share in (0.4, 0.6)]
    )
    first, second, third, _ = segments(stages, placement, cost)
    assert (first.split, second.split, third.split) == ("channels", "channels", "rows")
    assert (first.bytes, first.halo, first.recomputed) == (8 * 400, 8, 0)
    for choice in ("always", "once"):
        assert not choose_exchanges(stages, 2, FAST, PROCESSOR, choice).by_channels
    assert not choose_exchanges(stages, 2, SLOW, PROCESSOR).by_channels


def chain(count: int = 3, rows: int = 64) -> list[NetworkStage]:
    """3x3 convolutions, and a sum over all rows."""
    stages = [NetworkStage("x", "input", rows, 400)]
    for number in range(count):
        read = (StageOperand(number, (RowWindow(rows, 1, 3, 1),)),)
        stages.append(NetworkStage(f"conv{number}", "conv2d", rows, 400, read, 1e5, 1000))
    stages.append(NetworkStage("sum", "sum", 1, 4, (StageOperand(count, None),), grain=1))
    return stages


def test_always_exchanges_before_every_halo_and_once_before_the_head() -> None:
    always = choose_exchanges(chain(), 4, FAST, PROCESSOR, "always")
    assert always.exchanged == (1, 2, 3)
    assert always.computed[1].tolist() == [[0, 16], [16, 32], [32, 48], [48, 64]]
    assert always.held[1].tolist() == [[0, 17], [15, 33], [31, 49], [47, 64]]
    assert always.held[3].tolist() == [[0, 64], [0, 0], [0, 0], [0, 0]]
    once = choose_exchanges(chain(), 4, FAST, PROCESSOR, "once")
    assert once.exchanged == (3,)
    assert once.computed[1].tolist() == [[0, 18], [14, 34], [30, 50], [46, 64]]


def test_segments_count_halos_bytes_and_recomputed_rows() -> None:
    stages = chain()
    placement = choose_exchanges(stages, 4, FAST, PROCESSOR, "always")
    first, _, last, result = segments(
        stages, placement, row_cost(stages, placement, FAST, PROCESSOR)
    )
    assert (first.end, first.halo, first.messages, first.bytes) == ("exchange", 2, 6, 6 * 400)
    assert (last.end, last.halo, last.messages, last.bytes) == ("gather", 48, 3, 48 * 400)
    assert (result.end, result.messages, result.rows[0]) == ("result", 0, (0, 1))
    assert first.recomputed == 0
    once = place(stages, 4, [3])
    found = segments(stages, once, row_cost(stages, once, FAST, PROCESSOR))
    assert found[0].recomputed == pytest.approx((6 * 2 + 6 * 1) / (3 * 64))
    assert len(found) == 2


def test_the_choice_follows_the_network() -> None:
    stages = chain()

    def seconds(network: Network, choice: str) -> float:
        placement = choose_exchanges(stages, 4, network, PROCESSOR, choice)
        return row_cost(stages, placement, network, PROCESSOR).seconds

    for network in (FAST, Network(1e-4, 1e8), SLOW):
        best = min(seconds(network, choice) for choice in ("always", "once"))
        assert seconds(network, "auto") <= best
    assert choose_exchanges(stages, 4, FAST, PROCESSOR).exchanged == (1, 2, 3)
    assert choose_exchanges(stages, 4, Network(2e-4, 1e9), PROCESSOR).exchanged == (3,)
    assert choose_exchanges(stages, 4, SLOW, PROCESSOR).exchanged == ()


def test_each_stage_is_predicted_once_for_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search places the network hundreds of times, mostly as before."""
    seen: list[tuple[int, bool, bytes]] = []
    predict = row_cost_module._compute_seconds

    def noted(stages: Any, index: int, placement: RowPlacement, processor: Processor) -> Any:
        rows = placement.computed[index].tobytes()
        seen.append((index, index in placement.by_channels, rows))
        return predict(stages, index, placement, processor)

    monkeypatch.setattr(row_cost_module, "_compute_seconds", noted)
    stages = [replace(stage, blocks=4) if stage.flops else stage for stage in chain(8)]
    choose_exchanges(stages, 3, FAST, PROCESSOR)
    assert len(seen) == len(set(seen)) > len(stages)


def test_what_convolutions_write_is_not_copied() -> None:
    stages = chain()
    plain = [replace(stage, flops=0.0) for stage in stages]
    seconds = [
        row_cost(each, place(each, 2, [1]), FAST, PROCESSOR).exchange[1].max()
        for each in (stages, plain)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * 32 * 400 / 1e10)


def test_shares_are_cut_between_tiles_where_that_gains() -> None:
    """14 rows in tiles of 4: 8 and 6 are computed at once, 7 and 7 as 8 and 10."""
    stages = chain(2, rows=14)
    tiled = replace(stages[2], grain=4)
    read = (StageOperand(2, (RowWindow(14, 1, 1, 0),)),)
    last = NetworkStage("conv2", "conv2d", 14, 400, read, 1.0, 1000)
    head = NetworkStage("sum", "sum", 1, 4, (StageOperand(3, None),), grain=1)
    placement = choose_exchanges([*stages[:2], tiled, last, head], 2, FAST, PROCESSOR)
    assert placement.computed[2].tolist() == [[0, 8], [8, 14]]
    assert place([*stages[:2], tiled, last, head], 2, [3]).computed[2].tolist() == [[0, 8], [4, 14]]


def test_tiles_are_exchanged_where_later_shares_are_equal() -> None:
    """Equal shares of what reads the tiles compute one twice if nothing is exchanged after them."""
    stages = chain(2, rows=14)
    tiled = replace(stages[2], grain=4, flops=1e6)
    read = (StageOperand(2, (RowWindow(14, 1, 1, 0),)),)
    last = NetworkStage("conv2", "conv2d", 14, 400, read, 1e6, 1000)
    head = NetworkStage("sum", "sum", 1, 4, (StageOperand(3, None),), grain=1)
    placement = choose_exchanges([*stages[:2], tiled, last, head], 2, FAST, PROCESSOR)
    assert placement.computed[2].tolist() == [[0, 8], [8, 14]]
    assert placement.computed[3].tolist() == [[0, 7], [7, 14]]
    assert transfers(placement.computed[2], placement.held[2]).tolist() == [[0, 1, 7, 8]]


def test_a_share_reads_all_weights_and_computes_whole_tiles() -> None:
    stages = [
        NetworkStage("x", "input", 14, 8),
        NetworkStage("y", "conv2d", 14, 8, (StageOperand(0, ()),), 1e6, fixed_bytes=10**7, grain=4),
    ]
    processor = replace(PROCESSOR, only_read=2e9)
    shares = place(stages, 2, [1])
    assert shares.computed[1].tolist() == [[0, 8], [8, 14]]
    whole = row_cost(stages, place(stages, 1, []), FAST, processor).compute[1]
    parts = row_cost(stages, shares, FAST, processor).compute[1]
    assert whole == pytest.approx([14e6 / 1e9 + 1e7 / 2e9 + CALL_SECONDS])
    assert parts == pytest.approx([8e6 / 1e9 + 1e7 / 2e9 + CALL_SECONDS] * 2)
    plain = row_cost(stages, shares, FAST, PROCESSOR).compute[1]
    assert parts - plain == pytest.approx([1e7 / 2e9 - 1e7 / 1e10] * 2)
    twice = row_cost(stages, shares, FAST, processor.slower(2)).compute[1]
    assert twice - CALL_SECONDS == pytest.approx(2 * (parts - CALL_SECONDS))


def test_python_takes_longer_to_exchange_than_kernels() -> None:
    stages, between = chain(), replace(FAST, is_shared=False)
    placement = choose_exchanges(stages, 2, FAST, PROCESSOR, "always")
    costs = [row_cost(stages, placement, each, PROCESSOR).exchange for each in (FAST, between)]
    longer = PYTHON_SECONDS - KERNEL_SECONDS
    assert np.count_nonzero(costs[0]) == 6
    assert costs[1] - costs[0] == pytest.approx(np.where(costs[0] > 0, longer, 0.0))


def test_one_rank_exchanges_nothing() -> None:
    placement = choose_exchanges(chain(), 1, FAST, PROCESSOR, "always")
    assert placement.exchanged == () and placement.computed[1].tolist() == [[0, 64]]


@pytest.mark.parametrize(
    ("stages", "ranks", "choice", "message"),
    [
        (chain(), 0, "auto", "over 0 ranks; expected at least 1"),
        (chain(), 2, "maybe", "exchange is 'maybe'; expected 'auto', 'always', 'once'"),
        (
            [chain()[0], NetworkStage("t", "matmul", 1, 4, (StageOperand(0, None),))],
            2,
            "auto",
            r"'t' \(matmul",
        ),
    ],
)
def test_bad_input(stages: list[NetworkStage], ranks: int, choice: str, message: str) -> None:
    with pytest.raises(OpError, match=message):
        choose_exchanges(stages, ranks, FAST, PROCESSOR, choice)


@given(networks())
def test_higher_images(stages: list[NetworkStage]) -> None:
    assert heighten(stages, 1) == stages
    high = heighten(stages, 5)
    assert high[0].rows == (5 * stages[0].rows if stages[0].rows > 1 else 1)
    for stage in high[1:]:  # what a reader asks for lies within its operand, and reaches its end
        for operand in stage.operands:
            source = high[operand.stage]
            if operand.maps:
                [one] = operand.maps
                assert one.extent == source.rows  # type: ignore[attr-defined]


def test_a_layer_for_one_height_cannot_be_heightened() -> None:
    stages = chain()
    with pytest.raises(OpError, match=r"any height: 'flat' \(reshape\) reads 64 rows"):
        heighten([*stages[:-1], replace(stages[-1], name="flat", op="reshape")], 2)


def test_a_plan_is_read_as_it_was_written() -> None:
    stages = chain()
    placement = choose_exchanges(stages, 2, FAST, PROCESSOR, "once")
    found = segments(stages, placement, row_cost(stages, placement, FAST, PROCESSOR))
    exchange = RowExchange("y", (1, 3, 8, 5), "float32", ((0, 4), (4, 8)), ((0, 8), (0, 0)))
    shared = RowExchange("z", (1, 9), "float32", ((0, 4), (4, 9)), ((0, 1), (0, 0)), True)
    assert shared.own_region(1) == ((0, 1), (4, 9)) and shared.held_region(0) == ((0, 1), (0, 9))
    assert shared.held_region(1)[0] == (0, 0) and shared.transfers().tolist() == [[1, 0, 0, 1]]
    parts = RankPart("part_0", ((0, 6), None)), RankPart("", (None, None))
    plan = RankPlan(parts, (exchange, shared), found)
    data = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(data) == plan and plan.functions == ("part_0",)
    old = json.loads(json.dumps(data | {"exchanges": data["exchanges"][:1]}))
    for entry in (*old["exchanges"], *old["segments"]):  # Entries of format 7.
        entry.pop("by_channels", entry.pop("split", None))
    assert plan_from_json(old) == replace(plan, exchanges=(exchange,))
    for change in (
        {"parts": []},
        {"exchanges": [data["exchanges"][1] | {"own": [[0, 4], [4, 10]]}]},
        {"exchanges": [data["exchanges"][0] | {"own": [[0, 4]]}]},
        {"exchanges": [data["exchanges"][0] | {"held": [[0, 9], [0, 0]]}]},
        {"exchanges": [data["exchanges"][0] | {"shape": [1, "3", 8, 5]}]},
        {"segments": [data["segments"][0] | {"bytes": "many"}]},
        {"segments": [data["segments"][0] | {"rows": [[4, 0]]}]},
    ):
        with pytest.raises((ValueError, TypeError)):
            plan_from_json(data | change)
