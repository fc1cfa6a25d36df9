# SPDX-License-Identifier: Apache-2.0
"""Pass ``LiftScratch``: a decoder's step on several blocks, whose partial results it plans."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from relax_on_opencl import OPENCL, RelaxOnOpenCL
from tvm import relax, s_tir, tirx
from tvm.relax import op

from relay_passes import LiftScratch
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.launches import launches
from tvm_fusion.compiler.targets import resolve

HEADS, KEYS, WIDTH = 2, 2048, 32
WEIGHT = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype("float32") / 6


def decoder_step() -> tvm.IRModule:
    """Attention of one query, between products."""
    builder = relax.BlockBuilder()
    q, k, v = (
        relax.Var(name, relax.TensorType((1, count, HEADS, WIDTH), "float32"))
        for name, count in (("q", 1), ("k", KEYS), ("v", KEYS))
    )
    with builder.function("main", [q, k, v]):
        with builder.dataflow():
            factors = [builder.emit(op.matmul(each, relax.const(WEIGHT))) for each in (q, k, v)]
            found = builder.emit(op.nn.attention(*factors))
            result = builder.emit_output(op.matmul(found, relax.const(WEIGHT)))
        builder.emit_func_output(result)
    return builder.get()


def allocations(func: tirx.PrimFunc) -> list[tirx.Buffer]:
    """Device memory that a function allocates."""
    found: list[tirx.Buffer] = []
    tvm_ffi.structural_walk(
        func.body,
        [
            (tirx.AllocBuffer, lambda stmt: found.append(stmt.buffer)),
            (s_tir.SBlock, lambda block: found.extend(block.alloc_buffers)),
        ],
    )
    return [buffer for buffer in found if buffer.scope() == "global"]


@pytest.mark.slow
def test_calls_of_a_graph_give_the_same_bits() -> None:
    """Each of the calls, whatever the ones before left in the memory that they share."""
    machine = RelaxOnOpenCL(LiftScratch()(pipeline.optimize(decoder_step(), OPENCL)), OPENCL)
    rng = np.random.default_rng()
    shapes = [(1, count, HEADS, WIDTH) for count in (1, KEYS, KEYS)]
    first, second = ([rng.standard_normal(s, "float32") for s in shapes] for _ in range(2))
    results = [machine(*inputs)[0] for inputs in (first, second, first)]
    np.testing.assert_array_equal(results[0], results[2])
    for (q, k, v), found in zip((first, second), results, strict=False):
        q, k, v = ((array.astype("float64") @ WEIGHT)[0] for array in (q, k, v))
        scores = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        exact = np.einsum("hqk,khe->qhe", weights, v) @ WEIGHT
        np.testing.assert_allclose(found[0], exact, rtol=0, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_captured_functions_allocate_nothing(arch: str) -> None:
    target = resolve(f"cuda -arch={arch}")
    mod = pipeline.optimize(decoder_step(), target)
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert any(map(allocations, kernels)), "the keys are not divided"
    lifted = LiftScratch()(mod)
    tvm.ir.assert_structural_equal(LiftScratch()(lifted), lifted)
    with target:
        lowered = pipeline.lower_to_vm(target, ["main"])(mod)
    functions = [func for func in lowered.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert not any(allocations(func) for func in functions if launches(func.body))
    assert "run_or_capture" in lowered["main"].script()
