# SPDX-License-Identifier: Apache-2.0
"""Matrix products on the GPU: numbers in OpenCL, structure of CUDA's machine code."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from graph_cases import CUDA, OPENCL, functions, fused, numpy_dtype, run, scheduled
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.target import Target

from schedules.gpu import Matmul
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.matmul.matmul_tile_sizes import choose_tiles
from schedules.gpu.gemm.matmul.skinny_matmul import RowsConfig, scratch_place
from tests.selection import in_turns, one_test

F32, F16 = "float32", "float16"

Types = list[tuple[tuple[int, ...], str]]
Case = tuple[Callable[..., relax.Expr], Callable[..., np.ndarray], Types]


def _erf(x: np.ndarray) -> np.ndarray:
    from math import erf

    return np.vectorize(erf)(x)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + _erf(x / np.sqrt(2)))


CASES: dict[str, Case] = {
    "nn": (op.matmul, np.matmul, [((1, 65, 48), F32), ((48, 72), F32)]),
    "nn_odd": (op.matmul, np.matmul, [((33, 37), F32), ((37, 41), F32)]),
    "nt": (
        lambda x, w: op.matmul(x, op.permute_dims(w)),
        lambda x, w: x @ w.T,
        [((40, 100), F32), ((36, 100), F32)],
    ),
    "nt_odd": (
        lambda x, w: op.matmul(x, op.permute_dims(w)),
        lambda x, w: x @ w.T,
        [((17, 35), F32), ((19, 35), F32)],
    ),
    "bias_gelu": (
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, w), b)),
        lambda x, w, b: _gelu(x @ w + b),
        [((1, 20, 64), F32), ((64, 96), F32), ((96,), F32)],
    ),
    "bias_residual": (
        lambda x, w, b, r: op.add(op.add(op.matmul(x, w), b), r),
        lambda x, w, b, r: x @ w + b + r,
        [((1, 20, 64), F32), ((64, 36), F32), ((36,), F32), ((1, 20, 36), F32)],
    ),
    "attention_scores": (
        lambda q, k: op.multiply(op.matmul(q, k), relax.const(0.125)),
        lambda q, k: q @ k * 0.125,
        [((2, 3, 18, 64), F32), ((2, 3, 64, 20), F32)],
    ),
    "attention_values": (op.matmul, np.matmul, [((2, 3, 18, 20), F32), ((2, 3, 20, 64), F32)]),
    "masked_scores": (
        lambda q, k, m: op.add(
            op.matmul(q, k),
            op.multiply(
                op.subtract(relax.const(1.0), op.expand_dims(m, [1, 2])), relax.const(-9.0)
            ),
        ),
        lambda q, k, m: q @ k + (1 - m[:, None, None]) * -9,
        [((2, 3, 18, 64), F32), ((2, 3, 64, 20), F32), ((2, 20), F32)],
    ),
    "one_row": (
        lambda x, w, b: op.add(op.matmul(x, op.permute_dims(w)), b),
        lambda x, w, b: x @ w.T + b,
        [((1, 320), F32), ((75, 320), F32), ((75,), F32)],
    ),
    "one_row_nn": (
        lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)),
        lambda x, w, b: np.maximum(x @ w + b, 0),
        [((1, 130), F32), ((130, 100), F32), ((100,), F32)],
    ),
    "one_row_nn_odd": (op.matmul, np.matmul, [((1, 131), F32), ((131, 37), F32)]),
    "few_rows": (
        lambda x, w: op.matmul(x, op.permute_dims(w)),
        lambda x, w: x @ w.T,
        [((5, 129), F32), ((33, 129), F32)],
    ),
    "eight_rows": (op.matmul, np.matmul, [((8, 70), F32), ((70, 44), F32)]),
    "rows_of_columns": (
        lambda x, w: op.matmul(op.permute_dims(x), op.permute_dims(w)),
        lambda x, w: x.T @ w.T,
        [((64, 3), F32), ((20, 64), F32)],
    ),
    "one_column": (op.matmul, np.matmul, [((70, 48), F32), ((48, 1), F32)]),
    "one_number": (op.matmul, np.matmul, [((1, 300), F32), ((300, 1), F32)]),
    "decode": (op.matmul, np.matmul, [((1, 6, 1, 64), F32), ((1, 6, 64, 45), F32)]),
    "half": (
        lambda x, w: op.matmul(x, w, out_dtype=F32),
        lambda x, w: x.astype(F32) @ w.astype(F32),
        [((34, 40), F16), ((40, 24), F16)],
    ),
    "half_row": (
        lambda x, w: op.matmul(x, op.permute_dims(w), out_dtype=F32),
        lambda x, w: x.astype(F32) @ w.astype(F32).T,
        [((1, 80), F16), ((24, 80), F16)],
    ),
    "bfloat16": (
        lambda x, w: op.matmul(x, w, out_dtype=F32),
        lambda x, w: x.astype(F32) @ w.astype(F32),
        [((34, 40), "bfloat16"), ((40, 24), "bfloat16")],
    ),
    "double": (op.matmul, np.matmul, [((18, 24), "float64"), ((24, 20), "float64")]),
    "int8": (
        lambda x, w: op.matmul(x, w, out_dtype="int32"),
        lambda x, w: x.astype("int32") @ w.astype("int32"),
        [((34, 40), "int8"), ((40, 24), "int8")],
    ),
}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def _check(got: np.ndarray, wanted: np.ndarray, depth: int) -> None:
    assert got.shape == wanted.shape
    tolerance = 0 if got.dtype.kind == "i" else 4e-7 * depth
    np.testing.assert_allclose(got.astype("float64"), wanted, 1e-5 if tolerance else 0, tolerance)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, rng: np.random.Generator) -> None:
    build, reference, types = CASES[name]
    inputs = [_random(rng, shape, dtype) for shape, dtype in types]
    exact = [x.astype("float64") if x.dtype == F32 else x for x in inputs]
    [got] = run(build, inputs)
    _check(got, reference(*exact), types[0][0][-1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("tile", "transposed"),
    in_turns([(128, 128, 8, 8), (64, 128, 8, 8), (64, 64, 8, 4), (32, 64, 4, 4)], [False, True]),
)
def test_every_tile(
    tile: tuple[int, ...],
    transposed: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("schedules.gpu.gemm.matmul.matmul_tile_sizes._TILES", (tile,))
    target = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")
    x, w = _random(rng, (130, 44), F32), _random(rng, (44, 68), F32)
    build = op.matmul
    if transposed:
        w, build = w.T.copy(), CASES["nt"][0]
    [got] = run(build, [x, w], target=target)
    w = w.T if transposed else w
    _check(got, x.astype("float64") @ w, 44)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, pytest.param(31, marks=pytest.mark.slow), 200])
def test_symbolic_rows(rows: int, rng: np.random.Generator) -> None:
    x, w, b = (_random(rng, shape, F32) for shape in ((1, rows, 36), (36, 50), (50,)))
    shapes = [(1, tirx.Var("n", "int64"), 36), (36, 50), (50,)]
    [got] = run(lambda x, w, b: op.nn.relu(op.add(op.matmul(x, w), b)), [x, w, b], shapes)
    _check(got, np.maximum(x.astype("float64") @ w + b, 0), 36)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 40])
def test_symbolic_attention(size: int, rng: np.random.Generator) -> None:
    """The length of the sequence is also the reduced axis of the second product."""
    p, v = _random(rng, (1, 2, size, size), F32), _random(rng, (1, 2, size, 16), F32)
    n = tirx.Var("n", "int64")
    [got] = run(op.matmul, [p, v], [(1, 2, n, n), (1, 2, n, 16)])
    _check(got, p.astype("float64") @ v, size)


BERT: dict[str, Case] = {
    "projection": (
        CASES["bias_residual"][0],
        CASES["bias_residual"][1],
        [((1, 128, 768), F32), ((768, 768), F32), ((768,), F32), ((1, 128, 768), F32)],
    ),
    "feed_forward": (
        CASES["bias_gelu"][0],
        CASES["bias_gelu"][1],
        [((1, 128, 768), F32), ((768, 3072), F32), ((3072,), F32)],
    ),
    "scores": (op.matmul, np.matmul, [((1, 12, 128, 64), F32), ((1, 12, 64, 128), F32)]),
    "values": (op.matmul, np.matmul, [((1, 12, 128, 128), F32), ((1, 12, 128, 64), F32)]),
    "large": (CASES["nt"][0], CASES["nt"][1], [((2048, 1024), F32), ((2048, 1024), F32)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turns(BERT))
def test_machine_code_of_tiles(name: str) -> None:
    build, _, types = BERT[name]
    [func] = scheduled(build, *types, target=CUDA).values()
    source = cuda_source(func)
    [used], [code] = ptxas(source).values(), sass(source).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "LDG.E") == count(names, "LDG.E.128") > 0
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0
    assert count(names, "LDS.128") > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_row", "one_row_nn"])
def test_machine_code_of_rows(name: str) -> None:
    build, _, _ = CASES[name]
    weight = (1000, 1280) if name == "one_row" else (1280, 1000)
    types = [((1, 1280), F32), (weight, F32), ((1000,), F32)]
    [func] = scheduled(build, *types, target=CUDA).values()
    source = cuda_source(func)
    [used], [code] = ptxas(source).values(), sass(source).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert count(opcodes(code), "LDG.E.128") > 0


@one_test([8, 16, 32], [*range(1, 9), 16, 20, 32])
def test_parts_of_rows_meet_without_bank_conflicts(lanes: int, size: int) -> None:
    """Each phase of a warp's access, of 128 bytes in vectors, touches each bank once."""
    config = RowsConfig(along_depth=False, vector=4, lanes=lanes, parts=256 // lanes)
    vector = math.gcd(size, 4)
    places = [[scratch_place(config, size, t, e) for t in range(256)] for e in range(size)]
    assert sorted(place for each in places for place in each) == list(range(256 * size))
    for first in range(0, size, vector):
        for phase in range(0, 256, 32 // vector):
            words = [
                places[first + k][thread]
                for thread in range(phase, phase + 32 // vector)
                for k in range(vector)
            ]
            assert len({word % 32 for word in words}) == 32
            assert all(place % vector == 0 for place in places[first])


@pytest.mark.parametrize(("m", "n", "k"), [(128, 768, 768), (128, 768, 3072), (64, 512, 512)])
def test_few_tiles_share_the_reduction(m: int, n: int, k: int) -> None:
    config = choose_tiles(1, m, n, k, 4, GPUInfo.from_target(CUDA))
    assert (config.rows, config.columns) == (32, 32)
    assert config.groups > 1


def test_other_reductions_are_left_alone() -> None:
    x, y = (te.placeholder((8, 8), F32, name=name) for name in "xy")
    k = te.reduce_axis((0, 8))
    largest = te.compute((8, 8), lambda i, j: te.max(x[i, k] * y[k, j], k))
    assert Matmul().apply(te.create_prim_func([x, y, largest]), CUDA, False) is None
    squares = te.compute((8,), lambda i: te.sum(x[i, k] + y[i, k], k))
    assert Matmul().apply(te.create_prim_func([x, y, squares]), CUDA, False) is None


def test_an_epilogue_that_moves_elements_is_left_alone() -> None:
    x, y = (te.placeholder((8, 8), F32, name=name) for name in "xy")
    k = te.reduce_axis((0, 8))
    product = te.compute((8, 8), lambda i, j: te.sum(x[i, k] * y[k, j], k))
    moved = te.compute((8, 8), lambda i, j: product[j, i])
    func = te.create_prim_func([x, y, moved])
    assert Matmul().apply(func, OPENCL, False) is None
    assert functions(fused(op.matmul, ((2, 2), F32), ((2, 2), F32)))
