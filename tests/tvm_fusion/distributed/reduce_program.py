# SPDX-License-Identifier: Apache-2.0
"""Program of every rank in the tests of reductions: uneven parts of random arrays, against numpy.

The argument ``all`` checks every operator, ``few`` two.
"""

from __future__ import annotations

import itertools
import sys
import warnings

import ml_dtypes
import numpy as np
from tvm import te, tirx, topi

from tvm_fusion import distributed
from tvm_fusion.errors import DistributedError, OpError

CASES = [
    # operator, type, shape, reduced axes, axis over the ranks
    ("sum", "float32", (29, 6), (0,), 0),  # y
    ("argmax", "float32", (2, 13, 3), (0, 1), 1),  # ties between ranks, positions not in order
]
MORE = [
    ("sum", "int8", (40,), None, 0),  # all, wraps around
    ("max_sum_exp", "float32", (5, 31), (1,), 1),  # x
    ("max", "float16", (8, 17), (1,), 0),  # not over the ranks
    ("prod", "int64", (23, 2), (0,), 0),
    ("prod", "float64", (9, 2), (0,), 0),
    ("min", "float64", (19, 3), (0,), 0),
    ("max", "bfloat16", (4, 9), (1,), 1),
    ("min", "uint8", (11, 4), (0,), 0),
    ("max", "bool", (9, 4), (0,), 0),
    ("and", "bool", (13, 5), (0,), 0),
    ("or", "float32", (5, 13), (1,), 1),
    ("argmin", "int32", (3, 14), (0, 1), 1),
    ("argmin", "float64", (16, 5), (0,), 0),
    ("mean", "float16", (31, 7), (0,), 0),
    ("sum", "bfloat16", (31, 2), (0,), 0),
    ("sum_squares", "int32", (12, 3), (0,), 0),
    ("variance", "float32", (2, 27, 4), (1, 2), 1),
    ("logsumexp", "float64", (3, 26), (1,), 1),
    ("sum", "float32", (12, 20011), (0,), 0),  # many outputs are shared out
    ("argmin", "float32", (12, 9001), (0,), 0),
]


def array(generator, dtype, shape):
    """Few values, so that extremes occur twice; NaN and infinities where there are some."""
    if dtype == "bool":
        return generator.random(shape) < 0.8
    if "int" in dtype:
        return generator.integers(-100 if dtype[0] == "i" else 0, 100, shape).astype(dtype)
    found = generator.integers(-8, 8, shape) / 4
    if shape[-1] < 100:
        found[..., 0] = np.where(generator.random(shape[:-1]) < 0.1, np.nan, found[..., 0])
        found[..., -1] = np.where(generator.random(shape[:-1]) < 0.1, -np.inf, found[..., -1])
    return found.astype(getattr(ml_dtypes, dtype, dtype))


def reference(operator, whole, axes):
    """The same in float64, or in the type of the integers."""
    wide = whole.astype("float64") if whole.dtype.kind not in "iub" else whole
    axes = tuple(range(whole.ndim)) if axes is None else axes
    if operator in ("argmin", "argmax"):
        kept = [axis for axis in range(whole.ndim) if axis not in axes]
        flat = wide.transpose([*kept, *axes]).reshape([wide.shape[axis] for axis in kept] + [-1])
        return getattr(np, operator)(flat, axis=-1)
    if operator in ("max_sum_exp", "logsumexp"):
        largest = wide.max(axes)
        terms = np.exp(wide - np.where(np.isfinite(largest), largest, 0)[..., None])
        total = terms.sum(axes)
        whole_pair = largest, np.where(np.isnan(largest), np.nan, total)
        return whole_pair if operator == "max_sum_exp" else largest + np.log(total)
    if operator in ("sum", "prod") and whole.dtype.kind in "iu":
        return getattr(np, operator)(whole, axes, dtype=whole.dtype)
    if operator == "sum_squares":
        return (wide * wide).sum(axes, dtype=wide.dtype)
    name = {"and": "all", "or": "any", "variance": "var"}.get(operator, operator)
    return getattr(np, name)(wide, axes)


def tolerance(dtype):
    return {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-13}.get(dtype, 0)


def check(world, number, case):
    operator, dtype, shape, axes, axis = case
    generator = np.random.default_rng(100 * world.size + number)
    whole = array(generator, dtype, shape)
    cuts = np.sort(generator.integers(0, shape[axis] + 1, world.size - 1))
    part = np.split(whole, cuts, axis)[world.rank]
    found = distributed.reduce(world, part, operator, axes, axis=axis, keepdims=number % 2 == 0)
    again = distributed.reduce(world, part, operator, axes, axis=axis)
    found, again = (value if isinstance(value, tuple) else (value,) for value in (found, again))
    expected = reference(operator, whole, axes)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for one, other, right in zip(found, again, expected, strict=True):
        reduced = range(whole.ndim) if axes is None else axes
        if axis not in reduced:
            place = axis - sum(a < axis for a in reduced)
            right = np.split(right, cuts, place)[world.rank]
        if number % 2 == 0:
            assert one.ndim == whole.ndim
            one = one.squeeze(tuple(reduced))
        assert one.tobytes() == other.tobytes()
        assert one.dtype == (right.dtype if right.dtype.kind in "iub" else one.dtype)
        close = {"rtol": tolerance(dtype), "atol": tolerance(dtype)}
        np.testing.assert_allclose(one.astype(right.dtype), right, err_msg=str(case), **close)
        if axis in reduced:
            bits = world.all_gather(np.frombuffer(one.tobytes(), "uint8"))
            assert (bits == bits[0]).all()


