# SPDX-License-Identifier: Apache-2.0
"""Work of functions that sizes and FLOPs do not tell."""

from tvm.script import tirx as T

from tvm_fusion.bench.kernel_work import count_work


def test_elementary_functions_count_once_an_element():
    @T.prim_func(s_tir=True)
    def exp(x: T.Buffer((4, 6), "float32"), y: T.Buffer((4, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = T.exp(x[vi, vj]) + T.exp(x[vi, vj] + T.float32(1))

    work = count_work(exp)
    assert (work.functions, work.gathered_bytes) == (24, {})


def test_rows_that_indices_choose_are_read_and_not_the_table():
    @T.prim_func(s_tir=True)
    def take(
        table: T.Buffer((1000, 8), "float32"),
        index: T.Buffer((5,), "int64"),
        y: T.Buffer((5, 8), "float32"),
    ):
        for i, j in T.grid(5, 8):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = table[index[vi], vj]

    assert count_work(take).gathered_bytes == {0: 5 * 8 * 4}
