# SPDX-License-Identifier: Apache-2.0
"""Gradients of norms: sums of rows and of columns of the same data in one kernel."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import tvm
from cuda_text import cuda_source, ptxas
from relax_on_opencl import RelaxOnOpenCL
from tvm import relax, tirx
from tvm.target import Target

from schedules import attributes
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.coalesced_reduce import CHAIN
from schedules.gpu.reduce.plan.configure import read_group
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from schedules.tuning.records import canonical
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options, optimize, phases, run_phases
from tvm_fusion.compiler.targets import resolve

op = relax.op
OPENCL, CUDA = resolve("opencl"), resolve("cuda -arch=sm_90")


def gradient(norm: str, shape: tuple, dtype: str) -> tvm.IRModule:
    """Gradients of the input, the scale, and of a layer norm's shift, in float32 inside."""
    rows = (*shape[:-1], 1)
    given = {"dy": (shape, dtype), "x": (shape, dtype), "gamma": (shape[-1:], dtype)}
    given |= {"mean": (rows, "float32"), "scale": (rows, "float32")}
    params = {name: relax.Var(name, relax.TensorType(*type_)) for name, type_ in given.items()}
    axes = list(range(len(shape) - 1))
    builder = relax.BlockBuilder()
    emit = builder.emit
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            dy, x, gamma = (
                emit(op.astype(params[name], "float32")) for name in ("dy", "x", "gamma")
            )
            mean, scale = params["mean"], params["scale"]
            normal = emit(op.multiply(emit(op.subtract(x, mean)), scale))
            inner = emit(op.multiply(dy, gamma))
            along = op.mean(emit(op.multiply(inner, normal)), [-1], keepdims=True)
            rest = emit(op.subtract(inner, emit(op.multiply(normal, emit(along)))))
            if norm == "layer":
                rest = emit(op.subtract(rest, emit(op.mean(inner, [-1], keepdims=True))))
            results = [op.multiply(rest, scale), op.sum(emit(op.multiply(dy, normal)), axes)]
            if norm == "layer":
                results.append(op.sum(dy, axes, keepdims=True))
            typed = [op.astype(emit(result), dtype) for result in results]
            outputs = [builder.emit_output(each) for each in typed]
        builder.emit_func_output(outputs)
    return builder.get()