OPERATORS = {
    "sum": (te.sum, np.add),
    "min": (te.min, np.minimum),
    "max": (te.max, np.maximum),
    "prod": (te.comm_reducer(lambda x, y: x * y, lambda t: tirx.const(1, t), "prod"), np.multiply),
}


def of_columns(kind, dtype, rows):
    """A reduction of six columns."""
    a, k = te.placeholder((rows, 6), dtype, "A"), te.reduce_axis((0, rows), "k")
    return te.create_prim_func([a, te.compute((6,), lambda j: kind(a[k, j], k), "C")])


def check_loops(world, cases):
    """The reduced loop of a function over the ranks."""
    for operator, dtype, rows in cases:
        kind, combine = OPERATORS[operator]
        func = of_columns(kind, dtype, rows)
        whole = np.nan_to_num(array(np.random.default_rng(rows), dtype, (rows, 6)), neginf=-1)
        local = distributed.compile(func, world.size, loop="k").on(world)
        held = local.input("A")
        held.owned[...] = whole[slice(*held.region[0])]
        found = local()
        assert found.dtype == whole.dtype and found.tobytes() == local().tobytes()
        expected = combine.reduce(whole, axis=0, dtype=whole.dtype)
        np.testing.assert_allclose(found, expected, rtol=tolerance(dtype), atol=tolerance(dtype))
        bits = world.all_gather(np.frombuffer(found.tobytes(), "uint8"))
        assert (bits == bits[0]).all()


def check_positions(world):
    """The position of the first extreme, and given sizes of the parts."""
    a = te.placeholder((23, 6), "int32", "A")
    whole = np.random.default_rng(5).integers(0, 4, (23, 6), dtype="int32")
    sizes = [0] * (world.size - 1) + [23]
    func = te.create_prim_func([a, topi.argmin(a, 0)])
    for options in ({"ranks": world.size}, {"sizes": sizes}):
        local = distributed.compile(func, loop="k0", **options).on(world)
        held = local.input("A")
        held.owned[...] = whole[slice(*held.region[0])]
        np.testing.assert_array_equal(local(), whole.argmin(0))


def check_special(world):
    """No elements, one of several parts, and what cannot be reduced."""
    reduce, rank = distributed.reduce, world.rank
    empty = np.zeros((0, 3), "float32")
    assert reduce(world, empty, "sum", 0).tolist() == [0, 0, 0]
    assert reduce(world, empty, "and", 0).tolist() == [True] * 3
    assert np.isnan(reduce(world, empty, "mean", 0)).all()
    assert reduce(world, empty, "max", 1).shape == (0,)
    part = np.full((2 * (rank == world.size - 1), 3), -np.inf, "float32")
    assert reduce(world, part, "logsumexp", 0).tolist() == [-np.inf] * 3
    largest, total = reduce(world, part, "max_sum_exp", 0)
    assert largest.tolist() == [-np.inf] * 3 and total.tolist() == [0] * 3
    one = np.full_like(part, -2)
    assert reduce(world, one, "max", 0).tolist() == [-2] * 3
    assert reduce(world, one, "argmin", 0).tolist() == [0] * 3
    for call, text in (
        (lambda: reduce(world, empty, "max", 0), "max over axes [0] has no elements"),
        (
            lambda: reduce(world, empty, "median", 0),
            "mean, sum_squares, argmin, argmax, variance, logsumexp, max",
        ),
        (lambda: reduce(world, part.astype("int8"), "variance"), "variance of int8; expected a fl"),
        (lambda: reduce(world, part, "sum", axis=2), "axis 2 is out of range"),
        (lambda: reduce(world, part, "sum" if rank else "min"), "rank 0 reduce differently"),
    ):
        try:
            call()
        except (DistributedError, OpError) as error:
            assert text in str(error), error
        else:
            assert "differently" in text and world.size == 1, text


with distributed.session(timeout=60) as world, warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    more = {"all": MORE, "few": []}[sys.argv[1]]
    for number, case in enumerate(CASES + more):
        check(world, number, case)
    loops = [("sum", "float32", 23), ("prod", "int8", 41)]  # which wraps around
    if sys.argv[1] == "all":
        types = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8")
        loops = itertools.product(OPERATORS, types, (1, 12, 31))
    check_loops(world, loops)
    check_positions(world)
    check_special(world)
    print("all checked", flush=True)
