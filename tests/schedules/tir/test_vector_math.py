# SPDX-License-Identifier: Apache-2.0
"""Elementary functions as vector code: accuracy, special values, what stays a call."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import platform
from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from cpu.rule_cases import AVX2, HOST, Array, assembly, compiled, function, run, tensor
from tvm import ir, s_tir, te, tirx
from tvm.script import tirx as T

from schedules.tir.vector_math import vectorize_math

UNDERFLOW = 8 if platform.machine() in ("aarch64", "arm64") else 16
"""The flag of products that underflow."""

SPECIAL = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    88.7,
    88.73,
    -87.4,
    -103.9,
    -104.5,
    1e-40,
    -1e-40,
    1e-45,
    1.0,
    -1.0,
    0.625,
    -0.625,
    3.4e38,
    -3.4e38,
    4.0,
    -4.0,
]


def values(positive: bool) -> Array:
    generator = np.random.default_rng(1)
    drawn = generator.standard_normal(4000) * np.exp(generator.uniform(-6, 4, 4000))
    numbers = np.concatenate([SPECIAL, np.abs(drawn) if positive else drawn])
    return numbers.astype("float32")


def apply(op: Callable[[ir.Expr], ir.Expr], count: int, dtype: str = "float32") -> tirx.PrimFunc:
    x = tensor("x", count, dtype=dtype)
    func = function([x], te.compute((count,), lambda i: op(x[i]), name="y"))
    return vectorize_math(func)


def calls(func: tirx.PrimFunc) -> set[str]:
    found: set[str] = set()
    tvm_ffi.structural_walk(func.body, (ir.Call, lambda call: found.add(call.op.name)))
    return found


@pytest.mark.parametrize(
    ("op", "reference", "positive", "units"),
    [
        (te.exp, np.exp, False, 2),
        (te.log, np.log, True, 2),
        (te.tanh, np.tanh, False, 3),
        (te.sigmoid, lambda v: 1 / (1 + np.exp(-v)), False, 3),
        (te.erf, np.vectorize(math.erf), False, 4),
        (te.sinh, np.sinh, False, 5),
        (te.cosh, np.cosh, False, 5),
        (tirx.log1p, np.log1p, True, 3),
        (tirx.log1p, np.log1p, False, 3),
        (tirx.atanh, np.arctanh, False, 4),
    ],
    ids=["exp", "log", "tanh", "sigmoid", "erf", "sinh", "cosh", "log1p+", "log1p", "atanh"],
)
def test_within_units_in_the_last_place_of_float64(op, reference, positive, units):
    x = values(positive)
    (found,) = run(apply(op, len(x)), x)
    with np.errstate(all="ignore"):
        exact = reference(x.astype("float64"))
        expected = exact.astype("float32")
    normal = np.isfinite(expected) & (np.abs(expected) > 1.2e-38)
    error = np.abs(found[normal] - exact[normal])
    assert np.max(error / np.spacing(np.abs(expected[normal]))) <= units
    np.testing.assert_array_equal(found[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    np.testing.assert_allclose(found[~normal], expected[~normal], atol=1.2e-38)


def test_exponentials_that_are_zero_do_not_underflow():
    """A product that underflows is a hundred cycles on Intel's CPUs; masked scores are such."""
    x = np.array([-104, -110, -200, -1e4, -3.4e38, -np.inf] * 16, "float32")
    kernel = compiled(apply(te.exp, len(x)), HOST)["main"]
    math_library = ctypes.CDLL(ctypes.util.find_library("m"))

    def underflows(numbers: Array) -> bool:
        given, found = (tvm.runtime.tensor(each) for each in (numbers, np.ones_like(numbers)))
        math_library.feclearexcept(UNDERFLOW)
        kernel(given, found)
        flag = math_library.fetestexcept(UNDERFLOW)
        np.testing.assert_allclose(found.numpy(), np.exp(numbers), rtol=1e-6, atol=1e-44)
        return bool(flag)

    assert not underflows(x)
    assert underflows(np.full(len(x), -100, "float32"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "op",
    [te.exp, te.log, te.tanh, te.sigmoid, te.erf, te.sinh, te.cosh, tirx.log1p, tirx.atanh],
)
def test_vectors_have_the_results_of_their_elements(op):
    @T.prim_func(s_tir=True)
    def wide(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        for i in range(8):
            y[T.Ramp(i * 8, 1, 8)] = op(x[T.Ramp(i * 8, 1, 8)])

    x = values(False)[:64]
    expanded = vectorize_math(wide)
    assert s_tir.analysis.verify_well_formed(expanded)
    assert not calls(expanded) & calls(wide)
    np.testing.assert_array_equal(run(expanded, x)[0], run(apply(op, 64), x)[0])


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    "exponent",
    [0.25, 0.5, 0.75, -0.75, 0.6, 1.0, 1.5, 2.0, -2.0, 4.0, -1.3, 1 / 3, 2.2, -3.9, 1e-3],
)
def test_powers_with_a_constant_exponent(exponent):
    exponent = np.float32(exponent).item()
    drawn = np.exp2(np.random.default_rng().uniform(-149, 128, 20_000)).astype("float32")
    x = np.concatenate([values(True)[len(SPECIAL) :], drawn, [1e-45, 3.4e38]]).astype("float32")
    func = apply(lambda v: te.power(v, tirx.FloatImm("float32", exponent)), len(x))
    assert "tirx.pow" not in calls(func)
    with np.errstate(over="ignore"):
        exact = x.astype("float64") ** exponent
        expected = exact.astype("float32")
    (found,) = run(func, x)
    normal = np.isfinite(expected) & (expected > 1.2e-38)
    np.testing.assert_allclose(found[normal], exact[normal], rtol=4e-7)
    np.testing.assert_allclose(found[~normal], expected[~normal], atol=1.2e-38)


@pytest.mark.parametrize("exponent", [0.6, -1.3])
def test_powers_of_special_values(exponent):
    x = np.array([0.0, -0.0, np.inf, -1.0, np.nan], "float32")
    (found,) = run(apply(lambda v: te.power(v, tirx.FloatImm("float32", exponent)), len(x)), x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(found, np.power(x, np.float32(exponent)))


@pytest.mark.parametrize("exponent", [0.0, 5.0, -4.25, 17.5])
def test_other_powers_stay_calls(exponent):
    func = apply(lambda v: te.power(v, tirx.FloatImm("float32", exponent)), 8)
    assert "tirx.pow" in calls(func)


def test_float32_leaves_no_library_call_and_other_types_keep_theirs():
    assert "callq\texp" not in assembly(apply(te.exp, 64), AVX2)
    before = function(
        [x := tensor("x", 8, dtype="float64")], te.compute((8,), lambda i: te.exp(x[i]), name="y")
    )
    assert vectorize_math(before).same_as(before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_roundings_and_tests_for_nan_stay_vectors(dtype):
    def op(x):
        rounded = tirx.nearbyint(x)
        return tirx.Select(tirx.isnan(rounded), tirx.const(7, dtype), rounded)

    func = apply(op, 4096, dtype)
    schedule = s_tir.Schedule(func)
    (loop,) = schedule.get_loops(schedule.get_sblock("y"))
    schedule.vectorize(schedule.split(loop, [None, 4])[1])
    wide = schedule.mod["main"]
    halves = np.concatenate([np.arange(-9, 9) / 2, values(False)])
    x = np.resize(halves, 4096).astype(dtype)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(run(wide, x)[0], np.where(np.isnan(x), 7, np.rint(x)))
    suffix = {"float32": "s", "float64": "d"}[dtype]
    text = assembly(wide, AVX2)
    assert f"vroundp{suffix}" in text and f"vrounds{suffix}" not in text


def test_twice_equals_once():
    once = apply(te.tanh, 8)
    tvm.ir.assert_structural_equal(vectorize_math(once), once)


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (te.sinh, np.sinh),
        (te.cosh, np.cosh),
        (lambda v: te.log(te.exp(v) + tirx.FloatImm("float64", 1)), lambda v: np.log1p(np.exp(v))),
    ],
    ids=["sinh", "cosh", "log1p"],
)
def test_what_llvm_has_not_becomes_a_library_call_in_other_types(op, reference):
    x = np.linspace(-30, 5, 16)
    placeholder = tensor("x", 16, dtype="float64")
    func = function([placeholder], te.compute((16,), lambda i: op(placeholder[i]), name="y"))
    np.testing.assert_allclose(run(vectorize_math(func), x)[0], reference(x), rtol=1e-14)
