# SPDX-License-Identifier: Apache-2.0
"""The rule for matrix products: numbers in all forms, register tiles, streams, refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from cpu.rule_cases import (
    AVX2,
    AVX512,
    FOREIGN,
    HOST,
    NEON,
    Array,
    assembly,
    close,
    compiled,
    draw,
    function,
    guards,
    parallel,
    run,
    schedule,
    tensor,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi
from tvm.target import Target

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.dense import DENSE, Dense, even_parts, matrix_tile
from tests.selection import in_turns

ROWS = [1, 2, 3, 5, 8, 13, 24, 37]
COLUMNS = [1, 2, 7, 8, 9, 16, 31, 40, 65]


def dense(rows, columns: int, depth: int, transposed: bool, epilogue: bool = True):
    """``relu(x @ w + b)``, or just the product; ``transposed``: weights ``[N, K]``."""
    x = te.placeholder((rows, depth), name="x")
    w = tensor("w", *((columns, depth) if transposed else (depth, columns)))
    product = topi.matmul(x, w, transp_b=transposed)
    if not epilogue:
        return function([x, w], product)
    b = tensor("b", columns)
    return function([x, w, b], topi.nn.relu(topi.add(product, b)))


def arrays(rows: int, columns: int, depth: int, transposed: bool) -> tuple[Array, Array, Array]:
    shape = [columns, depth] if transposed else [depth, columns]
    return draw([rows, depth]), draw(shape, 1), draw([columns], 2)


def expected(x: Array, w: Array, b: Array, transposed: bool) -> Array:
    product = x.astype("float64") @ (w.T if transposed else w).astype("float64")
    return np.maximum(product + b, 0)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 5)
@given(
    st.sampled_from(ROWS),
    st.sampled_from(COLUMNS),
    st.sampled_from([2, 5, 16, 33, 100]),
    st.booleans(),
)
def test_numbers_of_float64(rows, columns, depth, transposed):
    found = Dense().apply(dense(rows, columns, depth, transposed), HOST, False)
    if found is None:  # a single sum
        assert rows == columns == 1
        return
    x, w, b = arrays(rows, columns, depth, transposed)
    func = found.mod["main"]
    assert guards(func) == 0
    close(run(func, x, w, b)[0], expected(x, w, b, transposed), depth**0.5)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([1, 2, 4]), st.sampled_from(ROWS), st.sampled_from(COLUMNS), st.booleans())
def test_batches(batch, rows, columns, shared):
    x = tensor("x", batch, rows, 19)
    y = tensor("y", 1 if shared else batch, columns, 19)
    func = function([x, y], topi.nn.batch_matmul(x, y))
    a, b = draw([batch, rows, 19]), draw([1 if shared else batch, columns, 19], 1)
    found = Dense().apply(func, HOST, False)
    scheduled = func if found is None else found.mod["main"]
    assert found is not None or columns == 1 or rows == 1
    exact = a.astype("float64") @ b.astype("float64").transpose(0, 2, 1)
    close(run(scheduled, a, b)[0], exact, 5)


@pytest.mark.quick_cases("steps-100-False", "offset-100-True")  # tails of tiles of any vectors
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [16, 28, 40, 65, 100])
@pytest.mark.parametrize(
    "place",
    [lambda n: 2 * n, lambda n: n + 5, lambda n: 199 - n],
    ids=["steps", "offset", "from the end"],
)
def test_columns_with_steps_offsets_and_from_the_end(place, columns, transposed):
    x = tensor("x", 37, 33)
    w = tensor("w", *((200, 33) if transposed else (33, 200)))
    k = te.reduce_axis((0, 33))
    product = te.compute(
        (37, columns),
        lambda m, n: te.sum(x[m, k] * (w[place(n), k] if transposed else w[k, place(n)]), axis=[k]),
    )
    a, b = draw([37, 33]), draw([200, 33] if transposed else [33, 200], 1)
    taken = (b.T if transposed else b)[:, [place(n) for n in range(columns)]]
    func = schedule(Dense(), function([x, w], product), HOST)
    close(run(func, a, b)[0], a.astype("float64") @ taken.astype("float64"), 6)


def test_a_matrix_times_itself():
    x = tensor("x", 40, 40)
    a = draw([40, 40])
    func = schedule(Dense(), function([x], topi.matmul(x, x)), HOST)
    close(run(func, a)[0], a.astype("float64") @ a.astype("float64"), 7)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("cores", "depth", "rows"), in_turns([1, 2, 3, 8], [640, 643], [1, 3]))
def test_large_matrices_are_streamed_on_any_number_of_cores(cores, depth, rows):
    target = Target({**HOST.export(), "num-cores": cores})
    func = schedule(Dense(), dense(rows, 505, depth, False), target)
    assert sum(extent > 1 for extent in parallel(func)) <= 1
    x, w, b = arrays(rows, 505, depth, False)
    close(run(func, x, w, b, target=target)[0], expected(x, w, b, False), 30)


def multiply_adds(text: str) -> tuple[int, int]:
    """Multiply-adds of whole vectors, and how many different registers they add to."""
    found = re.findall(r"vfmadd231ps\s+.*?, %(?:[yz]mm\d+), %([yz]mm\d+)", text)
    found += re.findall(r"vfmadd231ps\s+.*\), %(?:[yz]mm\d+), %([yz]mm\d+)", text)
    return len(found), len(set(found))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("target", [AVX2, AVX512], ids=["avx2", "avx512"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_sums_of_a_tile_are_registers(target, transposed):
    func = schedule(Dense(), dense(12, 96, 256, transposed), target)
    text = assembly(func, target)
    count, registers = multiply_adds(text)
    assert count >= 12 and registers >= 12
    assert "TVMBackendAllocWorkspace" not in text


def test_a_vector_uses_several_sums():
    _, registers = multiply_adds(assembly(schedule(Dense(), dense(1, 80, 256, False), AVX2), AVX2))
    assert registers >= 4


def test_large_products_run_in_parallel_and_small_ones_do_not():
    assert len(parallel(schedule(Dense(), dense(64, 256, 256, False)))) == 1
    assert parallel(schedule(Dense(), dense(4, 24, 32, False))) == []


def test_many_rows_read_a_copy_of_the_columns():
    func = schedule(Dense(), dense(48, 256, 64, False), AVX2)
    assert len(func.body.block.alloc_buffers) == 2
    assert len(schedule(Dense(), dense(12, 256, 64, False), AVX2).body.block.alloc_buffers) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("rows", "columns", "transposed"), in_turns([24, 50, 67], [128, 256], [False, True])
)
def test_constant_matrices_get_a_layout_of_their_own(rows, columns, transposed):
    plain = dense(rows, columns, 33, transposed)
    func = schedule(Dense(), plain.with_attr(attributes.CONSTANTS, [1, 2]))
    place, axis, lanes = map(int, func.attrs[attributes.LAID_OUT])
    assert (place, axis, columns % lanes) == (1, 0 if transposed else 1, 0)
    assert len(func.body.block.alloc_buffers) == 1  # the sums
    x, w, b = arrays(rows, columns, 33, transposed)
    depth_first = w.T if transposed else w
    packed = depth_first.reshape(33, -1, lanes).transpose(1, 0, 2)
    close(run(func, x, np.ascontiguousarray(packed), b)[0], expected(x, w, b, transposed), 6)
    text = assembly(func, AVX512)
    assert text.count("idiv") <= 1 and "gather" not in text  # one for the share of a thread


def test_other_matrices_keep_their_layout():
    alone = Target({**HOST.export(), "num-cores": 1})
    # No whole vectors, few rows, less than a vector.
    for func in (dense(24, 99, 33, False), dense(5, 96, 33, False), dense(24, 2, 33, False)):
        for target in (HOST, alone):
            assert (
                attributes.LAID_OUT
                not in schedule(Dense(), func.with_attr(attributes.CONSTANTS, [1]), target).attrs
            )
    assert attributes.LAID_OUT not in schedule(Dense(), dense(24, 96, 33, False)).attrs


@pytest.mark.parametrize(
    ("height", "width", "accumulators", "tile"),
    [(12, 12, 12, (6, 2)), (1, 9, 12, (1, 3)), (5, 1, 12, (5, 1)), (56, 8, 14, (7, 2))],
)
def test_register_tiles(height, width, accumulators, tile):
    assert matrix_tile(height, width, accumulators) == tile


@settings(max_examples=200)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 24))
def test_register_tiles_fit(height, width, accumulators):
    rows, columns = matrix_tile(height, width, accumulators)
    assert 1 <= rows <= height and 1 <= columns <= width and rows * columns <= accumulators


@pytest.mark.parametrize(
    ("extent", "cores", "parts"), [(1280, 2, 2), (1280, 6, 10), (1283, 2, 0), (7, 8, 0), (90, 3, 3)]
)
def test_parts_for_the_threads(extent, cores, parts):
    assert even_parts(extent, cores) == parts


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int32"])
def test_other_types(dtype):
    x, w = tensor("x", 5, 20, dtype=dtype), tensor("w", 20, 33, dtype=dtype)
    func = schedule(Dense(), function([x, w], topi.matmul(x, w)))
    a, b = draw([5, 20], 0, dtype), draw([20, 33], 1, dtype)
    tolerance = 2e-2 if dtype == "float16" else 1e-6
    exact = a.astype("float64") @ b.astype("float64")
    np.testing.assert_allclose(run(func, a, b)[0], exact, rtol=tolerance, atol=tolerance)


def test_symbolic_rows():
    n = tirx.Var("n", "int64")
    sizes = [tirx.IntImm("int64", extent) for extent in (20, 33)]
    x = te.placeholder((n, sizes[0]), name="x")
    w = te.placeholder(tuple(sizes), name="w")
    executable = compiled(schedule(Dense(), function([x, w], topi.matmul(x, w))))
    a, b = draw([6, 20]), draw([20, 33], 1)
    out = tvm.runtime.tensor(np.full((6, 33), np.nan, "float32"))
    executable["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b), out)
    close(out.numpy(), a.astype("float64") @ b, 10)


def convolve(x: Array, w: Array, stride: int, groups: int) -> Array:
    """A convolution without padding in float64, as a sum over the kernel's places."""
    kernel, each = w.shape[2], x.shape[1] // groups
    parts = []
    for g, part in enumerate(np.split(w.astype("float64"), groups)):
        data = x[:, g * each : (g + 1) * each].astype("float64")
        windows = np.lib.stride_tricks.sliding_window_view(data, (kernel, kernel), (2, 3))
        parts.append(np.einsum("nchwij,ocij->nohw", windows[:, :, ::stride, ::stride], part))
    return np.concatenate(parts, axis=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kernel", "groups", "each"), in_turns([1, 4], [1, 3, 8], [5, 8, 13]))
def test_convolutions_whose_windows_do_not_overlap(kernel, groups, each):
    x = draw([2, 7 * groups, 8, 12])
    w = draw([each * groups, 7, kernel, kernel], 1)
    data, weight = tensor("x", *x.shape), tensor("w", *w.shape)
    conv = topi.nn.group_conv2d_nchw(data, weight, kernel, 0, 1, groups)
    func = schedule(Dense(), function([data, weight], topi.nn.relu(conv)))
    close(run(func, x, w)[0], np.maximum(convolve(x, w, kernel, groups), 0), 30)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 4)])
