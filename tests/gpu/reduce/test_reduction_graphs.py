# SPDX-License-Identifier: Apache-2.0
"""Graphs through the reduction passes and the GPU rules, executed in OpenCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from opencl import compile_opencl
from reduce_cases import OPENCL
from reduction_checks import random_data
from reduction_graphs import TABLE_2, data, op, several
from tvm import relax
from tvm.s_tir import dlight

from relay_passes import CoalesceReduction, ConfigureReductions, FuseReductionProducers
from schedules import gpu


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    transform = relax.transform
    passes = [
        CoalesceReduction(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        FuseReductionProducers(),
        transform.FuseOps(),
        transform.FuseTIR(),
        ConfigureReductions(),
        dlight.ApplyDefaultSchedule(*gpu.RULES),
    ]
    with OPENCL:
        return tvm.transform.Sequential(passes)(mod)


def run(mod: tvm.IRModule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Run the calls of ``main`` one by one into poisoned outputs, and return all of these."""
    main = mod["main"]
    values: dict[Any, np.ndarray] = dict(zip(main.params, inputs, strict=True))
    for binding in main.body.blocks[0].bindings:
        if not isinstance(binding.value, relax.Call):
            continue
        function, arguments = binding.value.args
        read = [values[a] if a in values else a.value.numpy() for a in arguments.fields]
        shape = [int(extent) for extent in binding.var.ty.shape]
        out = np.full(shape, 77).astype(str(binding.var.ty.dtype))
        compile_opencl(mod[function].with_attr("global_symbol", "main"), OPENCL).run(*read, out)
        values[binding.var] = out
    return [value for var, value in values.items() if var not in list(main.params)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", TABLE_2)
def test_sub_graphs_of_table_2(number):
    types, build, by_numpy = TABLE_2[number]
    params = [data(*shape, dtype=dtype, name=f"x{i}") for i, (dtype, shape) in enumerate(types)]
    mod = lower(several(lambda emit, *params: build(*params), *params))
    rng = np.random.default_rng()
    inputs = [random_data(rng, shape, dtype) for dtype, shape in types]
    expected = by_numpy(*[value.astype("float64") for value in inputs])
    for actual, wanted in zip(run(mod, inputs), expected, strict=True):
        np.testing.assert_allclose(actual.astype("float64"), wanted, rtol=1e-3)


@pytest.mark.slow
def test_a_variance_in_two_kernels():
    mod = lower(several(lambda emit, x: [op.variance(emit(x), [1])], data(33, 301)))
    inputs = [random_data(np.random.default_rng(), (33, 301), "float32") + np.float32(100)]
    means, variances = run(mod, inputs)
    exact = inputs[0].astype("float64")
    np.testing.assert_allclose(means, exact.mean(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(variances, exact.var(1), rtol=1e-4)
