# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseReductionProducers``: what is absorbed, what stays apart, and numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_checks import Array, module_of, random_data
from reduction_graphs import TABLE_2, calls, data, f32, legal, op, several, total
from tvm import relax, s_tir, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import relay_passes
from relay_passes import FuseReductionProducers
from relay_passes.op import coalesced_reduce
from relay_passes.reduction.fuse_reduction_producers import MAX_TENSORS
from schedules.compute.coalesced_reduce import FINISH, STATE, VALUE
from tests.targets import compile_unchecked

transform = relax.transform
STAGES = [VALUE, STATE, FINISH]


def fuse(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass on an unlegalized module, check that twice is once, then TVM's fusion."""
    before = legal(mod)
    functions = dict(before.functions_items())
    once = FuseReductionProducers()(before)
    assert dict(before.functions_items()) == functions
    tvm.ir.assert_structural_equal(FuseReductionProducers()(once), once)
    return tvm.transform.Sequential([transform.FuseOps(), transform.FuseTIR()])(once)


def blocks(mod: tvm.IRModule, name: str) -> list[str]:
    found: list[str] = []
    tvm_ffi.structural_walk(mod[name].body, (s_tir.SBlock, lambda b: found.append(b.name_hint)))
    return found


def sorted_blocks(mod: tvm.IRModule, name: str) -> list[str]:
    return sorted(block for block in blocks(mod, name) if block != "root")


def run(mod: tvm.IRModule, *inputs: Array):
    machine = relax.VirtualMachine(compile_unchecked(mod), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in inputs])
    if isinstance(result, tvm.runtime.Tensor):
        return result.numpy()
    return [tensor.numpy() for tensor in result]


@I.ir_module
class Example:
    @R.function
    def main(x: R.Tensor((6, 8), "float16")):
        with R.dataflow():
            lv = R.exp(x)
            lv1 = R.astype(lv, "float32")
            lv2 = R.reshape(lv1, (3, 16))
            gv = R.tvm_fusion.coalesced_reduce(lv2, operator="sum", axes=[1])
            R.output(gv)
        return gv


def test_the_group_is_built_as_fuse_ops_builds_it():
    grouped = FuseReductionProducers()(legal(Example))
    name = "fused_tir_exp_cast_reshape_coalesced_sum"
    assert [v.name_hint for v in grouped.functions if isinstance(grouped[v], relax.Function)] == [
        name,
        "main",
    ]
    func = grouped[name]
    assert int(func.attrs["Primitive"]) == 1 and "global_symbol" not in func.attrs
    (block,) = func.body.blocks
    assert isinstance(block, relax.DataflowBlock)
    assert [b.value.args[0].name_hint for b in block.bindings] == [
        "tir_exp",
        "cast",
        "reshape",
        "coalesced_sum",
    ]
    (binding,) = grouped["main"].body.blocks[0].bindings
    assert binding.value.op.name_hint == name and len(binding.value.args) == 1


def test_one_function_comes_out():
    fused = fuse(Example)
    name = "fused_tir_exp_cast_reshape_coalesced_sum"
    assert calls(fused) == [name]
    assert sorted_blocks(fused, name) == sorted(["compute", "compute1", "T_reshape", *STAGES])
    values = random_data(np.random.default_rng(0), (6, 8), "float16")
    expected = np.exp(values.astype("float64")).reshape(3, 16).sum(1)
    np.testing.assert_allclose(run(fused, values), expected, rtol=2e-3)


def test_without_the_pass_the_reshape_is_apart():
    plain = tvm.transform.Sequential([transform.FuseOps(), transform.FuseTIR()])(legal(Example))
    assert len(calls(plain)) > 1


def test_pass_has_the_name_of_its_file_and_is_exported():
    assert FuseReductionProducers().info.name == "FuseReductionProducers"
    assert relay_passes.FuseReductionProducers is FuseReductionProducers


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("number", TABLE_2)
def test_sub_graphs_of_table_2_are_one_function_a_reduction(number):
    types, build, by_numpy = TABLE_2[number]
    params = [data(*shape, dtype=dtype, name=f"x{i}") for i, (dtype, shape) in enumerate(types)]
    fused = fuse(several(lambda emit, *params: build(*params), *params))
    rng = np.random.default_rng(number)
    values = [random_data(rng, shape, dtype) for dtype, shape in types]
    expected = by_numpy(*[value.astype("float64") for value in values])
    assert len(calls(fused)) == len(expected)
    for name in calls(fused):
        assert set(STAGES) <= set(blocks(fused, name))
    for actual, wanted in zip(run(fused, *values), expected, strict=True):
        np.testing.assert_allclose(actual.astype("float64"), wanted, rtol=1e-3)


