# SPDX-License-Identifier: Apache-2.0
"""Pass ``SimplifyInference``: the example of its docstring, kinds of functions, and names."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import tvm
from simplify_checks import calls, check, check_unchanged, const, dyadic, per_channel, simplify
from tvm import relax, topi
from tvm.script import ir as I
from tvm.script import relax as R

import relay_passes
from relay_passes import SimplifyInference
from relay_passes.simplify import simplify_inference as pass_module

WEIGHT = dyadic(4, 2, 3, 3)
GAMMA, BETA, MEAN = (dyadic(4, seed=seed) for seed in (1, 2, 3))
VAR = np.array([3, 15, 63, 0], "float32")  # plus 1: the squares of 2, 4, 8 and 1
SCALE = GAMMA / np.sqrt(VAR + 1)
SHIFT = BETA - MEAN * SCALE


def imported(has_parameters=False):
    """The example as TVM's importer emits it: padding and bounds are PrimFuncs."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 2, 5, 5), "float32"))
    values = {"gamma": GAMMA, "beta": BETA, "mean": MEAN, "var": VAR}
    parameters = [
        relax.Var(name, relax.TensorType((4,), "float32")) if has_parameters else const(value)
        for name, value in values.items()
    ]
    with builder.function("main", [x, *(parameters if has_parameters else [])]):
        with builder.dataflow():
            padded = builder.emit_te(topi.nn.pad, x, [0, 0, 1, 1], [0, 0, 1, 1], 0.0)
            conv = builder.emit(relax.op.nn.conv2d(padded, const(WEIGHT)))
            norm = relax.op.nn.batch_norm(conv, *parameters, 1, 1.0, training=False)
            item = builder.emit(relax.TupleGetItem(builder.emit(norm), 0))
            bounded = builder.emit_te(topi.maximum, item, 0.0)
            result = builder.emit_output(builder.emit_te(topi.minimum, bounded, 6.0))
        builder.emit_func_output(result)
    return builder.get()


@I.ir_module
class Expected:
    @R.function
    def main(x: R.Tensor((1, 2, 5, 5), "float32")):
        with R.dataflow():
            lv = R.nn.conv2d(x, const(WEIGHT * SCALE.reshape(4, 1, 1, 1)), padding=(1, 1, 1, 1))
            lv1 = R.add(lv, per_channel(SHIFT))
            gv = R.clip(lv1, 0, 6)
            R.output(gv)
        return gv


def test_the_example_of_the_docstring():
    check(imported(), Expected)


def test_works_in_a_sequential_without_this_package_around():
    values = {"gamma": GAMMA, "beta": BETA, "mean": MEAN, "var": VAR}
    passes = [
        relax.transform.BindParams("main", values),
        SimplifyInference(),
        relax.transform.LegalizeOps(),
    ]
    legalized = tvm.transform.Sequential(passes)(imported(has_parameters=True))
    names = sorted(var.name_hint for var in legalized.functions)
    assert names == ["add", "conv2d", "main", "tir_clip"]


def test_pass_has_its_name_and_rules_are_of_its_family():
    assert SimplifyInference().info.name == "SimplifyInference"
    rules = Path(pass_module.__file__).parent
    for rule, _ in pass_module.RULES:
        assert Path(inspect.getfile(rule)).parent == rules


