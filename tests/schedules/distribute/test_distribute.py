# SPDX-License-Identifier: Apache-2.0
"""Distribution of loops: what each rank owns, reads and sends, against brute force."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_nests import (
    CASES,
    SEVERAL,
    Interpreter,
    blur,
    elements,
    gaps,
    gradients,
    heat2d,
    matmul,
    wave2d,
)
from tvm import s_tir

from schedules.distribute.distribute import Distribution, distribute
from schedules.distribute.exchange import Region, intersection, region_size, segment_size
from schedules.distribute.transfer import Mode, send_recv
from schedules.errors import OpError
from tests.selection import in_turns


def check_messages(plan: Distribution, interpreter: Interpreter) -> None:
    """Every element that a rank reads and does not own is sent to it once, by an owner."""
    for part in plan.parts:
        reads = {
            element
            for output in interpreter.outputs
            for index in elements(part.owned[output])
            for element in interpreter.reads(index, output)
        }
        owned = {
            (buffer.name, index)
            for buffer in plan.nest.inputs
            for index in elements(part.owned[buffer.name])
        }
        received = [
            (message.buffer, index)
            for exchange in plan.exchanges
            for message in exchange.received_by(part.rank)
            for index in elements(message.region)
        ]
        assert sorted(received) == sorted(reads - owned)
        for message in plan.exchange.received_by(part.rank):
            source = plan.parts[message.source].owned[message.buffer]
            assert intersection(source, message.region) == message.region
            window = part.windows[message.buffer]
            assert intersection(window, message.region) == message.region
            windows = [
                plan.parts[rank].windows[message.buffer] for rank in (message.source, part.rank)
            ]
            assert message.segment == min(segment_size(message.region, w) for w in windows)


def rows_of(plan: Distribution, rows: Region) -> Region:
    """The elements of the only output of some rows."""
    [[region]] = plan.nest.output_regions(rows).values()
    return region


@functools.cache
def interpreter_of(name: str) -> Interpreter:
    return Interpreter((CASES | SEVERAL)[name]())


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("name", CASES)
def test_rows(name: str, ranks: int) -> None:
    plan = distribute(CASES[name](), 0, ranks)
    check_messages(plan, interpreter_of(name))
    if ranks == 1:
        assert plan.bytes == 0
    rows = [part.rows[0] for part in plan.parts]
    assert [begin for begin, _ in rows[1:]] == [end for _, end in rows[:-1]]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 64])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_outputs(name: str, ranks: int) -> None:
    plan = distribute(SEVERAL[name](), "i", ranks)
    check_messages(plan, interpreter_of(name))
    for output in plan.nest.outputs:
        owned = [index for part in plan.parts for index in elements(part.owned[output.name])]
        assert sorted(owned) == elements(tuple((0, int(n)) for n in output.shape))


@pytest.mark.slow
def test_grid_of_several_outputs() -> None:
    for name in ("wave2d", "levels", "turned"):
        check_messages(distribute(SEVERAL[name](), ["i", "j"], 6), interpreter_of(name))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("ranks", "deep"), [(4, 2), (12, 3)])
def test_halos_of_any_number_of_steps(ranks: int, deep: int) -> None:
    """The last round may have fewer steps than the others; each number reads other rows."""
    func = gaps()
    plan = distribute(func, "i", ranks, repeat="A", exchange_every=deep)
    interpreter = Interpreter(func)
    for part in plan.parts:
        wanted, needed = set(elements(part.owned["next"])), set()
        for _ in range(deep):
            wanted = {index for out in wanted for _, index in interpreter.reads(out)}
            needed |= wanted
        received = [m.region for m in plan.exchange.received_by(part.rank)]
        found = [index for region in received for index in elements(region)]
        assert sorted(found) == sorted(needed - set(elements(part.owned["A"])))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("ranks", "deep"), [(3, 2), (2, 4), (12, 3)])
def test_halos_of_several_fields(ranks: int, deep: int) -> None:
    """The displacement needs a row more for each step, the velocity one less."""
    fields = {"A": "next", "V": "speed"}
    plan = distribute(wave2d(), "i", ranks, repeat=fields, exchange_every=deep)
    interpreter = interpreter_of("wave2d")
    for part in plan.parts:
        wanted = {(out, index) for out in fields.values() for index in elements(part.owned[out])}
        for _ in range(deep):
            read = {e for out, index in wanted for e in interpreter.reads(index, out)}
            wanted = {(fields[name], index) for name, index in read}
        owned = {(name, index) for name in fields for index in elements(part.owned[name])}
        received = [
            (m.buffer, index)
            for m in plan.exchange.received_by(part.rank)
            for index in elements(m.region)
        ]
        assert sorted(received) == sorted(read - owned)
        assert all(part.windows[name] == part.windows[out] for name, out in fields.items())


@pytest.mark.parametrize(
    ("repeat", "reason"),
    [
        ("A", "repeat names 'A', and the function has the outputs next, speed; say which"),
        ({"A": "next", "V": "next"}, "two inputs cannot take one output"),
        ({"A": "other"}, "repeat names 'other'; the outputs are next, speed"),
        ({"B": "next"}, "repeat names 'B'; the inputs are A, V"),
    ],
)
def test_refused_repeat(repeat: str | dict[str, str], reason: str) -> None:
    with pytest.raises(OpError, match=reason):
        distribute(wave2d(), "i", 2, repeat=repeat)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "ranks"), in_turns(CASES, [2, 4, 6, 12]))
def test_grids(name: str, ranks: int) -> None:
    plan = distribute(CASES[name](), [0, 1], ranks)
    check_messages(plan, interpreter_of(name))


def test_rows_of_a_row_cut_are_contiguous_and_columns_are_not() -> None:
    for loop, expected in (("i", True), ("j", False)):
        messages = distribute(blur(), loop, 3).exchange.messages
        assert messages and all((m.segment == m.size) == expected for m in messages)


def test_corners() -> None:
    plan = distribute(blur(12, 12), ["i", "j"], 9, grid=(3, 3))
    corners = [m for m in plan.exchange.received_by(4) if m.size == 1]
    assert [m.source for m in corners] == [0, 2, 6, 8]
    assert len(distribute(heat2d(12, 12), ["i", "j"], 9, grid=(3, 3)).exchange.received_by(4)) == 4


def test_fewest_bytes_choose_the_grid() -> None:
    assert distribute(blur(30, 8), ["i", "j"], 4).partition.grid == (4, 1)
    assert distribute(blur(8, 30), ["i", "j"], 4).partition.grid == (1, 4)
    assert distribute(blur(20, 20), ["i", "j"], 4).partition.grid == (2, 2)


def test_stencils_are_cut_like_their_output() -> None:
    for part in distribute(heat2d(11), 0, 4).parts:
        assert part.owned["A"] == part.owned["next"]


def test_columns() -> None:
    plan = distribute(CASES["gaussian"](), "j", 3)
    check_messages(plan, interpreter_of("gaussian"))
    assert plan.parts[1].owned["gy"] == ((0, 12), (1, 2), (0, 3))


def test_inputs_that_no_loop_moves_are_everywhere() -> None:
    plan = distribute(matmul(), "i", 3)
    assert plan.bytes == 0
    assert all(part.owned["B"] == ((0, 4), (0, 5)) for part in plan.parts)
    both = distribute(matmul(), ["i", "j"], 6, grid=(3, 2))
    assert both.bytes == 0
    assert both.parts[3].owned["B"] == ((0, 4), (2, 5))


def test_loop_of_a_schedule() -> None:
    schedule = s_tir.Schedule(blur())
    loop = schedule.get_loops(schedule.get_sblock("by"))[0]
    assert distribute(schedule, loop, 3) == distribute(schedule.mod["main"], "i", 3)
    schedule.compute_inline(schedule.get_sblock("bx"))
    assert distribute(schedule, loop, 3).bytes == distribute(blur(), "i", 3).bytes


def test_given_sizes() -> None:
    plan = distribute(blur(13), "i", sizes=[1, 9, 0, 3])
    assert [part.rows for part in plan.parts] == [((0, 1),), ((1, 10),), ((10, 10),), ((10, 13),)]
    check_messages(plan, interpreter_of("blur"))
    grid = distribute(blur(13), ["i", "j"], sizes=[[6, 7], [2, 3]])
    assert grid.partition.grid == (2, 2)
    check_messages(grid, interpreter_of("blur"))


def test_all_rows_on_one_rank_are_scattered() -> None:
    plan = distribute(blur(13), "i", 3, owned={"A": [15, 0, 0]})
    check_messages(plan, interpreter_of("blur"))
    assert {message.source for message in plan.exchange.messages} == {0}


@pytest.mark.slow
@given(
    name=st.sampled_from(sorted(CASES)),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    data=st.data(),
)
@settings(max_examples=settings.default.max_examples)
def test_any_sizes(name: str, sizes: list[int], data: st.DataObject) -> None:
    func = CASES[name]()
    extent = int(func.params[-1].shape[0])
    cuts = sorted(data.draw(st.integers(0, extent)) for _ in sizes[1:])
    parts = [e - b for b, e in zip([0, *cuts], [*cuts, extent], strict=True)]
    check_messages(distribute(func, 0, sizes=parts), interpreter_of(name))


@pytest.mark.parametrize("name", ["blur", "heat2d", "strided", "chain", "dilated"])
def test_interior_reads_what_the_rank_owns(name: str) -> None:
    interpreter = interpreter_of(name)
    plan = distribute(CASES[name](), 0, 2)
    for part in plan.parts:
        interior = plan.interior(part.rank)
        if not plan.exchange.received_by(part.rank):
            assert not region_size(interior)
            continue
        owned = set(elements(part.owned["A"]))
        local = [
            row
            for row in range(*part.rows[0])
            if all(
                index in owned
                for place in elements(rows_of(plan, ((row, row + 1),)))
                for _, index in interpreter.reads(place)
            )
        ]
        assert region_size(interior)
        assert local == list(range(*interior[0]))


@pytest.mark.slow
def test_interior_of_a_grid() -> None:
    plan = distribute(heat2d(12, 12), ["i", "j"], 4, grid=(2, 2))
    assert plan.interior(0) == ((0, 5), (0, 5))
    assert plan.interior(3) == ((7, 12), (7, 12))


def test_interior_off_the_middle() -> None:
    """A rank that owns the first half of what it reads computes that alone meanwhile."""
    plan = distribute(blur(60), "i", sizes=[60, 0], owned={"A": [20, 42]})
    assert plan.interior(0) == ((0, 18),)
    assert plan.interior(1) == ((60, 60),)


def test_interior_of_the_first_of_several_steps() -> None:
    plan = distribute(heat2d(40), "i", 2, repeat="A", exchange_every=3)
    assert plan.parts[0].steps[0] == ((0, 22),)
    assert plan.interior(0) == ((0, 19),)


def test_interior_of_several_outputs() -> None:
    plan = distribute(gradients(20), "i", 2)
    (begin, end), _ = plan.parts[0].owned["A"]
    assert plan.interior(0) == ((0, end - 3),) and begin == 0


def test_no_interior_where_nothing_is_received() -> None:
    plan = distribute(CASES["pipeline"](), 0, 2)
    assert region_size(plan.interior(0)) == 0


def test_explicit_transfers_are_not_sent_again() -> None:
    plan = distribute(blur(12), "i", 2, transfers=[send_recv("A", (0, 7), 0, 1)])
    assert plan.exchanges[0].messages[0].region == ((0, 7), (0, 7))
    assert [m.dest for m in plan.exchange.messages] == [0]
    assert plan.exchange.id == 1
    assert plan.parts[1].windows["A"] == ((0, 14), (0, 7))


def test_transfers_instead_of_an_exchange() -> None:
    given = [send_recv("A", (7, 8), 1, 0), send_recv("A", ((6, 7), (0, 7)), 0, 1)]
    plan = distribute(blur(12), "i", 2, transfers=given, infer=False)
    assert not plan.exchange.messages and plan.bytes == 2 * 7 * 4
    with pytest.raises(OpError, match=r"rank 0 reads region \(\(7, 8\), .* which it does not own"):
        distribute(blur(12), "i", 2, transfers=given[1:], infer=False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("plan", "loops"), in_turns([(3, 2), (3, 3), (5, 4), (12, 3)], [[0], [0, 1]])
)
def test_halos_of_several_steps(plan: tuple[int, int], loops: list[int]) -> None:
    """Exactly the elements that all steps together need, corners of a grid included."""
    ranks, deep = plan
    interpreter = interpreter_of("heat2d")
    plan = distribute(heat2d(), loops, ranks, repeat="A", exchange_every=deep)
    for part in plan.parts:
        wanted = set(elements(part.owned["next"]))
        for rows in reversed(part.steps):
            assert wanted <= set(elements(rows_of(plan, rows)))
            wanted = {index for place in wanted for _, index in interpreter.reads(place)}
        received = [
            index for m in plan.exchange.received_by(part.rank) for index in elements(m.region)
        ]
        assert sorted(received) == sorted(wanted - set(elements(part.owned["A"])))
        assert part.windows["A"] == part.windows["next"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"ranks": 2, "exchange_every": 2}, "exchange_every is 2; expected 1, or more for"),
        ({"ranks": 2, "repeat": "A", "exchange_every": 0}, "exchange_every is 0"),
        ({"ranks": 2, "repeat": "A", "exchange_every": "often"}, "exchange_every is 'often'"),
        ({"ranks": 2, "repeat": 3}, "repeat is 3; expected an input, or inputs and their outputs"),
        ({"ranks": 0}, "ranks is 0; expected a positive integer"),
        ({"ranks": "2"}, "ranks is '2'; expected a positive integer"),
        ({"ranks": 2.0}, "ranks is 2.0; expected a positive integer"),
        ({"sizes": [6.0, 7.0]}, "sizes have 6.0; expected integers"),
        ({"sizes": [6, 7], "grid": [2]}, "a grid is given, and sizes, which are one already"),
        ({"ranks": 4, "grid": 3}, r"grid \[3\] does not spread 1 loops over 4 ranks"),
        ({}, "neither the number of ranks nor the sizes"),
        ({"sizes": [6, 6]}, r"\[6, 6\] of loop 'i' sum up to 12; expected its extent 13"),
        ({"sizes": [14, -1]}, "have a negative one"),
        ({"sizes": [6, 7], "ranks": 3}, "given for 2 ranks; expected 3"),
        ({"sizes": [[6, 7], [5]]}, "given for 2 loops; expected 1"),
        ({"ranks": 4, "grid": (2, 2)}, r"grid \[2, 2\] does not spread 1 loops over 4 ranks"),
        ({"ranks": 2, "owned": {"B": [1, 2]}}, "owners are given of 'B'; the inputs are A"),
        ({"ranks": 2, "owned": {"A": [8, 8]}}, "sum up to 16; its dimension 0 has 15"),
        ({"ranks": 2, "owned": {"A": [15]}}, "expected a size for each of the 2 parts"),
        ({"ranks": 2, "owned": {"A": [8, 6]}}, "which no rank owns"),
    ],
)
def test_refused(arguments: dict, reason: str) -> None:
    with pytest.raises(OpError, match=reason):
        distribute(blur(), "i", **arguments)


def test_refused_waits_between_exchanges() -> None:
    late = send_recv("A", (0, 2), 0, 1, Mode(blocking=False), before="next")
    arguments: dict = {"repeat": "A", "exchange_every": 2, "transfers": [late]}
    with pytest.raises(OpError, match="exchange_every is 2, and a transfer has before=; expected"):
        distribute(heat2d(), 0, 2, **arguments)


def test_refused_owners_of_what_is_not_cut() -> None:
    with pytest.raises(OpError, match="of which every part reads all"):
        distribute(matmul(), "i", 2, owned={"B": [2, 2]})


def test_refused_without_loops() -> None:
    with pytest.raises(OpError, match="no loop to distribute"):
        distribute(blur(), [], 2)


def test_interpreter_sees_what_is_read() -> None:
    interpreter = interpreter_of("blur")
    expected = {("A", index) for index in itertools.product(range(2, 5), range(1, 4))}
    assert interpreter.reads((2, 1)) == expected
    assert interpreter_of("heat2d").reads((0, 3)) == {("A", (0, 3))}
