# SPDX-License-Identifier: Apache-2.0
"""Element-wise GPU kernels: numbers in OpenCL, wide accesses in CUDA's machine code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from graph_cases import CUDA, functions, fused, numpy_dtype, run, scheduled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax, te, tirx
from tvm.relax import op

from schedules.gpu import Elementwise

Case = tuple[Callable[..., relax.Expr], Callable[..., object], list[tuple[tuple[int, ...], str]]]

F32, F16, I64, I8 = "float32", "float16", "int64", "int8"

CASES: dict[str, Case] = {
    "add_relu": (
        lambda x, y: op.nn.relu(op.add(x, y)),
        lambda x, y: np.maximum(x + y, 0),
        [((3, 5, 7), F32), ((3, 5, 7), F32)],
    ),
    "bias_of_channels": (
        lambda x, b: op.add(x, b),
        lambda x, b: x + b,
        [((2, 8, 7, 7), F32), ((1, 8, 1, 1), F32)],
    ),
    "bias_of_rows": (
        lambda x, b: op.add(x, b),
        lambda x, b: x + b,
        [((9, 768), F32), ((768,), F32)],
    ),
    "cast_to_half": (
        lambda x: op.astype(x, F16),
        lambda x: x.astype(F16),
        [((5, 77), F32)],
    ),
    "cast_from_int8": (lambda x: op.astype(x, F32), lambda x: x.astype(F32), [((6, 64), I8)]),
    "compare": (lambda x, y: op.less(x, y), lambda x, y: x < y, [((3, 40), F32), ((3, 40), F32)]),
    "where": (
        lambda c, x, y: op.where(c, x, y),
        np.where,
        [((5, 9), "bool"), ((5, 9), F32), ((5, 9), F32)],
    ),
    "clip_of_clips": (
        lambda x: op.clip(op.negative(op.clip(op.negative(op.clip(x, -2, 2)), -1, 2)), -1.5, 1),
        lambda x: np.clip(x, -1.5, 1),
        [((3, 40), F32)],
    ),
    "concat_channels": (
        lambda x, y: op.concat([op.abs(x), y], 1),
        lambda x, y: np.concatenate([np.abs(x), y], 1),
        [((1, 16, 7, 7), F32), ((1, 8, 7, 7), F32)],
    ),
    "concat_odd": (
        lambda x, y: op.concat([x, y], 1),
        lambda x, y: np.concatenate([x, y], 1),
        [((3, 5), F32), ((3, 6), F32)],
    ),
    "split": (
        lambda x: op.split(x, 3, 1),
        lambda x: np.split(x, 3, 1),
        [((4, 36), F32)],
    ),
    "split_unequal": (
        lambda x: op.split(x, [3, 10], 1),
        lambda x: np.split(x, [3, 10], 1),
        [((5, 17), I64)],
    ),
    "pad_of_rows_of_one_value": (
        lambda x: op.nn.pad(_squared_exp(op.broadcast_to(x, (3, 12))), [0, 0, 2, 2]),
        lambda x: np.pad(np.exp(2 * x).repeat(12, 1), [(0, 0), (2, 2)]),
        [((3, 1), F32)],
    ),
    "slice": (
        lambda x: op.strided_slice(x, [0, 1], [1, 3], [6, 20], [2, 4]),
        lambda x: x[1:6:2, 3:20:4],
        [((7, 21), F32)],
    ),
    "pad": (
        lambda x: op.nn.pad(x, [0, 0, 1, 2, 1, 1], pad_value=2.5),
        lambda x: np.pad(x, [(0, 0), (1, 2), (1, 1)], constant_values=2.5),
        [((3, 6, 8), F32)],
    ),
    "take_rows": (
        lambda x, i: op.take(x, i, 0),
        lambda x, i: np.take(x, i, 0),
        [((11, 20), F32), ((2, 5), I64)],
    ),
    "permute_last_stays": (
        lambda x: op.permute_dims(x, [0, 2, 1, 3]),
        lambda x: x.transpose(0, 2, 1, 3),
        [((2, 6, 5, 8), F32)],
    ),
    "reshape_permute": (
        lambda x: op.permute_dims(op.reshape(x, (1, 10, 4, 16)), [0, 2, 1, 3]),
        lambda x: x.reshape(1, 10, 4, 16).transpose(0, 2, 1, 3),
        [((1, 10, 64), F32)],
    ),
    "permute_reshape_twice": (
        lambda x: _permuted_rows(x),
        lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[2], -1),
        [((1, 3, 5, 16), F32)],
    ),
    "one_hot": (
        lambda i: op.one_hot(
            i, relax.prim_value(tirx.const(1, F32)), relax.prim_value(tirx.const(0, F32)), 11
        ),
        lambda i: np.eye(11, dtype=F32)[i],
        [((5,), I64)],
    ),
    "two_outputs": (
        lambda x: relax.Tuple([op.exp(x), op.negative(x)]),
        lambda x: (np.exp(x), -x),
        [((5, 33), F32)],
    ),
    "broadcast": (
        lambda x, y: op.multiply(x, y),
        lambda x, y: x * y,
        [((4, 1, 12), F32), ((1, 3, 1), F32)],
    ),
    "scalar": (lambda x: op.sqrt(op.abs(x)), lambda x: np.sqrt(np.abs(x)), [((), F32)]),
    "tile_flip": (
        lambda x: op.flip(op.tile(x, (2, 3)), 1),
        lambda x: np.flip(np.tile(x, (2, 3)), 1),
        [((3, 5), F32)],
    ),
    "resize": (
        lambda x: op.image.resize2d(
            x,
            (8, 12),
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: x.repeat(2, 2).repeat(3, 3),
        [((1, 2, 4, 4), F32)],
    ),
    "shared_values": (
        lambda x: _repeated(x),
        lambda x: _repeated_numpy(x),
        [((5, 12), F32)],
    ),
    "lookups": (
        lambda i, x, y: _lookups(i, x, y),
        lambda i, x, y: np.concatenate([x[i[:, 0] - 5], y[i[:, 1] - 5], i[:, :1].astype(F32)], 1),
        [((6, 2), I64), ((11, 8), F32), ((11, 12), F32)],
    ),
    "bfloat16": (
        lambda x: op.astype(op.add(op.astype(x, F32), relax.const(1.0)), "bfloat16"),
        lambda x: (x.astype(F32) + 1).astype(numpy_dtype("bfloat16")),
        [((3, 24), "bfloat16")],
    ),
}


def _permuted_rows(x: relax.Expr) -> relax.Expr:
    """The heads of attention side by side again, as rows of a matrix."""
    emit = relax.BlockBuilder.current().emit
    _, heads, rows, width = (int(extent) for extent in x.ty.shape)
    beside = emit(op.permute_dims(x, [0, 2, 1, 3]))
    return op.reshape(emit(op.reshape(beside, (1, rows, heads * width))), (rows, heads * width))


def _lookups(index: relax.Expr, *tables: relax.Expr) -> relax.Expr:
    """Rows of several tables side by side, counted from the end where the index is negative."""
    emit = relax.BlockBuilder.current().emit
    parts = []
    for k, table in enumerate(tables):
        shifted = op.subtract(op.take(index, relax.const(k, I64), 1), relax.const(5, I64))
        shifted = emit(shifted)
        ended = op.add(shifted, relax.const(11, I64))
        mended = emit(op.where(op.less(shifted, relax.const(0, I64)), ended, shifted))
        parts.append(emit(op.take(table, mended, 0)))
    first = op.strided_slice(index, [1], [0], [1])
    return op.concat([*parts, emit(op.astype(first, F32))], 1)


def _squared_exp(x: relax.Expr) -> relax.Expr:
    """A value that is used twice."""
    emit = relax.BlockBuilder.current().emit
    y = emit(op.exp(emit(x)))
    return emit(op.multiply(y, y))


def _repeated(x: relax.Expr) -> relax.Expr:
    """Every value is used twice: without sharing 2 ** 12 reads."""
    for _ in range(12):
        x = op.multiply(op.add(x, op.tanh(x)), relax.const(0.5))
    return x


def _repeated_numpy(x: np.ndarray) -> np.ndarray:
    for _ in range(12):
        x = (x + np.tanh(x)) * 0.5
    return x


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == "int64":
        return rng.integers(0, 11, shape)
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype("int8")
    return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype(dtype))


def _check(got: list[np.ndarray], wanted: object) -> None:
    results = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    assert len(got) == len(results)
    for a, b in zip(got, results, strict=True):
        b = np.asarray(b)
        assert a.shape == b.shape
        if a.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
        else:
            epsilon = {"float32": 1e-5, "float16": 1e-3}.get(str(a.dtype), 1e-2)
            np.testing.assert_allclose(a.astype("float64"), b.astype("float64"), epsilon, 1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, rng: np.random.Generator) -> None:
    build, reference, types = CASES[name]
    inputs = [_random(rng, shape, dtype) for shape, dtype in types]
    _check(run(build, inputs), reference(*inputs))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_symbolic_rows(size: int, rng: np.random.Generator) -> None:
    rows = tirx.Var("n", "int64")
    x, b = _random(rng, (size, 12), F32), _random(rng, (12,), F32)
    got = run(lambda x, b: op.nn.relu(op.add(x, b)), [x, b], [(rows, 12), (12,)])
    _check(got, np.maximum(x + b, 0))


def test_symbolic_columns(rng: np.random.Generator) -> None:
    m, n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
    x, b = _random(rng, (7, 13), F32), _random(rng, (13,), F32)
    _check(run(lambda x, b: op.add(op.exp(x), b), [x, b], [(m, n), (n,)]), np.exp(x) + b)


Op = tuple[Callable[[relax.Expr], relax.Expr], Callable[[np.ndarray], np.ndarray]]


@st.composite
def _chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Op]]:
    """A shape, and operators that follow each other."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 12]), min_size=2, max_size=4)))
    first, chain = shape, []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["tanh", "add", "permute", "merge", "pad", "slice", "concat"]))
        axis = draw(st.integers(0, len(shape) - 1))
        if kind == "tanh":
            step: Op = (op.tanh, np.tanh)
        elif kind == "add":
            step = (lambda x: op.add(x, x), lambda x: x + x)
        elif kind == "permute":
            order = draw(st.permutations(range(len(shape))))
            step = (lambda x, o=order: op.permute_dims(x, o), lambda x, o=order: x.transpose(o))
        elif kind == "merge":
            to = (shape[0] * shape[1], *shape[2:]) if len(shape) > 2 else (1, *shape)
            step = (lambda x, to=to: op.reshape(x, to), lambda x, to=to: x.reshape(to))
        elif kind == "pad":
            width = [(1, 2) if k == axis else (0, 0) for k in range(len(shape))]
            flat = [w for pair in width for w in pair]
            step = (lambda x, w=flat: op.nn.pad(x, w), lambda x, w=width: np.pad(x, w))
        elif kind == "slice":
            step = (
                lambda x, a=axis, e=shape[axis]: op.strided_slice(x, [a], [e // 2], [e], [1]),
                lambda x, a=axis, e=shape[axis]: np.take(x, range(e // 2, e), a),
            )
        else:
            step = (
                lambda x, a=axis: op.concat([op.negative(x), x], a),
                lambda x, a=axis: np.concatenate([-x, x], a),
            )
        chain.append(step)
        shape = step[1](np.empty(shape, np.float32)).shape
    return first, chain


@settings(
    max_examples=settings.default.max_examples // 4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=_chains(), seed=st.integers(0, 2**32 - 1))
def test_random_graphs(case: tuple[tuple[int, ...], list[Op]], seed: int) -> None:
    shape, chain = case
    x = np.random.default_rng(seed).standard_normal(shape).astype(F32)

    def build(value: relax.Expr) -> relax.Expr:
        builder = relax.BlockBuilder.current()
        for step, _ in chain:
            value = builder.emit(step(value))
        return value

    wanted = x.astype("float64")
    for _, step in chain:
        wanted = step(wanted)
    _check(run(build, [x]), wanted)


WIDE = {
    "permute_reshape_twice": ([((1, 12, 128, 64), F32)], 1, 1),
    "add_relu": ([((64, 100), F32), ((64, 100), F32)], 2, 1),
    "bias_of_rows": ([((128, 768), F32), ((768,), F32)], 2, 1),
    "concat_channels": ([((1, 16, 7, 7), F32), ((1, 8, 7, 7), F32)], 2, 1),
    "permute_last_stays": ([((1, 128, 12, 64), F32)], 1, 1),
    "take_rows": ([((3000, 768), F32), ((1, 128), I64)], 1, 1),
    "split": ([((128, 2304), F32)], 3, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_accesses_are_16_bytes(name: str) -> None:
    build = CASES[name][0]
    types, reads, writes = WIDE[name]
    [func] = scheduled(build, *types, target=CUDA).values()
    [code] = sass(cuda_source(func)).values()
    names = opcodes(code)
    assert count(names, "LDG.E.128") == reads
    assert count(names, "STG.E.128") == writes == count(names, "STG")


@pytest.mark.slow
def test_nothing_spills() -> None:
    """One text with the kernels of all cases."""
    kernels = {}
    for name, (build, _, types) in CASES.items():
        for number, func in enumerate(scheduled(build, *types, target=CUDA).values()):
            kernels[f"{name}_{number}"] = func.with_attr("global_symbol", f"{name}_{number}")
    used = ptxas(cuda_source(tvm.IRModule(kernels)))
    assert len(used) >= len(CASES)
    for name, resources in used.items():
        spilled = (resources.stack_frame, resources.spill_stores, resources.spill_loads)
        assert spilled == (0, 0, 0), name


def test_reductions_are_left_alone() -> None:
    x = te.placeholder((8, 8), F32, name="x")
    k = te.reduce_axis((0, 8))
    func = te.create_prim_func([x, te.compute((8,), lambda i: te.sum(x[i, k], k))])
    assert Elementwise().apply(func, CUDA, False) is None
    assert Elementwise().apply(func, CUDA.host, False) is None


def test_a_zero_sized_output_needs_no_kernel() -> None:
    mod = fused(lambda x: op.exp(x), ((0, 4), F32), target=CUDA)
    [func] = functions(mod).values()
    assert Elementwise().apply(func, CUDA, False) is not None
