# SPDX-License-Identifier: Apache-2.0
"""Sister reductions and epilogues in one kernel: numbers in OpenCL, CUDA text, structure."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from cuda_text import count, cuda_source, main_loop, opcodes, ptxas, sass
from group_cases import Group
from reduce_cases import CUDA, OPENCL, check, check_workspace, numpy_dtype, random_data, reference
from tvm import relax, tirx

from relay_passes.op import coalesced_reduce
from schedules.gpu import CoalescedReduce
from schedules.gpu.reduce.plan.config import tiles
from schedules.workload.reduce import CanonicalLoops
from schedules.workload.workspace_layout import first_word
from tests.selection import in_turns

op = relax.op
FINISHES = ("one_block", "atomic", "last_block")
# No vector and no block divides the extents, which are long enough to be split.
SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "all": ((100_003,), [0]),
    "x": ((3, 30_011), [1]),
    "y": ((9_001, 6), [0]),
    "x_inner": ((7, 3, 2050), [0, 2]),
}


def sisters(operators: list[str], axes: list[int], finish: str = "auto"):
    """Several reductions of one tensor."""

    def build(data: relax.Expr) -> list[relax.Expr]:
        return [coalesced_reduce(data, name, axes, finish=finish) for name in operators]

    return build


@pytest.mark.slow
@pytest.mark.parametrize(("form", "finish"), in_turns(SHAPES, ["one_block", "last_block"], every=4))
def test_any_mixture_of_operators(form: str, finish: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form]
    operators = ["sum", "argmax", "max", "sum_squares", "mean", "argmin", "prod"]
    group = Group(sisters(operators, axes, finish), ("float32", shape))
    config = group.config
    assert (config.splits > 1) == (finish == "last_block")
    data = random_data(rng, "prod", "float32", shape)
    for operator, got in zip(operators, group.run(data), strict=True):
        check(operator, got, data, reference(operator, data, axes))


@pytest.mark.slow
@pytest.mark.parametrize(("form",), in_turns(SHAPES))
def test_integers_are_updated_atomically_on_request(form: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form]
    operators = ["sum", "min", "max", "sum_squares", "or"]
    assert Group(sisters(operators, axes), ("int32", shape)).config.finish == "last_block"
    group = Group(sisters(operators, axes, "atomic"), ("int32", shape))
    assert group.config.finish == "atomic"
    data = random_data(rng, "sum", "int32", shape)
    arguments = group.arguments(data)
    kernels = group.compile()
    assert len(kernels.launches(*arguments)) == 2  # the first one initialises
    kernels.run(*arguments)
    for operator, got in zip(operators, group.outputs(arguments), strict=True):
        check(operator, got, data, reference(operator, data, axes))


def test_atomic_only_where_every_sister_can_be() -> None:
    data = ("int32", (4, 100_000))
    assert Group(sisters(["sum", "max"], [1], "atomic"), data).config.finish == "atomic"

    def build(x: relax.Expr) -> list[relax.Expr]:
        return [coalesced_reduce(x, "sum", [1], finish=way) for way in ("atomic", "last_block")]

    assert Group(build, data).config.finish == "last_block"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"),
    in_turns(["x", "y"], ["float16", "bfloat16", "float32", "float64", "int8", "bool"], every=4),
)
def test_types(form: str, dtype: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form]
    operators = ["max", "argmin", "or"] if dtype == "bool" else ["sum", "max", "argmin", "and"]
    group = Group(sisters(operators, axes), (dtype, shape))
    data = random_data(rng, "sum", dtype, shape)
    for operator, got in zip(operators, group.run(data), strict=True):
        check(operator, got, data, reference(operator, data, axes))


@pytest.mark.slow
@pytest.mark.parametrize("form", SHAPES)
def test_different_inputs_of_different_types(form: str, rng: np.random.Generator) -> None:
    """The backward pass of a normalisation has two sums, of one and of two tensors."""
    shape, axes = SHAPES[form]

    def build(gradient: relax.Expr, data: relax.Expr, mask: relax.Expr) -> list[relax.Expr]:
        wide = op.astype(gradient, "float32")
        kept = op.where(mask, op.multiply(wide, data), op.zeros_like(data))
        return [op.sum(wide, axes), op.sum(kept, axes), op.max(data, axes)]

    group = Group(build, ("float16", shape), ("float32", shape), ("bool", shape))
    gradient = random_data(rng, "sum", "float16", shape)
    data = random_data(rng, "sum", "float32", shape)
    mask = random_data(rng, "sum", "bool", shape)
    exact = gradient.astype("float64")
    kept = np.where(mask, exact * data, 0)
    first, second, third = group.run(gradient, data, mask)
    check("sum", first, exact, exact.sum(tuple(axes)))
    check("sum", second, kept, kept.sum(tuple(axes)))
    np.testing.assert_array_equal(third, data.max(tuple(axes)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("form", "finish"), in_turns(SHAPES, ["one_block", "last_block"]))
def test_epilogues(form: str, finish: str, rng: np.random.Generator) -> None:
    """A norm and a scaled mean; one result is stored too, one only used."""
    shape, axes = SHAPES[form]
    kept = [size for axis, size in enumerate(shape) if axis not in axes]

    def build(data: relax.Expr, scale: relax.Expr, shift: relax.Expr) -> list[relax.Expr]:
        norm = op.sqrt(coalesced_reduce(data, "sum_squares", axes, finish=finish))
        mean = coalesced_reduce(data, "mean", axes, finish=finish)
        scaled = op.add(op.multiply(mean, scale), shift)
        return [norm, mean, op.astype(op.greater(scaled, norm), "int32"), op.add(scaled, norm)]

    group = Group(build, ("float32", shape), ("float32", kept), ("float32", ()))
    data = random_data(rng, "sum", "float32", shape)
    scale, shift = (random_data(rng, "sum", "float32", size) for size in (kept, ()))
    exact = data.astype("float64")
    norm, mean = np.sqrt((exact**2).sum(tuple(axes))), exact.mean(tuple(axes))
    scaled = mean * scale + shift
    got = group.run(data, scale, np.array(shift))
    for actual, wanted in zip(got, (norm, mean, scaled > norm, scaled + norm), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_epilogues_follow_integer_sums_in_the_last_block(rng: np.random.Generator) -> None:
    shape = (2, 70_001)

    def build(data: relax.Expr) -> relax.Expr:
        return op.multiply(op.sum(data, [1]), relax.const(3, "int32"))

    group = Group(build, ("int32", shape))
    assert group.config.finish == "last_block"
    data = random_data(rng, "sum", "int32", shape)
    np.testing.assert_array_equal(group.run(data)[0], data.sum(1, dtype="int32") * np.int32(3))


@pytest.mark.slow
def test_epilogue_of_a_reshaped_result(rng: np.random.Generator) -> None:
    shape = (4, 6, 513)

    def build(data: relax.Expr) -> relax.Expr:
        return op.exp(op.reshape(op.max(data, [2]), (2, 12)))

    data = random_data(rng, "max", "float32", shape)
    got = Group(build, ("float32", shape)).run(data)[0]
    np.testing.assert_allclose(got, np.exp(data.max(2)).reshape(2, 12), rtol=1e-5)


@pytest.mark.slow
def test_the_same_bits_every_time_and_tickets_at_zero(rng: np.random.Generator) -> None:
    shape, axes = SHAPES["x"]
    group = Group(sisters(["sum", "sum_squares", "argmax", "mean"], axes), ("float32", shape))
    config = group.config
    assert config.finish == "last_block"
    data = random_data(rng, "sum", "float32", shape)
    arguments = group.arguments(data)
    session = group.compile().session(*arguments)
    session.launch()
    first = group.outputs(session.read())
    for _ in range(50):
        session.launch()
        for got, wanted in zip(group.outputs(session.read()), first, strict=True):
            np.testing.assert_array_equal(got, wanted)
    loops = CanonicalLoops(shape, tuple(axes))
    check_workspace(config, loops, np.array(session.read()[0]))
    for _ in range(20):  # back to back
        session.launch()
    for got, wanted in zip(group.outputs(session.read()), first, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_sisters_have_room_for_all_partial_results(rng: np.random.Generator) -> None:
    """Two split like one, and all their words are in one workspace."""
    group = Group(sisters(["sum", "max"], [1]), ("float32", (3, 30_011)))
    alone = Group(sisters(["sum"], [1]), ("float32", (3, 30_011)))
    assert group.config == alone.config and group.config.splits > 1
    words, of_one = (int(of.plain.params[0].shape[0]) for of in (group, alone))
    [stage] = group.group.stages
    before = first_word(tiles(group.config, stage.reductions[0].loops))
    assert words - before == 2 * (of_one - before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("finish", ["one_block", "last_block"])
def test_nan_and_infinity(finish: str, rng: np.random.Generator) -> None:
    data = random_data(rng, "max", "float32", (5, 20_001))
    data[0, 11_111] = np.nan
    data[1, 20_000] = np.inf
    data[2, 0] = -np.inf
    data[3] = -np.inf
    operators = ["sum", "max", "argmin", "min", "argmax"]
    group = Group(sisters(operators, [1], finish), ("float32", data.shape))
    with np.errstate(invalid="ignore"):
        wanted = [reference(operator, data, [1]) for operator in operators]
    for operator, got, exact in zip(operators, group.run(data), wanted, strict=True):
        check(operator, got, data, exact)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("symbolic", "axes"), [(0, [1]), (1, [1]), (0, [0]), (1, [0])])
def test_symbolic_extents(symbolic: int, axes: list[int], rng: np.random.Generator) -> None:
    shape: list[int | tirx.Var] = [37, 70]
    shape[symbolic] = tirx.Var("n", "int64")

    def build(data: relax.Expr) -> list[relax.Expr]:
        return [op.sum(data, axes), op.sqrt(op.max(data, axes)), op.mean(data, axes)]

    group = Group(build, ("float32", shape))
    kernels = group.compile()
    for size in (1, 5, 300, 4000):
        actual = (size, 70) if symbolic == 0 else (37, size)
        data = np.abs(random_data(rng, "sum", "float32", actual))
        arguments = group.arguments(data)
        kernels.run(*arguments)
        exact = data.astype("float64")
        wanted = [exact.sum(axes[0]), np.sqrt(exact.max(axes[0])), exact.mean(axes[0])]
        for got, number in zip(group.outputs(arguments), wanted, strict=True):
            np.testing.assert_allclose(got, number, rtol=1e-5)


def test_other_groups_are_left_alone() -> None:
    def of_other_extents(a: relax.Expr, b: relax.Expr) -> list[relax.Expr]:
        return [op.sum(a, [1]), op.sum(b, [1])]

    def of_other_form(a: relax.Expr) -> list[relax.Expr]:
        return [op.sum(a, [1]), op.sum(a, [0])]

    def transposed(a: relax.Expr) -> relax.Expr:
        return op.permute_dims(op.sum(a, [2]), [1, 0])

    for build, *types in (
        (of_other_extents, ("float32", (4, 8)), ("float32", (4, 16))),
        (of_other_form, ("float32", (8, 8))),
        (transposed, ("float32", (4, 8, 16))),
    ):
        with pytest.raises(AssertionError):
            Group(build, *types)


def _loads_of_inputs(func: tirx.PrimFunc) -> list[str]:
    """Names of the parameters at each read, views told apart by their data."""
    found: list[tvm.ir.TensorLoad] = []
    tvm_ffi.structural_walk(func.body, (tvm.ir.TensorLoad, found.append))
    return [load.source.name for load in found if load.source.scope() == "global"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["x", "y"])
def test_a_shared_input_is_read_once(form: str) -> None:
    shape, axes = ((1024, 4096), [1]) if form == "x" else ((4096, 1 << 16), [0])
    alone = Group(sisters(["sum"], axes), ("float32", shape), target=CUDA)
    group = Group(sisters(["sum", "sum_squares", "max"], axes), ("float32", shape), target=CUDA)
    config = group.config
    assert config.finish == "one_block"
    assert len(_loads_of_inputs(group.func)) == config.unroll
    assert config == alone.config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "finish"),
    in_turns(["float32", "float16", "int8"], ["one_block", "last_block"], every=3),
)
def test_nothing_spills(dtype: str, finish: str) -> None:
    functions = {}
    for form, shape, axes in (("x", (64, 1 << 16), [1]), ("y", (1 << 16, 64), [0])):
        operators = ["sum", "sum_squares", "max", "argmax", "min"]
        build = sisters(operators, axes, finish)
        group = Group(build, (dtype, shape), target=CUDA)
        functions[form] = group.func.with_attr("global_symbol", form)
    used = ptxas(cuda_source(tvm.IRModule(functions)))
    assert len(used) == 2
    for resources in used.values():
        assert (resources.stack_frame, resources.spill_stores, resources.spill_loads) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["x", "y"])
def test_main_loop_loads_16_bytes(form: str) -> None:
    shape, axes = ((64, 1 << 18), [1]) if form == "x" else ((1 << 16, 64), [0])

    def build(a: relax.Expr, b: relax.Expr) -> list[relax.Expr]:
        return [op.sum(a, axes), op.sum(op.multiply(a, b), axes)]

    group = Group(build, ("float32", shape), ("float32", shape), target=CUDA)
    [code] = sass(cuda_source(group.func)).values()
    main = main_loop(code)
    assert count(main, "LDG.E.128") >= 2 * group.config.unroll
    assert count(main, "LDG.E") == count(main, "LDG.E.128")
    assert count(opcodes(code), "LDL") == 0


def test_half_precision_is_rounded_once(rng: np.random.Generator) -> None:
    data = np.ones((3, 70_001), numpy_dtype("bfloat16"))
    group = Group(sisters(["mean", "sum"], [1]), ("bfloat16", data.shape))
    mean, total = group.run(data)
    np.testing.assert_array_equal(mean.astype("float64"), 1)
    np.testing.assert_allclose(total.astype("float64"), 70_001, rtol=2.0**-8)


def test_the_rule_needs_a_gpu() -> None:
    group = Group(sisters(["sum", "max"], [1]), ("float32", (3, 300)))
    assert CoalescedReduce().apply(group.plain, OPENCL.host, False) is None
