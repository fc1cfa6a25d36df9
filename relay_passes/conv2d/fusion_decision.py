# SPDX-License-Identifier: Apache-2.0
"""Decision whether two neighbouring convolutions become one kernel, on CPUs.

The cost model of the kernels' knobs (:mod:`schedules.cpu.cost.cost_model`) also decides this: a
fused kernel with its best knobs is compared with two kernels with theirs, by
:func:`schedules.cost.decisions.compare`. Fusion can lose by:

- halo: where the second kernel is wider than its stride, steps overlap in the intermediate, and
  every part of the channels recomputes the first layer;
- parallelism: cores wait for the one with the most rows, while a separate kernel can be split by
  channels at no cost.

Separate kernels pay for writing and reading the intermediate, in the cache level of its size, and
for one more parallel region; and where data or result are NCHW, for a kernel that changes the
layout, which a fused one does in registers. They gain where a layer can be computed by Winograd's
algorithm (:mod:`.winograd_decision`), with fewer multiplications.

Where a tuning job has raced the forms of a pair, its record decides (:func:`recorded_decision`).
For GPUs see :mod:`.gpu_fusion_decision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf, prod

from tvm.target import Target

from schedules.cost.cpu_kernels import CYCLES
from schedules.cost.decisions import by_record, compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.conv2d.forms import FORMS, pair_workload, recorded_form
from schedules.cpu.conv2d.fused_conv2d import FusedConv2DKnobs
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.cost_model import default_conv2d_knobs, default_fused_knobs, estimate
from schedules.cpu.cost.fused_conv2d_limits import plain_sides
from schedules.gpu.core.machine import KINDS
from schedules.tuning.records import Records
from schedules.workload.conv2d import Conv2DKernel, FusedConv2DWorkload

from .gpu_fusion_decision import decide_gpu
from .pair_decision import Decision
from .winograd_decision import WinogradDecision, decide_winograd

LEAST_GAIN = -0.008  # predicted, below which there are two kernels; of equals one needs less memory


def decide(
    workload: FusedConv2DWorkload,
    target: Target,
    winograd: tuple[bool, bool] = (True, True),
    tf32: bool = False,
) -> Decision:
    """Predict whether one kernel is faster than two.

    Parameters
    ----------
    workload : FusedConv2DWorkload
        The pair on concrete shapes.
    target : Target
        The machine.
    winograd : tuple[bool, bool]
        Whether each layer, as a separate kernel, may be computed by Winograd's algorithm.
    tf32 : bool
        Whether, on a GPU, separate layers of float32 may be rounded to TF32.

    Returns
    -------
    Decision
        A function of the arguments alone.
    """
    if target.kind.name in KINDS:
        return decide_gpu(workload, target, tf32)
    if target.kind.name != "llvm":
        return Decision(False, f"no fused convolution kernel for target kind {target.kind.name!r}")
    cpu = CPUInfo.from_target(target)
    sides = plain_sides(
        workload.layer1,
        workload.layer2,
        (workload.height, workload.width),
        cpu.lanes(workload.dtype),
    )
    data, out = workload.plain_data and sides[0], workload.plain_out and sides[1]
    kernel = _kernel(workload, cpu, data, out)
    knobs = default_fused_knobs(kernel, cpu)
    apart = _winograd_apart(workload, target, winograd)
    fused = _call("cpu.fused_conv2d", estimate(kernel, knobs, cpu).cycles)
    comparison = compare(
        "fuse",
        f"{workload.layer1}, {workload.layer2} @{workload.height}x{workload.width}",
        {"fused": [fused], "separate": _separate(workload, cpu, data, out, apart)},
        LEAST_GAIN,
    )
    reason = _explain(workload, cpu, knobs, comparison.gain, apart)
    return Decision(comparison.chosen == "fused", reason, comparison.gain)


def recorded_decision(
    workload: FusedConv2DWorkload,
    target: Target,
    records: Records,
    winograd: tuple[bool, bool] = (True, True),
) -> Decision | None:
    """Decide by the times that a tuning job measured.

    Parameters
    ----------
    workload, target, winograd
        As for :func:`decide`.
    records : Records
        Records of tuning jobs.

    Returns
    -------
    Decision | None
        None without a record of the pair.
    """
    if target.kind.name != "llvm":
        return None
    pair, cpu = pair_workload(workload), CPUInfo.from_target(target)
    recorded = recorded_form(records, pair, cpu, winograd)
    if recorded is None:
        return None
    best = {True: inf, False: inf}
    for form in FORMS.settings(pair, cpu):
        seconds = recorded.seconds.get(form.title(2), inf)
        best[form.fused] = min(best[form.fused], seconds)
    saved = best[False] - best[True] if inf not in best.values() else None
    gain = saved / best[True] if saved is not None else 0.0
    subject = f"{workload.layer1}, {workload.layer2} @{workload.height}x{workload.width}"
    chosen, source = recorded.form.title(2), recorded.about["source"]
    by_record("fuse", subject, recorded.seconds, chosen, source)
    return Decision(recorded.form.fused, recorded.text, gain, saved, recorded.about)


def _winograd_apart(
    workload: FusedConv2DWorkload, target: Target, allowed: tuple[bool, bool]
) -> list[WinogradDecision | None]:
    """Gain of each layer by Winograd's algorithm, as a separate kernel."""
    decisions: list[WinogradDecision | None] = []
    for layer, size, may in (
        (workload.layer1, (workload.height, workload.width), allowed[0]),
        (workload.layer2, workload.mid_size, allowed[1]),
    ):
        found = None
        if may:
            found = decide_winograd(layer, workload.batch, *size, workload.dtype, target)
        decisions.append(found if found is not None and found.pays else None)
    return decisions


