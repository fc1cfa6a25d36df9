# SPDX-License-Identifier: Apache-2.0
"""Decision whether two neighbouring convolutions become one kernel, on GPUs.

The answer is an estimate (:mod:`schedules.gpu.conv2d.costs`), measured on no device. One kernel
saves a launch and the traffic of the intermediate through the second-level cache or device memory.
It can lose by recomputing the first layer, for the halo of the second one and for each tile of
output channels, and by having fewer and larger blocks than two kernels would.
"""

from __future__ import annotations

from tvm.target import Target

from schedules.gpu.conv2d import tensor_core_pair_tile
from schedules.gpu.conv2d.costs import fused_cycles, separate_cycles
from schedules.gpu.conv2d.fused_conv2d import unsupported
from schedules.gpu.conv2d.fused_tiles import ConvPair, choose_fused_tile
from schedules.gpu.conv2d.tensor_core_pair_tile import (
    choose_pair_tile,
    fused_product_cycles,
    separate_product_cycles,
)
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.implicit_gemm import ConvShape
from schedules.workload.conv2d import FusedConv2DWorkload

from .pair_decision import Decision

LEAST_GAIN = 0.05  # predicted, below which there are two kernels: the estimate may err by more


def decide_gpu(workload: FusedConv2DWorkload, target: Target, tf32: bool = False) -> Decision:
    """Predict whether one kernel is faster than two.

    Parameters
    ----------
    workload : FusedConv2DWorkload
        The pair on concrete shapes.
    target : Target
        A ``cuda`` or ``opencl`` target.
    tf32 : bool
        Whether pairs and separate layers of float32 may run on tensor cores, rounded to TF32.

    Returns
    -------
    Decision
        A function of the arguments alone.
    """
    obstacle = gpu_obstacle(workload, target, tf32)
    if obstacle is not None:
        return Decision(False, obstacle)
    gpu = GPUInfo.from_target(target)
    separate, fused = _cycles(workload, gpu, tf32)
    gain = separate / fused - 1
    kib = workload.mid_bytes() / 1024
    if gain >= LEAST_GAIN:
        between = f"{kib:.{0 if kib >= 10 else 1}f} KiB between the layers"
        return Decision(True, f"estimated {gain:+.1%}: {between} stay in shared memory", gain)
    cause = "the first layer would be recomputed, or by too few blocks"
    return Decision(False, f"estimated {gain:+.1%}: {cause}", gain)


def gpu_obstacle(workload: FusedConv2DWorkload, target: Target, tf32: bool = False) -> str | None:
    """Reason why no kernel can take a pair on a GPU, or None; ``tf32`` as above."""
    gpu, layers = GPUInfo.from_target(target), (workload.layer1, workload.layer2)
    if choose_pair_tile(workload, gpu, tf32) is not None:
        return None
    is_float32 = workload.dtype == "float32"
    if is_float32:
        reason = unsupported(*layers)
    else:
        reason = tensor_core_pair_tile.unsupported(*layers, workload.dtype)
    if reason is not None:
        return reason
    if not is_float32 and not gpu.has_tensor_cores:
        return f"the element type is {workload.dtype}; without tensor cores it must be float32"
    if is_float32 and choose_fused_tile(_pair(workload), gpu) is not None:
        return None
    return "no tile of the pair fits the shared memory and registers of a block"


def _cycles(workload: FusedConv2DWorkload, gpu: GPUInfo, tf32: bool) -> tuple[float, float]:
    """Predicted cycles of two kernels and of one, which :func:`gpu_obstacle` allows."""
    tile = choose_pair_tile(workload, gpu, tf32)
    ways = []  # Ways to compute it in separate kernels.
    if workload.dtype != "float32" or (tf32 and gpu.has_tensor_cores):
        ways.append(separate_product_cycles(workload, gpu))
    if workload.dtype == "float32":
        ways.append(separate_cycles(_pair(workload), gpu))
    if tile is not None:
        return min(ways), fused_product_cycles(workload, tile, gpu)
    fused = fused_cycles(_pair(workload), gpu)
    assert fused is not None, "there is a tile"
    return min(ways), fused


def _pair(workload: FusedConv2DWorkload) -> ConvPair:
    size = workload.height, workload.width
    first = ConvShape(workload.layer1, workload.batch, size)
    return ConvPair(first, ConvShape(workload.layer2, workload.batch, workload.mid_size))
