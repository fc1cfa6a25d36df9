# SPDX-License-Identifier: Apache-2.0
"""Reduction of any axes by one op, fusion of its producers, and the resulting CUDA kernel.

    python examples/coalesced_reduction.py

No GPU is needed: the module runs on the CPU, and TVM writes CUDA text without one.
"""

# mypy: disable-error-code="valid-type, misc"
# The annotations of TVMScript are no types of Python.

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir.transform import Pass
from tvm.s_tir import dlight
from tvm.script import ir as I  # noqa: N812  (TVMScript's own names)
from tvm.script import relax as R  # noqa: N812
from tvm.target import Target

from relay_passes import (
    CoalesceReduction,
    ConfigureReductions,
    FuseReductionProducers,
    FuseReductions,
)
from relay_passes.op import coalesced_reduce
from schedules import cpu, gpu

CUDA = Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024}, host="llvm")
KERNEL = 'extern "C" __global__'
HOST = Target({"kind": "llvm", "num-cores": 2})


@I.ir_module
class Gradients:
    """Gradients of a bias and of a scale, as training computes them: sums over the batch."""

    @R.function
    def main(  # noqa: D102  (TVMScript takes no docstring)
        gradient: R.Tensor((8192, 768), "float16"), data: R.Tensor((8192, 768), "float16")
    ):
        with R.dataflow():
            wide = R.reshape(R.astype(gradient, "float32"), (64, 128, 768))
            shifted = R.multiply(wide, R.reshape(R.astype(data, "float32"), (64, 128, 768)))
            bias = R.sum(wide, axis=[0, 1])
            scale = R.sum(shifted, axis=[0, 1])
            both = (bias, scale)
            R.output(both)
        return both


def passes(rules: tuple[dlight.ScheduleRule, ...]) -> list[Pass]:
    """Return a user's pipeline: four passes of ours among those of TVM."""
    transform = relax.transform
    return [
        CoalesceReduction(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        FuseReductions(),
        FuseReductionProducers(),
        transform.FuseOps(),
        transform.FuseTIR(),
        ConfigureReductions(),
        dlight.ApplyDefaultSchedule(*rules),
    ]


def lower(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Run the pipeline for a target."""
    rules = cpu.RULES if target.kind.name == "llvm" else gpu.RULES
    with target:
        return tvm.transform.Sequential(passes(rules))(mod)


def one_call() -> tvm.IRModule:
    """Return a module that calls the op itself: the position of each column's maximum."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((4, 1000, 3), "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            result = builder.emit_output(coalesced_reduce(data, "argmax", axes=[0, 1]))
        builder.emit_func_output(result)
    return builder.get()


def run(mod: tvm.IRModule, *inputs: np.ndarray) -> list[np.ndarray]:
    """Compile a module for the CPU, by TVM's own pipeline after this point, and run it."""
    machine = relax.VirtualMachine(tvm.compile(mod, HOST), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in inputs])
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else result
    return [tensor.numpy() for tensor in tensors]


def cuda_text(mod: tvm.IRModule) -> str:
    """Return the CUDA kernels of a module, without the declarations before them."""
    lowered = lower(mod, CUDA)
    kernels = {
        name: func.with_attr("global_symbol", name.name_hint)
        for name, func in lowered.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    text = str(tirx.build(tvm.IRModule(kernels), target=CUDA).imports[0].inspect_source())
    return text[text.index(KERNEL) :]


def main() -> int:
    """Run the op and the pipeline on the CPU, then print the CUDA kernels."""
    generator = np.random.default_rng(0)
    data = generator.standard_normal((4, 1000, 3), dtype=np.float32)
    (positions,) = run(one_call(), data)
    right = np.array_equal(positions, data.reshape(4000, 3).argmax(axis=0))
    print(f"argmax over axes 0 and 1 of {data.shape}: {positions}")

    inputs = [generator.standard_normal((8192, 768)).astype("float16") for _ in range(2)]
    fused = lower(Gradients, HOST)
    print("functions:", *sorted(name.name_hint for name in fused.functions))
    bias, scale = run(fused, *inputs)
    wide, other = (array.astype("float64") for array in inputs)
    error = max(
        np.abs(bias - wide.sum(0)).max() / np.abs(wide).sum(0).max(),
        np.abs(scale - (wide * other).sum(0)).max() / np.abs(wide * other).sum(0).max(),
    )
    print(f"relative error against numpy: {error:.1e}")
    print(cuda_text(Gradients))
    return 0 if right and error < 1e-5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
