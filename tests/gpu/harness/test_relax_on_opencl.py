# SPDX-License-Identifier: Apache-2.0
"""Whole Relax modules in OpenCL: sizes, tuples, constants that keep what is written, poison."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from relax_on_opencl import OPENCL, RelaxOnOpenCL
from tvm import relax, tirx
from tvm.relax.backend.cuda import pipeline as stock
from tvm.script import tirx as T

from schedules.errors import OpError


def schedule(mod: tvm.IRModule) -> tvm.IRModule:
    """TVM's own rules; functions that are scheduled already stay as they are."""
    with OPENCL:
        return tvm.transform.Sequential(stock.legalize_passes(OPENCL))(mod)


def calling(func: tirx.PrimFunc, arguments: list, *outputs: relax.TensorType) -> tvm.IRModule:
    """A module whose ``main`` calls a scheduled function."""
    builder = relax.BlockBuilder()
    var = builder.add_func(func.with_attr("tirx.is_scheduled", True), "func")
    params = [argument for argument in arguments if isinstance(argument, relax.Var)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.call_tir(var, arguments, list(outputs)))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_symbolic_extents_tuples_and_views(rows: int, rng: np.random.Generator) -> None:
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 64), "float32"))
    shift = np.arange(64, dtype="float32")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            shifted = builder.emit(relax.op.add(x, relax.const(shift)))
            narrow = builder.emit(relax.op.reshape(shifted, (n * 8, 8)))
            inner = relax.Tuple([builder.emit(relax.op.nn.softmax(narrow)), shifted])
            total = builder.emit(relax.op.sum(shifted, [1]))
            result = builder.emit_output(relax.Tuple([total, inner]))
        builder.emit_func_output(result)
    run = RelaxOnOpenCL(schedule(builder.get()))
    data = rng.standard_normal((rows, 64)).astype("float32")
    sums, softmax, moved = run(data)
    exact = data.astype("float64") + shift
    np.testing.assert_allclose(moved, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, exact.sum(1), rtol=1e-5)
    powers = np.exp(exact.reshape(-1, 8) - exact.reshape(-1, 8).max(1, keepdims=True))
    np.testing.assert_allclose(softmax, powers / powers.sum(1, keepdims=True), rtol=1e-4)
    assert [launch.kernel for launch in run.launches] == [
        "add_kernel",
        "softmax_kernel",
        "sum_kernel",
    ], "the reshape is a view"
    assert run.kernels == 3
    grids = [launch.grid for launch in run.launches]
    run(np.zeros((rows + 100, 64), "float32"))
    assert [launch.grid for launch in run.launches] != grids


def test_constants_keep_what_kernels_write() -> None:
    @T.prim_func(s_tir=True)
    def count(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (4,), "int32")
        B = T.match_buffer(b, (4,), "int32")
        for tx in T.thread_binding(4, thread="threadIdx.x"):
            with T.sblock("count"):
                i = T.axis.spatial(4, tx)
                T.reads(A[i])
                T.writes(A[i], B[i])
                A[i] = A[i] + 1
                B[i] = A[i]

    scratch = relax.const(np.zeros(4, "int32"))
    run = RelaxOnOpenCL(calling(count, [scratch], relax.TensorType((4,), "int32")))
    for calls in (1, 2, 3):
        np.testing.assert_array_equal(run()[0], calls)


def test_outputs_are_poisoned() -> None:
    @T.prim_func(s_tir=True)
    def half(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (8,), "float32")
        B = T.match_buffer(b, (8,), "float32")
        for tx in T.thread_binding(4, thread="threadIdx.x"):
            with T.sblock("half"):
                i = T.axis.spatial(4, tx)
                B[i] = A[i]

    x = relax.Var("x", relax.TensorType((8,), "float32"))
    run = RelaxOnOpenCL(calling(half, [x], x.ty))
    data = np.arange(8, dtype="float32")
    for _ in range(2):
        (result,) = run(data)
        np.testing.assert_array_equal(result[:4], data[:4])
        assert np.isnan(result[4:]).all()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "bfloat16"])
def test_types_go_through(dtype: str, rng: np.random.Generator) -> None:
    x = relax.Var("x", relax.TensorType((3, 50), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(relax.op.permute_dims(x))
        builder.emit_func_output(result)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    data = rng.integers(0, 2, (3, 50)).astype(kind)
    (result,) = RelaxOnOpenCL(schedule(builder.get()))(data)
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result, data.T)


def test_refusals() -> None:
    @T.prim_func(s_tir=True)
    def serial(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (8,), "float32")
        B = T.match_buffer(b, (8,), "float32")
        for i in range(8):
            with T.sblock("copy"):
                v = T.axis.spatial(8, i)
                B[v] = A[v]

    @T.prim_func(s_tir=True)
    def beyond(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (8,), "float32")
        B = T.match_buffer(b, (8,), "float32")
        for tx in T.thread_binding(8, thread="threadIdx.x"):
            with T.sblock("copy"):
                v = T.axis.spatial(8, tx)
                if A[v] > T.float32(0):
                    B[v + 8] = A[v]

    x = relax.Var("x", relax.TensorType((8,), "float32"))
    with pytest.raises(OpError, match="func launches no kernel: no schedule rule took it"):
        RelaxOnOpenCL(calling(serial, [x], x.ty))
    run = RelaxOnOpenCL(calling(beyond, [x], x.ty))
    run(np.zeros(8, "float32"))
    with pytest.raises(OpError, match="wrote behind the end of a buffer of 32 bytes"):
        run(np.ones(8, "float32"))
    with pytest.raises(RuntimeError, match="shape.0. mismatch to specified constant"):
        run(np.ones(9, "float32"))


def test_a_dropped_module_leaves_nothing_behind() -> None:
    x = relax.Var("x", relax.TensorType((8,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))

    def names() -> set[str]:
        return {n for n in tvm_ffi.registry.list_global_func_names() if "relax_on_opencl" in n}

    before = names()
    run = RelaxOnOpenCL(schedule(builder.get()))
    assert len(names() - before) == 1
    del run
    gc.collect()
    assert names() <= before