def test_windows_that_overlap_are_left_alone(kernel, stride):
    x, w = tensor("x", 1, 4, 13, 13), tensor("w", 6, 2, kernel, kernel)
    func = function([x, w], topi.nn.group_conv2d_nchw(x, w, stride, 0, 1, 2))
    assert Dense().apply(func, HOST, False) is None


def test_compiles_for_neon():
    for rows in (1, 30):
        assert "fmla" in assembly(schedule(Dense(), dense(rows, 65, 64, False), NEON), NEON)


def test_lanes_are_whole_vectors():
    assert vectors(schedule(Dense(), dense(7, 40, 64, False), AVX2)) == {8}


def test_convolutions_other_reductions_and_targets_are_left_alone():
    x, w = tensor("x", 1, 4, 9, 9), tensor("w", 5, 4, 3, 3)
    y, z = tensor("y", 6, 10), tensor("z", 6, 10)
    refused = [
        function([x, w], topi.nn.conv2d_nchw(x, w, 1, 0, 1)),
        function([y], topi.sum(y, 1)),
        function([y, z], topi.sum(topi.add(y, z), 1)),
        function([y, z], topi.sum(topi.multiply(y, z), 1)),
        function([y], topi.nn.relu(y)),
    ]
    for func in refused:
        assert Dense().apply(func, HOST, False) is None
    assert Dense().apply(dense(3, 8, 8, False), FOREIGN, False) is None


