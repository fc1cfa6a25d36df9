# SPDX-License-Identifier: Apache-2.0
"""One call of a whole network: kernels, no copies, one wake-up of the threads each."""

from __future__ import annotations

from collections import Counter

import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from examples.models import MODELS
from relay_passes.program.buffers import CHECK
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

# What the virtual machine does beside kernels; ``vm.builtin.reshape`` gives a view.
BESIDE_KERNELS = {
    "relax.null_value",
    "relax.vm.alloc_storage",
    "relax.vm.alloc_tensor",
    "relax.vm.kill_object",
    "vm.builtin.check_tensor_info",
    "vm.builtin.match_shape",
    "vm.builtin.reshape",
    CHECK,
}


@pytest.fixture(scope="module")
def optimized() -> tvm.IRModule:
    mod = import_onnx(MODELS["mobilenet_v2"]()).mod
    return pipeline.optimize(mod, resolve("native", cores=2))


def called(mod: tvm.IRModule) -> Counter[str]:
    """Number of calls of each function, op and builtin in ``main``."""
    names: Counter[str] = Counter()

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            callee = expr.op
            if isinstance(callee, tvm.ir.GlobalVar):
                names[callee.name_hint] += 1
            elif isinstance(callee, relax.ExternFunc):
                names[str(callee.global_symbol)] += 1
            else:
                names[callee.name] += 1

    relax.analysis.post_order_visit(mod["main"], look)
    return names


def parallel_loops(func: tirx.PrimFunc) -> int:
    """Each wakes the threads once."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append))
    return sum(loop.kind == tirx.ForKind.PARALLEL for loop in found)


def kernels_of(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {
        var.name_hint: func
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
    }


def written(mod: tvm.IRModule) -> list[tuple[int, ...]]:
    """The shapes of what the kernels write, in order."""
    found: list[tuple[int, ...]] = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op.name == "relax.call_tir":
            found.append(tuple(int(extent) for extent in expr.ty_args[0].shape.values))

    relax.analysis.post_order_visit(mod["main"], look)
    return found


@pytest.mark.slow
def test_all_is_packed_up_to_the_classifier(optimized: tvm.IRModule) -> None:
    *packed, row, scores = written(optimized)
    assert len(packed) > 30 and all(len(shape) == 5 for shape in packed)
    assert (row, scores) == ((1, 1280), (1, 1000))


@pytest.mark.slow
def test_main_calls_kernels_and_copies_nothing(optimized: tvm.IRModule) -> None:
    target = resolve("native", cores=2)
    with target:
        names = called(pipeline.lower_to_vm(target)(optimized))
    assert set(names) <= set(kernels_of(optimized)) | BESIDE_KERNELS
    # A few storages serve all tensors in turn.
    assert 2 * names["relax.vm.alloc_storage"] < names["relax.vm.alloc_tensor"]


def test_each_kernel_wakes_the_threads_once_at_most(optimized: tvm.IRModule) -> None:
    loops = [parallel_loops(func) for func in kernels_of(optimized).values()]
    assert max(loops) == 1
    assert loops.count(1) > len(loops) / 2
