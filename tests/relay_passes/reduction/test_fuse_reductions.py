# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseReductions``: sisters, epilogues, chains, what stays apart, and numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_chains import (
    CHAINS,
    half_norm,
    layer_norm,
    likelihood,
    log_softmax,
    log_softmax_of,
    normalized,
    normalized_of,
    random_graph,
    residual,
    softmax,
    softmax_of,
    total_of,
)
from reduction_checks import Array, random_data, run
from reduction_graphs import TABLE_2, calls, data, f16, f32, legal, op, several, total
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm.target import Target

import relay_passes
from relay_passes import FuseReductions
from relay_passes.op import coalesced_reduce
from relay_passes.reduction import groups as reduction_groups
from relay_passes.reduction.coalesce_reduction import read_reduction_report
from relay_passes.reduction.fuse_reduction_producers import MAX_TENSORS
from schedules.errors import TargetError

H100 = Target({"kind": "cuda", "arch": "sm_90"})
LONG = (4, 300_000)  # rows that no cluster of an H100 has at once
transform = relax.transform


def group(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass; check that it leaves its input alone and does nothing the second time."""
    functions = dict(mod.functions_items())
    once = FuseReductions(H100)(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(FuseReductions(H100)(once), once)
    return once


def finish(mod: tvm.IRModule) -> tvm.IRModule:
    passes = [transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()]
    return tvm.transform.Sequential(passes)(mod)


class Fused:
    """Fusion of a graph.

    Attributes
    ----------
    grouped, mod : tvm.IRModule
        Modules after the pass, and after TVM's fusion.
    kernels : list[str]
        The functions that ``main`` calls.
    groups : list
        The report's.
    """

    def __init__(self, build: Callable, *params: relax.Var) -> None:
        self.grouped = group(legal(several(build, *params)))
        self.mod = finish(self.grouped)
        self.kernels = calls(self.mod)
        self.groups = read_reduction_report(self.grouped)["groups"]

    @property
    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.groups]

    def check(self, by_numpy: Callable, *inputs: Array, rtol: float = 1e-4) -> None:
        """Compare with numpy, which gets the inputs in float64."""
        wanted = by_numpy(*[x.astype("float64") if x.dtype.kind == "f" else x for x in inputs])
        found = run(self.mod, *inputs)
        for actual, expected in zip(found, wanted, strict=True):
            scale = np.abs(expected).max(initial=0)
            np.testing.assert_allclose(
                actual.astype("float64"), expected, rtol=rtol, atol=rtol * scale
            )

    def touched(self) -> list[tuple[int, int]]:
        """Number of tensors that each kernel reads and writes."""
        found = []
        for name in self.kernels:
            func = self.mod[name]
            call = next(
                binding.value
                for binding in self.mod["main"].body.blocks[0].bindings
                if isinstance(binding.value, relax.Call) and binding.value.args[0].name_hint == name
            )
            read = len(call.args[1].fields)
            found.append((read, len(func.params) - read))
        return found


def normal(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng().standard_normal(shape).astype(dtype)


def test_the_group_is_one_function_as_fuse_ops_builds_it():
    fused = Fused(lambda emit, x: [softmax(emit, x)], data(64, 128))
    name = "fused_coalesced_max_subtract_tir_exp_coalesced_sum_divide"
    func = fused.grouped[name]
    assert int(func.attrs["Primitive"]) == 1 and "global_symbol" not in func.attrs
    (block,) = func.body.blocks
    assert isinstance(block, relax.DataflowBlock)
    assert [b.value.args[0].name_hint for b in block.bindings] == [
        "coalesced_max",
        "subtract",
        "tir_exp",
        "coalesced_sum",
        "divide",
    ]
    binding = fused.grouped["main"].body.blocks[0].bindings[0]
    assert binding.value.op.name_hint == name and len(binding.value.args) == 1
    assert fused.kernels == [name]


def test_pass_has_the_name_of_its_file_and_is_exported():
    assert FuseReductions().info.name == "FuseReductions"
    assert relay_passes.FuseReductions is FuseReductions


@pytest.mark.parametrize("target", [None, Target("llvm")])
def test_other_targets_than_gpus_are_left_alone(target):
    before = legal(several(lambda emit, x: [softmax(emit, x)], data(64, 128)))
    tvm.ir.assert_structural_equal(FuseReductions(target)(before), before)


def test_the_current_target_counts():
    before = legal(several(lambda emit, x: [softmax(emit, x)], data(64, 128)))
    with H100:
        after = FuseReductions()(before)
    tvm.ir.assert_structural_equal(after, group(before))
    with Target("llvm"):
        tvm.ir.assert_structural_equal(FuseReductions()(before), before)


def test_an_old_gpu_is_refused():
    before = legal(several(lambda emit, x: [softmax(emit, x)], data(64, 128)))
    with pytest.raises(TargetError, match="architecture sm_50 is too old"):
        FuseReductions(Target({"kind": "cuda", "arch": "sm_50"}))(before)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("number", TABLE_2)
def test_a_sub_graph_of_table_2_is_one_kernel(number):
    types, build, by_numpy = TABLE_2[number]
    params = [data(*shape, dtype=dtype, name=f"x{i}") for i, (dtype, shape) in enumerate(types)]
    fused = Fused(lambda emit, *params: build(*params), *params)
    inputs = [random_data(np.random.default_rng(), shape, dtype) for dtype, shape in types]
    assert fused.touched() == [(len(types), len(by_numpy(*inputs)))]
    fused.check(by_numpy, *inputs, rtol=1e-3)


# Sisters


def test_sisters_of_one_input_read_it_once():
    def build(emit, x):
        shared = emit(op.tanh(x))
        return [total(shared, [0], operator) for operator in ("sum", "max", "min")]

    fused = Fused(build, data(6, 8))
    assert fused.touched() == [(1, 3)] and fused.kinds == ["sisters"]
    fused.check(lambda x: [f(np.tanh(x), axis=0) for f in (np.sum, np.max, np.min)], normal(6, 8))


def test_sisters_may_see_their_inputs_in_other_shapes():
    def build(emit, x, y):
        return [total(x, [0, 1]), total(op.reshape(y, (12, 7)), [0], "max")]

    fused = Fused(build, data(4, 3, 7), data(2, 6, 7, name="y"))
    assert fused.touched() == [(2, 2)]
    fused.check(lambda x, y: [x.sum((0, 1)), y.max((0, 1))], normal(4, 3, 7), normal(2, 6, 7))


MISMATCHED = {
    "outputs": ((6, 8), (6, 9), [0], [0], "auto"),
    "reduced": ((6, 8), (7, 8), [0], [0], "auto"),
    "form": ((8, 8), (8, 8), [0], [1], "auto"),
    "runs": ((4, 3, 5), (3, 4, 5), [0], [1], "auto"),
    "finish": ((6, 8), (6, 8), [0], [0], "one_block"),
}


@pytest.mark.parametrize("what", MISMATCHED)
def test_reductions_over_other_loops_stay_apart(what):
    first, second, axes, other_axes, end = MISMATCHED[what]

    def build(emit, x, y):
        return [total(x, axes), coalesced_reduce(y, "sum", other_axes, finish=end)]

    fused = Fused(build, data(*first), data(*second, name="y"))
    assert len(fused.kernels) == 2 and not fused.groups


def test_no_group_has_more_tensors_than_a_kernel_should():
    def build(emit, *inputs):
        return [total(x, [0]) for x in inputs]

    count = MAX_TENSORS + 2
    fused = Fused(build, *[data(6, 8, name=f"x{i}") for i in range(count)])
    assert fused.touched() == [(MAX_TENSORS, MAX_TENSORS), (2, 2)]


def test_a_large_tensor_is_not_kept_for_a_sister(monkeypatch):
    def build(emit, x, w):
        results = []
        for _ in range(2):
            x = emit(op.matmul(x, w))
            results.append(emit(total(x, [0])))
        return results

    params = [data(6, 8), data(8, 8, name="w")]
    assert len(Fused(build, *params).kernels) == 3
    monkeypatch.setattr(reduction_groups, "KEPT_BYTES", 6 * 8 * 4 - 1)
    assert len(Fused(build, *params).kernels) == 3  # the second product reads it anyway

    def apart(emit, x, w):
        products = [emit(op.matmul(x, w)) for _ in range(1)]
        first = emit(total(products[0], [0]))
        return [first, emit(total(emit(op.matmul(op.negative(x), w)), [0]))]

    assert len(Fused(apart, *params).kernels) == 5
    monkeypatch.setattr(reduction_groups, "KEPT_BYTES", 6 * 8 * 4)
    assert len(Fused(apart, *params).kernels) == 4


def test_a_reader_between_sisters_moves_behind_them():
    def build(emit, x, y, w):
        first = emit(total(x, [0]))
        product = emit(op.matmul(first, w))
        return [product, total(y, [0], "max")]

    fused = Fused(build, data(6, 8), data(6, 8, name="y"), data(8, 8, name="w"))
    assert fused.kernels == ["fused_coalesced_sum_coalesced_max", "matmul"]
    fused.check(lambda x, y, w: [x.sum(0) @ w, y.max(0)], normal(6, 8), normal(6, 8), normal(8, 8))


# Cycles


def test_reductions_that_depend_on_each_other_through_a_product_stay_apart():
    def build(emit, x, w):
        first = emit(total(x, [1]))
        product = emit(op.reshape(emit(op.matmul(w, first)), (6, 1)))
        return [total(op.add(x, product), [1])]

    fused = Fused(build, data(6, 8), data(6, 6, name="w"))
    assert [len(entry["reductions"]) for entry in fused.groups] == [1]
    fused.check(lambda x, w: [(x + (w @ x.sum(1))[:, None]).sum(1)], normal(6, 8), normal(6, 6))


def test_two_pairs_of_sisters_that_would_wait_for_each_other():
    def build(emit, x, y, v, w):
        first, second = emit(total(x, [0])), emit(total(v, [1]))
        third = emit(total(op.add(y, emit(op.matmul(w, second))), [0]))
        fourth = emit(total(op.add(w, emit(op.matmul(first, y))), [1]))
        return [third, fourth]

    fused = Fused(build, *[data(8, 8, name=name) for name in "xyvw"])
    assert sorted(len(entry["reductions"]) for entry in fused.groups) == [1, 2]
    fused.check(
        lambda x, y, v, w: [(y + w @ v.sum(1)).sum(0), (w + x.sum(0) @ y).sum(1)],
        *[normal(8, 8) for _ in range(4)],
    )


def test_groups_that_would_wait_for_each_other_are_not_made():
    def build(emit, x, y, v, w):
        first, second = emit(total(x, [0])), emit(total(v, [0]))
        third = emit(total(op.add(w, emit(op.matmul(first, y))), [0]))  # a sister of the second
        fourth = emit(total(op.add(y, emit(op.matmul(second, w))), [0]))  # and of the first
        return [third, fourth]

    shapes = [(6, 8), (8, 8), (8, 8), (8, 8)]
    inputs = [normal(*shape) for shape in shapes]
    fused = Fused(build, *[data(*shape, name=n) for shape, n in zip(shapes, "xyvw", strict=True)])
    fused.check(lambda x, y, v, w: [(w + x.sum(0) @ y).sum(0), (y + v.sum(0) @ w).sum(0)], *inputs)
    assert max(len(entry["reductions"]) for entry in fused.groups) == 2


def test_an_epilogue_does_not_wait_for_its_own_group():
    def build(emit, x, w):
        first = emit(total(x, [1]))
        return [op.add(first, emit(op.matmul(w, first)))]

    fused = Fused(build, data(6, 8), data(6, 6, name="w"))
    assert fused.kernels[0] == "coalesced_sum"
    fused.check(lambda x, w: [x.sum(1) + w @ x.sum(1)], normal(6, 8), normal(6, 6))


# Epilogues


def test_epilogues_in_a_row_leave_one_output():
    def build(emit, x, y):
        mean = emit(coalesced_reduce(x, "mean", 1))
        return [op.reshape(f16(op.multiply(op.rsqrt(op.abs(mean)), y)), (2, 3))]

    fused = Fused(build, data(6, 8), data(6, name="y"))
    assert fused.touched() == [(2, 1)] and fused.kinds == ["epilogue"]
    fused.check(
        lambda x, y: [(y / np.sqrt(np.abs(x.mean(1)))).reshape(2, 3)],
        normal(6, 8),
        normal(6),
        rtol=2e-3,
    )


def test_the_statistics_of_a_norm_are_one_kernel():
    def build(emit, x):
        mean = emit(coalesced_reduce(x, "mean", 1))
        squares = emit(coalesced_reduce(op.multiply(x, x), "mean", 1))
        variance = emit(op.subtract(squares, op.multiply(mean, mean)))
        return [mean, op.rsqrt(op.add(variance, relax.const(1e-5)))]

    fused = Fused(build, data(6, 80))
    assert fused.touched() == [(1, 2)] and fused.kinds == ["sisters"]
    fused.check(lambda x: [x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)], normal(6, 80))


def test_a_result_with_other_readers_is_an_output_too():
    def build(emit, x, w):
        largest = emit(total(x, [1], "max"))
        return [op.exp(largest), emit(op.matmul(w, largest))]

    fused = Fused(build, data(6, 8), data(6, 6, name="w"))
    assert fused.touched()[0] == (1, 2) and len(fused.kernels) == 2
    fused.check(lambda x, w: [np.exp(x.max(1)), w @ x.max(1)], normal(6, 8), normal(6, 6))


def test_a_reshape_of_a_result_that_is_written_anyway_stays_a_view():
    def build(emit, x, w):
        first = emit(total(x, [1]))
        return [first, emit(op.matmul(emit(op.reshape(first, (1, 6))), w))]

    fused = Fused(build, data(6, 8), data(6, 6, name="w"))
    assert fused.kernels == ["coalesced_sum", "reshape", "matmul"]


@pytest.mark.parametrize("turn", [False, True])
def test_an_epilogue_reads_at_the_row_that_it_writes(turn):
    def build(emit, x):
        first = emit(total(x, [2]))
        return [op.exp(op.permute_dims(first) if turn else first)]

    fused = Fused(build, data(4, 6, 8))
    assert fused.kinds == ([] if turn else ["epilogue"])


# Chains


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_kernel(name):
    build, by_numpy, shapes, outputs = CHAINS[name]
    params = [data(*shape, name=f"x{i}") for i, shape in enumerate(shapes)]
    inputs = [normal(*shape) for shape in shapes]
    fused = Fused(build, *params)
    constants = sum(isinstance(a, tvm.ir.GenericConst) for a in arguments(fused.mod))
    assert fused.kinds == ["chain"]
    assert fused.touched() == [(len(shapes) + constants, outputs)]
    fused.check(by_numpy, *inputs)


def arguments(mod: tvm.IRModule) -> list[relax.Expr]:
    return list(mod["main"].body.blocks[0].bindings[0].value.args[1].fields)


def test_the_likelihood_of_targets_does_not_write_all_logarithms():
    fused = Fused(likelihood, data(5, 17), data(5, dtype="int64", name="t"))
    assert fused.touched() == [(2, 1)] and fused.kinds == ["chain"]
    targets = np.random.default_rng().integers(0, 17, 5)
    fused.check(lambda x, t: [-log_softmax_of(x)[np.arange(5), t]], normal(5, 17), targets)


def test_casts_around_a_chain_are_part_of_it():
    fused = Fused(half_norm, data(5, 32, dtype="float16"))
    assert fused.touched() == [(1, 1)]
    fused.check(lambda x: [normalized_of(x)], normal(5, 32, dtype="float16"), rtol=5e-3)


def test_a_chain_takes_in_no_stranger():
    def build(emit, x, y):
        return [softmax(emit, x), softmax(emit, y), total(y, [1], "min")]

    fused = Fused(build, data(5, 17), data(5, 17, name="y"))
    assert sorted(fused.touched()) == [(1, 1), (1, 2)]


def test_an_element_that_depends_on_other_rows_is_left_out():
    def build(emit, x):
        mean = emit(total_of("mean", x, 1))
        return [op.subtract(x, op.flip(mean, 0))]

    fused = Fused(build, data(6, 8))
    assert len(fused.kernels) == 2 and not fused.groups
    fused.check(lambda x: [x - x.mean(1, keepdims=True)[::-1]], normal(6, 8))


def test_an_input_of_a_chain_that_comes_from_its_result_leaves_it():
    def build(emit, x, w):
        scores = emit(softmax(emit, x))
        return [op.multiply(scores, emit(op.matmul(scores, w)))]

    fused = Fused(build, data(5, 8), data(8, 8, name="w"))
    assert [entry["results"] for entry in fused.groups] == [["divide"]]
    fused.check(lambda x, w: [softmax_of(x) * (softmax_of(x) @ w)], normal(5, 8), normal(8, 8))


# Long rows


def test_softmax_of_long_rows_computes_the_exponentials_twice():
    fused = Fused(lambda emit, x: [softmax(emit, x)], data(*LONG))
    assert fused.kernels == [
        "fused_coalesced_max_subtract_tir_exp_coalesced_sum",
        "fused_subtract_tir_exp_divide",
    ]
    assert fused.touched() == [(1, 2), (3, 1)]
    (entry,) = fused.groups
    assert entry["kind"] == "online" and entry["results"] == ["coalesced_max", "coalesced_sum"]
    assert entry["reductions"] == ["coalesced_max", "coalesced_sum"]
    assert entry["members"] == ["subtract", "tir_exp"] and entry["producers"] == []
    fused.check(lambda x: [softmax_of(x)], normal(*LONG))


def by_ops(emit, x, keepdims=True):
    """The maximum as ``x`` has it along the rows, and the exponentials."""
    largest = emit(op.max(x, [1], keepdims=keepdims))
    if not keepdims:
        largest = emit(op.reshape(largest, (x.ty.shape[0], 1)))
    return largest, emit(op.exp(emit(op.subtract(x, largest))))


def test_a_maximum_may_come_in_another_shape():
    def build(emit, x):
        exponential = by_ops(emit, x, keepdims=False)[1]
        total = emit(op.expand_dims(emit(op.sum(exponential, [1])), 1))
        return [op.divide(exponential, total)]

    fused = Fused(build, data(*LONG))
    assert [entry["kind"] for entry in fused.groups] == ["online"] and len(fused.kernels) == 2
    fused.check(lambda x: [softmax_of(x)], normal(*LONG))


def test_a_scaled_and_masked_softmax_stores_neither_its_input_nor_exponentials():
    def build(emit, x, mask):
        scaled = emit(op.multiply(x, relax.const(0.125)))
        return [softmax(emit, emit(op.where(mask, scaled, relax.const(-1e30))))]

    fused = Fused(build, data(*LONG), data(1, LONG[1], dtype="bool", name="mask"))
    assert len(fused.kernels) == 2 and fused.groups[0]["producers"] == ["multiply", "where"]
    assert [written for _, written in fused.touched()] == [2, 1]
    keep = np.random.default_rng().random((1, LONG[1])) < 0.5
    fused.check(lambda x, m: [softmax_of(np.where(m, x / 8, -1e30))], normal(*LONG), keep)


def test_a_log_sum_exp_of_long_rows_is_one_kernel():
    def build(emit, x):
        largest, exponential = by_ops(emit, x)
        return [op.add(op.log(emit(op.sum(exponential, [1], keepdims=True))), largest)]

    fused = Fused(build, data(*LONG))
    assert fused.touched() == [(1, 1)] and fused.kinds == ["online"]
    fused.check(lambda x: [np.logaddexp.reduce(x, 1, keepdims=True)], normal(*LONG))


def test_the_loss_of_long_rows_reads_them_twice():
    def build(emit, x, y):
        return [op.negative(emit(op.sum(emit(op.multiply(emit(log_softmax(emit, x)), y)))))]

    fused = Fused(build, data(*LONG), data(*LONG, name="y"))
    assert len(fused.kernels) == 2 and fused.kinds == ["online", "epilogue"]
    x, y = normal(*LONG), np.abs(normal(*LONG))
    fused.check(lambda x, y: [-(log_softmax_of(x) * y).sum()], x, y, rtol=1e-3)


def test_the_exponentials_may_be_asked_for():
    def build(emit, x):
        largest, exponential = by_ops(emit, x)
        return [exponential, op.sum(exponential, [1]), largest]

    fused = Fused(build, data(*LONG))
    assert fused.touched() == [(1, 2), (2, 1)]
    fused.check(
        lambda x: [e := np.exp(x - x.max(1, keepdims=True)), e.sum(1), x.max(1, keepdims=True)],
        normal(*LONG),
    )


def test_unknown_lengths_of_few_rows_are_online_and_unknown_rows_a_chain():
    n = tirx.Var("n", "int64")
    few = Fused(lambda emit, x: [softmax(emit, x)], data(4, n))
    assert few.kinds == ["online"] and len(few.kernels) == 2
    few.check(lambda x: [softmax_of(x)], normal(4, 301))
    many = Fused(lambda emit, x: [softmax(emit, x)], data(n, 40000))
    assert many.kinds == ["chain"] and len(many.kernels) == 1


NOT_ONLINE = {
    "of the minimum": lambda emit, x, y: total_of("min", x, 1),
    "of another tensor": lambda emit, x, y: total_of("max", y, 1),
    "over other axes": lambda emit, x, y: total_of("max", x, 0),
}


@pytest.mark.parametrize("name", NOT_ONLINE)
def test_what_has_no_maximum_of_its_rows_takes_a_kernel_for_each_step(name):
    def build(emit, x, y):
        shifted = emit(op.subtract(x, emit(NOT_ONLINE[name](emit, x, y))))
        return [op.divide(shifted, emit(total_of("sum", emit(op.exp(shifted)), 1)))]

    fused = Fused(build, data(*LONG), data(*LONG, name="y"))
    assert "online" not in fused.kinds and len(fused.kernels) >= 3


def test_a_maximum_that_reaches_the_sum_through_a_product_stays_apart():
    def build(emit, x, w):
        largest = emit(total_of("max", x, 1))
        shift = emit(op.matmul(largest, w))
        return [total_of("sum", emit(op.exp(emit(op.subtract(x, shift)))), 1)]

    fused = Fused(build, data(*LONG), data(1, 1, name="w"))
    assert "online" not in fused.kinds and len(fused.kernels) == 3


def test_layer_norm_of_long_rows_is_three_kernels():
    gains = [data(LONG[1], name=name) for name in "gb"]
    fused = Fused(lambda e, x, g, b: [layer_norm(e, x, g, b)], data(*LONG), *gains)
    assert fused.kernels == [
        "coalesced_mean",
        "fused_subtract_multiply_coalesced_mean_add_tir_rsqrt",
        "fused_subtract_multiply1_multiply2_add1",
    ]
    fused.check(
        lambda x, g, b: [normalized_of(x) * g + b],
        normal(*LONG),
        normal(LONG[1]),
        normal(LONG[1]),
        rtol=1e-3,
    )


@pytest.mark.slow
def test_long_rows_of_two_inputs_take_no_more_launches():
    def build(emit, x, y):
        return [softmax(emit, x), softmax(emit, y)]

    fused = Fused(build, data(*LONG), data(*LONG, name="y"))
    assert fused.touched() == [(2, 4), (3, 1), (3, 1)]
    assert fused.kinds == ["online"]
    fused.check(lambda x, y: [softmax_of(x), softmax_of(y)], normal(*LONG), normal(*LONG))


def test_many_long_rows_are_one_kernel():
    fused = Fused(lambda emit, x: [softmax(emit, x)], data(66, LONG[1]))
    assert len(fused.kernels) == 1


# Producers


def test_a_producer_that_others_read_is_stored():
    def build(emit, x, w):
        wide = emit(f32(x))
        return [total(wide, [0]), emit(op.matmul(wide, w))]

    fused = Fused(build, data(*LONG[::-1], dtype="float16"), data(4, 4, name="w"))
    assert fused.kernels == ["fused_cast_coalesced_sum", "matmul"] and fused.kinds == ["stored"]
    x = normal(*LONG[::-1], dtype="float16")
    fused.check(lambda x, w: [x.sum(0), x @ w], x, normal(4, 4), rtol=1e-3)


def test_a_kernel_with_whole_rows_writes_what_others_read():
    def build(emit, x, y, w):
        added = emit(op.add(x, y))
        return [total(added, [1]), emit(op.matmul(added, w))]

    fused = Fused(build, *[data(8, 8, name=name) for name in "xyw"])
    assert fused.kernels == ["fused_add_coalesced_sum", "matmul"]
    assert fused.touched() == [(2, 2), (2, 1)]
    fused.check(
        lambda x, y, w: [(x + y).sum(1), (x + y) @ w], normal(8, 8), normal(8, 8), normal(8, 8)
    )


def test_every_norm_of_a_residual_stream_writes_the_sum_that_the_next_one_reads():
    def build(emit, x, w):
        for _ in range(3):
            product = emit(op.matmul(emit(normalized(emit, x)), w))
            x = emit(op.add(x, emit(op.reshape(product, (5, 32)))))
        return [normalized(emit, x)]

    fused = Fused(build, data(5, 32), data(32, 32, name="w"))
    norms = [entry for entry in fused.groups if entry["kind"] == "chain"]
    assert [entry["results"] for entry in norms] == [
        ["multiply1"],
        ["add1", "multiply1"],
        ["add1", "multiply1"],
        ["multiply1"],
    ]


def test_an_embedding_and_its_norm_are_one_kernel():
    def build(emit, table, tokens):
        wrapped = op.where(op.less(tokens, relax.const(0)), op.add(tokens, relax.const(50)), tokens)
        return [normalized(emit, emit(op.take(table, emit(wrapped), 0)))]

    fused = Fused(build, data(50, 128, name="table"), data(64, dtype="int32", name="tokens"))
    assert len(fused.kernels) == 1
    tokens = np.random.default_rng().integers(-50, 50, 64).astype("int32")
    fused.check(lambda table, t: [normalized_of(table[t])], normal(50, 128), tokens)


def test_the_epilogue_of_a_product_stays_with_it():
    def build(emit, x, w, y):
        return residual(emit, emit(op.matmul(x, w)), y)

    fused = Fused(build, data(5, 8), data(8, 32, name="w"), data(5, 32, name="y"))
    assert fused.kernels[0] == "fused_matmul_add" and fused.touched() == [(3, 1), (1, 1)]


def test_a_concatenation_of_many_tensors_is_read():
    params = [data(5, 4, name=f"x{i}") for i in range(MAX_TENSORS + 1)]
    fused = Fused(lambda emit, *inputs: [softmax(emit, emit(op.concat(inputs, 1)))], *params)
    assert len(fused.kernels) == 2


# Where it is applied


def test_branches_are_rewritten_one_by_one():
    @I.ir_module
    class Branches:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((4, 6), "float32")) -> R.Tensor(
            (4,), "float32"
        ):
            if c:
                with R.dataflow():
                    lv = R.sum(x, axis=[1])
                    gv = R.negative(lv)
                    R.output(gv)
                r = gv
            else:
                with R.dataflow():
                    lv1 = R.max(x, axis=[1])
                    gv1 = R.exp(lv1)
                    R.output(gv1)
                r = gv1
            return r

    grouped = group(legal(Branches))
    assert [entry["kind"] for entry in read_reduction_report(grouped)["groups"]] == ["epilogue"] * 2
    x, mod = normal(4, 6), finish(grouped)
    for condition, expected in ((True, -x.sum(1)), (False, np.exp(x.max(1)))):
        np.testing.assert_allclose(run(mod, np.asarray(condition), x), expected, rtol=1e-5)


def test_functions_of_other_passes_stay():
    before = legal(several(lambda emit, x: [softmax(emit, x)], data(5, 17)))
    before.update_func(before.get_global_var("main"), before["main"].with_attr("Primitive", True))
    tvm.ir.assert_structural_equal(FuseReductions(H100)(before), before)


def test_functions_that_are_scheduled_already_stay():
    before = legal(several(lambda emit, x: [softmax(emit, x)], data(5, 17)))
    exp = before.get_global_var("tir_exp")
    before.update_func(exp, before[exp].with_attr("tirx.is_scheduled", True))
    groups = read_reduction_report(group(before))["groups"]
    assert [entry["members"] for entry in groups] == [["subtract"], ["divide"]]


def test_code_outside_dataflow_blocks_stays():
    @I.ir_module
    class Outside:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            lv = R.sum(x, axis=[1])
            gv = R.negative(lv)
            return gv

    before = legal(Outside)
    tvm.ir.assert_structural_equal(group(before), before)


def test_nothing_passes_a_match_cast():
    @I.ir_module
    class Matched:
        @R.function
        def main(x: R.Tensor((4, 6), "float32"), y: R.Tensor("float32", ndim=2)):
            with R.dataflow():
                lv = R.sum(x, axis=[1])
                n = T.int64()
                lv1 = R.match_cast(y, R.Tensor((n, 6), "float32"))
                lv2 = R.max(x, axis=[1])
                lv3 = R.sum(lv1, axis=[1])
                gv = (lv, lv2, lv3)
                R.output(gv)
            return gv

    mod = legal(Matched)
    tvm.ir.assert_structural_equal(group(mod), mod)


def test_what_nobody_reads_does_not_matter():
    @I.ir_module
    class Dead:
        @R.function
        def main(x: R.Tensor((4, 6), "float32")):
            with R.dataflow():
                lv = R.sum(x, axis=[1])
                _lv1 = R.max(x, axis=[1])
                gv = R.negative(lv)
                R.output(gv)
            return gv

    (entry,) = read_reduction_report(group(relax.transform.LegalizeOps()(legal(Dead))))["groups"]
    assert entry["reductions"] == ["coalesced_sum"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("extent", [1, 3, 8])
def test_a_symbolic_batch(extent):
    n = tirx.Var("n", "int64")

    def build(emit, x):
        return [softmax(emit, x), total(x, [1], "min")]

    fused = Fused(build, data(n, 17))
    assert len(fused.kernels) == 1
    fused.check(lambda x: [softmax_of(x), x.min(1)], normal(extent, 17))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_symbolic_rows(axis):
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    columns = 200 if axis else 1600  # enough to keep a device busy, several in a block
    shape = (n, k) if axis else (k, columns)
    fused = Fused(lambda emit, x: [softmax(emit, x, axis)], data(*shape))
    assert len(fused.kernels) == 1
    fused.check(lambda x: [softmax_of(x, axis)], normal(37, columns))


def test_symbolic_extents_of_other_names_stay_apart():
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")

    def build(emit, x, y):
        return [total(x, [0]), total(y, [0])]

    assert len(Fused(build, data(n, 7), data(n, 7, name="y")).kernels) == 1
    assert len(Fused(build, data(n, 7), data(k, 7, name="y")).kernels) == 2


def test_the_report_tells_what_was_fused():
    fused = Fused(half_norm, data(5, 32, dtype="float16"))
    report = read_reduction_report(fused.grouped)
    assert report["rewritten"] == 0
    assert report["groups"] == [
        {
            "function": "main",
            "name": fused.kernels[0],
            "kind": "chain",
            "outputs": 5,
            "reduced": 32,
            "reductions": ["coalesced_mean", "coalesced_mean"],
            "members": ["subtract", "multiply", "add", "tir_rsqrt", "multiply1", "cast1"],
            "producers": ["cast"],
            "results": ["cast1"],
        }
    ]


def test_the_report_counts_what_was_rewritten_too():
    mod = legal(several(lambda emit, x: [op.exp(op.max(x, 1))], data(5, 17)))
    report = read_reduction_report(group(mod))
    assert (report["rewritten"], len(report["groups"])) == (1, 1)


# Random graphs


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data(), st.booleans())
def test_numbers_of_random_graphs(draw, fits):
    graph, inputs, check = random_graph(draw.draw, 2, 14)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction_groups, "chain_fits", lambda *_: fits)
        fused = finish(group(legal(graph)))
    check(run(fused, *inputs))
