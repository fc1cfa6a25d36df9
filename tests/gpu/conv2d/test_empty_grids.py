# SPDX-License-Identifier: Apache-2.0
"""Symbolic extents that are zero at run time: no kernel has an empty grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cpu.conv_cases import arguments, build, pack
from cuda_text import cuda_source
from gpu_conv_cases import case_of, dense, depthwise
from graph_cases import CUDA, OPENCL, Build, Shape, scheduled
from opencl import compile_opencl
from reduce_cases import Case, check, random_data, reference
from tvm import relax, tirx
from tvm.s_tir.dlight import ScheduleRule

from schedules.gpu import AnyConv2D, Conv2D, DepthwiseConv2D, FusedConv2D
from schedules.workload.conv2d import to_json
from tests.selection import in_turns

op = relax.op
n = tirx.Var("n", "int64")

GRAPHS: dict[str, tuple[Build, list[Shape]]] = {
    "elementwise": (op.exp, [(n, 30)]),
    "several": (lambda x: op.split(op.exp(x), [8], 1), [(n, 30)]),
    "pooling": (lambda x: op.nn.max_pool2d(x, [3, 3], [2, 2], [1, 1, 1, 1]), [(n, 8, 9, 9)]),
    "transpose": (lambda x: op.permute_dims(x, [0, 2, 1]), [(n, 65, 70)]),
    "transpose of rows": (lambda x: op.permute_dims(x, [1, 0]), [(n, 130)]),
    "rows": (op.matmul, [(n, 40), (40, 64)]),
    "columns": (op.matmul, [(1, 40), (40, n)]),
    "batch": (op.matmul, [(n, 20, 40), (n, 40, 64)]),
    "sums of tiles": (op.matmul, [(70, n), (n, 64)]),
    "sums of rows": (op.matmul, [(1, n), (n, 40)]),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str) -> None:
    """Outputs that exist for size zero are zero; with size three everything is written."""
    graph, shapes = GRAPHS[name]
    inputs = [(shape, "float32") for shape in shapes]
    for func in scheduled(graph, *inputs, target=CUDA).values():
        cuda_source(func)
    [func] = scheduled(graph, *inputs).values()
    kernels = compile_opencl(func, OPENCL)
    for size in (0, 3):
        arrays = [np.full(_actual(param.shape, size), 0.5, "float32") for param in func.params]
        outputs = arrays[len(shapes) :]
        for output in outputs:
            output[...] = np.nan
        kernels.run(*arrays)
        for output in outputs:
            assert np.isfinite(output).all()
            assert size or not output.any()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("data", "operator", "finish"),
    in_turns(
        [((n, 70), [1]), ((n, 70), [0]), ((37, n), [1]), ((37, n), [0]), ((n,), [0])],
        ["sum", "prod", "max", "mean"],
        ["auto", "atomic"],
        every=4,
    ),
)
def test_reductions(
    data: tuple[Sequence, list[int]], operator: str, finish: str, rng: np.random.Generator
) -> None:
    """Nothing is written without outputs; without elements outputs are the identity."""
    shape, axes = data
    case = Case(operator, "float32", shape, axes, finish)
    kernels = compile_opencl(case.func, OPENCL)
    for size in (0, 3):
        actual = _actual(shape, size)
        elements = random_data(rng, operator, "float32", actual)
        kept = [extent for axis, extent in enumerate(actual) if axis not in axes]
        given = case.arguments(elements, kept)
        kernels.run(*given)
        assert bool(kernels.launches(*given)) == (0 not in kept)
        if size:
            check(operator, given[-1], elements, reference(operator, elements, axes))
        elif given[-1].size:
            identity = {"sum": 0, "prod": 1, "max": -np.inf, "mean": np.nan}[operator]
            np.testing.assert_array_equal(given[-1], identity)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        (Conv2D(), [dense(6, 10, 3, "relu")]),
        (DepthwiseConv2D(), [depthwise(6)]),
        (AnyConv2D(), [dense(6, 10, 3)]),
        (FusedConv2D(), [depthwise(6), dense(6, 10)]),
    ],
    ids=["Conv2D", "DepthwiseConv2D", "AnyConv2D", "FusedConv2D"],
)
def test_convolutions_of_no_image(rule: ScheduleRule, layers: list) -> None:
    case = case_of(*layers, height=5, width=7)
    func = build(case, n).with_attr(
        "tvm_fusion.workload", to_json(replace(case.kernel, batch=None))
    )
    kernels = compile_opencl(rule.apply(func, OPENCL, False).mod["main"], OPENCL)
    packed, _ = arguments(case, 1)
    data, *others = [np.ascontiguousarray(array, "float32") for array in packed]
    output = np.zeros(pack(np.zeros(case.out_shape), case.lanes).shape, "float32")
    assert len(kernels.launches(data, *others, output)) == 1
    kernels.run(data[:0], *others, output[:0])
    assert kernels.launches(data[:0], *others, output[:0]) == []


def _actual(shape: Sequence, size: int) -> list[int]:
    return [size if isinstance(extent, tirx.Var) else int(extent) for extent in shape]
