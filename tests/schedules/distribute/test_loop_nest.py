# SPDX-License-Identifier: Apache-2.0
"""Functions that cannot be distributed, and what their errors say."""

from __future__ import annotations

import pytest
import tvm
from loop_nests import CASES, blur, function, image, matmul, turned
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from schedules.distribute.loop_nest import read_loop_nest
from schedules.distribute.regions import regions_needed
from schedules.errors import OpError


@pytest.mark.parametrize(
    ("loops", "reason"),
    [
        (["k"], "'k' of block 'C' is a reduction, which can only be .* name one of i, j"),
        (["z"], "which computes an output, has no loop 'z'; it has i, j"),
        ([2], "loop 2 is not an axis of 'C'; it has 2"),
        (["i", 0], "name one loop twice"),
        ([["i"]], r"a loop is \['i'\]; expected its name, an axis of the output, or a loop of"),
    ],
)
def test_loops(loops: list, reason: str) -> None:
    with pytest.raises(OpError, match=reason):
        read_loop_nest(matmul(), loops)


def test_reduction_of_a_schedule() -> None:
    schedule = s_tir.Schedule(matmul())
    loop = schedule.get_loops(schedule.get_sblock("C"))[2]
    with pytest.raises(OpError, match="is a reduction"):
        read_loop_nest(schedule, [loop])
    with pytest.raises(OpError, match="or a loop of the schedule that is distributed"):
        read_loop_nest(matmul(), [loop])


def test_split_loops() -> None:
    schedule = s_tir.Schedule(blur())
    schedule.split(schedule.get_loops(schedule.get_sblock("by"))[0], [None, 4])
    with pytest.raises(OpError, match="before its loops are split"):
        read_loop_nest(schedule, [0])


@T.prim_func(s_tir=True)
def running_sum(a: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")) -> None:
    for i in range(8):
        with T.sblock("scan"):
            vi = T.axis.spatial(8, i)
            c[vi] = T.if_then_else(vi > 0, c[vi - 1], T.float32(0)) + a[vi]


def test_dependence() -> None:
    with pytest.raises(OpError, match="block 'scan' reads 'c', which it writes: an iteration"):
        read_loop_nest(running_sum, [0])


def gather() -> tirx.PrimFunc:
    table, index = image(9, 4, name="table"), image(6, name="index", dtype="int64")
    return function(table, index, te.compute((6, 4), lambda i, j: table[index[i], j], "taken"))


def test_gather() -> None:
    with pytest.raises(OpError, match=r"block 'taken' reads buffer 'table' at the index index\["):
        read_loop_nest(gather(), ["i"])


def test_gather_along_another_loop() -> None:
    nest = read_loop_nest(gather(), ["j"])
    needed = regions_needed(nest, nest.output_regions(((1, 3),)))
    assert {buffer.name: regions for buffer, regions in needed.items()} == {
        "taken": [((0, 6), (1, 3))],
        "table": [((0, 9), (1, 3))],
        "index": [((0, 6),)],
    }


def test_unbounded_index() -> None:
    a, scale = image(9, 4), image(1, name="scale")
    stretched = te.compute(
        (9, 4),
        lambda i, j: a[(i.astype("float32") * 0.5).astype("int64"), j] + scale[0],
        "stretched",
    )
    nest = read_loop_nest(function(a, scale, stretched), ["i"])
    with pytest.raises(OpError, match="buffer .A. at the index .*cannot be"):
        regions_needed(nest, nest.output_regions(((0, 3),)))


def test_loops_of_several_outputs() -> None:
    nest = read_loop_nest(turned(8, 5), ["i"])
    assert nest.loops == ((0,), (1,)) and nest.extents == (8,)
    assert [buffer.name for buffer in nest.outputs] == ["plain", "turned"]
    with pytest.raises(
        OpError, match=r"loops i have the extents \[8\] of output 'plain' and \[5\]"
    ):
        read_loop_nest(turned(8, 5), [0])
    a = image(4, 4)
    one = te.compute((4, 4), lambda i, j: a[i, j] + 1.0, "one")
    two = te.compute((4, 4), lambda k, j: a[k, j] + 2.0, "two")
    with pytest.raises(OpError, match="block 'two', which computes an output, has no loop 'i'"):
        read_loop_nest(function(a, one, two), ["i"])


@T.prim_func(s_tir=True)
def in_and_out(
    a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32"), c: T.Buffer((8,), "float32")
) -> None:
    for i in range(8):
        with T.sblock("first"):
            vi = T.axis.spatial(8, i)
            c[vi] = b[vi] + a[vi]
    for i in range(8):
        with T.sblock("second"):
            vi = T.axis.spatial(8, i)
            b[vi] = a[vi]


def test_inputs_that_are_outputs() -> None:
    with pytest.raises(OpError, match="'first' reads 'b' before a later block writes it; give"):
        read_loop_nest(in_and_out, [0])


def test_what_is_no_function() -> None:
    with pytest.raises(OpError, match="a IRModule is to be distributed; expected a function of"):
        read_loop_nest(tvm.IRModule({"main": in_and_out}), [0])


def test_symbolic_extents() -> None:
    n = te.var("n", "int64")
    a = te.placeholder((n, 4), "float32", "A")
    func = te.create_prim_func([a, te.compute((n, 4), lambda i, j: a[i, j] + 1.0, "C")])
    with pytest.raises(OpError, match=r"buffer '\w+' has the symbolic shape"):
        read_loop_nest(func, [0])


def test_equal_names() -> None:
    a, b = image(4, 4), image(4, 4)
    func = function(a, b, te.compute((4, 4), lambda i, j: a[i, j] + b[i, j], "C"))
    with pytest.raises(OpError, match="have one name twice"):
        read_loop_nest(func, [0])


@pytest.mark.parametrize("name", CASES)
def test_names_of_loops(name: str) -> None:
    assert read_loop_nest(CASES[name](), [0, 1]).loop_names == ("i", "j")
