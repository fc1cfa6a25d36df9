# SPDX-License-Identifier: Apache-2.0
"""Rules that fail: told of, passed over, or raised; and what all rules have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from cpu.rule_cases import AVX2, FOREIGN, HOST, draw, function, run, tensor
from tvm import s_tir, te, tirx, topi
from tvm.error import InternalError
from tvm.s_tir import dlight
from tvm.target import Target

from schedules import attributes, cpu, gpu
from schedules.cpu.core.rule import CPURule
from schedules.cpu.nests import blocks
from schedules.errors import CompilationError, OpError, SlowPathWarning
from schedules.gpu.core.rule import GPURule
from schedules.schedule_rule import (
    STRICT,
    KernelFacts,
    Rule,
    failed_rules,
    rule_name,
    schedule_function,
)
from schedules.tir import block_expressions
from schedules.tuning.tunable_rule import TunableRule

X, Y = tensor("x", 8, 24), tensor("y", 16, 24)
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
RELU = function([X], topi.nn.relu(X))


class Broken(CPURule):
    """A rule with a fault."""

    def __init__(self, fault: Callable[[], Any]) -> None:
        self.fault = fault

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        self.fault()
        return None


class Late(CPURule):
    """A rule that TVM refuses a step in the middle of its work."""

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        sch = s_tir.Schedule(facts.func)
        _, inner = sch.split(sch.get_loops(sch.get_sblock("total"))[-1], [None, 2])
        sch.vectorize(inner)
        return sch


class Refused(CPURule):
    """A rule one of whose primitives raises what is no refusal."""

    def schedule(self, facts: KernelFacts) -> s_tir.Schedule | None:
        sch = s_tir.Schedule(facts.func)
        outer, _ = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 8])
        sch.reverse_compute_at(sch.get_sblock("z"), outer)
        return sch


def raising(error: BaseException) -> Callable[[], Any]:
    def fault() -> None:
        raise error

    return fault


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set nothing, as for a user."""
    monkeypatch.delenv(STRICT)


def scheduled(func: tirx.PrimFunc, *rules: dlight.ScheduleRule) -> tirx.PrimFunc:
    return schedule_function("fused_relu", func, HOST, [*rules, *cpu.RULES])


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no luck"), "ValueError: no luck"),
        (RuntimeError("first\n  second"), "RuntimeError: first second"),
        (KeyError("axis"), "KeyError: 'axis'"),
        (AssertionError(), "AssertionError"),
        (InternalError("Check failed"), "InternalError: Check failed"),
    ],
)
def test_a_rule_that_fails_is_told_of_and_the_next_one_asked(error, reason) -> None:
    with pytest.warns(SlowPathWarning) as caught:
        func = scheduled(RELU, Broken(raising(error)))
    (warning,) = caught
    assert str(warning.message) == (
        f"the schedule rule Broken failed on the kernel 'fused_relu': {reason}; it is "
        "compiled without this rule, and may be slow: please report the model"
    )
    assert func.attrs[attributes.RULE] == "Elementwise" and failed_rules(func) == {"Broken": reason}
    x = draw([8, 24])
    np.testing.assert_array_equal(run(func, x)[0], np.maximum(x, 0))


@pytest.mark.usefixtures("lenient")
def test_a_step_that_tvm_refuses_half_way_leaves_no_trace() -> None:
    k = te.reduce_axis((0, 8), name="k")
    x = tensor("x", 8)
    total = function([x], te.compute((1,), lambda i: te.sum(x[k], axis=k), name="total"))
    with pytest.warns(SlowPathWarning, match="rule Late failed .*: ScheduleError: ") as caught:
        func = scheduled(total, Late())
    assert "T.prim_func" not in str(caught[0].message)
    assert func.without_attr(attributes.FAILED_RULES).script() == scheduled(total).script()


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("extent", "reads", "error"),
    [
        (10, lambda y, j: y[2 * j + 1], InternalError),
        (24, lambda y, j: y[tirx.min(j, 19)], ValueError),
    ],
)
def test_other_errors_of_primitives_are_told_of_too(extent, reads, error) -> None:
    x = tensor("x", 20)
    y = te.compute((20,), lambda i: x[i] * 2.0, name="y")
    func = function([x], te.compute((extent,), lambda j: reads(y, j) * 2.0, name="z"))
    with pytest.raises(error):
        Refused().apply(func, HOST, False)
    with pytest.warns(SlowPathWarning, match=f"rule Refused failed .*: {error.__name__}: Check"):
        done = scheduled(func, Refused())
    np.testing.assert_array_equal(*(run(each, draw([20]))[0] for each in (done, scheduled(func))))


