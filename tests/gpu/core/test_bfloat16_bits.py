# SPDX-License-Identifier: Apache-2.0
"""bfloat16 where the GPU lacks it: numbers in OpenCL; CUDA kernels before sm_80, without spills."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import cuda_source, ptxas
from graph_cases import scheduled
from group_cases import Group
from reduce.test_reduce_chains import make
from reduce_cases import OPENCL, Case, random_data
from tvm import relax, tirx
from tvm.target import Target

from schedules.gpu.core.machine import GPUInfo
from tests.selection import in_turns

op = relax.op
BF16 = "bfloat16"
OLD, FIRST = (Target({"kind": "cuda", "arch": arch}, host="llvm") for arch in ("sm_70", "sm_80"))


def _check(func: tirx.PrimFunc) -> None:
    for used in ptxas(cuda_source(func, "sm_70"), "sm_70").values():
        assert (used.spill_stores, used.spill_loads) == (0, 0)


def test_which_have_it() -> None:
    assert GPUInfo.from_target(FIRST).has_bfloat16
    assert not GPUInfo.from_target(OLD).has_bfloat16


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "data"),
    in_turns(
        [
            (operator, finish)
            for operator in ("sum", "prod", "max", "mean", "argmin")
            for finish in ("one_block", "atomic", "last_block")
            if (operator, finish) != ("argmin", "atomic")
        ],
        [((4, 100_000), [1]), ((100_001, 64), [0])],
        every=4,
    ),
)
def test_reductions(kind: tuple[str, str], data: tuple[tuple[int, ...], list[int]]) -> None:
    (operator, finish), (shape, axes) = kind, data
    _check(Case(operator, BF16, shape, axes, finish, OLD).func)


PRODUCERS: dict[str, tuple[Callable[..., relax.Expr], Callable[..., np.ndarray]]] = {
    "abs": (op.abs, np.abs),
    "exp": (op.exp, np.exp),
    "negative": (op.negative, np.negative),
    "square": (lambda x: op.multiply(x, x), np.square),
    "silu": (op.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "clip": (lambda x: op.clip(x, 0, 6), lambda x: np.clip(x, 0, 6)),
}


def _sisters(producer: str, target: Target) -> Group:
    compute, _ = PRODUCERS[producer]
    return Group(
        lambda x: [op.sum(x, [1]), op.max(compute(x), [1])], (BF16, (30, 700)), target=target
    )


@pytest.mark.slow
@pytest.mark.parametrize(("producer",), in_turns(reversed(PRODUCERS)))
def test_numbers_of_what_is_computed_before_a_reduction(
    producer: str, rng: np.random.Generator
) -> None:
    x = random_data(rng, "sum", BF16, (30, 700))
    _, largest = _sisters(producer, OPENCL).run(x)
    wanted = PRODUCERS[producer][1](x.astype("float64")).max(1)
    np.testing.assert_allclose(largest.astype("float64"), wanted, rtol=2.0**-7)


@pytest.mark.slow
@pytest.mark.parametrize(("producer",), in_turns(PRODUCERS))
def test_what_is_computed_before_a_reduction(producer: str) -> None:
    _check(_sisters(producer, OLD).func)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_chains(name: str) -> None:
    _check(make(name, BF16, (300, 768), 1, OLD).func)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x, y: op.nn.relu(op.add(x, y)), [(5, 70), (5, 70)]),
        (lambda x: op.permute_dims(x), [(65, 70)]),
        (op.matmul, [(65, 70), (70, 66)]),
        (lambda x: op.astype(x, "float32"), [(5, 70)]),
    ],
)
def test_other_kernels(build: Callable[..., relax.Expr], shapes: list[tuple[int, ...]]) -> None:
    for func in scheduled(build, *((shape, BF16) for shape in shapes), target=OLD).values():
        _check(func)
