# SPDX-License-Identifier: Apache-2.0
"""Pass ``CoalesceReduction``: the example of its docstring, each op, refusals, and numbers."""

from __future__ import annotations

import inspect

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from reduction_checks import module_of, random_data, reference, run
from tvm import relax, tirx
from tvm.relax.frontend.onnx import from_onnx
from tvm.s_tir import dlight
from tvm.script import ir as I
from tvm.script import relax as R

import relay_passes
from relay_passes import CoalesceReduction
from relay_passes.op import coalesced_reduce
from relay_passes.reduction.coalesce_reduction import read_reduction_report
from schedules import attributes, cpu

PLAIN = ["sum", "prod", "min", "max", "mean", "argmin", "argmax"]


def coalesce(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass; check that it leaves its input alone and changes nothing more next time."""
    functions = dict(mod.functions_items())
    once = CoalesceReduction()(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(CoalesceReduction()(once), once)
    return once


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    after = coalesce(before)
    tvm.ir.assert_structural_equal(
        after.without_attr(attributes.REDUCTION_REPORT) if after.attrs else after, expected
    )


def ops(mod: tvm.IRModule) -> list[str]:
    """Ops of ``main`` in order, with the operator of coalesced reductions."""
    found = []

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            name = expr.op.name.removeprefix("relax.")
            is_ours = name == "tvm_fusion.coalesced_reduce"
            found.append(f"[{expr.attrs['operator']}]" if is_ours else name)

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


def data(*shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def reduction(name, x, axis, keepdims):
    if name.startswith("arg"):  # these take one axis or all
        axis = None if axis is None else axis[0]
    return getattr(relax.op, name)(x, axis, keepdims)


@I.ir_module
class Before:
    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float32"),
        y: R.Tensor((2, 3), "int32"),
        z: R.Tensor((5, 6), "float32"),
    ):
        with R.dataflow():
            lv = R.multiply(x, x)
            lv1 = R.sum(lv, axis=[0, 2])
            lv2 = R.max(y, axis=[1], keepdims=True)
            lv3 = R.variance(z, axis=[0])
            gv = (lv1, lv2, lv3)
            R.output(gv)
        return gv


@I.ir_module
class Expected:
    @R.function
    def main(
        x: R.Tensor((2, 3, 4), "float32"),
        y: R.Tensor((2, 3), "int32"),
        z: R.Tensor((5, 6), "float32"),
    ):
        with R.dataflow():
            lv1 = R.tvm_fusion.coalesced_reduce(x, operator="sum_squares", axes=[0, 2])
            lv2 = R.tvm_fusion.coalesced_reduce(y, operator="max", axes=[1], keepdims=True)
            lv = R.tvm_fusion.coalesced_reduce(z, operator="mean", axes=[0], keepdims=True)
            lv4 = R.subtract(z, lv)
            lv5 = R.multiply(lv4, lv4)
            lv3 = R.tvm_fusion.coalesced_reduce(lv5, operator="mean", axes=[0])
            gv = (lv1, lv2, lv3)
            R.output(gv)
        return gv


def test_the_report_counts_what_was_rewritten():
    assert read_reduction_report(Before) == {"rewritten": 0, "groups": []}
    assert read_reduction_report(coalesce(Before)) == {"rewritten": 3, "groups": []}


def test_the_example_of_the_docstring():
    check(Before, Expected)


def test_pass_has_the_name_of_its_file_and_is_exported():
    assert CoalesceReduction().info.name == "CoalesceReduction"
    assert relay_passes.CoalesceReduction is CoalesceReduction
    module = inspect.getmodule(CoalesceReduction)
    assert module.__name__ == "relay_passes.reduction.coalesce_reduction"


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, [1], [-1]])
@pytest.mark.parametrize("name", PLAIN)
def test_each_op(name, axis, keepdims):
    n = tirx.Var("n", "int64")
    x, same = data(n, 3, 4), data(n, 3, 4)
    before = module_of(reduction(name, x, axis, keepdims), x)
    expected = module_of(coalesced_reduce(same, name, axis, keepdims=keepdims), same)
    check(before, expected)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64", "int8", "uint8"])
def test_types_are_kept(dtype):
    for name in PLAIN:
        if name == "mean" and "int" in dtype:
            continue
        x = data(2, 3, dtype=dtype)
        before = module_of(reduction(name, x, [1], False), x)
        after = coalesce(before)
        assert ops(after) == [f"[{name}]"]
        tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)


@pytest.mark.parametrize(
    "make",
    [
        lambda: relax.op.sum(data(2, 3, dtype="uint16")),
        lambda: relax.op.max(data(2, 3, dtype="float8_e4m3fn")),
        lambda: relax.op.sum(data(2, 3, dtype="bool")),
        lambda: relax.op.mean(data(2, 3, dtype="int32")),
        lambda: relax.op.variance(data(2, 3, dtype="int32")),
        lambda: relax.op.max(data(2, 0)),
        lambda: relax.op.sum(data(tirx.Var("n", "int64"), tirx.Var("k", "int64"))),
        lambda: relax.op.sum(relax.Var("x", relax.TensorType(None, "float32", ndim=2))),
        lambda: relax.op.nn.softmax(data(2, 3)),
        lambda: relax.op.median(data(2, 3), 1),
        lambda: relax.op.cumsum(data(2, 3), 0),
    ],
)
def test_what_stays(make):
    call = make()
    mod = module_of(call, call.args[0])
    check(mod, mod)


def test_functions_of_other_passes_stay():
    @I.ir_module
    class Marked:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Primitive": True})
            gv = R.sum(x)
            return gv

        @R.function
        def other(x: R.Tensor((2, 3), "float32")):
            R.func_attr({"Codegen": "somewhere"})
            gv = R.max(x)
            return gv

    check(Marked, Marked)


def test_branches_local_functions_and_code_outside_dataflow():
    @I.ir_module
    class Nested:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), which: R.Tensor((), "bool")):
            @R.function
            def inner(y: R.Tensor((2, 3), "float32")) -> R.Tensor((3,), "float32"):
                r = R.min(y, axis=[0])
                return r

            if which:
                a = R.sum(x, axis=[0])
            else:
                a = R.std(x, axis=[0])
            b = inner(x)
            c = R.add(a, b)
            return c

    @I.ir_module
    class Coalesced:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), which: R.Tensor((), "bool")):
            @R.function
            def inner(y: R.Tensor((2, 3), "float32")) -> R.Tensor((3,), "float32"):
                r = R.tvm_fusion.coalesced_reduce(y, operator="min", axes=[0])
                return r

            if which:
                a = R.tvm_fusion.coalesced_reduce(x, operator="sum", axes=[0])
            else:
                m = R.tvm_fusion.coalesced_reduce(x, operator="mean", axes=[0], keepdims=True)
                d = R.subtract(x, m)
                s = R.multiply(d, d)
                v = R.tvm_fusion.coalesced_reduce(s, operator="mean", axes=[0])
                a = R.sqrt(v)
            b = inner(x)
            c = R.add(a, b)
            return c

    check(Nested, Coalesced)


def test_squares_with_other_readers_stay_beside_the_reduction():
    @I.ir_module
    class Shared:
        @R.function
        def main(x: R.Tensor((2, 3), "float16")):
            with R.dataflow():
                lv = R.square(x)
                lv1 = R.sum(lv)
                gv = (lv, lv1)
                R.output(gv)
            return gv

    after = coalesce(Shared)
    assert ops(after) == ["square", "[sum_squares]"]


def test_products_of_two_tensors_are_no_squares():
    @I.ir_module
    class Products:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                lv = R.multiply(x, y)
                gv = R.sum(lv)
                R.output(gv)
            return gv

    assert ops(coalesce(Products)) == ["multiply", "[sum]"]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ((2, 3, 4), (3, 4), ["[sum]"]),
        ((2, 3, 4), (2, 1, 1), ["[sum]"]),
        ((2, 3, 4), (1, 4), ["[sum]", "reshape"]),
        ((2, 3), (2, 3), ["[sum]"]),
        ((2, 1), (1, 1), ["[sum]"]),
        ((2, 3), (), ["[sum]"]),
    ],
)
@pytest.mark.parametrize("like", [False, True])
def test_sums_over_broadcast_axes(shape, target, expected, like):
    x, y = data(*shape), data(*target, name="y")
    if like:
        mod = module_of(relax.op.collapse_sum_like(x, y), x, y)
    else:
        mod = module_of(relax.op.collapse_sum_to(x, target), x, y)
    after = coalesce(mod)
    assert ops(after) == expected
    values = random_data(np.random.default_rng(0), shape, "float32")
    new = len(shape) - len(target)
    axes = [*range(new)]
    axes += [new + i for i, size in enumerate(target) if size == 1 != shape[new + i]]
    actual = run(after, values, np.zeros(target, "float32"))
    np.testing.assert_array_equal(actual, reference("sum", values, axes).reshape(target))


@I.ir_module
class Transposed:
    @R.function
    def main(x: R.Tensor((2, 3, 4, 5), "float32")):
        with R.dataflow():
            lv = R.permute_dims(x, axes=[0, 3, 1, 2])
            lv1 = R.mean(lv, axis=[2, 3])
            lv2 = R.permute_dims(x, axes=[0, 2, 1, 3])
            lv3 = R.sum(lv2, axis=[3])
            gv = (lv1, lv3)
            R.output(gv)
        return gv


@I.ir_module
class Untransposed:
    @R.function
    def main(x: R.Tensor((2, 3, 4, 5), "float32")):
        with R.dataflow():
            lv1 = R.tvm_fusion.coalesced_reduce(x, operator="mean", axes=[1, 2])
            lv = R.tvm_fusion.coalesced_reduce(x, operator="sum", axes=[3])
            lv3 = R.permute_dims(lv, axes=[0, 2, 1])
            gv = (lv1, lv3)
            R.output(gv)
        return gv


def test_transposed_data_is_reduced_in_place():
    check(Transposed, Untransposed)


@settings(max_examples=settings.default.max_examples // 7)
@given(st.sampled_from(PLAIN), st.permutations(range(3)), st.booleans(), st.data())
def test_numbers_of_transposed_data(name, order, keepdims, draw):
    x = data(2, 3, 4)
    turned = relax.op.permute_dims(x, order if draw.draw(st.booleans()) else None)
    axes = draw.draw(st.sampled_from([None, [0], [1], [-1], [0, 2], [1, 2]]), "axes")
    before = module_of(reduction(name, turned, axes, keepdims), x)
    values = np.random.default_rng(0).permutation(24).reshape(2, 3, 4).astype("float32")
    after = coalesce(before)
    tvm.ir.assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty)
    np.testing.assert_allclose(run(after, values), run(before, values), rtol=1e-5)


@settings(max_examples=settings.default.max_examples // 7)
@given(
    st.sampled_from(["variance", "std"]),
    st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([0.0, 1000.0]),
    st.booleans(),
    st.data(),
)
def test_variances_are_safe_for_large_means(name, dtype, shape, offset, keepdims, draw):
    axes = sorted(draw.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    values = random_data(np.random.default_rng(draw.draw(st.integers(0, 9))), shape, "float64")
    values = (values + offset).astype(random_data(np.random.default_rng(0), (), dtype).dtype)
    x = data(*shape, dtype=dtype)
    after = coalesce(module_of(getattr(relax.op, name)(x, axes, keepdims), x))
    actual = run(after, values)
    exact = values.astype("float64")
    fold = np.var if name == "variance" else np.std
    expected = fold(exact, axis=tuple(axes), keepdims=keepdims)
    precision = {"float64": 1e-12, "float32": 1e-4, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    assert actual.dtype == values.dtype
    np.testing.assert_allclose(
        actual.astype("float64"), expected, rtol=precision, atol=precision / 10
    )


ONNX_REDUCTIONS = {
    "ReduceSum": (["[sum]"], np.sum),
    "ReduceMean": (["[mean]"], np.mean),
    "ReduceMax": (["[max]"], np.max),
    "ReduceMin": (["[min]"], np.min),
    "ReduceProd": (["[prod]"], np.prod),
    "ReduceL1": (["abs", "[sum]"], lambda x, **axes: np.abs(x).sum(**axes)),
    "ReduceL2": (["[sum_squares]", "sqrt"], lambda x, **axes: np.sqrt((x * x).sum(**axes))),
    "ReduceSumSquare": (["[sum_squares]"], lambda x, **axes: (x * x).sum(**axes)),
    "ReduceLogSum": (["[sum]", "log"], lambda x, **axes: np.log(x.sum(**axes))),
}


@pytest.mark.parametrize("name", ONNX_REDUCTIONS)
def test_reductions_of_the_onnx_importer(name):
    expected, fold = ONNX_REDUCTIONS[name]
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [0, 2])
    node = helper.make_node(name, ["x", "axes"], ["y"], keepdims=0)
    old_node = helper.make_node(name, ["x"], ["y"], keepdims=0, axes=[0, 2])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    is_sum = name == "ReduceSum"  # Only opset 13 of it has the axes as an input.
    graph = helper.make_graph(
        [node if is_sum else old_node], "g", [x], [y], [axes] if is_sum else []
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    onnx.checker.check_model(model)
    after = coalesce(from_onnx(model, keep_params_in_input=False))
    assert ops(after) == expected
    values = np.abs(random_data(np.random.default_rng(1), (2, 3, 4), "float32")) + 0.5
    np.testing.assert_allclose(run(after, values), fold(values, axis=(0, 2)), rtol=1e-5)


def test_global_average_pool_of_the_onnx_importer():
    node = helper.make_node("GlobalAveragePool", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 5, 7])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3, 1, 1])
    model = helper.make_model(helper.make_graph([node], "g", [x], [y]))
    after = coalesce(from_onnx(model, keep_params_in_input=False))
    assert ops(after) == ["[mean]"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [*PLAIN, "variance", "std"])
def test_numbers(name):
    values = random_data(np.random.default_rng(2), (3, 5, 7), "float32")
    x = data(3, 5, 7)
    mod = module_of(reduction(name, x, [1], True), x)
    np.testing.assert_allclose(run(coalesce(mod), values), run(mod, values), rtol=1e-5, atol=1e-6)


def test_a_nan_wins():
    values = np.array([[1, np.nan, 3], [4, 5, 6]], "float32")
    x = data(2, 3)
    after = coalesce(module_of(relax.op.max(x, 1), x))
    np.testing.assert_array_equal(run(after, values), [np.nan, 6])


def test_a_scheduled_reduction_passes_through_tvms_own_pipeline() -> None:
    """It is one of several functions: it must not call itself ``main``."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((64, 70), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.sum(data, [1]))
        builder.emit_func_output(result)
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    passes = [
        CoalesceReduction(),
        relax.transform.LegalizeOps(),
        dlight.ApplyDefaultSchedule(*cpu.RULES),
    ]
    with target:
        lowered = tvm.transform.Sequential(passes)(builder.get())
    machine = relax.VirtualMachine(tvm.compile(lowered, target), tvm.cpu())
    array = np.random.default_rng().standard_normal((64, 70)).astype("float32")
    got = machine["main"](tvm.runtime.tensor(array)).numpy()
    np.testing.assert_allclose(got, array.astype("float64").sum(1), rtol=1e-5, atol=1e-5)