@pytest.mark.usefixtures("lenient")
def test_each_rule_that_fails_is_told_of_once() -> None:
    class Other(Broken):
        """Another one."""

    faults = [Broken(raising(ValueError("one"))), Other(raising(ValueError("two")))]
    with pytest.warns(SlowPathWarning) as caught:
        func = scheduled(RELU, *faults)
    assert len(caught) == 2
    assert failed_rules(func) == {"Broken": "ValueError: one", "Other": "ValueError: two"}


@pytest.mark.usefixtures("lenient")
def test_where_no_rule_is_left_the_function_stays() -> None:
    with pytest.warns(SlowPathWarning):
        func = schedule_function("f", RELU, HOST, [Broken(raising(ValueError()))])
    assert failed_rules(func) == {"Broken": "ValueError"}
    assert (
        func.without_attr(attributes.FAILED_RULES).script() == RELU.script()
        and attributes.RULE not in func.attrs
    )


@pytest.mark.parametrize("value", ["1", "yes"])
def test_strictly_a_failure_stops_the_compilation(monkeypatch, value: str) -> None:
    monkeypatch.setenv(STRICT, value)
    error = ValueError("no luck")
    message = "^the schedule rule Broken failed on the kernel 'fused_relu': ValueError: no luck$"
    with pytest.raises(CompilationError, match=message) as caught:
        scheduled(RELU, Broken(raising(error)))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("value", ["", "0"])
def test_strictness_can_be_said_to_be_off(monkeypatch, value: str) -> None:
    monkeypatch.setenv(STRICT, value)
    with pytest.warns(SlowPathWarning):
        scheduled(RELU, Broken(raising(ValueError("no luck"))))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("error", [OpError("too large: use smaller images"), KeyboardInterrupt()])
def test_errors_for_the_user_and_interrupts_pass(monkeypatch, strict: bool, error) -> None:
    monkeypatch.setenv(STRICT, str(int(strict)))
    with warnings.catch_warnings(), pytest.raises(type(error)) as caught:
        warnings.simplefilter("error")
        scheduled(RELU, Broken(raising(error)))
    assert caught.value is error


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_is_told_of_rules_that_do_not_fail(monkeypatch, strict: bool) -> None:
    monkeypatch.setenv(STRICT, str(int(strict)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        func = scheduled(RELU)
    assert (
        func.attrs[attributes.RULE] == "Elementwise" and attributes.FAILED_RULES not in func.attrs
    )
    assert func.attrs["tirx.is_scheduled"]


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(CompilationError) as caught:
        scheduled(RELU, Broken(raising(ValueError("word " * 1000))))
    assert len(str(caught.value)) < 400


def test_rules_of_tvm_are_named_as_such() -> None:
    assert rule_name(dlight.gpu.Fallback()) == "dlight.Fallback"
    assert rule_name(cpu.RULES[-1]) == "Fallback"


def test_all_rules_have_one_base() -> None:
    assert all(isinstance(rule, CPURule) for rule in cpu.RULES)
    assert all(isinstance(rule, GPURule) for rule in gpu.RULES)
    for rule in (*cpu.RULES, *gpu.RULES):
        assert type(rule).apply in (Rule.apply, TunableRule.apply)
        assert rule.apply(RELU, FOREIGN, False) is None
        assert rule.apply(tirx.Var("n", "int64"), HOST, False) is None
    assert all(rule.apply(RELU, AVX2, False) is None for rule in gpu.RULES)
    assert all(rule.apply(RELU, Target("opencl"), False) is None for rule in cpu.RULES)


def test_a_rule_must_say_how_it_schedules() -> None:
    with pytest.raises(NotImplementedError):
        CPURule().apply(RELU, HOST, False)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """First arguments of the calls of a function of a module."""
    calls: list[Any] = []
    called = getattr(module, name)

    def count(first: Any, *others: Any, **options: Any) -> Any:
        calls.append(first)
        return called(first, *others, **options)

    monkeypatch.setattr(module, name, count)
    return calls


def test_a_function_is_read_once_and_no_rule_sees_what_another_did_to_it(monkeypatch) -> None:
    opened = counted(monkeypatch, blocks, "open_blocks")
    func = function([X], topi.nn.softmax(X))
    done = schedule_function("f", func, HOST, cpu.RULES)
    assert done.attrs[attributes.RULE] == "Softmax" and len(opened) == 1
    alone = cpu.Softmax().apply(func, HOST, False)
    tvm.ir.assert_structural_equal(done.body, alone.mod["main"].body, map_free_vars=True)


def test_stages_of_a_function_are_read_once(monkeypatch) -> None:
    read = counted(monkeypatch, block_expressions, "read_stages")
    func = function([X, Y], topi.nn.dense(X, Y))
    done = schedule_function("f", func, CUDA, gpu.RULES)
    assert done.attrs[attributes.RULE] == "Matmul" and len(read) == 1