def data(norm: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> list:
    dy, x = rng.standard_normal((2, *shape)).astype(dtype)
    gamma = rng.standard_normal(shape[-1]).astype(dtype)
    exact = x.astype("float64")
    mean = exact.mean(-1, keepdims=True) if norm == "layer" else np.zeros((*shape[:-1], 1))
    scale = 1 / np.sqrt(((exact - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return [dy, x, gamma, mean.astype("float32"), scale.astype("float32")]


def expected(norm: str, *inputs: np.ndarray) -> list[np.ndarray]:
    dy, x, gamma, mean, scale = (array.astype("float64") for array in inputs)
    axes = tuple(range(dy.ndim - 1))
    normal, inner = (x - mean) * scale, dy * gamma
    rest = inner - normal * (inner * normal).mean(-1, keepdims=True)
    if norm == "rms":
        return [rest * scale, (dy * normal).sum(axes)]
    rest -= inner.mean(-1, keepdims=True)
    return [rest * scale, (dy * normal).sum(axes), dy.sum(axes, keepdims=True)]


def reduction_functions(mod: tvm.IRModule, target: Target) -> list[tirx.PrimFunc]:
    """The functions of a module before the schedule rules."""
    plan = phases(target, Options())
    del plan["schedule"]
    functions = run_phases(mod, target, plan).functions.values()
    return [func for func in functions if isinstance(func, tirx.PrimFunc)]


def large_tensors(functions: list[tirx.PrimFunc], elements: int) -> int:
    """Tensors of the size of the data that all kernels together read or write."""
    sizes = [math.prod(map(int, param.shape)) for func in functions for param in func.params]
    return sum(size >= elements for size in sizes)


@pytest.mark.quick_cases("rms-float32-shape2")
@pytest.mark.parametrize(
    ("norm", "dtype", "shape"),
    [
        ("layer", "float32", (1031, 513)),
        ("layer", "float16", (7, 331, 520)),
        ("rms", "float32", (131, 2052)),
        ("rms", "float16", (2049, 515)),
    ],
)
def test_gradient(norm: str, dtype: str, shape: tuple, rng: np.random.Generator) -> None:
    run = RelaxOnOpenCL(optimize(gradient(norm, shape, dtype), OPENCL), OPENCL)
    inputs = data(norm, shape, dtype, rng)
    found = run(*inputs)
    assert sorted("column_sums" in launch.kernel for launch in run.launches) == [False, True]
    count = math.prod(shape[:-1])
    half = 2.0**-10 if dtype == "float16" else 0.0
    for number, (got, exact) in enumerate(zip(found, expected(norm, *inputs), strict=True)):
        assert str(got.dtype) == dtype
        bound = 1e-5 if number == 0 else 1e-6 * count
        np.testing.assert_allclose(got.astype("float64"), exact, rtol=half, atol=bound)
    for got, again in zip(found, run(*inputs), strict=True):
        np.testing.assert_array_equal(got, again)
    inputs[0].reshape(count, -1)[-1, 5] = (
        np.nan
    )  # the last row, which shares its block with rows past the end
    dx, *sums = run(*inputs)
    assert np.isnan(dx.reshape(count, -1)).any(1).tolist() == [False] * (count - 1) + [True]
    for each in sums:
        assert np.flatnonzero(np.isnan(each)).tolist() == [5]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_data_is_read_once(norm: str, dtype: str) -> None:
    shape = (8192, 1024)
    mod = gradient(norm, shape, dtype)
    functions = reduction_functions(mod, CUDA)
    assert len(functions) == 2
    assert large_tensors(functions, math.prod(shape)) == 3  # dy, x, and the gradient
    assert [use.rule for use in kernel_uses(optimize(mod, CUDA))] == ["CoalescedReduce"] * 2


def softmax_and_its_columns(shape: tuple[int, int], dtype: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            softmax = builder.emit(op.nn.softmax(x, -1))
            outputs = [builder.emit_output(each) for each in (softmax, op.sum(softmax, [0]))]
        builder.emit_func_output(outputs)
    return builder.get()


ROWS = tirx.Var("rows", "int64")


@pytest.mark.parametrize(
    ("mod", "is_one_pass"),
    [
        (gradient("layer", (64, 1024), "float32"), False),  # a row for each block
        (gradient("layer", (4096, 1 << 18), "float32"), False),  # no block keeps a row
        (gradient("layer", (ROWS, 1024), "float32"), False),
        (softmax_and_its_columns((8000, 1024), "float16"), False),  # sums of two rows each
        (softmax_and_its_columns((80000, 1024), "float16"), True),
    ],
)
def test_one_pass_where_it_pays(mod: tvm.IRModule, is_one_pass: bool) -> None:
    texts = [func.script() for func in reduction_functions(mod, CUDA)]
    assert any(attributes.COLUMN_SUMS in text for text in texts) == is_one_pass


@pytest.mark.slow
def test_columns_of_what_the_rows_give(rng: np.random.Generator) -> None:
    """The gradient of a bias is a sum over rows of what needs the sums along them."""
    shape = (1030, 512)
    run = RelaxOnOpenCL(optimize(softmax_and_its_columns(shape, "float32"), OPENCL), OPENCL)
    given = rng.standard_normal(shape, dtype="float32")
    exact = np.exp(given.astype("float64"))
    exact /= exact.sum(-1, keepdims=True)
    for got, wanted in zip(run(given), (exact, exact.sum(0)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert any("column_sums" in launch.kernel for launch in run.launches)


def test_every_setting_keeps_whole_rows() -> None:
    """Columns are summed by the threads of one block, which take a group of rows in turns."""
    gpu = GPUInfo.from_target(CUDA)
    functions = reduction_functions(gradient("layer", (8192, 1024), "float32"), CUDA)
    plain = [func.without_attr(attributes.REDUCE_CONFIG) for func in functions]
    groups = [found for func in plain if (found := read_group(func)) is not None]
    [group] = [group for group in groups if group.columns]
    workload = CHAIN.read_workload(canonical(asdict(GroupWorkload.of(group))))
    settings = list(CHAIN.settings(workload, gpu))
    assert CHAIN.default(workload, gpu) in settings
    assert group.turns > 1
    for setting in settings:
        assert (setting.turns, setting.splits) == (group.turns, 1)
        assert setting.kept > 0
        assert CHAIN.contains(workload, setting, gpu)
        assert not CHAIN.has_setting(workload, replace(setting, turns=1), gpu)


@pytest.mark.slow
def test_nothing_spills() -> None:
    functions = {}
    for norm, dtype, columns in (
        ("layer", "float32", 1024),
        ("layer", "float32", 4096),
        ("layer", "float16", 4096),
        ("rms", "float16", 8192),
    ):
        mod = optimize(gradient(norm, (8192, columns), dtype), CUDA)
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                key = f"{norm}_{dtype}_{columns}_{len(functions)}"
                functions[key] = func.with_attr("global_symbol", key)
                assert func.attrs["tirx.is_scheduled"], name
    used = ptxas(cuda_source(tvm.IRModule(functions)))
    assert len(used) == len(functions) == 8
    for resources in used.values():
        assert (resources.stack_frame, resources.spill_stores, resources.spill_loads) == (0, 0, 0)
