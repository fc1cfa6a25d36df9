# SPDX-License-Identifier: Apache-2.0
"""Consumers of a tiled block: computed with it or in a separate nest, always correctly."""

from __future__ import annotations

import numpy as np
import pytest
from cpu.rule_cases import AVX2, Array, close, draw, function, run, schedule, schedule_first, tensor
from tvm import s_tir, te, tirx, topi

from schedules.cpu.loops.matmul.dense import Dense
from schedules.cpu.loops.pooling import Pooling
from schedules.cpu.nests.fused_consumers import follow

# Extents, the element of a vector of 20 that is read, and whether that is a tile's own.
CONSUMERS = {
    "own": ((20,), lambda c, j: c[j] * c[j], True),
    "wider": ((20, 7), lambda c, j, k: c[j] * 2.0, True),
    "reshaped": ((5, 4), lambda c, p, q: c[4 * p + q] * 2.0, False),
    "reversed": ((20,), lambda c, j: c[19 - j] * 2.0, False),
    "shifted": ((15,), lambda c, j: c[j + 5] * 2.0, False),
    "strided": ((10,), lambda c, j: c[2 * j + 1] * 2.0, False),
    "two places": ((20, 20), lambda c, i, j: c[i] + c[j], False),
    "clipped": ((24,), lambda c, j: c[tirx.min(j, 19)] * 2.0, False),
}


def gathered(name: str, source: Array) -> Array:
    """The consumer of that name in numpy."""
    return {
        "own": lambda: source * source,
        "wider": lambda: np.repeat(source[:, None], 7, 1) * 2,
        "reshaped": lambda: source.reshape(5, 4) * 2,
        "reversed": lambda: source[::-1] * 2,
        "shifted": lambda: source[5:] * 2,
        "strided": lambda: source[1::2] * 2,
        "two places": lambda: source[:, None] + source,
        "clipped": lambda: source[np.minimum(np.arange(24), 19)] * 2,
    }[name]()


@pytest.mark.parametrize("name", CONSUMERS)
def test_only_blocks_that_read_their_own_elements_of_an_overlapping_tile_move(name):
    shape, body, own = CONSUMERS[name]
    x = tensor("x", 20)
    y = te.compute((20,), lambda i: x[i] * 2.0, name="y")
    sch = s_tir.Schedule(function([x], te.compute(shape, lambda *axes: body(y, *axes), name="z")))
    block, consumer = sch.get_sblock("y"), sch.get_sblock("z")
    outer, _ = sch.split(sch.get_loops(block)[0], [None, 8])
    moved, rest = follow(sch, block, [consumer], outer, [(outer, 8)])
    assert (len(moved), len(rest)) == ((1, 0) if own else (0, 1))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("axis", [0, 1], ids=["columns", "rows"])
@pytest.mark.parametrize("name", CONSUMERS)
def test_numbers_after_a_reduction(name, axis):
    shape, body, _ = CONSUMERS[name]
    x = tensor("x", *((40, 20) if axis == 0 else (20, 40)))
    total = topi.sum(x, axis)
    z = te.compute(shape, lambda *axes: body(total, *axes), name="z")
    func = schedule_first(function([x], z), AVX2)
    data = draw([int(extent) for extent in x.shape])
    close(run(func, data)[0], gathered(name, data.astype("float64").sum(axis)), 50)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("columns", [20, 32], ids=["overlapping", "dividing"])
def test_a_reshape_after_a_product(columns):
    x, w = tensor("x", 6, 16), tensor("w", 16, columns)
    product = topi.matmul(x, w)
    heads = te.compute(
        (6, columns // 4, 4), lambda i, p, q: product[i, 4 * p + q] * 2.0, name="heads"
    )
    a, b = draw([6, 16]), draw([16, columns], 1)
    func = schedule(Dense(), function([x, w], heads), AVX2)
    close(run(func, a, b)[0], (2 * (a @ b)).reshape(6, -1, 4), 10)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(2, 8, 9, 9), (2, 9, 9, 12)], ids=["NCHW", "NHWC"])
def test_a_reshape_after_pooling(shape):
    x = tensor("x", *shape)
    layout = "NCHW" if shape[1] == 8 else "NHWC"
    windows = topi.nn.pool2d(x, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), "max", layout=layout)
    flat = (2, int(np.prod(shape)) // 2)
    data = draw(shape)
    plain = run(schedule(Pooling(), function([x], windows), AVX2), data)[0]
    func = schedule(Pooling(), function([x], topi.nn.relu(topi.reshape(windows, flat))), AVX2)
    np.testing.assert_array_equal(run(func, data)[0], np.maximum(plain.reshape(flat), 0))
