# SPDX-License-Identifier: Apache-2.0
"""The rule for coalesced reductions: numbers of all operators and types, threads, vectors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.rule_cases import (
    AVX2,
    FOREIGN,
    HOST,
    NEON,
    Array,
    assembly,
    compiled,
    function,
    parallel,
    schedule,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi
from tvm.target import Target

from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.cpu.reduce.coalesced_reduce import CoalescedReduce
from schedules.workload.reduce import DTYPES, FLOATS, OPERATORS, ReduceWorkload
from tests.selection import in_turns
from tvm_fusion.runtime.thread_pool import Crew

RULE = CoalescedReduce()
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY: dict[str, Callable[..., Array]] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
    "and": np.all,
    "or": np.any,
    "mean": np.mean,
    "sum_squares": lambda data, axis, keepdims: np.sum(data * data, axis, keepdims=keepdims),
}
EXTENTS = [1, 2, 3, 5, 8, 9, 17, 31, 33, 65, 100, 257]
MOST_ELEMENTS = 100_000
# One shape of each form: all, rows, short rows twice, columns, few columns, R-P-R, P-R-P, threads.
FORMS = [
    ((1003,), [0]),
    ((7, 131), [1]),
    ((65, 5), [1]),
    ((65, 3), [1]),
    ((33, 77), [0]),
    ((131, 3), [0]),
    ((3, 5, 41), [0, 2]),
    ((5, 9, 37), [1]),
    ((3, 20011), [1]),
    ((4099, 9), [0]),
]


def numpy_type(dtype: str) -> np.dtype:
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def reduced(
    data: te.Tensor, operator: str, axes: Sequence[int] | None, keepdims: bool = False
) -> te.Tensor:
    shape = data.shape
    workload = ReduceWorkload.create(operator, axes, len(shape), str(data.dtype), keepdims)
    return coalesced_reduce(data, workload)


def reduction(
    shape: Sequence[int], dtype: str, operator: str, axes: Sequence[int] | None, **more: bool
) -> tirx.PrimFunc:
    data = tensor("x", *shape, dtype=dtype)
    return function([data], reduced(data, operator, axes, **more))


def can_reduce(operator: str, dtype: str) -> bool:
    if dtype == "bool":
        return operator in ("and", "or", "min", "max", "argmin", "argmax")
    return operator != "mean" or dtype in FLOATS


def draw(shape: Sequence[int], dtype: str, operator: str, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return generator.random(shape) < {"and": 0.999, "or": 0.001}.get(operator, 0.5)
    if dtype in FLOATS:
        values = generator.standard_normal(shape)
        if operator == "prod":
            values = np.exp2(values / 16)
        if operator in ("and", "or"):
            values = np.where(generator.random(shape) < 0.99, values, 0)
        return np.asarray(values).astype(numpy_type(dtype))
    return generator.integers(0 if dtype == "uint8" else -5, 6, shape).astype(dtype)


def expected(
    data: Array, operator: str, axes: Sequence[int] | None, keepdims: bool = False
) -> Array:
    axes = tuple(range(data.ndim)) if axes is None else tuple(axes)
    if operator not in NUMPY:
        moved = np.moveaxis(data, axes, range(-len(axes), 0))
        flat = moved.reshape(*moved.shape[: data.ndim - len(axes)], -1)
        found = np.asarray(getattr(np, operator)(flat, -1))
        return np.expand_dims(found, axes) if keepdims else found
    is_float = data.dtype.kind not in "iub"
    wide = data.astype("float64" if is_float else "int64")
    return np.asarray(NUMPY[operator](wide, axis=axes, keepdims=keepdims))


def close(found: Array, exact: Array, reduced_elements: int, operator: str, dtype: str) -> None:
    if found.dtype.kind in "iub":
        np.testing.assert_array_equal(found, exact.astype(found.dtype))  # integers wrap around
        return
    unit = float(ml_dtypes.finfo(found.dtype).eps)
    accumulator = 2.0**-23 if dtype != "float64" else 2.0**-52
    size = math.sqrt(reduced_elements) if "sum" in operator else 1.0
    growth = 1.0 if operator in ("min", "max") else 4 * math.sqrt(reduced_elements)
    tolerance = {"rtol": unit + growth * accumulator, "atol": 32 * accumulator * size}
    np.testing.assert_allclose(found.astype("float64"), exact, **tolerance)


def run(func: tirx.PrimFunc, *inputs: Array, target: Target = HOST, threads: int = 2) -> Array:
    """The output, which must be written whole."""
    out = func.params[-1]
    dtype = numpy_type(str(out.dtype))
    shape = [int(extent) for extent in out.shape]
    poison = 1 if dtype == np.bool_ else 113 if dtype.kind in "iu" else float("nan")
    output = tvm.runtime.tensor(np.full(shape, poison, dtype))
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs]
    Crew(threads).run(compiled(func, target)["main"], *arguments, output)
    return output.numpy()


def check(shape: Sequence[int], dtype: str, operator: str, axes: Sequence[int], **more) -> None:
    func = schedule(RULE, reduction(shape, dtype, operator, axes, **more))
    data = draw(shape, dtype, operator)
    count = math.prod(shape[axis] for axis in axes)
    exact = expected(data, operator, axes, **more)
    close(run(func, data), exact, count, operator, dtype)


CASES = [(op, dtype) for op in OPERATORS for dtype in DTYPES if can_reduce(op, dtype)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        pytest.param(*case, marks=() if number % 2 == 0 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
    ids=lambda value: value,
)
def test_every_operator_and_type(operator, dtype):
    """Each pair on one form, so that all pairs together meet each form several times."""
    place = CASES.index((operator, dtype))
    shape, axes = FORMS[(place + place // len(FORMS)) % len(FORMS)]
    check(shape, dtype, operator, axes)


@settings(max_examples=settings.default.max_examples // 3)
@given(st.data())
def test_numbers_over_any_axes(data):
    shape = data.draw(st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=5))
    while math.prod(shape) > MOST_ELEMENTS:
        shape[shape.index(max(shape))] = 3
    axes = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    operator, dtype = data.draw(st.sampled_from(CASES))
    keepdims = data.draw(st.booleans())
    if all(shape[axis] == 1 for axis in axes):
        assert RULE.apply(reduction(shape, dtype, operator, axes), HOST, False) is None
        return
    check(shape, dtype, operator, axes, keepdims=keepdims)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("operator", ["min", "max", "argmin", "argmax", "sum", "prod"])
@pytest.mark.parametrize(("shape", "axis"), [((6, 203), 1), ((203, 6), 0), ((203, 24), 0)])
def test_nan_and_infinity_are_as_in_numpy(operator, shape, axis):
    rows = np.random.default_rng(0).standard_normal((shape[1 - axis], 203)).astype("float32")
    rows[0, 150] = rows[0, 77] = np.nan
    rows[1, 202] = rows[1, 3] = -np.inf
    rows[2, 5] = rows[2, 201] = np.inf
    rows[3, 0] = np.nan
    rows[3, 1:] = np.inf
    rows[4] = -np.inf
    rows[5] = np.inf
    data = rows if axis else np.ascontiguousarray(rows.T)
    found = run(schedule(RULE, reduction(shape, "float32", operator, [axis])), data)
    with np.errstate(all="ignore"):
        exact = expected(data, operator, [axis])
    if operator in ("sum", "prod"):
        assert np.isnan(found[[0, 3]]).all()
        np.testing.assert_array_equal(
            found[[1, 2, 5]][np.isinf(exact[[1, 2, 5]])],
            exact[[1, 2, 5]][np.isinf(exact[[1, 2, 5]])],
        )
    else:
        np.testing.assert_array_equal(found, exact.astype(found.dtype))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("shape", "axes"), [((9, 207), [1]), ((207, 9), [0]), ((65, 83), [0])])
def test_producers_are_computed_on_the_way(shape, axes):
    half, other = tensor("x", *shape, dtype="float16"), tensor("y", shape[1])
    wide = topi.exp(topi.multiply(topi.cast(half, "float32"), other))
    func = schedule(RULE, function([half, other], reduced(wide, "sum", axes)))
    x, y = draw(shape, "float16", "sum"), draw(shape[1:], "float32", "sum", 1)
    exact = np.exp(x.astype("float64") * y.astype("float64")).sum(axes[0])
    np.testing.assert_allclose(run(func, x, y), exact, rtol=2e-5)
    text = assembly(func, HOST)
    assert "expf" not in text


def test_a_producer_that_is_constant_along_a_part_of_the_reduced_axes():
    x, scale = tensor("x", 6, 5, 4, 17), tensor("scale", 5, 1, 1)
    func = schedule(RULE, function([x, scale], reduced(topi.multiply(x, scale), "sum", [1, 2, 3])))
    assert "//" not in func.script()  # the loop is cut where the scale changes
    data, factors = draw((6, 5, 4, 17), "float32", "sum"), draw((5, 1, 1), "float32", "sum", 1)
    exact = (data.astype("float64") * factors).sum((1, 2, 3))
    np.testing.assert_allclose(run(func, data, factors), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_producer_that_reorders_elements(axis):
    """Addresses that are not linear in any loop: numbers stay right."""
    x = tensor("x", 60, 35)
    turned = topi.reshape(topi.transpose(x), (60, 35))
    func = schedule(RULE, function([x], reduced(turned, "sum", [axis])))
    data = draw((60, 35), "float32", "sum")
    exact = data.astype("float64").T.reshape(60, 35).sum(axis)
    np.testing.assert_allclose(run(func, data), exact, rtol=1e-4, atol=1e-4)


def test_a_relu_before_a_sum_keeps_nan():
    x = tensor("x", 4, 100)
    func = schedule(RULE, function([x], reduced(topi.nn.relu(x), "sum", [1])))
    data = draw((4, 100), "float32", "sum")
    data[2, 50] = np.nan
    assert np.isnan(run(func, data)).tolist() == [False, False, True, False]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("shape", "axis"), [((9, 207), 1), ((207, 9), 0), ((2, 70000), 1)])
def test_an_epilogue_is_computed_with_the_result(shape, axis):
    x, bias = tensor("x", *shape), tensor("bias", shape[1 - axis])
    after = topi.add(topi.sqrt(reduced(x, "sum_squares", [axis])), bias)
    func = schedule(RULE, function([x, bias], after))
    data, shift = draw(shape, "float32", "sum"), draw(shape[1 - axis : 2 - axis], "float32", "sum")
    exact = np.sqrt((data.astype("float64") ** 2).sum(axis)) + shift
    np.testing.assert_allclose(run(func, data, shift), exact, rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("data", "operator"),
    in_turns(
        [
            (("n",), [0]),
            (("n", 77), [1]),
            ((9, "n"), [1]),
            (("n", 12), [0]),
            ((9, "n"), [0]),
            (("n", 70), [0]),
            ((5, "n", 9), [1]),
            ((3, "n", 20), [0, 2]),
        ],
        ["sum", "max", "argmin", "and"],
        every=3,
    ),
)
def test_symbolic_extents(data, operator):
    shape, axes = data
    n = tirx.Var("n", "int64")
    extents = [n if extent == "n" else tirx.IntImm("int64", extent) for extent in shape]
    x = te.placeholder(extents, "float32", name="x")
    func = schedule(RULE, function([x], reduced(x, operator, axes)))
    kernel = compiled(func)["main"]
    for size in (1, 5, 8, 31, 64, 67, 1030):
        known = [size if extent == "n" else extent for extent in shape]
        data = draw(known, "float32", operator)
        exact = expected(data, operator, axes)
        out = tvm.runtime.tensor(np.full(exact.shape, 113, str(func.params[-1].dtype)))
        kernel(tvm.runtime.tensor(data), out)
        close(out.numpy(), exact, math.prod(known[axis] for axis in axes), operator, "float32")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((300_007,), [0]),
        ((3, 70_001), [1]),
        ((40_009, 5), [0]),
        ((9_001, 40), [0]),
        ((50, 3, 2003), [0, 2]),
        ((257, 1031), [1]),
    ],
)
def test_results_do_not_depend_on_the_threads(shape, axes):
    func = schedule(RULE, reduction(shape, "float32", "sum", axes))
    assert len(parallel(func)) >= 1
    data = draw(shape, "float32", "sum")
    one, two = (run(func, data, threads=threads) for threads in (1, 2))
    np.testing.assert_array_equal(one.view("int32"), two.view("int32"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cores", [1, 3, 8])
def test_any_number_of_cores(cores):
    target = Target({**HOST.export(), "num-cores": cores})
    for shape, axis in (((70_001,), 0), ((30_011, 9), 0), ((5_003, 40), 0)):
        func = schedule(RULE, reduction(shape, "float32", "sum", [axis]), target)
        data = draw(shape, "float32", "sum")
        exact = data.astype("float64").sum(axis)
        close(run(func, data, target=target), exact, shape[0], "sum", "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1 << 24,), 0), ((2, 1 << 23), 1), ((1 << 14, 1 << 10), 0), ((1 << 22, 4), 0)],
)
def test_large_sums_are_as_accurate_as_those_of_numpy(shape, axis):
    func = schedule(RULE, reduction(shape, "float32", "sum", [axis]))
    error = theirs = 0.0
    for seed in range(2):
        data = np.random.default_rng(seed).random(shape, "float32")
        exact = data.sum(axis, dtype="float64")
        error += np.abs(run(func, data) / exact - 1).max()
        theirs += np.abs(data.sum(axis) / exact - 1).max()
    assert error <= 4 * theirs


def test_small_reductions_are_serial_and_large_ones_are_not():
    assert parallel(schedule(RULE, reduction((40, 40), "float32", "sum", [1]))) == []
    assert parallel(schedule(RULE, reduction((64, 1000), "float32", "sum", [1]))) == [64]
    assert parallel(schedule(RULE, reduction((1 << 20,), "float32", "sum", [0]))) == [2]


LOOPS = [
    ("float32", "sum", (4099, 1000), [1], "vaddps"),
    ("float32", "sum", (4099, 1000), [0], "vaddps"),
    ("float32", "sum", (40990, 3), [0], "vaddps"),
    ("float64", "prod", (4099, 1000), [1], "vmulpd"),
    ("float16", "sum", (4099, 1000), [1], "vcvtph2ps"),
    ("float16", "sum", (4099, 1000), [0], "vcvtph2ps"),
    ("bfloat16", "sum", (4099, 1000), [1], "vpslld"),
    ("int8", "sum", (409, 10_000), [1], "xbd"),
    ("uint8", "max", (409, 10_000), [1], "vpmaxub"),
    ("float32", "max", (4099, 1000), [0], "vmaxps"),
    ("float32", "argmax", (4099, 1000), [1], "vblendvps"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("dtype", "operator", "shape", "axes", "instruction"), LOOPS)
def test_inner_loops_are_vectors_in_registers(dtype, operator, shape, axes, instruction):
    func = schedule(RULE, reduction(shape, dtype, operator, axes), AVX2)
    loops = inner_loops(assembly(func, AVX2))
    body = max(loops, key=lambda lines: sum(instruction in line for line in lines))
    assert sum(instruction in line and "ymm" in line for line in body) >= 3
    assert not any("call" in line for line in body)


def test_other_vector_units():
    for axes in ([0], [1]):
        func = schedule(RULE, reduction((129, 1031), "float32", "sum", axes), NEON)
        assert vectors(func) >= {4}
        loops = inner_loops(assembly(func, NEON))
        assert any(re.search(r"fadd\s+v\d+\.4s", line) for body in loops for line in body)


def inner_loops(text: str) -> list[list[str]]:
    """The instructions of each loop that holds no other label."""
    lines = text.splitlines()
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    found = []
    for at, line in enumerate(lines):
        jump = re.match(r"\s+(?:j\w+|b\.\w+|b|cbn?z\s+\w+,|tbn?z.*,)\s+(\.L\w+)", line)
        start = labels.get(jump.group(1), at) if jump else at
        if start < at and not any(start < other < at for other in labels.values()):
            found.append(lines[start + 1 : at + 1])
    return found


def test_states_are_on_the_stack():
    for shape, axes in (((4099, 100), [1]), ((4099, 100), [0]), ((4099, 3), [0])):
        func = schedule(RULE, reduction(shape, "float32", "sum", axes), AVX2)
        assert "TVMBackendAllocWorkspace" not in assembly(func, AVX2)


def test_other_functions_and_targets_are_left_alone():
    x = tensor("x", 60, 100)
    wider = topi.divide(x, reduced(x, "sum", [1], keepdims=True))
    two = [reduced(x, "sum", [1]), reduced(x, "max", [1])]
    for func in (function([x], wider), function([x], *two)):
        assert RULE.apply(func, HOST, False) is None
    y = tensor("y", 6, 7, 8)
    turned = topi.transpose(reduced(y, "sum", [0]))
    assert RULE.apply(function([y], turned), HOST, False) is None
    assert RULE.apply(reduction((60, 100), "float32", "sum", [1]), FOREIGN, False) is None