def _kernel(workload: FusedConv2DWorkload, cpu: CPUInfo, data: bool, out: bool) -> Conv2DKernel:
    """The fused kernel that legalization will create."""
    packed = f"NCHW{cpu.lanes(workload.dtype)}c"
    return Conv2DKernel(
        layers=(workload.layer1, workload.layer2),
        batch=workload.batch,
        height=workload.height,
        width=workload.width,
        residual=workload.residual,
        dtype=workload.dtype,
        data_layout=packed,
        out_layout=packed,
        plain_data=data,
        plain_out=out,
    )


def _separate(
    workload: FusedConv2DWorkload,
    cpu: CPUInfo,
    data: bool,
    out: bool,
    apart: Sequence[WinogradDecision | None],
) -> list[KernelCall]:
    """Two kernels, and the layout changes that the fused one would save."""
    both = _kernel(workload, cpu, False, False)
    height, width = workload.mid_size
    first = replace(both, layers=(workload.layer1,), residual=False)
    second = replace(both, layers=(workload.layer2,), height=height, width=width)
    calls = []
    for kernel, winograd in zip((first, second), apart, strict=True):
        direct = estimate(kernel, default_conv2d_knobs(kernel, cpu), cpu).cycles
        cycles = direct if winograd is None else direct / (1 + winograd.gain)
        calls.append(_call("cpu.conv2d", cycles))
    elements = 0
    if data:
        elements += workload.height * workload.width * workload.layer1.in_channels
    if out:
        elements += prod(workload.out_size) * workload.layer2.out_channels
    moved = workload.batch * elements * workload.item_bytes
    layouts = moved / (cpu.num_cores * cpu.costs.layout_bytes_per_cycle)
    return [*calls, _call(CYCLES, (data + out) * cpu.costs.fork), _call(CYCLES, layouts)]


def _call(op: str, cycles: float) -> KernelCall:
    return KernelCall(op, {"cycles": cycles})


def _explain(
    workload: FusedConv2DWorkload,
    cpu: CPUInfo,
    knobs: FusedConv2DKnobs,
    gain: float,
    apart: Sequence[WinogradDecision | None],
) -> str:
    height, width = workload.out_size
    if gain >= LEAST_GAIN:
        tiles = f"{knobs.h}x{width} pixels"
        tiles += f" and 1/{knobs.oc_t} of the channels" if knobs.oc_t > 1 else ""
        kib = workload.mid_bytes() / 1024
        return (
            f"predicted {gain:+.1%}: {kib:.{0 if kib >= 10 else 1}f} KiB between the layers stay "
            f"in cache, in tiles of {tiles}"
        )
    if any(apart):
        layers = " and ".join(f"layer {index}" for index, by in enumerate(apart, 1) if by)
        return f"predicted {gain:+.1%}: separate, {layers} can use Winograd's algorithm"
    recomputed, imbalance = _recomputed(workload, knobs), _imbalance(workload, cpu, knobs)
    losses = {
        f"output of {height}x{width} does not divide evenly among {cpu.num_cores} cores": imbalance,
        f"{recomputed - 1:.0%} of the first layer would be recomputed": recomputed,
    }
    cause, loss = max(losses.items(), key=lambda item: item[1])
    if loss < 1.001:
        cause = "too little traffic between the layers to save"
    return f"predicted {gain:+.1%}: {cause}"


def _recomputed(workload: FusedConv2DWorkload, knobs: FusedConv2DKnobs) -> float:
    """Rows of the intermediate that are computed, over those that it has."""
    layer2, mid_h, out_h = workload.layer2, workload.mid_size[0], workload.out_size[0]
    reach = (layer2.kernel[0] - 1) * layer2.dilation[0] + 1
    steps = knobs.h_t * ceil(ceil(out_h / knobs.h_t) / knobs.h)
    rows = steps * min(mid_h, (ceil(out_h / steps) - 1) * layer2.strides[0] + reach)
    return max(1.0, rows / mid_h) * knobs.oc_t


def _imbalance(workload: FusedConv2DWorkload, cpu: CPUInfo, knobs: FusedConv2DKnobs) -> float:
    """Outputs of the busiest core, over the mean."""
    height = workload.out_size[0]
    pieces = workload.batch * knobs.h_t * knobs.oc_t
    most = ceil(pieces / cpu.num_cores) * ceil(height / knobs.h_t) / height
    return most * cpu.num_cores / (workload.batch * knobs.oc_t)
