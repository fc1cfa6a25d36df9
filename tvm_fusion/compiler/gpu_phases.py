# SPDX-License-Identifier: Apache-2.0
"""Phases of the pipeline for GPUs, and the check after the last of them."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir.transform import Pass
from tvm.relax.backend.gpu_generic import pipeline as gpu_generic
from tvm.s_tir import dlight
from tvm.target import Target

from relay_passes import (
    AllowTF32,
    AnnotateGathers,
    ApplyRules,
    CoalesceReduction,
    ConfigureReductions,
    DecomposeNormalization,
    FuseAttention,
    FuseConv2D,
    FuseEpilogue,
    FuseLayerNorm,
    FuseReductionProducers,
    FuseReductions,
    HalfPrecision,
    LegalizeCalls,
    MultiplyBytes,
    PackLayout,
    ShortenNames,
    SimplifyInference,
    WidenSums,
)
from schedules import gpu
from schedules.tuning.records import Records

from ..errors import CompilationError
from .failures import NoteKernels
from .launches import launches

STOCK_RULES: tuple[dlight.ScheduleRule, ...] = (
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)
"""TVM's own rules, for functions that ours do not take; the last one takes anything. Transpose is
missing: it fails on a scatter, and ours takes transpositions."""


def gpu_phases(
    target: Target, fuse: Any = "auto", precision: str = "fp32", records: Records | None = None
) -> dict[str, list[Pass]]:
    """All phases up to scheduled kernels, in order.

    Parameters
    ----------
    target : Target
        A GPU with a host.
    fuse : str or callable
        Choice of pairs of convolutions for :class:`relay_passes.FuseConv2D`.
    precision : str
        ``"fp16"`` for products and convolutions of float16, ``"tf32"`` for those of TF32.
    records : Records, optional
        Knobs of tuned kernels.

    Returns
    -------
    dict[str, list[Pass]]
        From the name of a phase to its passes.
    """
    transform = relax.transform
    rules = gpu.rules(records) if records else gpu.RULES
    # Before norms and softmax decompose, which stay float32.
    half = [HalfPrecision(), SimplifyInference(target)] if precision == "fp16" else []
    is_tf32 = precision == "tf32"
    tf32 = [AllowTF32()] if is_tf32 else []
    return {
        "simplify": [
            SimplifyInference(target),
            *half,
            FuseAttention(target),
            FuseLayerNorm(target),
            DecomposeNormalization(),
        ],
        "fuse": [
            MultiplyBytes(target),
            FuseConv2D(fuse=fuse, target=target, winograd="never", tf32=is_tf32),
            FuseEpilogue(target=target),
        ],
        "pack": [PackLayout(target=target, tf32=is_tf32)],
        "reduce": [CoalesceReduction(), WidenSums(products="name")],
        "lower": [
            *gpu_generic.library_dispatch_passes(target),
            LegalizeCalls(),
            transform.AnnotateTIROpPattern(),
            AnnotateGathers(),
            FuseReductions(target),
            FuseReductionProducers(),
            NoteKernels(),
            transform.FuseOps(),
            NoteKernels(),
            transform.FuseTIR(),
            # Views, not copies; a scheduled reshape is no longer recognised.
            transform.RewriteDataflowReshape(),
            transform.DeadCodeElimination(),
            ShortenNames(),
        ],
        "schedule": [
            *tf32,
            ConfigureReductions(target, records),
            ApplyRules(*rules, *STOCK_RULES),
            RequireKernels(),
        ],
    }


def stock_phases(target: Target) -> dict[str, list[Pass]]:
    """TVM's default phases for an imported module, up to scheduled kernels."""
    return {
        "dispatch": gpu_generic.library_dispatch_passes(target),
        "legalize": gpu_generic.legalize_passes(target),
    }


@tvm.transform.module_pass(opt_level=0, name="RequireKernels")
class RequireKernels:
    """Check that every function runs on the GPU, or is marked for the host.

    Unscheduled functions would run on the host, which cannot read the memory of a GPU.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module, or raise ``CompilationError`` with the function's name."""
        for name, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or "tirx.is_host_func" in func.attrs:
                continue
            if not launches(func.body):
                raise CompilationError(
                    f"no schedule rule for GPUs takes the function {name.name_hint!r}; please "
                    "report the model, or compile it for a CPU"
                )
        return mod
