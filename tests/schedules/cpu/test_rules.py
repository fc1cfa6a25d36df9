# SPDX-License-Identifier: Apache-2.0
"""The list of rules: which one takes what, through TVM's own driver."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.rule_cases import HOST, close, draw, function, run, tensor
from tvm import IRModule, topi
from tvm.s_tir import dlight

from schedules.cpu import RULES
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
    "CoalescedReduce": function([X], topi.sum(X, [2, 3])),
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
    close(run(scheduled["CoalescedReduce"], x)[0], x.astype("float64").sum((2, 3)), 15)
