# SPDX-License-Identifier: Apache-2.0
"""Phases of the pipeline: every pass, in order, for CPUs and for GPUs."""

from __future__ import annotations

from tvm import relax
from tvm.ir.transform import Pass
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic
from tvm.relax.backend.gpu_generic import pipeline as gpu_generic
from tvm.s_tir import dlight
from tvm.target import Target

from relay_passes import (
    AllowTF32,
    AnnotateGathers,
    ApplyRules,
    AttentionInTiles,
    ChooseWinograd,
    CoalesceReduction,
    ConfigureReductions,
    DecomposeNormalization,
    DropPragmaScopes,
    FuseAttention,
    FuseConv2D,
    FuseEpilogue,
    FuseLayerNorm,
    FusePack,
    FuseReductionProducers,
    FuseReductions,
    HalfPrecision,
    KeepBytes,
    LegalizeCalls,
    MarkConstants,
    MultiplyBfloat16,
    MultiplyBytes,
    MultiplyNarrow,
    NameSizes,
    NarrowWeights,
    PackLayout,
    PackWeights,
    PadColumns,
    PairInTiles,
    ShortenNames,
    SimplifyInference,
    WidenSums,
)
from relay_passes.op.legalizations import shared_legalizations
from schedules import cpu, gpu
from schedules.cpu.core.machine import CPUInfo
from schedules.tuning.records import Records

from .failures import NoteKernels
from .launches import RequireKernels
from .options import WEIGHTS_BITS, Fuse, Options, check_options, chosen_precision
from .targets import is_gpu

STOCK_RULES: tuple[dlight.ScheduleRule, ...] = (
    dlight.gpu.Matmul(),
    dlight.gpu.GEMV(),
    dlight.gpu.Reduction(),
    dlight.gpu.GeneralReduction(),
    dlight.gpu.Fallback(),
)
"""TVM's own rules, for functions that ours do not take; the last one takes anything. Transpose is
missing: it fails on a scatter, and ours takes transpositions."""


def phases(target: Target, options: Options) -> dict[str, list[Pass]]:
    """All phases up to scheduled functions, in order.

    Parameters
    ----------
    target : Target
        A CPU, or a GPU with a host.
    options : Options
        The user's choices.

    Returns
    -------
    dict[str, list[Pass]]
        From the name of a phase to its passes.

    Raises
    ------
    TargetError
        If the target has another kind, a choice is for CPUs only and this is a GPU, or the machine
        is another device.
    """
    check_options(target, options)
    precision = chosen_precision(options.precision, target)
    if is_gpu(target):
        return gpu_phases(target, options.fuse, precision, options.records)
    return _cpu_phases(target, options, precision)


def _cpu_phases(target: Target, options: Options, precision: str) -> dict[str, list[Pass]]:
    transform = relax.transform
    has_halves = CPUInfo.from_target(target).halves_pay
    halves = has_halves or precision == "bf16"
    # The weights of a pair are floats.
    fuse = "none" if (options.weights, options.fuse) == ("int8", "auto") else options.fuse
    return {
        "simplify": [
            MultiplyNarrow(target),
            SimplifyInference(bounds=True),
            WidenSums(reductions=False, stored=["bfloat16"] * has_halves),
            SimplifyInference(),
            *_narrowing(target, options.weights),
        ],
        "fuse": [
            MultiplyBytes(target),
            *(_halving(target, precision == "bf16") if halves else []),
            FuseConv2D(fuse, target, options.winograd, options.records),
            FuseEpilogue(halves=True),
        ],
        "pack": [
            PackLayout(target=target),
            *_choosing(target, options),
            PadColumns(target),
            NameSizes(),
        ],
        "reduce": [PairInTiles(fuse, target), CoalesceReduction(), WidenSums()],
        "lower": [
            *cpu_generic.library_dispatch_passes(target),
            LegalizeCalls(shared_legalizations()),
            DropPragmaScopes(),
            FusePack(),
            transform.AnnotateTIROpPattern(),
            NoteKernels(),
            transform.FuseOps(),
            NoteKernels(),
            transform.FuseTIR(),
            # Views, not copies; a scheduled reshape may not be recognised.
            transform.RewriteDataflowReshape(),
            transform.DeadCodeElimination(),
        ],
        "schedule": [MarkConstants(), ApplyRules(*cpu.rules(options.records)), PackWeights()],
    }


def _choosing(target: Target, options: Options) -> list[Pass]:
    """Passes that choose layers for Winograd's algorithm, and layers whose weights stay bytes."""
    choose = ChooseWinograd(options.winograd, target, options.records)
    if options.weights == "int8":
        return [KeepBytes(target, rounds=True), choose]
    return [choose, KeepBytes(target)]


def _halving(target: Target, rounds: bool) -> list[Pass]:
    """Passes of products of bfloat16, which round to it if asked to."""
    attention = [AttentionInTiles(target)] if rounds else []
    return [MultiplyBfloat16(exact=not rounds), *attention, MultiplyNarrow(target)]


def _narrowing(target: Target, weights: str | None) -> list[Pass]:
    """Passes that round the matrices of products."""
    if weights is None:
        return []
    return [NarrowWeights(WEIGHTS_BITS[weights]), MultiplyNarrow(target)]


def gpu_phases(
    target: Target, fuse: Fuse = "auto", precision: str = "fp32", records: Records | None = None
) -> dict[str, list[Pass]]:
    """All phases up to scheduled kernels, in order.

    ``target``: a GPU with a host. ``fuse``: choice of pairs of convolutions for
    :class:`relay_passes.FuseConv2D`. ``precision``: ``"fp16"`` for products and convolutions of
    float16, ``"tf32"`` for those of TF32. ``records``: knobs of tuned kernels. Returns from the
    name of a phase to its passes.
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
            MarkConstants(),
            ConfigureReductions(target, records),
            ApplyRules(*rules, *STOCK_RULES),
            PackWeights(),
            RequireKernels(),
        ],
    }


def stock_phases(target: Target) -> dict[str, list[Pass]]:
    """TVM's default phases for an imported module, up to scheduled kernels."""
    return {
        "dispatch": gpu_generic.library_dispatch_passes(target),
        "legalize": gpu_generic.legalize_passes(target),
    }
