# SPDX-License-Identifier: Apache-2.0
"""Graphs with reductions that use each other's results, as Relax and as numpy computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from reduction_checks import random_data
from reduction_graphs import data, f16, f32, op, several
from tvm import relax

from relay_passes.op import coalesced_reduce


def softmax(emit, x, axis=-1):
    e = emit(op.exp(op.subtract(x, emit(total_of("max", x, axis)))))
    return op.divide(e, emit(total_of("sum", e, axis)))


def total_of(operator, x, axis):
    return coalesced_reduce(x, operator, axis, keepdims=True)


def softmax_of(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def normalized(emit, x, axes=-1):
    mean = emit(total_of("mean", x, axes))
    difference = emit(op.subtract(x, mean))
    variance = emit(total_of("mean", emit(op.multiply(difference, difference)), axes))
    return op.multiply(difference, op.rsqrt(op.add(variance, relax.const(1e-5))))


def normalized_of(x, axes=-1):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def layer_norm(emit, x, gain, bias):
    return op.add(op.multiply(normalized(emit, x), gain), bias)


def residual(emit, x, y):
    added = emit(op.add(x, y))
    return [normalized(emit, added), added]


def group_norm(emit, x):
    return [op.reshape(normalized(emit, emit(op.reshape(x, (2, 3, 20))), 2), (2, 6, 10))]


def attention(emit, x, mask):
    return [softmax(emit, emit(op.add(op.multiply(x, relax.const(0.25)), mask)))]


def log_softmax(emit, x):
    shifted = emit(op.subtract(x, emit(total_of("max", x, 1))))
    return op.subtract(shifted, op.log(emit(total_of("sum", emit(op.exp(shifted)), 1))))


def likelihood(emit, x, targets):
    index = op.expand_dims(targets, 1)
    return [op.negative(op.squeeze(op.gather_elements(emit(log_softmax(emit, x)), index, 1), [1]))]


def half_norm(emit, x):
    return [f16(normalized(emit, emit(f32(x))))]


def log_softmax_of(x):
    return x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1))[:, None]


CHAINS: dict[str, tuple[Callable, Callable, list, int]] = {
    "softmax": (lambda e, x: [softmax(e, x)], lambda x: [softmax_of(x)], [(5, 17)], 1),
    "softmax over channels": (
        lambda e, x: [softmax(e, x, 1)],
        lambda x: [softmax_of(x, 1)],
        [(2, 5, 3, 4)],
        1,
    ),
    "log-softmax": (lambda e, x: [log_softmax(e, x)], lambda x: [log_softmax_of(x)], [(5, 17)], 1),
    "attention": (
        attention,
        lambda x, mask: [softmax_of(x / 4 + mask)],
        [(2, 3, 5, 7), (2, 1, 1, 7)],
        1,
    ),
    "layer norm": (
        lambda e, x, g, b: [layer_norm(e, x, g, b)],
        lambda x, g, b: [normalized_of(x) * g + b],
        [(2, 5, 32), (32,), (32,)],
        1,
    ),
    "residual and layer norm": (
        residual,
        lambda x, y: [normalized_of(x + y), x + y],
        [(5, 32), (5, 32)],
        2,
    ),
    "instance norm": (
        lambda e, x: [normalized(e, x, [2, 3])],
        lambda x: [normalized_of(x, (2, 3))],
        [(2, 3, 5, 4)],
        1,
    ),
    "instance norm of a packed layout": (
        lambda e, x: [normalized(e, x, [2, 3])],
        lambda x: [normalized_of(x, (2, 3))],
        [(2, 3, 5, 6, 4)],
        1,
    ),
    "batch norm": (
        lambda e, x: [op.nn.relu(normalized(e, x, [0, 2, 3]))],
        lambda x: [np.maximum(normalized_of(x, (0, 2, 3)), 0)],
        [(4, 3, 5, 4)],
        1,
    ),
    "group norm": (
        group_norm,
        lambda x: [normalized_of(x.reshape(2, 3, 20)).reshape(2, 6, 10)],
        [(2, 6, 10)],
        1,
    ),
    "variance": (lambda e, x: [op.variance(x, [1])], lambda x: [x.var(1)], [(5, 32)], 1),
}


def _mixture(extent) -> np.ndarray:
    return (1 - 2 * np.eye(int(extent), dtype="float32")) / int(extent)


FOLDS = {"sum": np.sum, "max": np.max, "min": np.min, "mean": np.mean}
UNARY = {
    "negative": (op.negative, np.negative),
    "tanh": (op.tanh, np.tanh),
    "half": (lambda x: op.multiply(x, relax.const(0.5)), lambda x: x / 2),
    "turn": (op.permute_dims, np.transpose),
    "flat": (lambda x: op.reshape(x, (x.ty.shape[0], -1)), lambda x: x.reshape(len(x), -1)),
    "up": (lambda x: op.expand_dims(x, 1), lambda x: x[:, None]),
    "product": (
        lambda x: op.matmul(x, relax.const(_mixture(x.ty.shape[-1]))),
        lambda x: x @ _mixture(x.shape[-1]),
    ),
}
BINARY = {
    "add": (op.add, np.add),
    "subtract": (op.subtract, np.subtract),
    "multiply": (op.multiply, np.multiply),
    "maximum": (op.maximum, np.maximum),
}


def random_graph(draw, least: int, most: int):
    """A module of ``least`` to ``most`` random steps, its inputs, and a check of its results."""
    shapes = [(4, 6), (4, 6), (4, 1), (6,)]
    params = [data(*shape, name=name) for shape, name in zip(shapes, "xyzw", strict=True)]
    inputs = [random_data(np.random.default_rng(), shape, "float32") for shape in shapes]
    nodes = [(p, v.astype("float64")) for p, v in zip(params, inputs, strict=True)]
    results: list = []

    def build(emit, *_):
        for _ in range(draw(st.integers(least, most), "steps")):
            _grow(draw, emit, nodes, results)
        results.append(nodes[-1])
        return [var for var, _ in results]

    def check(found) -> None:
        scale = max(np.abs(array).max() for _, array in nodes)
        for actual, (_, expected) in zip(found, results, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * scale)

    return several(build, *params), inputs, check


def _grow(draw, emit, nodes, results) -> None:
    """Add a node, a pair of a variable and its values, mostly to one of the last."""
    tensor, array = draw(st.sampled_from([*nodes[-5:], *nodes[:2]]))
    name = draw(st.sampled_from(["fold", "fold", *BINARY, *UNARY, "softmax", "output"]))
    if name == "fold" and array.ndim:
        axis = draw(st.sampled_from([array.ndim - 1, 0, None]))
        keepdims, fold = draw(st.booleans()), draw(st.sampled_from([*FOLDS]))
        reduced = coalesced_reduce(tensor, fold, axis, keepdims=keepdims)
        nodes.append((emit(reduced), FOLDS[fold](array, axis=axis, keepdims=keepdims)))
    elif name == "softmax" and array.ndim:
        exponential = np.exp(array - array.max(-1, keepdims=True))
        largest = emit(total_of("max", tensor, -1))
        nodes.append((emit(op.exp(op.subtract(tensor, largest))), exponential))
        total = emit(total_of("sum", nodes[-1][0], -1))
        nodes.append((emit(op.divide(nodes[-1][0], total)), softmax_of(array)))
    elif name in BINARY:
        fitting = [n for n in nodes if _broadcasts(n[1].shape, array.shape)]
        other, values = draw(st.sampled_from(fitting))
        ours, by_numpy = BINARY[name]
        nodes.append((emit(ours(tensor, other)), by_numpy(array, values)))
    elif name in UNARY and (array.ndim or name not in ("flat", "up", "product")):
        ours, by_numpy = UNARY[name]
        nodes.append((emit(ours(tensor)), by_numpy(array)))
    else:
        results.append((tensor, array))


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        return len(np.broadcast_shapes(a, b)) < 4
    except ValueError:
        return False
