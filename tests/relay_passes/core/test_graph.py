# SPDX-License-Identifier: Apache-2.0
"""The graph that rules edit: readers, refusals, forwarding, and what falls dead."""

from __future__ import annotations

import pytest
import tvm
from simplify_checks import const
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes.core.graph import Graph


@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            lv = R.exp(x)
            lv1 = R.multiply(lv, lv)
            lv2 = R.tanh(lv1)
            gv = R.add(lv2, x)
            R.output(gv)
        return gv


@pytest.fixture
def graph():
    return Graph(Module, Module["main"])


@pytest.fixture
def variables():
    return [binding.var for binding in Module["main"].body.blocks[0].bindings]


def test_readers_are_counted_as_often_as_they_read(graph, variables):
    lv, lv1, lv2, gv = variables
    assert [graph.has_one_use(var) for var in variables] == [False, True, True, True]
    assert [user.op.name for user in graph.users(lv)] == ["relax.multiply"]
    assert graph.users(gv) == [None]
    assert not graph.has_one_use(const(1.0))


def test_no_rule_no_change(graph):
    assert not graph.sweep({"relax.tanh": [lambda _graph, _call: None]})
    tvm.ir.assert_structural_equal(graph.to_function(), Module["main"])


def test_an_answer_of_another_type_is_refused_with_its_helpers(graph):
    def rule(graph, call):
        return relax.op.concat((graph.emit(relax.op.sin(call.args[0])), call.args[0]), axis=0)

    assert not graph.sweep({"relax.tanh": [rule]})
    tvm.ir.assert_structural_equal(graph.to_function(), Module["main"])


def test_what_an_answer_no_longer_reads_falls_dead(graph):
    assert graph.sweep({"relax.multiply": [lambda _graph, _call: Module["main"].params[0]]})
    assert graph.sweep({"relax.add": [lambda graph, call: relax.op.cos(call.args[1])]})

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                gv = R.cos(x)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(graph.to_function(), Expected["main"])


def test_rules_are_asked_in_order_and_again_after_an_answer(graph):
    asked = []

    def first(_, call):
        asked.append("first")
        return relax.op.sin(call.args[0]) if len(asked) == 2 else None

    def second(_, call):
        asked.append("second")
        return relax.op.tanh(call.args[0]) if len(asked) == 2 else None

    graph.sweep({"relax.tanh": [first, second], "relax.sin": [second]})
    assert asked == ["first", "second", "first", "second"]


def test_costly_facts_are_learnt_once(graph):
    asked = []

    def learn(key):
        asked.append(key)
        return None

    assert graph.remember("key", learn) is graph.remember("key", learn) is None
    assert asked == ["key"]
