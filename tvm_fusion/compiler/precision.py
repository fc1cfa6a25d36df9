# SPDX-License-Identifier: Apache-2.0
"""Precisions of products: which a target has, which ``"auto"`` stands for, and what is faster."""

from __future__ import annotations

from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.gpu.core.machine import GPUInfo

from ..errors import TargetError
from .targets.target import is_gpu

CPU_PRECISIONS = ("fp32", "bf16", "auto")
GPU_PRECISIONS = ("fp32", "tf32", "fp16", "auto")
PRECISIONS = ("fp32", "bf16", "tf32", "fp16", "auto")


def chosen_precision(precision: str, target: Target) -> str:
    """The precision that a user's choice means on a target.

    Parameters
    ----------
    precision : str
        One of :data:`PRECISIONS`.
    target : Target
        A CPU or a GPU.

    Returns
    -------
    str
        ``precision`` itself; for ``"auto"`` ``"bf16"`` on CPUs that multiply bfloat16 faster than
        float32, else ``"fp32"``.

    Raises
    ------
    TargetError
        If there is no such precision, or the target does not have it.
    """
    if precision not in PRECISIONS:
        raise TargetError(
            f"precision is {precision!r}; expected {' or '.join(map(repr, PRECISIONS))}"
        )
    on_gpu = is_gpu(target)
    if on_gpu and precision == "bf16":
        raise TargetError(
            "precision='bf16' is for CPUs: tensor cores compute models of float32 in float16; "
            "expected 'fp16' or 'tf32', or leave it out"
        )
    if not on_gpu and precision not in CPU_PRECISIONS:
        raise TargetError(
            f"precision={precision!r} is for GPUs: CPUs compute float16 slower than float32; "
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
        f"precision='bf16' is faster on this CPU ({unit}); "
        "its errors: tvm-fusion compare --precision bf16"
    )
