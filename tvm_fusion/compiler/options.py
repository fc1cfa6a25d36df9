# SPDX-License-Identifier: Apache-2.0
"""Choices of a user for the pipeline, what they mean on a target, and which it does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tvm.target import Target

from relay_passes import Decision
from schedules.cost.machine import Machine
from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.records import Records
from schedules.workload.conv2d import FusedConv2DWorkload

from ..errors import TargetError
from .targets import check_machine, is_gpu

Fuse = str | Callable[[FusedConv2DWorkload, Target], "bool | Decision"]

CPU_PRECISIONS = ("fp32", "bf16", "auto")
GPU_PRECISIONS = ("fp32", "tf32", "fp16", "auto")
PRECISIONS = ("fp32", "bf16", "tf32", "fp16", "auto")

WEIGHTS_BITS = {"bf16": 16, "int8": 8, "int4": 4}
"""Types to which the matrices of products can be rounded, and their bits."""


@dataclass(frozen=True)
class Options:
    """Choices of a user for the pipeline."""

    fuse: Fuse = "auto"
    """Choice of pairs of convolutions for :class:`relay_passes.FuseConv2D`."""
    dump: Path | None = None
    """A folder for the module after each phase, as ``0-simplify.py`` and so on."""
    winograd: str = "auto"
    """Choice of 3x3 convolutions for :class:`relay_passes.ChooseWinograd`."""
    records: Records = field(default_factory=Records)
    """Winners of tuning jobs, for the forms and knobs of kernels."""
    fast_math: bool = False
    """Whether functions of float32 may be approximations on CUDA."""
    precision: str = "fp32"
    """``"fp16"``: products and convolutions of float32 are computed in float16 on a GPU;
    ``"bf16"``: what they multiply is rounded to bfloat16 on a CPU; see :func:`chosen_precision`."""
    cuda_graph: bool = False
    """Whether kernels are captured into CUDA graphs."""
    weights: str | None = None
    """``"bf16"``, ``"int8"`` or ``"int4"``: type of the matrices of products on a CPU, to which
    they are rounded; but for ``"bf16"`` of embeddings, and with ``"int8"`` of the weights of
    convolutions, too."""
    machine: Machine | None = None
    """Machine by whose figures choices are made; without one, a CPU has those of its family, and a
    GPU fixed thresholds."""
    reproducible: bool = False
    """Whether kernels for a GPU do not depend on its number of multiprocessors."""


def check_options(target: Target, options: Options) -> None:
    """Refuse choices that a target does not have.

    Raises TargetError if a choice is for other targets, or the machine is another device.
    """
    if options.machine is not None:
        check_machine(target, options.machine)
    if options.cuda_graph and target.kind.name != "cuda":
        raise TargetError(
            f"cuda_graph=True is for CUDA, not for {target.kind.name!r}: leave it out, or compile "
            "for 'cuda'"
        )
    if options.fast_math and target.kind.name != "cuda":
        raise TargetError(
            f"fast_math=True has no effect on {target.kind.name!r}; it chooses the functions of "
            "CUDA kernels: leave it out, or compile for 'cuda'"
        )
    if options.weights is not None and options.weights not in tuple(WEIGHTS_BITS):
        raise TargetError(
            f"weights is {options.weights!r}; expected {' or '.join(map(repr, WEIGHTS_BITS))}"
        )
    if is_gpu(target):
        _check_gpu(target, options)
    elif target.kind.name != "llvm":
        raise TargetError(
            f"target kind is {target.kind.name!r}; expected 'llvm', a CPU, or 'cuda' or 'opencl'"
        )


def _check_gpu(target: Target, options: Options) -> None:
    if options.weights is not None:
        raise TargetError(
            f"weights={options.weights!r} has no effect on {target.kind.name!r}: the kernels of "
            "narrow weights are for CPUs; leave it out"
        )
    if options.winograd == "always":
        raise TargetError(
            f"winograd='always' has no effect on {target.kind.name!r}: Winograd's algorithm is for "
            "CPUs only; expected 'auto' or 'never'"
        )
    if target.host is None:
        raise TargetError(
            f"the target {target.kind.name!r} has no host; expected one, as in "
            f"Target({{'kind': {target.kind.name!r}, ...}}, host='llvm')"
        )


def check_reproducible(target: Target, options: Options) -> None:
    """Refuse choices by which kernels would depend on the GPU."""
    if not is_gpu(target):
        raise TargetError(
            f"reproducible=True has no effect on {target.kind.name!r}; it is for GPUs: leave it "
            "out, or compile for 'cuda' or 'opencl'"
        )
    if options.machine is not None or options.records:
        raise TargetError(
            "reproducible=True is for all GPUs alike, and machine= and records= have times of one: "
            "leave either out"
        )


def chosen_precision(precision: str, target: Target) -> str:
    """The precision that a user's choice means on a target.

    ``precision``: one of :data:`PRECISIONS`. ``target``: a CPU or a GPU. Returns ``precision``
    itself; for ``"auto"`` ``"bf16"`` on CPUs that multiply bfloat16 faster than float32, else
    ``"fp32"``. Raises TargetError if there is no such precision, or the target does not have it.
    """
    on_gpu = is_gpu(target)
    expected = GPU_PRECISIONS if on_gpu else CPU_PRECISIONS
    if precision not in PRECISIONS:
        raise TargetError(
            f"precision is {precision!r}; expected {' or '.join(map(repr, expected))}"
        )
    if on_gpu and precision == "bf16":
        raise TargetError(
            "precision='bf16' is for CPUs: tensor cores compute models of float32 in float16; "
            "expected 'fp16' or 'tf32', or leave it out"
        )
    if not on_gpu and precision not in CPU_PRECISIONS:
        raise TargetError(
            f"precision={precision!r} is for GPUs, whose tensor cores compute in it; "
            f"expected {' or '.join(map(repr, CPU_PRECISIONS))}, or compile for 'cuda'"
        )
    if precision == "tf32" and not GPUInfo.from_target(target).has_tensor_cores:
        raise TargetError(
            f"precision='tf32' has no effect on {target}: tensor cores take it from sm_80 on; "
            "leave it out"
        )
    if precision != "auto":
        return precision
    return "fp32" if on_gpu or not CPUInfo.from_target(target).halves_pay else "bf16"


def faster_precision(precision: str, target: Target) -> str | None:
    """One line on a faster precision than the chosen one; None where there is none."""
    if is_gpu(target) or chosen_precision(precision, target) != "fp32":
        return None
    if chosen_precision("auto", target) == "fp32":
        return None
    unit = "AMX" if "bfloat16" in CPUInfo.from_target(target).tiles else "AVX512-BF16"
    return (
        f"{target.attrs['mcpu']} multiplies bfloat16 faster than float32 ({unit}) by "
        "precision='bf16'; its errors: tvm-fusion compare MODEL --precision bf16"
    )
