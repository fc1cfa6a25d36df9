# SPDX-License-Identifier: Apache-2.0
"""Sums of exponentials with their maximum in one pass: numbers in OpenCL, CUDA text, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from cuda_text import count, cuda_source, main_loop, ptxas, sass
from group_cases import Group
from reduce_cases import CUDA, OPENCL, numpy_dtype
from traffic import Traffic
from tvm import relax, tirx
from tvm.target import Target

from schedules.gpu.reduce.plan.config import ReduceConfig
from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group import ReduceGroup, in_one_stage

op = relax.op
_EPSILON = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def emit(value: relax.Expr) -> relax.Expr:
    return relax.BlockBuilder.current().emit(value)


def largest(x: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    return emit(op.max(x, axes, keepdims=True))


def total(x: relax.Expr, shift: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """The sum of exp(x - shift)."""
    return emit(op.sum(emit(op.exp(emit(op.subtract(x, shift)))), axes, keepdims=True))


def both(
    dtype: str, shape: Sequence[int | tirx.Var], axes: Sequence[int], target: Target = OPENCL
) -> Group:
    """The maximum and the sum; OpenCL only loads and stores 16-bit floats."""

    def build(x: relax.Expr) -> list[relax.Expr]:
        if not dtype.endswith("16") or target is CUDA:
            maximum = largest(x, axes)
            return [maximum, total(x, maximum, axes)]
        wide = emit(op.astype(x, "float32"))
        maximum = largest(wide, axes)
        return [op.astype(r, dtype) for r in (maximum, total(wide, maximum, axes))]

    return Group(build, (dtype, shape), target=target)


def chosen(group: Group) -> tuple[ReduceGroup, ReduceConfig]:
    found = read_group(group.plain)
    assert found is not None and found.is_chain
    return group.group, group.config


def check(got: Sequence[np.ndarray], x: np.ndarray, axes: Sequence[int]) -> None:
    exact = x.astype("float64")
    maximum = exact.max(tuple(axes), keepdims=True)
    with np.errstate(invalid="ignore"):
        wanted = np.exp(exact - maximum).sum(tuple(axes), keepdims=True)
    np.testing.assert_array_equal(got[0].astype("float64"), maximum)
    rtol = max(4e-6 if x.dtype != "float64" else 0, 8 * _EPSILON.get(str(x.dtype), 0))
    np.testing.assert_allclose(got[1].astype("float64"), wanted, rtol=rtol)


CASES = [
    ("float32", (1, 1 << 18), [1]),
    pytest.param("float32", (70_001,), [0], marks=pytest.mark.slow),
    ("float32", (3, 100_003), [1]),
    ("float32", (2, 200, 3, 101), [1, 3]),
    ("float32", (50_021, 3), [0]),
    pytest.param("float32", (2, 30_000, 8), [1], marks=pytest.mark.slow),
    pytest.param("float64", (2, 30_001), [1], marks=pytest.mark.slow),
    ("float16", (3, 60_001), [1]),
    ("bfloat16", (2, 65_536), [1]),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("dtype", "shape", "axes"), CASES)
def test_numbers(dtype: str, shape: tuple, axes: list[int], rng: np.random.Generator) -> None:
    group = both(dtype, shape, axes)
    assert chosen(group)[1].splits > 1
    kernels = group.compile()
    for spread, middle in ((1, 0), (30, 0), (20, 1e4), (8000, 0)):
        x = (middle + spread * (2 * rng.random(shape) - 1)).astype(numpy_dtype(dtype))
        arguments = group.arguments(x)
        for _ in range(2):  # the second call meets what the first left in the workspace
            kernels.run(*arguments)
            check(group.outputs(arguments), x, axes)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("shape", "axes"), [((4, 100_003), [1]), ((50_021, 4), [0])])
def test_infinities_and_nan(shape: tuple, axes: list[int], rng: np.random.Generator) -> None:
    group, inf = both("float32", shape, axes), np.inf
    kernels = group.compile()

    def run(change: Callable[[np.ndarray], None]) -> None:
        x = (10 * rng.standard_normal(shape)).astype("float32")
        change(x if axes == [1] else x.T)
        arguments = group.arguments(x)
        kernels.run(*arguments)
        check(group.outputs(arguments), x, axes)

    def masked(rows: np.ndarray) -> None:
        rows[0, : 3 * rows.shape[1] // 4] = -inf  # whole blocks of it
        rows[1, 1:] = -inf
        rows[2, :-1] = -inf
        rows[3, rng.random(rows.shape[1]) < 0.5] = -inf

    def nothing(rows: np.ndarray) -> None:
        rows[:2] = -inf
        rows[2, rng.integers(rows.shape[1])] = inf
        rows[3, rng.integers(rows.shape[1], size=2)] = inf

    def odd(rows: np.ndarray) -> None:
        rows[0, rng.integers(rows.shape[1])] = np.nan
        rows[1] = np.where(rng.random(rows.shape[1]) < 0.5, -inf, inf)
        rows[2], rows[2, -1] = -inf, np.nan
        rows[3, ::2], rows[3, 1] = inf, np.nan

    for change in (masked, nothing, odd):
        run(change)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_rows_in_order(order: int) -> None:
    """Every element is the largest one so far, or none is."""
    x = np.linspace(-9, 9, 2 * 150_001, dtype="float32").reshape(2, -1)[:, ::order]
    check(both("float32", x.shape, [1]).run(x.copy()), x, [1])


@pytest.mark.slow
def test_rows_of_unknown_length(rng: np.random.Generator) -> None:
    group = both("float32", (2, tirx.Var("n", "int64")), [1])
    assert chosen(group)[1].splits > 1
    for length in (1, 5, 40_001):
        x = (5 * rng.standard_normal((2, length))).astype("float32")
        check(group.run(x), x, [1])


def test_short_rows_are_a_chain(rng: np.random.Generator) -> None:
    group = both("float32", (2, 5001), [1])
    assert len(chosen(group)[0].stages) == 2
    x = rng.standard_normal((2, 5001)).astype("float32")
    check(group.run(x), x, [1])


@pytest.mark.slow
def test_another_shift_than_the_maximum(rng: np.random.Generator) -> None:
    """The shift is that of the logarithm of a sum of exponentials, or never the maximum."""

    def build(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
        maximum = largest(x, [1])
        finite = emit(op.where(emit(op.isinf(maximum)), relax.const(0.0), maximum))
        other = largest(y, [1])
        half = emit(op.multiply(other, relax.const(0.5)))
        return [emit(op.add(emit(op.log(total(x, finite, [1]))), finite)), total(y, half, [1])]

    shape = (4, 40_001)
    x, y = (10 * rng.standard_normal(shape).astype("float32") for _ in range(2))
    x[0], x[1, 7], x[2, 9] = -np.inf, np.inf, np.nan
    y[0], y[1, 7], y[2, 9] = -np.inf, np.inf, np.nan
    group = Group(build, ("float32", shape), ("float32", shape))
    assert chosen(group)[1].splits > 1
    found = group.run(x, y)
    exact = y.astype("float64")
    with np.errstate(invalid="ignore"):
        logarithm = np.logaddexp.reduce(x.astype("float64"), 1, keepdims=True)
        np.testing.assert_allclose(found[0], logarithm, rtol=1e-6)
        half = exact.max(1, keepdims=True) / 2
        np.testing.assert_allclose(found[1], np.exp(exact - half).sum(1, keepdims=True), rtol=1e-4)


@pytest.mark.slow
def test_sisters_share_the_pass(rng: np.random.Generator) -> None:
    def build(x: relax.Expr) -> list[relax.Expr]:
        maximum = largest(x, [1])
        found = total(x, maximum, [1])
        return [op.argmax(x, 1), maximum, op.sum(x, [1]), found, op.log(found)]

    x = rng.standard_normal((3, 40_001)).astype("float32")
    group = Group(build, ("float32", x.shape))
    position, maximum, added, found, logarithm = group.run(x)
    np.testing.assert_array_equal(position, x.argmax(1))
    np.testing.assert_allclose(added, x.sum(1, "float64"), rtol=1e-4, atol=0.01)
    check([maximum, found], x, [1])
    np.testing.assert_allclose(logarithm, np.log(found), rtol=1e-5)


@pytest.mark.slow
def test_sums_share_a_maximum(rng: np.random.Generator) -> None:
    """A softmax and a log-sum-exp lack the reduced axis, and one has another shift."""

    def build(x: relax.Expr) -> list[relax.Expr]:
        maximum, flat = largest(x, [1]), emit(op.max(x, [1]))
        again = emit(op.expand_dims(flat, 1))
        half = emit(op.multiply(maximum, relax.const(0.5)))
        shifts = (maximum, again, half)
        return [maximum, flat, *(total(x, shift, [1]) for shift in shifts)]

    x = (5 * rng.standard_normal((5, 40_001))).astype("float32")
    x[0], x[1, 7], x[2, 9], x[3, :30_000] = -np.inf, np.inf, np.nan, -np.inf
    group = Group(build, ("float32", x.shape))
    online, config = chosen(group)
    assert len(online.stages) == 1 and config.splits > 1
    maximum, flat, first, second, third = group.run(x)
    check([maximum, first], x, [1])
    check([flat[:, None], second], x, [1])
    exact = x.astype("float64")
    with np.errstate(invalid="ignore"):
        half = exact.max(1, keepdims=True) / 2
        np.testing.assert_allclose(third, np.exp(exact - half).sum(1, keepdims=True), rtol=1e-4)


def test_two_fields_split_like_one() -> None:
    """A row is shared by as many blocks as for the sum alone."""
    splits = Group(lambda x: op.sum(x, [1]), ("float32", (3, 100_003))).config.splits
    assert chosen(both("float32", (3, 100_003), [1]))[1].splits == splits > 1


REFUSED: dict[str, Callable[[relax.Expr, relax.Expr], list[relax.Expr]]] = {
    "minimum": lambda x, _: [total(x, emit(op.min(x, [1], keepdims=True)), [1])],
    "another row": lambda x, y: [total(y, largest(x, [1]), [1])],
    "scaled": lambda x, _: [total(emit(op.multiply(x, relax.const(2.0))), largest(x, [1]), [1])],
    "mean": lambda x, _: [op.mean(emit(op.exp(emit(op.subtract(x, largest(x, [1]))))), [1])],
    "no exponential": lambda x, _: [
        op.sum(emit(op.tanh(emit(op.subtract(x, largest(x, [1]))))), [1])
    ],
    "no difference": lambda x, _: [
        op.sum(emit(op.exp(emit(op.multiply(x, largest(x, [1]))))), [1])
    ],
    "turned": lambda x, _: [op.sum(emit(op.exp(emit(op.subtract(largest(x, [1]), x)))), [1])],
    "elements": lambda x, _: [emit(op.exp(emit(op.subtract(x, largest(x, [1])))))],
    "one more": lambda x, y: [total(x, m := largest(x, [1]), [1]), total(y, m, [1])],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_online_softmax(name: str) -> None:
    group = Group(REFUSED[name], ("float32", (3, 40_001)), ("float32", (3, 40_001)))
    found = read_group(group.plain)
    assert found is not None and in_one_stage(found) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape", "axis"),
    [
        ("float32", (1, 1 << 20), 1),
        ("float32", (300_000, 8), 0),
        ("float16", (4, 300_001), 1),
        pytest.param("bfloat16", (4, 300_000), 1, marks=pytest.mark.slow),
        pytest.param("float64", (4, 300_000), 1, marks=pytest.mark.slow),
    ],
)
def test_cuda_text_without_spills(dtype: str, shape: tuple, axis: int) -> None:
    group = both(dtype, shape, [axis], CUDA)
    assert chosen(group)[1].splits > 1
    [used] = ptxas(cuda_source(tvm.IRModule({"main": group.func}))).values()
    assert (used.spill_stores, used.spill_loads) == (0, 0)
    assert used.registers <= (80 if dtype == "float64" else 64)  # Three or four blocks fit.


@pytest.mark.slow
def test_an_exponential_an_element() -> None:
    group = both("float32", (1, 1 << 24), [1], CUDA)
    _, config = chosen(group)
    [code] = sass(cuda_source(tvm.IRModule({"main": group.func}))).values()
    main = main_loop(code)
    elements = config.vector * config.unroll
    assert count(main, "LDG") == config.unroll
    assert count(main, "MUFU") == elements
    assert count(main, "BRA") == 1 and len(main) < 24 * elements


@pytest.mark.slow
def test_every_element_is_read_once() -> None:
    group = both("float32", (3, 300_003), [1], CUDA)
    shapes = [(tuple(map(int, p.shape)), str(p.dtype)) for p in group.func.params]
    traffic = Traffic(group.func, CUDA, [np.empty(*shape) for shape in shapes])
    assert traffic.kernels == 1
    # The tensors behind the workspace.
    assert set(traffic.reads[1]) == {1} and set(traffic.writes[1]) == {0}
    for writes in traffic.writes[-2:]:
        assert set(writes) == {1}
