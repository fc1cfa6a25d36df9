# SPDX-License-Identifier: Apache-2.0
"""Transposes and layouts on the GPU: numbers in OpenCL, coalesced accesses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from graph_cases import CUDA, numpy_dtype, run, scheduled
from tvm import relax, tirx
from tvm.relax import op

from relay_passes.op.channels import pack, unpack
from schedules import attributes

F32 = "float32"

Case = tuple[Callable[..., relax.Expr], Callable[..., np.ndarray], tuple[int, ...], str]

CASES: dict[str, Case] = {
    "matrix": (op.permute_dims, np.transpose, (70, 45), F32),
    "keys": (
        lambda x: op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.transpose(0, 2, 3, 1),
        (1, 40, 3, 64),
        F32,
    ),
    "nhwc": (
        lambda x: op.permute_dims(x, [0, 2, 3, 1]),
        lambda x: x.transpose(0, 2, 3, 1),
        (2, 36, 7, 9),
        F32,
    ),
    "activation": (
        lambda x: op.exp(op.permute_dims(op.negative(x))),
        lambda x: np.exp(-x.T),
        (33, 64),
        F32,
    ),
    "bytes": (op.permute_dims, np.transpose, (40, 100), "int8"),
    "flags": (op.permute_dims, np.transpose, (40, 100), "bool"),
    "bfloat16": (op.permute_dims, np.transpose, (40, 33), "bfloat16"),
    "half": (op.permute_dims, np.transpose, (40, 33), "float16"),
    "long": (op.permute_dims, np.transpose, (33, 40), "int64"),
}


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (rng.standard_normal(shape) * 3).astype(numpy_dtype(dtype))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, rng: np.random.Generator) -> None:
    build, reference, shape, dtype = CASES[name]
    x = _random(rng, shape, dtype)
    [func] = scheduled(build, (shape, dtype)).values()
    assert func.attrs[attributes.RULE] == "Transpose"
    [got] = run(build, [x])
    np.testing.assert_allclose(got.astype(F32), reference(x).astype(F32), 1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("channels", [8, 12, 30])
def test_pack_and_unpack(channels: int, rng: np.random.Generator) -> None:
    x = _random(rng, (2, channels, 5, 7), F32)
    blocks = -(-channels // 4)
    wanted = np.zeros((2, blocks * 4, 5, 7), F32)
    wanted[:, :channels] = x
    packed = wanted.reshape(2, blocks, 4, 5, 7).transpose(0, 1, 3, 4, 2)
    [got] = run(lambda x: pack(x, 4), [x])
    np.testing.assert_array_equal(got, packed)
    [got] = run(lambda x: unpack(x, channels), [np.ascontiguousarray(packed)])
    np.testing.assert_array_equal(got, x)


def test_two_inputs_of_which_one_is_transposed(rng: np.random.Generator) -> None:
    x, y, b = (_random(rng, shape, F32) for shape in ((40, 50), (50, 40), (40,)))
    [got] = run(lambda x, y, b: op.add(op.add(op.permute_dims(x), y), b), [x, y, b])
    np.testing.assert_allclose(got, x.T + y + b, 1e-6, 1e-6)


@pytest.mark.slow
def test_more_inputs_than_tiles_fit_have_none(rng: np.random.Generator) -> None:
    """16 KiB of shared memory hold three tiles of float32."""

    def build(first: relax.Expr, *others: relax.Expr) -> relax.Expr:
        for other in others:
            first = relax.BlockBuilder.current().emit(op.add(first, other))
        return op.permute_dims(first)

    for tensors, rule in ((3, "Transpose"), (4, "Elementwise")):
        inputs = [_random(rng, (40, 50), F32) for _ in range(tensors)]
        [func] = scheduled(build, *[((40, 50), F32)] * tensors).values()
        assert func.attrs[attributes.RULE] == rule
        [got] = run(build, inputs)
        np.testing.assert_allclose(got, np.sum(inputs, axis=0).T, 1e-5, 1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [3, 100])
def test_symbolic_rows(rows: int, rng: np.random.Generator) -> None:
    x = _random(rng, (rows, 48), F32)
    [got] = run(op.permute_dims, [x], [(tirx.Var("n", "int64"), 48)])
    np.testing.assert_array_equal(got, x.T)


@pytest.mark.slow
def test_tiles_lie_in_shared_memory() -> None:
    [func] = scheduled(op.permute_dims, ((768, 3072), F32), target=CUDA).values()
    source = cuda_source(func)
    [used], [code] = ptxas(source).values(), sass(source).values()
    assert used.shared >= 32 * 32 * 4
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert count(opcodes(code), "BAR") == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_pack", [True, False])
def test_layouts_of_four_channels_move_pixels_at_once(is_pack: bool) -> None:
    if is_pack:
        [func] = scheduled(lambda x: pack(x, 4), ((1, 64, 56, 56), F32), target=CUDA).values()
    else:
        shape = (1, 16, 56, 56, 4)
        [func] = scheduled(lambda x: unpack(x, 64), (shape, F32), target=CUDA).values()
    assert func.attrs[attributes.RULE] == "Elementwise"
    [code] = sass(cuda_source(func)).values()
    names = opcodes(code)
    assert count(names, "STG.E.128" if is_pack else "LDG.E.128") == 1
    assert count(names, "LDG.E" if is_pack else "STG.E") == 4


def test_a_last_axis_that_stays_needs_no_tile() -> None:
    shape = (1, 128, 12, 64)
    [func] = scheduled(
        lambda x: op.permute_dims(x, [0, 2, 1, 3]), (shape, F32), target=CUDA
    ).values()
    assert func.attrs[attributes.RULE] == "Elementwise"