def test_functions_of_other_passes_and_of_other_kinds_stay():
    @I.ir_module
    class Marked:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Primitive": True})
            with R.dataflow():
                gv = R.add(x, const(0.0))
                R.output(gv)
            return gv

        @R.function
        def other(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Codegen": "somewhere"})
            gv = R.add(x, const(0.0))
            return gv

    check_unchanged(Marked)


def test_every_function_is_simplified_and_attributes_are_kept():
    @I.ir_module
    class Before:
        I.module_attrs({"answer": 42})

        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                lv = Before.helper(x)
                gv = R.maximum(lv, const(0.0))
                R.output(gv)
            return gv

        @R.function(private=True)
        def helper(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            with R.dataflow():
                gv = R.maximum(x, const(0.0))
                R.output(gv)
            return gv

    simplified = simplify(Before)
    assert calls(simplified, "helper") == ["nn.relu"]
    assert simplified["main"].body.blocks[0].bindings[-1].value.op.name == "relax.nn.relu"
    assert int(simplified["main"].attrs["num_input"]) == 1
    assert int(simplified.attrs["answer"]) == 42


def test_code_outside_dataflow_blocks():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            lv = R.nn.conv2d(x, const(WEIGHT))
            lv1 = R.multiply(lv, const(2.0))
            lv2 = R.add(x, const(0.0))
            lv3 = R.nn.relu(lv1)
            return (lv3, lv2)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            lv1 = R.nn.conv2d(x, const(2 * WEIGHT))
            lv3 = R.nn.relu(lv1)
            return (lv3, x)

    check(Before, Expected)


def test_values_of_another_block_are_unknown():
    @I.ir_module
    class Blocks:
        @R.function(pure=False)
        def main(x: R.Tensor((1, 2, 5, 5), "float32")):
            with R.dataflow():
                lv = R.abs(x)
                gv = R.nn.conv2d(lv, const(WEIGHT))
                R.output(gv)
            _ = R.print(format="between")
            with R.dataflow():
                gv1 = R.multiply(gv, const(2.0))
                R.output(gv1)
            return gv1

    check_unchanged(Blocks)


def test_branches_count_as_readers_and_stay():
    @I.ir_module
    class Branching:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), "float32"), which: R.Tensor((), "bool")):
            conv = R.nn.conv2d(x, const(WEIGHT))
            scaled = R.multiply(conv, const(2.0))
            if which:
                lv = R.add(conv, const(0.0))
                result = R.nn.relu(lv)
            else:
                result = R.nn.relu(scaled)
            return result

    check_unchanged(Branching)


def test_a_cast_is_a_reader_and_stays():
    @I.ir_module
    class Casting:
        @R.function
        def main(x: R.Tensor(dtype="float32", ndim=4)):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.match_cast(lv, R.Tensor((1, 4, 3, 3), "float32"))
                lv2 = R.multiply(lv, const(2.0))
                gv = (lv1, lv2)
                R.output(gv)
            return gv

    check_unchanged(Casting)


def test_unknown_shapes():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(dtype="float32", ndim=4)):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(WEIGHT))
                lv1 = R.multiply(lv, const(2.0))
                lv2 = R.add(lv1, per_channel(BETA))
                gv = R.maximum(lv2, const(0.0))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(dtype="float32", ndim=4)):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(2 * WEIGHT))
                lv1 = R.add(lv, per_channel(BETA))
                gv = R.nn.relu(lv1)
                R.output(gv)
            return gv

    check(Before, Expected)


def test_dead_bindings_and_functions_go():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                lv = Before.unused(x)
                _ = R.tanh(lv)
                gv = R.exp(x)
                R.output(gv)
            return gv

        @R.function(private=True)
        def unused(x: R.Tensor((2, 3), "float32")) -> R.Tensor((2, 3), "float32"):
            return x

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                gv = R.exp(x)
                R.output(gv)
            return gv

    check(Before, Expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_float_types(dtype):
    weight = dyadic(4, 2, 1, 1)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), dtype)):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(weight, dtype))
                lv1 = R.multiply(lv, const(0.5, dtype))
                gv = R.add(lv1, const(np.ones((4, 1, 1)), dtype))
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 5, 5), dtype)):
            with R.dataflow():
                lv = R.nn.conv2d(x, const(weight / 2, dtype))
                gv = R.add(lv, const(np.ones((1, 4, 1, 1)), dtype))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_the_package_exports_the_pass():
    assert relay_passes.SimplifyInference is SimplifyInference