def test_a_cheap_producer_of_two_reductions_is_computed_in_both():
    x, y = data(6, 8), data(6, 8, name="y")

    def build(emit, x, y):
        shared = emit(op.add(x, y))
        return [total(op.negative(shared), [1]), total(shared, [0], "max")]

    fused = fuse(several(build, x, y))
    names = calls(fused)
    assert names == ["fused_add_tir_negative_coalesced_sum", "fused_add_coalesced_max"]
    assert all("T_add" in blocks(fused, name) for name in names)
    values = [random_data(np.random.default_rng(i), (6, 8), "float32") for i in range(2)]
    rows_, columns = run(fused, *values)
    np.testing.assert_allclose(rows_, -sum(values).sum(1))
    np.testing.assert_array_equal(columns, sum(values).max(0))


def test_an_expensive_producer_of_two_reductions_is_read():
    def build(emit, x):
        shared = emit(op.exp(op.negative(x)))
        return [total(op.negative(shared), [1]), total(shared, [0])]

    fused = fuse(several(build, data(6, 8)))
    assert calls(fused) == [
        "fused_tir_negative_tir_exp",
        "fused_tir_negative_coalesced_sum",
        "coalesced_sum1",
    ]


def test_a_producer_that_others_read_too_is_read():
    def build(emit, x):
        shared = emit(op.negative(x))
        scaled = emit(op.add(shared, shared))
        return [shared, total(scaled, [0])]

    fused = fuse(several(build, data(6, 8)))
    assert calls(fused) == ["tir_negative", "fused_add_coalesced_sum"]


def test_a_producer_that_reads_many_tensors_is_shared_by_few_reductions_only():
    def build(count):
        def results(emit, *inputs):
            shared = inputs[0]
            for other in inputs[1:]:
                shared = op.add(shared, other)
            shared = emit(shared)
            return [total(shared, None, operator) for operator in ("sum", "max", "min")[:count]]

        return results

    def kernels(tensors, reductions):
        params = [data(4, 5, name=f"x{i}") for i in range(tensors)]
        return len(calls(fuse(several(build(reductions), *params))))

    # k * in <= in + (1 + k) * out, with in = tensors * out
    assert [kernels(tensors, 1) for tensors in (2, 4, MAX_TENSORS)] == [1, 1, 1]
    assert [kernels(tensors, 2) for tensors in (2, 3, 4)] == [2, 2, 3]
    assert [kernels(tensors, 3) for tensors in (2, 3)] == [3, 4]


@pytest.mark.parametrize(("count", "kernels"), [(MAX_TENSORS, 1), (MAX_TENSORS + 1, 2)])
def test_a_concatenation_of_many_tensors_is_read(count, kernels):
    params = [data(4, 5, name=f"x{i}") for i in range(count)]
    fused = fuse(module_of(total(op.concat(params, 1), [1]), *params))
    assert len(calls(fused)) == kernels


def test_before_a_broadcast_only_cheap_producers_are_computed_again():
    def kernels(producer):
        def build(emit, x, *small):
            return [total(op.add(op.multiply(x, x), producer(*small)), [1])]

        params = [data(6, 8), *(data(6, 1, name=name) for name in "yzw")]
        return len(calls(fuse(several(build, *params))))

    assert kernels(lambda y, z, w: op.negative(y)) == 1
    assert kernels(lambda y, z, w: op.add(y, z)) == 1
    assert kernels(lambda y, z, w: op.add(op.add(y, z), w)) == 2
    assert kernels(lambda y, z, w: op.exp(y)) == 2


def test_the_epilogue_of_a_product_stays_with_it():
    def build(emit, x, y):
        biased = op.add(emit(op.matmul(x, y)), relax.const(np.ones(8, "float32")))
        return [total(op.nn.relu(biased), [0])]

    fused = fuse(several(build, data(4, 6), data(6, 8, name="y")))
    assert calls(fused) == ["fused_matmul_add_relu", "coalesced_sum"]


def test_a_product_is_not_written_wider_than_it_is():
    def build(emit, x, y):
        return [total(f32(emit(op.matmul(x, y))), [0])]

    params = [data(4, 6, dtype="float16"), data(6, 8, dtype="float16", name="y")]
    assert calls(fuse(several(build, *params))) == ["matmul", "fused_cast_coalesced_sum"]


def test_a_product_with_two_readers_has_no_epilogue():
    def build(emit, x, y):
        product = emit(op.matmul(x, y))
        return [product, total(op.negative(product), [0])]

    fused = fuse(several(build, data(4, 6), data(6, 8, name="y")))
    assert calls(fused) == ["matmul", "fused_tir_negative_coalesced_sum"]


def test_results_of_reductions_are_read():
    def build(emit, x):
        mean = emit(coalesced_reduce(x, "mean", 1, keepdims=True))
        difference = emit(op.subtract(x, mean))
        return [coalesced_reduce(op.multiply(difference, difference), "mean", 1)]

    fused = fuse(several(build, data(5, 7)))
    assert calls(fused) == ["coalesced_mean", "fused_subtract_multiply_coalesced_mean1"]
    values = random_data(np.random.default_rng(0), (5, 7), "float32")
    (actual,) = run(fused, values)
    np.testing.assert_allclose(actual, values.astype("float64").var(1), rtol=1e-5)


