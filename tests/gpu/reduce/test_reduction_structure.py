# SPDX-License-Identifier: Apache-2.0
"""Kernels, blocks and tensors of reductions, counted in the IR, beside TVM's default rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import pytest
import tvm
import tvm_ffi
from reduce_cases import CUDA, Case
from tvm import relax, tirx
from tvm.s_tir import dlight

from relay_passes import CoalesceReduction, ConfigureReductions, FuseReductionProducers
from schedules.gpu import RULES

MULTIPROCESSORS = 132  # Multiprocessors of an H100.


@dataclass(frozen=True)
class Structure:
    """Launches of the scheduled functions of a module, and their buffers in global memory."""

    kernels: int
    blocks: int  # Blocks of the kernel with the most.
    intermediates: int


def count_structure(mod: tvm.IRModule) -> Structure:
    functions = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    grids = [grid for func in functions for grid in _grids(func.body)]
    main = next(func for func in mod.functions.values() if isinstance(func, relax.Function))
    calls: list[relax.Call] = []
    tvm_ffi.structural_walk(main.body, (relax.Call, calls.append))
    kernels = [call for call in calls if call.op == tvm.ir.Op.get("relax.call_tir")]
    return Structure(len(grids), max(grids), len(kernels) - 1)


def _grids(body: tirx.Stmt) -> list[int]:
    """The number of blocks of each kernel: thread bindings that begin with ``blockIdx``."""
    extents: list[tuple[str, int]] = []

    def note_launch(attr: tirx.AttrStmt) -> None:
        if attr.attr_key == "thread_extent":
            extents.append((attr.node.thread_tag, int(attr.value)))

    def note_loop(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            extents.append((loop.thread_binding.thread_tag, int(loop.extent)))

    tvm_ffi.structural_walk(
        body, [(tirx.AttrStmt, note_launch), (tirx.For, note_loop)], order="pre"
    )
    grids: list[list[int]] = []
    seen: set[str] = set()
    for tag, extent in extents:
        if not grids or tag in seen:  # a tag comes again with the next kernel
            grids.append([])
            seen = set()
        seen.add(tag)
        if tag.startswith("blockIdx"):
            grids[-1].append(extent)
    return [prod(grid) for grid in grids]


def reduction(shape: Sequence[int], axes: Sequence[int], operator: str) -> tvm.IRModule:
    """exp(cast(data)) reduced."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType(shape, "float16"))
    with builder.function("main", [data]):
        with builder.dataflow():
            wide = builder.emit(relax.op.exp(relax.op.astype(data, "float32")))
            result = builder.emit_output(getattr(relax.op, operator)(wide, list(axes)))
        builder.emit_func_output(result)
    return builder.get()


def lower(mod: tvm.IRModule, ours: bool) -> tvm.IRModule:
    gpu = dlight.gpu
    rules = RULES if ours else (gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    transform = relax.transform
    with CUDA:
        return tvm.transform.Sequential(
            [
                *([CoalesceReduction()] if ours else []),
                transform.LegalizeOps(),
                transform.AnnotateTIROpPattern(),
                *([FuseReductionProducers()] if ours else []),
                transform.FuseOps(),
                transform.FuseTIR(),
                transform.DeadCodeElimination(),
                *([ConfigureReductions()] if ours else []),
                dlight.ApplyDefaultSchedule(*rules),
            ]
        )(mod)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("operator", ["sum", "max"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1 << 22,), [0]),
        ((16, 1 << 18), [1]),
        ((1 << 16, 64), [0]),
        ((64, 128, 768), [0, 1]),
        ((128, 64, 56, 56), [0, 2, 3]),
        ((64, 12, 4096), [1]),
    ],
)
def test_one_kernel_fills_the_device(
    shape: Sequence[int], axes: Sequence[int], operator: str
) -> None:
    mod = reduction(shape, axes, operator)
    ours, default = (count_structure(lower(mod, own)) for own in (True, False))
    assert (ours.kernels, ours.intermediates) == (1, 0)
    assert ours.blocks >= 2 * MULTIPROCESSORS
    assert ours.kernels + ours.intermediates <= default.kernels + default.intermediates
    assert ours.blocks >= min(default.blocks, 2 * MULTIPROCESSORS)


def test_the_default_rule_has_one_block_for_one_output() -> None:
    """The purpose of this package; a TVM that does better would make it superfluous."""
    default = count_structure(lower(reduction((1 << 22,), [0], "sum"), ours=False))
    assert default.blocks == 1 or default.kernels > 1


def test_every_element_is_read_once() -> None:
    case = Case("sum", "float32", (1024, 4096), [1], target=CUDA)
    loads: list[tvm.ir.TensorLoad] = []
    tvm_ffi.structural_walk(case.func.body, (tvm.ir.TensorLoad, loads.append))
    reads = [load for load in loads if load.source.scope() == "global"]
    config = case.config
    assert config.finish == "one_block"
    assert len(reads) == config.unroll  # each a vector
    iterations = 4096 // (config.stride * config.unroll)
    blocks = 1024 // config.tile_outputs
    elements = blocks * config.threads * iterations * len(reads) * config.vector
    assert elements == 1024 * 4096
