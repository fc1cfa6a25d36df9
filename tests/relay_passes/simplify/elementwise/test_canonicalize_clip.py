# SPDX-License-Identifier: Apache-2.0
"""Rule ``canonicalize_clip``: all spellings of bounds, nested bounds, and what is no clip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simplify_checks import calls, check, check_unchanged, const, simplify
from tvm import relax, te, topi
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relay_passes.simplify.elementwise import Clip

INF = float("inf")
SHAPE = (2, 4, 3)


def elementwise(*steps, shape=SHAPE, dtype="float32"):
    """A function ``main(x)`` that applies ``steps`` (builder, tensor) -> expression in turn."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for step in steps:
                value = builder.emit(step(builder, value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return relax.transform.CanonicalizeBindings()(builder.get())


def clip(low, high):
    return lambda _, x: relax.op.clip(x, low, high)


def relu(_, x):
    return relax.op.nn.relu(x)


def maximum(bound):
    return lambda _, x: relax.op.maximum(x, const(bound))


def minimum_left(bound):
    return lambda _, x: relax.op.minimum(const(bound), x)


def topi_maximum(bound):
    return lambda builder, x: builder.call_te(topi.maximum, x, bound)


def topi_minimum_tensor(bound):
    return lambda builder, x: builder.call_te(topi.minimum, x, const(bound))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([maximum(0.0)], [relu]),
        ([topi_maximum(0.0)], [relu]),
        ([maximum(np.zeros((1, 1)))], [relu]),
        ([relu, relu], [relu]),
        ([clip(0.0, 6.0)], [clip(0, 6)]),
        ([relu, minimum_left(6.0)], [clip(0, 6)]),
        ([topi_maximum(0.0), topi_minimum_tensor(6.0)], [clip(0, 6)]),
        ([topi_minimum_tensor(np.full(1, 6.0)), topi_maximum(0.0)], [clip(0, 6)]),
        ([minimum_left(6.0)], [clip(-INF, 6)]),
        ([topi_maximum(-0.5)], [clip(-0.5, INF)]),
        ([clip(-1, 4), clip(0, 6)], [clip(0, 4)]),
        ([clip(-3, -1), clip(0, 6)], [clip(0, 0)]),
        ([maximum(7.0), minimum_left(6.0)], [clip(6, 6)]),
        ([maximum(-INF), minimum_left(INF), relu], [relu]),
        ([maximum(-1e38)], [clip(float(np.float32(-1e38)), INF)]),
        ([minimum_left(2.0**63), maximum(-(2.0**62))], [clip(-(2**62), 2.0**63)]),
    ],
)
def test_bounds_become_one_clip(steps, expected):
    check(elementwise(*steps), elementwise(*expected))


bounds = st.floats(-8, 8) | st.sampled_from([-INF, INF])
pairs = st.tuples(bounds, bounds).map(sorted).filter(lambda p: p[0] < INF and p[1] > -INF)


@given(inner=pairs, outer=pairs, values=st.lists(st.floats(-20, 20), min_size=1))
def test_two_clips_in_one_are_two_clips(inner, outer, values):
    x = np.array(values)
    both = Clip(None, *inner).then(Clip(None, *outer))
    assert both.low <= both.high
    assert np.array_equal(np.clip(x, both.low, both.high), np.clip(np.clip(x, *inner), *outer))


def test_inner_bounds_with_another_reader_stay():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((2, 4), "float32")):
            with R.dataflow():
                lv = R.nn.relu(x)
                lv1 = R.clip(lv, -1, 6)
                gv = R.add(lv, lv1)
                R.output(gv)
            return gv

    check_unchanged(Shared)


@pytest.mark.parametrize(
    "step",
    [
        clip(6, 0),
        maximum(np.nan),
        maximum(np.arange(3.0)),
        maximum(np.zeros((5, 1, 1, 1))),
        topi_minimum_tensor(np.arange(3.0)),
        lambda builder, x: builder.call_te(topi.add, x, const(1.0)),
        lambda builder, x: builder.call_te(topi.maximum, x, x),
        lambda builder, x: builder.call_te(
            lambda t: te.compute(t.shape, lambda *i: te.max(t(*i), 2 * t(*i)), name="T_maximum"), x
        ),
        lambda builder, x: builder.call_te(
            lambda t: te.compute(t.shape, lambda *i: te.max(t(*reversed(i)), 0.0)), x
        ),
    ],
)
def test_other_bounds_stay(step):
    check_unchanged(elementwise(step, shape=(3, 3, 3)))


def test_integers_stay():
    steps = [clip(0, 6), lambda _, x: relax.op.maximum(x, const(0, "int32"))]
    check_unchanged(elementwise(*steps, dtype="int32"))


def test_hand_written_prim_func_under_another_name():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def minimum(a: T.Buffer((4, 5), "float32"), b: T.Buffer((4, 5), "float32")):
            for i, j in T.grid(4, 5):
                with T.sblock("anything"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = T.max(a[vi, vj], T.float32(0))

        @R.function
        def main(x: R.Tensor((4, 5), "float32")):
            with R.dataflow():
                gv = R.call_tir(Before.minimum, (x,), R.Tensor((4, 5), "float32"))
                R.output(gv)
            return gv

    simplified = simplify(Before)
    assert calls(simplified) == ["nn.relu"]
    assert [var.name_hint for var in simplified.functions] == ["main"]
