# SPDX-License-Identifier: Apache-2.0
"""Rule ``fold_batch_norm``: constants, parameters, other axes, and what stays whole."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from simplify_checks import calls, check, check_unchanged, const, dyadic, per_channel, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

GAMMA, BETA, MEAN = (dyadic(4, seed=seed) for seed in (1, 2, 3))
VAR = np.array([3, 15, 63, 0], "float32")  # plus 1: the squares of 2, 4, 8 and 1
SCALE = GAMMA / np.sqrt(VAR + 1)
SHIFT = BETA - MEAN * SCALE
WEIGHT = dyadic(4, 2, 3, 3, seed=4)


def norm(data, axis=1, training=False, **attributes):
    """Batch normalisation with constant parameters and epsilon 1."""
    parameters = [const(values) for values in (GAMMA, BETA, MEAN, VAR)]
    return relax.op.nn.batch_norm(
        data, *parameters, axis=axis, epsilon=1.0, training=training, **attributes
    )


def test_becomes_one_multiply_and_one_add():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = norm(x)
                lv1 = lv[0]
                gv = R.nn.relu(lv1)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 4, 5, 5), "float32")):
            with R.dataflow():
                lv = R.multiply(x, per_channel(SCALE))
                lv1 = R.add(lv, per_channel(SHIFT))
                gv = R.nn.relu(lv1)
                R.output(gv)
            return gv

    check(Before, Expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("has_bias", [False, True])
def test_behind_a_convolution_becomes_weight_and_bias(has_bias):
    bias = dyadic(4, seed=5)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT), padding=(1, 1, 1, 1), strides=(2, 2))
                lv1 = R.add(lv, per_channel(bias if has_bias else 0 * bias))
                lv2 = norm(lv1)
                gv = lv2[0]
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(
                    x,
                    const(WEIGHT * SCALE.reshape(4, 1, 1, 1)),
                    padding=(1, 1, 1, 1),
                    strides=(2, 2),
                )
                gv = R.add(lv, per_channel(SHIFT + SCALE * bias if has_bias else SHIFT))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_other_axis_and_missing_scale_and_center():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 5, 4), "float32")):
            with R.dataflow():
                lv = norm(x, axis=-1, center=False, scale=False)
                gv = lv[0]
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 5, 4), "float32")):
            with R.dataflow():
                lv = R.multiply(x, const(1 / np.sqrt(VAR + 1).reshape(1, 1, 4)))
                gv = R.add(lv, const((-MEAN / np.sqrt(VAR + 1)).reshape(1, 1, 4)))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_running_statistics_are_the_parameters():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4, 5), "float32"), mean: R.Tensor((4,), "float32")):
            with R.dataflow():
                lv = R.nn.batch_norm(
                    x, const(GAMMA), const(BETA), mean, const(VAR), axis=1, training=False
                )
                lv1 = lv[1]
                lv2 = lv[2]
                gv = R.add(lv1, lv2)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 4, 5), "float32"), mean: R.Tensor((4,), "float32")):
            with R.dataflow():
                gv = R.add(mean, const(VAR))
                R.output(gv)
            return gv

    check(Before, Expected)


@I.ir_module
class WithParameters:
    @R.function
    def main(
        x: R.Tensor(("n", 2, 5, 5), "float32"),
        weight: R.Tensor((4, 2, 3, 3), "float32"),
        gamma: R.Tensor((4,), "float32"),
        beta: R.Tensor((4,), "float32"),
        mean: R.Tensor((4,), "float32"),
        var: R.Tensor((4,), "float32"),
    ):
        with R.dataflow():
            lv = R.nn.conv2d(x, weight)
            lv1 = R.nn.batch_norm(lv, gamma, beta, mean, var, axis=1, epsilon=1.0, training=False)
            gv = lv1[0]
            R.output(gv)
        return gv


def test_parameters_become_vectors_and_fold_once_they_are_bound():
    vectors = simplify(WithParameters)
    assert calls(vectors)[-2:] == ["multiply", "add"]
    assert "nn.batch_norm" not in calls(vectors)
    values = {"weight": WEIGHT, "gamma": GAMMA, "beta": BETA, "mean": MEAN, "var": VAR}
    bind = relax.transform.BindParams("main", values)
    bound = simplify(bind(vectors))
    assert calls(bound) == ["nn.conv2d", "add"]
    tvm.ir.assert_structural_equal(bound, simplify(bind(WithParameters)))


def test_numbers_with_parameters(run_module):
    data = dyadic(2, 2, 5, 5)
    arguments = (data, WEIGHT, GAMMA, BETA, MEAN, VAR)
    expected = run_module(
        tvm.relax.transform.DecomposeOpsForInference()(WithParameters), *arguments
    )
    actual = run_module(simplify(WithParameters), *arguments)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_training_stays():
    @I.ir_module
    class Training:
        @R.function
        def main(x: R.Tensor((2, 4, 5), "float32")):
            with R.dataflow():
                lv = norm(x, training=True)
                gv = lv[0]
                R.output(gv)
            return gv

    check_unchanged(Training)


def test_infinite_scale_stays():
    @I.ir_module
    class Broken:
        @R.function
        def main(x: R.Tensor((2, 4, 5), "float32")):
            with R.dataflow():
                lv = R.nn.batch_norm(
                    x, const(GAMMA), const(BETA), const(MEAN), const(-VAR), axis=1, training=False
                )
                gv = lv[0]
                R.output(gv)
            return gv

    check_unchanged(Broken)


def test_convolution_with_another_reader_keeps_its_weight():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = norm(lv)
                lv2 = lv1[0]
                lv3 = R.nn.relu(lv)
                gv = R.concat((lv2, lv3), axis=1)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.multiply(lv, per_channel(SCALE))
                lv2 = R.add(lv1, per_channel(SHIFT))
                lv3 = R.nn.relu(lv)
                gv = R.concat((lv2, lv3), axis=1)
                R.output(gv)
            return gv

    check(Shared, Expected)