SHAPES = [(2, 31, 16), (13, 40, 33), (24, 256, 64), (64, 7, 100)]


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("target", [AVX2, AVX512, NEON], ids=["AVX2", "AVX512", "NEON"])
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_the_template_with_its_default_is_the_rule(rows, columns, depth, target, transposed):
    func, cpu = dense(rows, columns, depth, transposed), CPUInfo.from_target(target)
    workload = Dense().workload(func, target)
    assert workload is not None
    assert (workload.rows, workload.columns, workload.depth) == (rows, columns, depth)
    knobs = DENSE.default(workload, cpu)
    assert DENSE.contains(workload, knobs, cpu)
    written = DENSE.write(func, workload, knobs, target).mod
    tvm.ir.assert_structural_equal(written, Dense().apply(func, target, False).mod)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("transposed", [False, True])
def test_numbers_of_drawn_settings(transposed):
    cpu = CPUInfo.from_target(HOST)
    generator = np.random.default_rng()
    for rows, columns, depth in SHAPES:
        func = dense(rows, columns, depth, transposed)
        workload = Dense().workload(func, HOST)
        space = DENSE.space(workload, cpu)
        x, w, b = arrays(rows, columns, depth, transposed)
        for index in generator.choice(len(space), min(3, len(space)), replace=False):
            written = DENSE.write(func, workload, space[index], HOST).mod["main"]
            found = run(written, x, w, b)[0]
            close(found, expected(x, w, b, transposed), depth**0.5)


def test_one_row_streams_and_symbolic_rows_have_no_knobs():
    assert Dense().workload(dense(1, 64, 64, False), HOST) is None
    assert Dense().workload(dense(2, 4096, 4096, False), HOST) is None
    assert Dense().workload(dense(tirx.Var("n", "int64"), 64, 64, False), HOST) is None
