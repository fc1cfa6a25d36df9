# SPDX-License-Identifier: Apache-2.0
"""GPU reductions executed in OpenCL: numbers, determinism, tickets, producers, symbolic extents."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opencl import compile_opencl, new_queue
from reduce_cases import CUDA, OPENCL, Case, check, check_workspace, random_data, reference
from tvm import te, tirx
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.errors import OpError
from schedules.gpu import CoalescedReduce
from schedules.gpu.core import subword_atomics
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.kernel import atomic_update
from schedules.tir.index_math import i64
from schedules.workload.reduce import DTYPES, OPERATORS, ReduceWorkload
from tests.selection import in_turns
from tests.targets import PLAIN

# Each form twice, with extents that no vector and no block divides; few and many outputs.
SHAPES: dict[str, list[tuple[tuple[int, ...], list[int]]]] = {
    "all": [((100_003,), [0]), ((6, 1, 2048), [0, 1, 2])],
    "x": [((3, 4099), [1]), ((515, 24), [1]), ((5, 3, 1025), [0, 2])],
    "y": [((4099, 3), [0]), ((2051, 72), [0]), ((3, 7, 130), [1])],
}
FINISHES = ("one_block", "atomic", "last_block")
# Reduced axes with parallel ones between: several digits, also shorter than a block; vectors; rows.
INTERLEAVED: list[tuple[tuple[int, ...], list[int]]] = [
    ((23, 3, 21, 21), [0, 2, 3]),
    ((300, 2, 40), [0, 2]),
    ((9, 2, 11, 3, 57), [0, 2, 4]),
    ((5, 2, 7, 3, 130, 2, 4), [0, 2, 4, 6]),
    ((31, 2, 41, 5), [0, 2]),
]
NARROW = ("int8", "uint8", "float16", "bfloat16")
# Outputs that fill words: one of a word by each thread, two, and all of it.
WORD_SHAPES: list[tuple[tuple[int, ...], list[int]]] = [
    ((12, 4099), [1]),
    ((2, 4099, 6), [1]),
    ((2051, 72), [0]),
]


def _is_valid(operator: str, dtype: str, finish: str = "auto") -> bool:
    if finish == "atomic" and operator.startswith("arg"):
        return False
    try:
        ReduceWorkload.create(operator, [0], 1, dtype)
    except OpError:
        return False
    return True


def _pairs() -> list:
    """Every operator with every type; forms, finishes and shapes take turns, so all meet."""
    found = []
    for i, operator in enumerate(OPERATORS):
        for j, dtype in enumerate(DTYPES):
            form = list(SHAPES)[(i + j) % 3]
            finish = FINISHES[(i + 2 * j + j // 3) % 3]
            finish = finish if _is_valid(operator, dtype, finish) else "last_block"
            if _is_valid(operator, dtype):
                slow = pytest.mark.slow if (2 * i + j) % 3 else ()
                found.append(
                    pytest.param(operator, dtype, form, finish, (i + j // 3) % 2, marks=slow)
                )
    return found


def _run(case: Case, data: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    arguments = case.arguments(data, wanted.shape)
    compile_opencl(case.func, OPENCL).run(*arguments)
    return arguments[-1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("operator", "dtype", "form", "finish", "number"), _pairs())
def test_numbers(
    operator: str, dtype: str, form: str, finish: str, number: int, rng: np.random.Generator
) -> None:
    shape, axes = SHAPES[form][number]
    case = Case(operator, dtype, shape, axes, finish)
    assert case.config.form == form
    data = random_data(rng, operator, dtype, shape)
    wanted = reference(operator, data, axes)
    roundings = case.config.splits if case.config.finish == "atomic" else 1
    check(operator, _run(case, data, wanted), data, wanted, roundings)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("form", SHAPES)
def test_every_form_with_every_finish(form: str, finish: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form][0]
    case = Case("sum", "float32", shape, axes, finish)
    assert case.config.finish == finish
    assert (case.config.splits > 1) == (finish != "one_block")
    data = random_data(rng, "sum", "float32", shape)
    wanted = reference("sum", data, axes)
    check("sum", _run(case, data, wanted), data, wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("data", "kind", "finish"),
    in_turns(
        INTERLEAVED, [("sum", "float32"), ("argmax", "int32")], ["one_block", "last_block"], every=3
    ),
)
def test_reduced_axes_that_are_no_neighbours(
    data: tuple[tuple[int, ...], list[int]],
    kind: tuple[str, str],
    finish: str,
    rng: np.random.Generator,
) -> None:
    (shape, axes), (operator, dtype) = data, kind
    case = Case(operator, dtype, shape, axes, finish)
    values = random_data(rng, operator, dtype, shape)
    wanted = reference(operator, values, axes)
    check(operator, _run(case, values, wanted), values, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bool", marks=pytest.mark.slow)])
def test_producers_that_know_their_place_on_far_axes(dtype: str, rng: np.random.Generator) -> None:
    """Read twice, also backwards, under conditions on their places."""
    shape = (140, 3, 9, 4)
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)

    def masked(data: te.Tensor) -> te.Tensor:
        def value(i: tirx.Var, j: tirx.Var, k: tirx.Var, n: tirx.Var) -> tirx.Expr:
            kept = tirx.Select(k % i64(4) < i64(3), data[i, j, k, n], zero)
            return tirx.Select(data[i, j, i64(8) - k, n] != zero, kept, one)

        return te.compute(data.shape, value, name="masked")

    operator = "or" if dtype == "bool" else "max"
    case = Case(operator, dtype, shape, [0, 2, 3], "last_block", producer=masked)
    data = random_data(rng, operator, dtype, shape)
    if dtype == "bool":
        data[:, 1] = False
    kept = np.where(np.arange(9)[:, None] % 4 < 3, data, np.zeros((), dtype))
    values = np.where(data[:, :, ::-1] != 0, kept, np.ones((), dtype))
    wanted = reference(operator, values, [0, 2, 3])
    check(operator, _run(case, data, wanted), values, wanted)


@settings(
    max_examples=settings.default.max_examples // 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    mask=st.integers(0, 15),
    operator=st.sampled_from(["sum", "max", "argmin"]),
    keepdims=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_axes(shape: list[int], mask: int, operator: str, keepdims: bool, seed: int) -> None:
    axes = [k for k in range(len(shape)) if mask >> k & 1]
    case = Case(operator, "float32", shape, axes, keepdims=keepdims)
    data = random_data(np.random.default_rng(seed), operator, "float32", shape)
    wanted = reference(operator, data, axes)
    kept = [1 if k in axes else size for k, size in enumerate(shape)] if keepdims else wanted.shape
    got = _run(case, data, wanted.reshape(kept))
    check(operator, got, data, wanted.reshape(kept))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("operator", "dtype", "shape"),
    [
        ("mean", "float32", (9, 5, 4096)),
        ("sum", "float64", (7, 3, 4099)),
        ("max", "int8", (3, 32, 24_576)),
        ("or", "bool", (5, 2, 16_384)),
        ("argmin", "int32", (2, 31, 10_002)),
    ],
)
def test_few_elements_of_many_outputs(
    operator: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    case = Case(operator, dtype, shape, [1])
    assert (case.config.rows, case.config.splits) == (1, 1)
    data = random_data(rng, operator, dtype, shape)
    wanted = reference(operator, data, [1])
    check(operator, _run(case, data, wanted), data, wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("form", "operator"), in_turns(["x", "y"], ["argmin", "argmax"]))
def test_positions_of_equal_elements(form: str, operator: str, rng: np.random.Generator) -> None:
    """The first one of them, also where all are the identity, and of several NaN."""
    infinity = np.inf if operator == "argmin" else -np.inf
    rows = np.full((5, 20_003), infinity, "float32")
    rows[1, 7_000:] = rng.integers(-2, 3, 13_003)
    rows[2, 19_999] = -infinity
    rows[3, [9_001, 12_000]] = np.nan
    rows[4] = rng.integers(0, 2, 20_003)
    data, axis = (rows, 1) if form == "x" else (np.ascontiguousarray(rows.T), 0)
    case = Case(operator, "float32", data.shape, [axis])
    assert case.config.splits > 1
    wanted = getattr(np, operator)(data, axis)
    np.testing.assert_array_equal(_run(case, data, wanted), wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("operator", "dtype", "shape"),
    [
        ("sum", "float32", (3, 30_001)),
        ("sum", "float64", (3, 30_001)),
        ("argmax", "float32", (3, 30_001)),
    ],
)
def test_last_block_gives_the_same_bits_every_time(
    operator: str, dtype: str, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    """Words of one and of two halves; an odd and an even number of calls."""
    case = Case(operator, dtype, shape, [1], "last_block")
    assert case.config.splits > 1
    data = random_data(rng, operator, dtype, shape)
    session = compile_opencl(case.func, OPENCL).session(*case.arguments(data, (shape[0],)))
    session.launch()
    first = np.array(session.read()[-1])
    check(operator, first, data, reference(operator, data, [1]))
    output = len(case.func.params) - 1
    for _ in range(50):
        session.write(output, np.ones_like(first))
        session.launch()
        np.testing.assert_array_equal(session.read()[-1], first)
    check_workspace(case.config, case.loops, np.array(session.read()[0]))


@pytest.mark.slow
def test_calls_in_several_queues_do_not_disturb_each_other(rng: np.random.Generator) -> None:
    """They share one workspace; calls in one queue follow each other."""
    case = Case("sum", "float64", (40_000, 2), [0], "last_block")
    kernels = compile_opencl(case.func, OPENCL)
    inputs = [random_data(rng, "sum", "float64", (40_000, 2)) for _ in range(3)]
    sessions = [kernels.session(*case.arguments(inputs[0], (2,)))]
    for data in inputs[1:]:
        arguments = case.arguments(data, (2,))
        sessions.append(kernels.session(*arguments, other=sessions[0], shared=[0]))
    queues = [new_queue() for _ in sessions]
    for _ in range(10):
        for session, queue in zip(sessions, queues, strict=True):
            session.launch(queue)
    for session, data in zip(sessions, inputs, strict=True):
        check("sum", np.array(session.read()[-1]), data, reference("sum", data, [0]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("operator", "finish"), in_turns(["min", "max", "sum"], FINISHES, every=3))
def test_nan_and_infinity(operator: str, finish: str, rng: np.random.Generator) -> None:
    shape = (6, 20_000)
    data = random_data(rng, operator, "float32", shape)
    data[0, 11_111] = np.nan
    data[1, 19_999] = np.inf
    data[2, 0] = -np.inf
    data[3] = -np.inf
    data[4] = -np.abs(data[4])
    data[5] = -0.0
    case = Case(operator, "float32", shape, [1], finish)
    wanted = reference(operator, data, [1])
    got = _run(case, data, wanted)
    check(operator, got, data, wanted)
    assert np.signbit(got[5])


def _cast_mul_exp(data: te.Tensor) -> te.Tensor:
    wide = te.compute(data.shape, lambda *i: data(*i).astype("float32"), name="cast")
    twice = te.compute(data.shape, lambda *i: wide(*i) * tirx.const(0.5, "float32"), name="mul")
    return te.compute(data.shape, lambda *i: tirx.exp(twice(*i)), name="exp")


def _without_first(data: te.Tensor) -> te.Tensor:
    rows, columns = data.shape
    return te.compute((rows, columns - 1), lambda i, j: data[i, j + 1], name="slice")


def _nothing(data: te.Tensor) -> te.Tensor:
    zero = te.compute(data.shape, lambda *i: data(*i) * tirx.const(0, "int32"), name="times_zero")
    return te.compute(data.shape, lambda *i: zero(*i).astype("float32"), name="cast")


def _reshape(data: te.Tensor) -> te.Tensor:
    rows, columns = data.shape
    shape = (rows, columns // 4, 4)
    return te.compute(shape, lambda i, j, k: data[i, j * 4 + k], name="reshape")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
def test_producers_are_part_of_the_kernel(axes: list[int], rng: np.random.Generator) -> None:
    shape = (130, 264)
    case = Case("sum", "float16", shape, axes, producer=_cast_mul_exp)
    kernels = compile_opencl(case.func, OPENCL)
    data = random_data(rng, "sum", "float16", shape)
    wanted = np.exp(data.astype("float64") * 0.5).sum(tuple(axes))
    arguments = case.arguments(data, wanted.shape)
    assert len(kernels.launches(*arguments)) == 1
    kernels.run(*arguments)
    np.testing.assert_allclose(arguments[-1], wanted, rtol=1e-5)


def test_data_that_begins_off_a_vector(rng: np.random.Generator) -> None:
    case = Case("max", "int8", (33, 4097), [1], producer=_without_first)
    data = random_data(rng, "max", "int8", (33, 4097))
    wanted = data[:, 1:].max(1)
    np.testing.assert_array_equal(_run(case, data, wanted), wanted)


@pytest.mark.slow
def test_an_input_that_is_not_needed_is_left_alone(rng: np.random.Generator) -> None:
    """TVM folds the product, so that the kernel reads nothing: the data stays as it is."""
    case = Case("sum", "int32", (100_000,), [0], "last_block", producer=_nothing)
    data = random_data(rng, "sum", "int32", (100_000,))
    arguments = case.arguments(data.copy(), ())
    compile_opencl(case.func, OPENCL).run(*arguments)
    np.testing.assert_array_equal(arguments[1], data)
    assert arguments[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("threads", [100, 64])
def test_devices_with_small_blocks(threads: int, rng: np.random.Generator) -> None:
    target = Target({"kind": "opencl", "max_num_threads": threads}, host="llvm")
    case = Case("sum", "int32", (50_001,), [0], target=target)
    data = random_data(rng, "sum", "int32", (50_001,))
    wanted = reference("sum", data, [0])
    arguments = case.arguments(data, ())
    compile_opencl(case.func, target).run(*arguments)
    assert arguments[-1] == wanted


def test_reshaped_data_is_read_in_place(rng: np.random.Generator) -> None:
    case = Case("max", "int32", (64, 4096), [0, 2], producer=_reshape)
    data = random_data(rng, "max", "int32", (64, 4096))
    wanted = data.reshape(64, 1024, 4).max((0, 2))
    np.testing.assert_array_equal(_run(case, data, wanted), wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("symbolic", "axes"), [(0, [1]), (1, [1]), (0, [0]), (1, [0])])
def test_symbolic_extents(symbolic: int, axes: list[int], rng: np.random.Generator) -> None:
    extent = tirx.Var("n", "int64")
    shape: list[int | tirx.Var] = [37, 70]
    shape[symbolic] = extent
    case = Case("mean", "float32", shape, axes)
    kernels = compile_opencl(case.func, OPENCL)
    for size in (1, 5, 300, 4000):
        actual = (size, 70) if symbolic == 0 else (37, size)
        data = random_data(rng, "mean", "float32", actual)
        wanted = reference("mean", data, axes)
        arguments = case.arguments(data, wanted.shape)
        kernels.run(*arguments)
        check("mean", arguments[-1], data, wanted)


def test_other_functions_are_left_alone() -> None:
    data = te.placeholder((8, 8), "float32", name="data")
    func = te.create_prim_func([data, te.compute((8, 8), lambda i, j: data[i, j] + 1.0)])
    assert CoalescedReduce().apply(func, OPENCL, False) is None
    workload = ReduceWorkload.create("sum", [1], 2, "float32")
    result = coalesced_reduce(data, workload)
    mirror = te.compute(result.shape, lambda i: result[7 - i], name="mirror")
    elsewhere = te.create_prim_func([data, mirror])
    assert CoalescedReduce().apply(elsewhere, OPENCL, False) is None
    assert CoalescedReduce().apply(func, OPENCL.host, False) is None


@pytest.mark.parametrize("operator", ["argmin", "argmax"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_atomic_finish_that_does_not_exist(operator: str, dtype: str) -> None:
    with pytest.raises(OpError, match=f"'atomic' for {operator} of {dtype}.*use 'last_block'"):
        Case(operator, dtype, (3, 4099), [1], "atomic")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "shape"),
    in_turns(
        [
            (name, dtype)
            for name in OPERATORS
            for dtype in NARROW
            if _is_valid(name, "float32", "atomic") and _is_valid(name, dtype)
        ],
        WORD_SHAPES,
        every=13,
    ),
)
def test_updates_of_a_part_of_a_word(
    kind: tuple[str, str], shape: tuple, rng: np.random.Generator
) -> None:
    (operator, dtype), (shape, axes) = kind, shape
    case = Case(operator, dtype, shape, axes, "atomic")
    assert (case.config.finish, case.config.splits > 1) == ("atomic", True)
    data = random_data(rng, operator, dtype, shape)
    wanted = reference(operator, data, axes)
    check(operator, _run(case, data, wanted), data, wanted, case.config.splits)


def _disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another block add 1 to the last byte of a word before each first swap of it."""
    swap_until_kept, swap = subword_atomics.swap_until_kept, subword_atomics.compare_and_swap
    came: list[tirx.Buffer] = []

    def until_kept(*arguments: object) -> None:
        came.append(T.alloc_buffer((1,), "int32", scope="local"))
        T.buffer_store(came[-1], tirx.const(0, "int32"), [0])
        swap_until_kept(*arguments)

    def disturbed(gpu: GPUInfo, address: tirx.Expr, *values: tirx.Expr) -> tirx.Expr:
        one = tirx.const(1 << 24, "int32")
        other = T.bind(tirx.Select(tirx.EQ(came[-1][0], 0), one, tirx.const(0, "int32")))
        T.buffer_store(came[-1], tirx.const(1, "int32"), [0])
        T.evaluate(T.call_extern("int32", "atomic_add", address, other))
        return swap(gpu, address, *values)

    monkeypatch.setattr(atomic_update, "swap_until_kept", until_kept)
    monkeypatch.setattr(subword_atomics, "compare_and_swap", disturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "dtype"),
    in_turns(
        [((4, 100_000), [1], 4), ((2, 40_000, 2), [1], 2), ((40_000, 4), [0], 1)],
        ["int8", "uint8"],
    ),
)
def test_blocks_that_contend_for_one_word(
    output: tuple[tuple[int, ...], list[int], int],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Neither what a block adds nor what another adds to its neighbour is lost."""
    shape, axes, updates = output
    _disturb(monkeypatch)
    case = Case("sum", dtype, shape, axes, "atomic")
    assert case.config.finish == "atomic"
    data = random_data(rng, "sum", dtype, shape)
    wanted = reference("sum", data, axes)
    got = _run(case, data, wanted).view("uint8").reshape(-1)
    expected = wanted.view("uint8").reshape(-1).astype("int64")
    expected[3] += updates * case.config.splits
    np.testing.assert_array_equal(got, expected % 256)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [OPENCL, CUDA], ids=["opencl", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_word_reaches_behind_the_output(dtype: str, target: Target) -> None:
    """Memory behind an output that ends within a word may belong to others."""
    width = {"int8": 8, "uint8": 8, "float16": 16, "bfloat16": 16}.get(dtype, 32)
    word = 16 if width == 16 and target is CUDA else 32
    for outputs in range(1, 9):
        operator = "max" if dtype == "bool" else "prod"
        finish = Case(operator, dtype, (outputs, 100_000), [1], "atomic", target).config.finish
        fills = dtype == "bool" or outputs * width % word == 0
        assert finish == ("atomic" if fills else "last_block"), outputs


def test_tensors_that_begin_within_a_word_are_refused() -> None:
    """TVM does so, which is why no word begins before an output."""
    data = te.placeholder((8,), "int8", name="data")
    copy = te.compute((8,), lambda i: data[i], name="copy")
    function = tvm.compile(te.create_prim_func([data, copy]), PLAIN)
    memory = tvm.runtime.tensor(np.arange(64, dtype="int8"))
    inside = memory._create_view((8,), "int8", relative_byte_offset=2)
    with pytest.raises(ValueError, match="byte_offset"):
        function(tvm.runtime.tensor(np.zeros(8, "int8")), inside)
    aligned = np.from_dlpack(memory)
    with pytest.raises(RuntimeError, match="not aligned to 64 bytes"):
        tvm.runtime.from_dlpack(aligned[2:10])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [((4, 1 << 18), [1], "float32"), ((1 << 16, 64), [0], "float16"), ((1 << 22,), [0], "int32")],
)
def test_blocks_in_opencl_meet_by_atomics_alone(
    shape: tuple[int, ...], axes: list[int], dtype: str
) -> None:
    """Its fences order the accesses of one work-item, and plain ones may stay in a cache."""
    case = Case("sum", dtype, shape, axes, "last_block", OPENCL)
    text = tirx.build(case.func, target=OPENCL).imports[0].inspect_source()
    uses = re.findall(r"^.*workspace_ptr \+.*$", text, re.MULTILINE)
    assert uses and all(re.search(r"\batomi?c?_\w+\(\(\(__global", line) for line in uses)
    assert not re.search(r"workspace_ptr\)*\[", text)
