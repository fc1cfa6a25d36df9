# SPDX-License-Identifier: Apache-2.0
"""Convolutions of many channels a group, which legalization leaves to TVM."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cuda_text import cuda_source, ptxas
from gpu_conv_cases import convolve_groups
from graph_cases import CUDA, Build, functions, fused, run, scheduled
from tvm import relax, te, tirx
from tvm.relax import op

from schedules import attributes
from schedules.gpu import GroupedConv2D

F16, F32 = "float16", "float32"


def conv(x: relax.Expr, w: relax.Expr, groups: int = 2, strides: int = 1) -> relax.Expr:
    return op.nn.conv2d(x, w, strides, 1, groups=groups, out_dtype=F32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("has_epilogue", [False, True])
@pytest.mark.parametrize("strides", [1, 2])
def test_numbers(strides: int, has_epilogue: bool, rng: np.random.Generator) -> None:
    """Each output is the sum of 81 products."""
    x = rng.standard_normal((2, 18, 7, 6)).astype(F16)
    w = rng.standard_normal((10, 9, 3, 3)).astype(F16)
    bias = rng.standard_normal((1, 10, 1, 1)).astype(F32)

    def build(x: relax.Expr, w: relax.Expr, bias: relax.Expr) -> relax.Expr:
        found = conv(x, w, strides=strides)
        return op.nn.relu(op.add(found, bias)) if has_epilogue else found

    [func] = scheduled(build, *((a.shape, str(a.dtype)) for a in (x, w, bias))).values()
    assert func.attrs[attributes.RULE] == "GroupedConv2D"
    [got] = run(build, [x, w, bias])
    wanted = convolve_groups(x, w, 2, (strides, strides), (1, 1, 1, 1))
    wanted = np.maximum(wanted + bias, 0) if has_epilogue else wanted
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-4)


def test_numbers_of_symbolic_batches(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 18, 4, 5)).astype(F16)
    w = rng.standard_normal((4, 9, 3, 3)).astype(F16)
    shapes = [(tirx.Var("n", "int64"), *x.shape[1:]), w.shape]
    [got] = run(conv, [x, w], shapes)
    np.testing.assert_allclose(got, convolve_groups(x, w, 2, padding=(1, 1, 1, 1)), 1e-5, 1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code(arch: str) -> None:
    """A thread of a layer of ResNeXt has one output, and needs few registers."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    shapes = ((1, 1024, 7, 7), F16), ((1024, 32, 3, 3), F16)
    [func] = scheduled(lambda x, w: conv(x, w, 32), *shapes, target=target).values()
    [used] = ptxas(cuda_source(func, arch), arch).values()
    assert (used.stack_frame, used.spill_stores, used.shared) == (0, 0, 0)
    assert used.registers <= 64


@pytest.mark.parametrize(
    "build",
    [
        lambda x, w: op.nn.conv2d(x, op.tile(w, [1, 2, 1, 1]), out_dtype=F32),
        lambda x, w: op.nn.avg_pool2d(x, (9, 9), padding=4),
    ],
    ids=["all channels", "no weights"],
)
def test_others_are_left_alone(build: Build) -> None:
    shapes = ((1, 18, 7, 6), F16), ((10, 9, 3, 3), F16)
    for func in functions(fused(build, *shapes)).values():
        assert GroupedConv2D().apply(func, CUDA, False) is None


def test_sums_that_are_stored_elsewhere_are_left_alone() -> None:
    data, weight = (te.placeholder((2, extent), F32) for extent in (20, 9))
    k = te.reduce_axis((0, 9))
    sums = te.compute((2, 12), lambda c, i: te.sum(data[c, i + k] * weight[c, k], k))
    as_they_are = te.compute((2, 12), lambda c, i: sums[c, i] + 1.0)
    turned = te.compute((12, 2), lambda i, c: sums[c, i] + 1.0)
    for output, is_taken in ((as_they_are, True), (turned, False)):
        func = te.create_prim_func([data, weight, output], "int64")
        assert (GroupedConv2D().apply(func, CUDA, False) is not None) is is_taken
