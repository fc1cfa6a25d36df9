# SPDX-License-Identifier: Apache-2.0
"""Elements that kernels of reductions store on the way: numbers, traffic, machine code."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from group_cases import Group
from reduce_cases import CUDA, OPENCL, check, random_data
from traffic import Traffic
from tvm import relax
from tvm.target import Target

from relay_passes.op import coalesced_reduce
from tests.selection import in_turns

op = relax.op
# No vector and no block divides the extents, which are long enough to be split.
SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "all": ((100_003,), [0]),
    "all of several axes": ((7, 13, 11, 101), [0, 1, 2, 3]),
    "x": ((3, 30_011), [1]),
    "short rows": ((37, 300), [1]),
    "y": ((9_001, 6), [0]),
    "far axes": ((33, 17, 49), [0, 2]),
    "far axes, one odd": ((6, 5, 14, 14), [0, 2, 3]),
    "y between": ((3, 130, 12), [1]),
}
CUDA_SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "all": ((1 << 20,), [0]),
    "all of several axes": ((32, 52, 52, 3, 5), [0, 1, 2, 3, 4]),
    "x": ((64, 1 << 14), [1]),
    "y": ((8192, 1024), [0]),
    "far axes": ((64, 96, 14, 14), [0, 2, 3]),
}


def gradients(axes: list[int], finish: str = "auto"):
    """Two sums, their products and copies in other types."""

    def build(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
        product = op.multiply(x, op.astype(y, "float32"))
        return [
            coalesced_reduce(product, "sum", axes, finish=finish),
            product,
            coalesced_reduce(op.astype(y, "float32"), "max", axes, finish=finish),
            op.astype(x, "float16"),
            op.greater(product, x),
        ]

    return build


def wanted(x: np.ndarray, y: np.ndarray, axes: list[int]) -> list[np.ndarray]:
    product, over = x * y.astype("float32"), tuple(axes)
    sums = product.astype("float64").sum(over)
    return [sums, product, y.max(over), x.astype("float16"), product > x]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("form", "finish"), in_turns(SHAPES, ["one_block", "last_block", "atomic", "auto"], every=4)
)
def test_numbers(form: str, finish: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form]
    group = Group(gradients(axes, finish), ("float32", shape), ("float16", shape))
    assert not group.group.is_chain
    x, y = (random_data(rng, "sum", dtype, shape) for dtype in ("float32", "float16"))
    arguments = group.arguments(x, y)
    group.compile().run(*arguments)
    for got, expected in zip(group.outputs(arguments), wanted(x, y, axes), strict=True):
        if expected.dtype == np.float64:
            check("sum", got, x * y.astype("float32"), expected)
        else:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("extents", [(5, 129), (3, 30_001)])
def test_symbolic_extents(extents: tuple[int, int], rng: np.random.Generator) -> None:
    shape = [tvm.tirx.Var(name, "int64") for name in "nk"]
    group = Group(gradients([1]), ("float32", shape), ("float16", shape))
    x, y = (random_data(rng, "sum", dtype, extents) for dtype in ("float32", "float16"))
    results = group.run(x, y)
    for got, expected in zip(results[1:], wanted(x, y, [1])[1:], strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", ["x", "y"])
def test_every_element_is_moved_once(form: str) -> None:
    """Several blocks share an output, too, on devices with clusters and without."""
    shape, axes = SHAPES[form]
    for arch in ("sm_80", "sm_90"):
        target = Target({"kind": "cuda", "arch": arch}, host="llvm")
        group = Group(gradients(axes), ("float32", shape), ("float16", shape), target=target)
        assert group.config.splits > 1
        arguments = group.arguments(*(np.empty(shape, dtype) for dtype in ("float32", "float16")))
        traffic = Traffic(group.func, target, arguments)
        tensors = [
            (reads, writes)
            for param, reads, writes in zip(
                group.func.params, traffic.reads, traffic.writes, strict=True
            )
            if str(param.dtype) != "int32"  # partial results and tickets
        ]
        assert traffic.kernels == 1 and len(tensors) == 7
        for reads, writes in tensors[:2]:
            assert (set(reads), set(writes)) == ({1}, {0})
        for reads, writes in tensors[2:]:
            assert (set(reads), set(writes)) == ({0}, {1})


@pytest.mark.slow
def test_stores_are_vectors_and_nothing_spills() -> None:
    functions = {
        form.replace(" ", "_"): Group(
            gradients(axes), ("float32", shape), ("float32", shape), target=CUDA
        ).func
        for form, (shape, axes) in CUDA_SHAPES.items()
    }
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    source = cuda_source(tvm.IRModule(named))
    for name, used in ptxas(source).items():
        assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0), name
    for name, code in sass(source).items():
        names = opcodes(code)
        assert count(names, "STG.E.128") > 0, name
        assert count(names, "LDG.E.128") >= 2 * count(names, "STG.E.128"), name


def test_a_chain_stores_in_its_first_pass_what_it_knows_there() -> None:
    """The sum of a residual stream, beside its norm, of rows that no block can keep."""

    def build(x: relax.Expr, y: relax.Expr) -> list[relax.Expr]:
        added = op.add(x, y)
        scale = op.rsqrt(coalesced_reduce(added, "sum_squares", [1], keepdims=True))
        return [added, op.multiply(added, scale)]

    shape = (3, 40_001)
    group = Group(build, *[("float32", shape)] * 2, target=OPENCL)
    assert [element.stage for element in group.group.elements] == [0, 1]
    assert group.group.is_chain and not group.config.kept
    x, y = (np.random.default_rng().standard_normal(shape).astype("float32") for _ in range(2))
    added, normal = group.run(x, y)
    np.testing.assert_array_equal(added, x + y)
    exact = (x + y).astype("float64")
    np.testing.assert_allclose(normal, exact / np.sqrt((exact**2).sum(1, keepdims=True)), rtol=1e-4)


@pytest.mark.slow
def test_an_online_sum_stores_what_it_reads(rng: np.random.Generator) -> None:
    """Biased logits, with the sum of exponentials of rows that many blocks share."""

    def build(x: relax.Expr, bias: relax.Expr) -> list[relax.Expr]:
        logits = op.add(x, bias)
        largest = coalesced_reduce(logits, "max", [1], keepdims=True)
        return [logits, coalesced_reduce(op.exp(op.subtract(logits, largest)), "sum", [1])]

    shape = (3, 70_001)
    group = Group(build, ("float32", shape), ("float32", shape[1:]))
    assert group.config.is_online and group.config.splits > 1
    x, bias = (random_data(rng, "sum", "float32", size) for size in (shape, shape[1:]))
    logits, total = group.run(x, bias)
    np.testing.assert_array_equal(logits, x + bias)
    exact = (x + bias).astype("float64")
    np.testing.assert_allclose(total, np.exp(exact - exact.max(1)[:, None]).sum(1), rtol=1e-5)