def test_constants_become_arguments():
    bias = np.arange(7, dtype="float32")
    x = data(5, 7)
    fused = fuse(module_of(total(op.add(x, relax.const(bias)), [0]), x))
    assert calls(fused) == ["fused_add_coalesced_sum"]
    values = random_data(np.random.default_rng(0), (5, 7), "float32")
    np.testing.assert_allclose(run(fused, values), (values + bias).sum(0))


@pytest.mark.parametrize("extent", [1, 3, 8])
def test_symbolic_extents(extent):
    n = tirx.Var("n", "int64")
    x = data(n, 7)
    flat = op.reshape(op.add(x, x), (n * 7,))
    fused = fuse(module_of(total(op.exp(flat), None, "max"), x))
    assert len(calls(fused)) == 1
    values = random_data(np.random.default_rng(0), (extent, 7), "float32")
    np.testing.assert_allclose(run(fused, values), np.exp(2 * values).max(), rtol=1e-5)


def test_symbolic_extents_that_no_argument_tells():
    n = tirx.Var("n", "int64")
    x = data(n, 7)

    def build(emit, x):
        flat = emit(op.reshape(x, (n * 7,)))
        return [flat, total(op.negative(flat))]

    fused = fuse(several(build, x))
    assert calls(fused) == ["reshape", "fused_tir_negative_coalesced_sum"]
    values = random_data(np.random.default_rng(0), (3, 7), "float32")
    flat, result = run(fused, values)
    np.testing.assert_array_equal(flat, values.ravel())
    np.testing.assert_allclose(result, -values.sum())


def test_code_outside_dataflow_blocks_stays():
    @I.ir_module
    class Outside:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            lv = R.negative(x)
            gv = R.tvm_fusion.coalesced_reduce(lv, operator="sum")
            return gv

    before = legal(Outside)
    tvm.ir.assert_structural_equal(FuseReductionProducers()(before), before)


def test_functions_of_other_passes_stay():
    before = legal(Example)
    before.update_func(before.get_global_var("main"), before["main"].with_attr("Primitive", True))
    tvm.ir.assert_structural_equal(FuseReductionProducers()(before), before)


def test_other_reductions_stay():
    @I.ir_module
    class Softmax:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                lv = R.negative(x)
                gv = R.nn.softmax(lv)
                R.output(gv)
            return gv

    before = legal(Softmax)
    tvm.ir.assert_structural_equal(FuseReductionProducers()(before), before)


STEPS: dict[str, tuple[Callable, Callable]] = {
    "negative": (op.negative, np.negative),
    "abs": (op.abs, np.abs),
    "tanh": (op.tanh, np.tanh),
    "flat": (lambda x: op.reshape(x, (24,)), lambda x: x.reshape(24)),
    "square": (lambda x: op.reshape(x, (4, 6)), lambda x: x.reshape(4, 6)),
    "turn": (op.permute_dims, np.transpose),
    "wide": (f32, lambda x: x),
    "row": (
        lambda x: op.add(x, relax.const(np.arange(int(x.ty.shape[-1])), "float32")),
        lambda x: x + np.arange(x.shape[-1]),
    ),
    "halves": (
        lambda x: op.concat([x, x], 0),
        lambda x: np.concatenate([x, x]),
    ),
}
FOLDS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean}


def grow(draw, emit, nodes, results):
    """Add one random node, or one random result; each is a pair of a variable and its values."""
    tensor, array = draw(st.sampled_from(nodes))
    name = draw(st.sampled_from([*STEPS, "multiply", "output", *FOLDS]))
    if name in FOLDS:
        axis = draw(st.integers(0, array.ndim - 1))
        reduced = emit(coalesced_reduce(tensor, name, axis))
        results.append((reduced, FOLDS[name](array, axis=axis)))
    elif name == "multiply":
        other, factor = draw(st.sampled_from([n for n in nodes if n[1].shape == array.shape]))
        nodes.append((emit(op.multiply(tensor, other)), array * factor))
    elif name == "output":
        results.append((tensor, array))
    elif array.size == 24 or name not in ("flat", "square"):
        step, by_numpy = STEPS[name]
        nodes.append((emit(step(tensor)), by_numpy(array)))


@settings(max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_numbers_of_random_graphs(draw):
    params = [data(4, 6), data(4, 6, name="y")]
    values = [random_data(np.random.default_rng(i), (4, 6), "float32") for i in range(2)]
    nodes = [(p, v.astype("float64")) for p, v in zip(params, values, strict=True)]
    results: list = []

    def build(emit, *_):
        for _ in range(draw.draw(st.integers(1, 8), "steps")):
            grow(draw.draw, emit, nodes, results)
        results.append((emit(coalesced_reduce(nodes[-1][0])), nodes[-1][1].sum()))
        return [var for var, _ in results]

    fused = fuse(several(build, *params))
    scale = max(np.abs(array).max() for _, array in nodes)
    for actual, (_, expected) in zip(run(fused, *values), results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * scale)
