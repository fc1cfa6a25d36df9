# SPDX-License-Identifier: Apache-2.0
"""Rule ``channels_first``: transposes around what works on the channels of each pixel go."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_checks import run
from simplify_checks import calls, check, check_unchanged, const, dyadic, per_channel, simplify
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R

W = dyadic(4, 6)
B = dyadic(6, seed=1)
GAMMA, BETA = dyadic(4, seed=2), dyadic(4, seed=3)


def test_norm_and_a_layer():
    @I.ir_module
    class Last:
        @R.function
        def main(x: R.Tensor((2, 4, 3, 5), "float32")):
            with R.dataflow():
                lv = R.permute_dims(x, [0, 2, 3, 1])
                lv1 = R.nn.layer_norm(lv, const(GAMMA), const(BETA), axes=[-1], epsilon=1e-6)
                lv2 = R.matmul(lv1, const(W))
                lv3 = R.add(const(B), lv2)
                lv4 = R.nn.gelu(lv3)
                gv = R.permute_dims(lv4, [0, 3, 1, 2])
                R.output(gv)
            return gv

    @I.ir_module
    class First:
        @R.function
        def main(x: R.Tensor((2, 4, 3, 5), "float32")):
            with R.dataflow():
                lv = R.nn.layer_norm(x, const(GAMMA), const(BETA), axes=[1], epsilon=1e-6)
                lv1 = R.nn.conv2d(lv, const(W.T[:, :, None, None]))
                lv2 = R.add(lv1, per_channel(B))
                gv = R.nn.gelu(lv2)
                R.output(gv)
            return gv

    check(Last, First)


def between(
    *steps, shape: tuple = (2, 3, 5, 4), last: tuple = (0, 3, 1, 2), first: tuple = (0, 2, 3, 1)
) -> tvm.IRModule:
    """``steps`` on an NHWC tensor of ``shape``, between two transposes."""
    x = relax.Var("x", relax.TensorType([shape[first.index(axis)] for axis in range(4)], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.permute_dims(x, first))
            for step in steps:
                value = builder.emit(step(value))
            output = builder.emit_output(relax.op.permute_dims(value, last))
        builder.emit_func_output(output)
    return builder.get()


STEPS = {
    "matmul": lambda x: relax.op.matmul(x, const(W)),
    "norm": lambda x: relax.op.nn.layer_norm(x, const(GAMMA), const(BETA), [3]),
    "scale": lambda x: relax.op.multiply(x, const(GAMMA)),
    "offset": lambda x: relax.op.subtract(const(BETA.reshape(1, 1, 1, 4)), x),
    "number": lambda x: relax.op.divide(x, const(3.0)),
    "gelu": relax.op.nn.gelu,
    "clip": lambda x: relax.op.clip(x, -1, 1),
}
SAME = [step for name, step in STEPS.items() if name != "matmul"]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_single_step(step):
    assert "permute_dims" not in calls(simplify(between(step)))


def test_two_transposes():
    assert calls(simplify(between())) == []


def test_a_symbolic_batch():
    n = tirx.Var("n", "int64")
    found = calls(simplify(between(STEPS["matmul"], relax.op.nn.gelu, shape=(n, 3, 5, 4))))
    assert found == ["nn.conv2d", "nn.gelu"]


@pytest.mark.slow
@settings(max_examples=8)
@given(
    before=st.lists(st.sampled_from(SAME), max_size=3),
    after=st.lists(st.sampled_from([relax.op.nn.gelu, relax.op.tanh]), max_size=2),
    extents=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)),
)
def test_numbers(before, after, extents):
    mod = between(*before, STEPS["matmul"], *after, shape=(*extents, 4))
    x = np.random.default_rng(0).standard_normal((extents[0], 4, *extents[1:])).astype("float32")
    np.testing.assert_allclose(run(simplify(mod), x), run(mod, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mod",
    [
        between(relax.op.nn.gelu, last=(0, 1, 3, 2)),
        between(relax.op.nn.gelu, first=(0, 3, 2, 1)),
        between(lambda x: relax.op.nn.softmax(x, -1)),
        between(lambda x: relax.op.nn.layer_norm(x, const(dyadic(5)), const(dyadic(5)), [2])),
        between(lambda x: relax.op.multiply(x, const(dyadic(5, 1)))),
        between(lambda x: relax.op.multiply(x, const(dyadic(3, 5, 4)))),
        between(lambda x: relax.op.matmul(x, const(dyadic(2, 3, 4, 4)))),
        between(lambda x: relax.op.add(x, x)),
    ],
)
def test_what_stays(mod: tvm.IRModule):
    check_unchanged(mod)


def test_a_value_with_another_reader_stays():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((2, 4, 3, 5), "float32")):
            with R.dataflow():
                lv = R.permute_dims(x, [0, 2, 3, 1])
                lv1 = R.matmul(lv, const(W))
                gv = R.permute_dims(lv1, [0, 3, 1, 2])
                gv1 = R.nn.softmax(lv1)
                R.output(gv, gv1)
            return (gv, gv1)

    check_unchanged(Shared)
