# SPDX-License-Identifier: Apache-2.0
"""Attention of few queries, whose keys are divided among blocks: numbers, splits, machine code."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from attention.test_attention_gpu import (
    CUDA,
    F32,
    OPENCL,
    Build,
    attend,
    heads,
    module,
    of_logits,
    plain,
    scheduled,
)
from cuda_text import count, cuda_source, loops, ptxas, sass
from relax_on_opencl import RelaxOnOpenCL
from tvm import IRModule, relax, tirx
from tvm.relax import op
from tvm.target import Target

from schedules.gpu.attention import attention as rule
from schedules.gpu.attention.decode_tile import DecodeTile
from tests.selection import in_turns

Shape = tuple[int | tirx.Var, ...]


def parted(mod: IRModule, target: Target, **fields: int) -> tuple[IRModule, list[DecodeTile]]:
    """The module with kernels, with some fields of the tile changed, and the tiles."""
    tiles: list[DecodeTile] = []
    choose = rule.choose_decode_tile

    def chosen(*given: object) -> DecodeTile | None:
        found = choose(*given)
        if found is not None:
            tiles.append(replace(found, **fields))
        return tiles[-1] if found is not None else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "choose_decode_tile", chosen)
        return scheduled(mod, target), tiles


def run(build: Build, *inputs: np.ndarray, splits: int) -> np.ndarray:
    """The result of a graph that is one attention of so many parts."""
    types = [(array.shape, str(array.dtype)) for array in inputs]
    mod, tiles = parted(module(build, *types), OPENCL, splits=splits)
    machine = RelaxOnOpenCL(mod, OPENCL)
    [found] = machine(*inputs)
    kernels = ["attention_kernel", "attention_kernel_1"][: min(2, splits)]
    assert tiles and [launch.kernel for launch in machine.launches] == kernels
    return found


def grouped(dtype: str) -> Build:
    """Heads of keys and values are repeated for the queries of a group."""

    def build(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Expr:
        block = relax.BlockBuilder.current()
        groups = int(query.ty.shape.values[1]) // int(key.ty.shape.values[1])

        def repeat(x: relax.Expr) -> relax.Expr:
            batch, own, n, depth = x.ty.shape.values
            each = op.broadcast_to(op.expand_dims(x, 2), (batch, own, groups, n, depth))
            return block.emit(op.reshape(each, (batch, own * groups, n, depth)))

        transposed = block.emit(op.permute_dims(repeat(key), [0, 1, 3, 2]))
        scores = block.emit(op.matmul(query, transposed))
        scaled = block.emit(op.multiply(scores, relax.const(0.125, dtype)))
        return op.matmul(block.emit(op.nn.softmax(scaled)), repeat(value))

    return build


@pytest.mark.quick_cases("1-5-8-8-4")
@pytest.mark.parametrize(
    ("m", "n", "depth", "columns", "splits"),
    [(1, 1000, 64, 64, 7), (3, 45, 20, 36, 1), (8, 130, 160, 128, 3), (1, 5, 8, 8, 4)],
)
def test_numbers(
    m: int, n: int, depth: int, columns: int, splits: int, rng: np.random.Generator
) -> None:
    """Also with parts that have no keys, and lanes that have no elements."""
    query, key, value = heads(rng, (2, 3, m, depth), (2, 3, n, depth), (2, 3, n, columns))
    exact = attend(query, key, value, lambda scores: scores * 0.125)
    found = run(plain, query, key, value, splits=splits)
    np.testing.assert_allclose(found, exact, 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "groups", "m"), [("float16", 7, 1), ("bfloat16", 4, 3), (F32, 2, 2)]
)
def test_heads_that_share_keys(dtype: str, groups: int, m: int, rng: np.random.Generator) -> None:
    """Rows of one block, or of two where there are more than eight."""
    shapes = (2, 2 * groups, m, 64), (2, 2, 150, 64), (2, 2, 150, 64)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    query, key, value = (array.astype(kind) for array in heads(rng, *shapes))
    wide = (np.repeat(array, groups, 1) for array in (key, value))
    exact = attend(query, *wide, lambda scores: scores * 0.125)
    found = run(grouped(dtype), query, key, value, splits=2).astype("float64")
    relative = {F32: 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(found, exact, relative, relative / 8)


def test_masks_infinities_and_nan(rng: np.random.Generator) -> None:
    """Results are those of the definition, also where a part, or all, is hidden, or a value is
    infinite.
    """
    query, key, value = heads(rng, (9, 2, 1, 16), (9, 2, 300, 16), (9, 2, 300, 16))
    mask = np.zeros((9, 1, 1, 300), F32)
    mask[0, ..., :290], mask[1], mask[2, ..., 100:] = -np.inf, -np.inf, -np.inf
    mask[3, ..., 5], mask[4, ..., 7], mask[5] = np.nan, np.inf, np.finfo(F32).min
    value[6, 0, 299, 3], value[7, 0, 0, 3] = np.inf, np.nan
    key[8, 1, 250] *= 100
    with np.errstate(invalid="ignore"):
        exact = attend(query, key, value, lambda scores: scores + mask)
    found = run(of_logits(op.add), query, key, value, mask, splits=3)
    assert np.isinf(exact[6, 0, 0, 3]) and np.isnan(exact[1]).all()
    np.testing.assert_allclose(found, exact, 2e-5, 2e-5)


@pytest.mark.slow
def test_a_cache_of_any_length(rng: np.random.Generator) -> None:
    batch, n = (tirx.Var(name, "int64") for name in ("batch", "n"))
    shapes: list[Shape] = [(batch, 1, 64), (batch, n, 64), (batch, n, 64)]
    mod, tiles = parted(module(plain, *((shape, F32) for shape in shapes)), OPENCL)
    machine = RelaxOnOpenCL(mod, OPENCL)
    for size, keys in [(2, 1), (3, 700)]:
        query, key, value = heads(rng, (size, 1, 64), (size, keys, 64), (size, keys, 64))
        exact = attend(query, key, value, lambda scores: scores * 0.125)
        [found] = machine(query, key, value)
        np.testing.assert_allclose(found, exact, 1e-5, 1e-5)
    assert tiles[0].splits > 1 and len(machine.launches) == 2


def tile_of(batch: int, queries: int, keys: int, n: int, arch: str = "sm_90") -> DecodeTile:
    shapes: list[Shape] = [(batch, queries, 1, 128), *[(batch, keys, n, 128)] * 2]
    mod = module(grouped("float16"), *((shape, "float16") for shape in shapes))
    return parted(mod, CUDA[arch])[1][0]


@pytest.mark.slow
def test_few_heads_have_more_parts() -> None:
    """The device is busy with either; short caches and many heads are one kernel."""
    long, many, short = tile_of(1, 32, 8, 32768), tile_of(64, 32, 32, 4096), tile_of(8, 32, 32, 64)
    assert (long.heads, long.rows) == (4, 4)
    assert 8 * long.splits >= 132 and many.splits == short.splits == 1
    assert tile_of(4, 32, 8, 32768).splits <= long.splits


def test_queries_of_many_heads_have_their_own_kernel() -> None:
    """Keys that are stored in another way are left to products of few rows."""

    def build(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Expr:
        block = relax.BlockBuilder.current()
        scores = block.emit(op.matmul(query, key))
        return op.matmul(block.emit(op.nn.softmax(scores)), value)

    mod = module(build, ((1, 1, 64), F32), ((1, 64, 99), F32), ((1, 99, 64), F32))
    assert not parted(mod, OPENCL)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arch"), in_turns([(32, 8), (64, 8), (32, 32)], CUDA, every=3), ids=str
)
def test_machine_code(kind: tuple[int, int], arch: str) -> None:
    """No spills, 16-byte loads of keys and values, and few instructions a byte."""
    queries, keys = kind
    shapes: list[Shape] = [(1, queries, 1, 128), *[(1, keys, 8192, 128)] * 2]
    mod = module(grouped("float16"), *((shape, "float16") for shape in shapes))
    mod, tiles = parted(mod, CUDA[arch])
    [func] = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    source = cuda_source(func.with_attr("global_symbol", "attention"), arch)
    for used in ptxas(source, arch).values():
        assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    code = sass(source, arch)["attention_kernel"]
    [loop] = loops(code)
    assert count(loop, "LDG.E") == count(loop, "LDG.E.128") == 2 * tiles[0].keys
    assert not count(loop, "BAR") and not count(loop, "I2F")
    products = tiles[0].rows * tiles[0].keys * 2 * tiles[0].vector
    assert len(loop) < 3 * products + 130
