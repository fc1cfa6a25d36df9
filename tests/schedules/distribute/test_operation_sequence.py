# SPDX-License-Identifier: Apache-2.0
"""Chunks of a device's rows: what they read and copy, and when they end."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_nests import (
    CASES,
    SEVERAL,
    Interpreter,
    blur,
    concatenation,
    elements,
    levels,
    matmul,
    turned,
)
from tvm import te, tirx

from schedules.distribute.loop_nest import read_loop_nest
from schedules.distribute.operation_sequence import operation_sequence, sequence_seconds
from schedules.errors import OpError

CHUNKED = ("blur", "with_zeros", "upsample", "matmul", "flip")
COPIED = ("gradients", "turned")
FLOATS = {"A": 4, "B": 4, "W": 4, "C": 4, "by": 4}


@pytest.mark.parametrize("name", [*CHUNKED, *COPIED])
def test_chunks_read_what_their_rows_need_and_no_row_more(name: str) -> None:
    func = (CASES | SEVERAL)[name]()
    nest = read_loop_nest(func, ["i"] if name in COPIED else [0])
    interpreter = Interpreter(func)
    extent = nest.extents[0]
    sequence = operation_sequence(nest, ((1, extent),), 3)
    rows = [chunk.rows[0] for chunk in sequence.chunks]
    assert list(itertools.chain(*(range(*ends) for ends in rows))) == list(range(1, extent))
    for chunk in sequence.chunks:
        made = nest.output_regions(chunk.rows)
        assert {name: chunk.windows[name] for name in sequence.outputs} == {
            output.name: region for output, [region] in made.items()
        }
        read = set().union(
            *(
                interpreter.reads(index, output.name)
                for output, [region] in made.items()
                for index in elements(region)
            )
        )
        for buffer in nest.inputs:
            first = {index[0] for at, index in read if at == buffer.name}
            assert chunk.windows[buffer.name][0] == (min(first), max(first) + 1)


def test_copies_of_several_outputs() -> None:
    sequence = operation_sequence(read_loop_nest(turned(8, 5), ["i"]), ((2, 8),), 2)
    assert sequence.copied_out(1) == {"plain": ((5, 8), (0, 5)), "turned": ((0, 5), (5, 8))}
    assert sequence.bytes({"A": 4, "plain": 4, "turned": 2}) == (40 * 4, 30 * (4 + 2))


def test_input_that_later_chunks_share() -> None:
    a, last = te.placeholder((8, 3), name="A"), te.placeholder((3,), name="last")
    out = te.compute((8, 3), lambda i, j: tirx.if_then_else(i == 7, last[j], a[i, j]), "out")
    nest = read_loop_nest(te.create_prim_func([a, last, out]), [0])
    sequence = operation_sequence(nest, ((0, 8),), 2)
    assert [sorted(sequence.copied_in(number)) for number in (0, 1)] == [["A"], ["A", "last"]]


def test_output_that_other_rows_read() -> None:
    with pytest.raises(OpError, match=r"rows .* of output 'once' need .*; .* leave devices= out"):
        operation_sequence(read_loop_nest(levels(), ["i"]), ((2, 8),))


def test_copies() -> None:
    sequence = operation_sequence(read_loop_nest(blur(12, 6), ["i"]), ((2, 12),), 4)
    assert [c.rows[0] for c in sequence.chunks] == [(2, 4), (4, 7), (7, 9), (9, 12)]
    assert sequence.copied_in(1) == {"A": ((4, 9), (0, 8))}
    assert sequence.bytes(FLOATS) == ((10 + 4 * 2) * 8 * 4, 10 * 6 * 4)
    assert (sequence.resident, sequence.slots) == ((), 2)


def test_weights_are_copied_once() -> None:
    sequence = operation_sequence(read_loop_nest(matmul(6, 5, 4), ["i"]), ((0, 6),), 3)
    assert sequence.resident == ("B",)
    assert [sorted(sequence.copied_in(n)) for n in range(3)] == [["A", "B"], ["A"], ["A"]]
    assert sequence.bytes(FLOATS) == (6 * 4 * 4 + 4 * 5 * 4, 6 * 5 * 4)


def test_unread_inputs_are_not_copied() -> None:
    """The first rows of one image below another read only the first."""
    sequence = operation_sequence(read_loop_nest(concatenation(4, 3), [0]), ((0, 2),))
    assert "B" not in sequence.chunks[0].copied
    assert sequence.copied_in(0) == {"A": ((0, 2), (0, 3))}


def test_fewer_rows_than_chunks() -> None:
    nest = read_loop_nest(blur(), ["i"])
    sequence = operation_sequence(nest, ((3, 5),), 8)
    assert (len(sequence.chunks), sequence.slots) == (2, 2)
    assert operation_sequence(nest, ((3, 5),), 1).slots == 1


def test_refused() -> None:
    nest = read_loop_nest(blur(), ["i"])
    with pytest.raises(OpError, match="cut into 0 chunks, with memory for 2; expected 1 or more"):
        operation_sequence(nest, ((0, 4),), 0)
    with pytest.raises(OpError, match=r"range \(\(3, 3\),\) of the loops i is empty"):
        operation_sequence(nest, ((3, 3),))


def test_one_chunk_takes_the_sum() -> None:
    assert sequence_seconds([(1.0, 2.0, 4.0)], 2) == (7.0,)
    assert sequence_seconds([(1.0, 2.0, 4.0)] * 3, 1)[-1] == 19.0  # a slot is free after kernels
    assert sequence_seconds([(2.0, 1.0, 1.0)] * 5, 2)[-1] == 5 * 2.0 + 2.0
    assert sequence_seconds([(1.0, 1.0, 3.0)] * 5, 2)[-1] == 2.0 + 5 * 3.0


@given(
    stages=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=6),
    slots=st.integers(1, 4),
)
def test_ends_as_by_events(stages: list[tuple[int, int, int]], slots: int) -> None:
    """A simulation, operation by operation, of what each waits for."""
    waits: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for i in range(len(stages)):
        waits["in", i] = [("in", i - 1), ("kernel", i - slots)]
        waits["kernel", i] = [("kernel", i - 1), ("in", i), ("out", i - slots)]
        waits["out", i] = [("out", i - 1), ("kernel", i)]
    ends: dict[tuple[str, int], int] = {}
    left = list(waits)
    random.shuffle(left)
    while left:
        ready = next(o for o in left if all(w in ends or w[1] < 0 for w in waits[o]))
        begin = max([ends.get(w, 0) for w in waits[ready]])
        ends[ready] = begin + stages[ready[1]][("in", "kernel", "out").index(ready[0])]
        left.remove(ready)
    assert sequence_seconds(stages, slots) == tuple(ends["out", i] for i in range(len(stages)))
