# SPDX-License-Identifier: Apache-2.0
"""The list of rules: which one takes what, through TVM's own driver."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.rule_cases import HOST, close, draw, function, run, tensor
from tvm import IRModule, te, tirx, topi
from tvm.error import InternalError
from tvm.s_tir import dlight

from schedules.cpu import RULES
from schedules.cpu.core.rule import CPURule
from schedules.cpu.loops.fallback import Fallback

X = tensor("x", 2, 16, 14, 14)
ROWS = tensor("rows", 12, 40)
WEIGHT = tensor("weight", 40, 24)

CASES = {
    "Elementwise": function([X], topi.nn.relu(X)),
    "LayoutTransform": function([X], topi.transpose(X, [0, 2, 3, 1])),
    "Pooling": function(
        [X], topi.nn.pool2d(X, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max", layout="NCHW")
    ),
    "Dense": function([ROWS, WEIGHT], topi.nn.relu(topi.matmul(ROWS, WEIGHT))),
    "Softmax": function([ROWS], topi.nn.softmax(ROWS, 1)),
    "Reduction": function([X], topi.sum(X, [2, 3])),
    "Fallback": function([ROWS], topi.sum(ROWS, 1), topi.max(ROWS, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_rule_that_knows_a_function(name):
    takers = [type(rule).__name__ for rule in RULES if rule.apply(CASES[name], HOST, False)]
    assert takers[0] == name and takers[-1] == "Fallback"


def test_the_rule_that_takes_anything_is_last():
    assert isinstance(RULES[-1], Fallback)


def test_the_driver_schedules_every_function_of_a_module():
    module = IRModule({name: func for name, func in CASES.items()})
    with HOST:
        scheduled = dlight.ApplyDefaultSchedule(*RULES)(module)
    for func in scheduled.functions.values():
        assert func.attrs["tirx.is_scheduled"]
    x = draw([2, 16, 14, 14])
    np.testing.assert_array_equal(run(scheduled["Elementwise"], x)[0], np.maximum(x, 0))
    close(run(scheduled["Reduction"], x)[0], x.astype("float64").sum((2, 3)), 15)


def test_a_step_that_tvm_refuses_leaves_the_function_to_the_next_rule():
    class Wrong(CPURule):
        def schedule(self, func, target):
            sch = dlight.base.transform.s_tir.Schedule(func)
            sch.vectorize(sch.get_loops(sch.get_sblock("total"))[-1])
            return sch

    k = te.reduce_axis((0, 8), name="k")
    x = tensor("x", 8)
    total = te.compute((1,), lambda i: te.sum(x[k], axis=k), name="total")
    assert Wrong().apply(function([x], total), HOST, False) is None


@pytest.mark.parametrize(
    ("extent", "reads", "error"),
    [
        (10, lambda y, j: y[2 * j + 1], InternalError),
        (24, lambda y, j: y[tirx.min(j, 19)], ValueError),
    ],
)
def test_other_errors_of_primitives_leave_the_function_to_the_next_rule(extent, reads, error):
    class Wrong(CPURule):
        def schedule(self, func, target):
            sch = dlight.base.transform.s_tir.Schedule(func)
            outer, _ = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 8])
            sch.reverse_compute_at(sch.get_sblock("z"), outer)
            return sch

    x = tensor("x", 20)
    y = te.compute((20,), lambda i: x[i] * 2.0, name="y")
    func = function([x], te.compute((extent,), lambda j: reads(y, j) * 2.0, name="z"))
    with pytest.raises(error):
        Wrong().schedule(func, HOST)
    assert Wrong().apply(func, HOST, False) is None


def test_rules_take_functions_only():
    others = RULES[5:]  # without convolutions, packs and norms in blocks, which look for their mark
    assert all(rule.apply(tirx.Var("n", "int64"), HOST, False) is None for rule in others)
