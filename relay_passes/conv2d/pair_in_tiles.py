# SPDX-License-Identifier: Apache-2.0
"""Pass ``PairInTiles``: pairs of packed convolutions as one kernel of a CPU's tile registers."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import IRModule, relax
from tvm.target import Target

from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.tile_conv2d_knobs import takes_tiles
from schedules.cpu.cost.tile_pair_knobs import (
    default_pair_knobs,
    separate_cycles,
    takes_pair,
    tile_pair_cycles,
)
from schedules.workload.conv2d import Conv2DKernel, FusedConv2DWorkload

from ..core.expressions import Value
from ..core.graph import Graph, function_graphs, pass_target
from ..op.conv2d import LAYERS, conv2d_pair, joined_kernel
from .fuse_conv2d import Chooser, asked_decision, check_fuse
from .fusion_decision import LEAST_GAIN
from .fusion_report import Entry, cost_fields, merge_reports, read_fusion_report, write_report
from .pair_decision import Decision


@tvm.transform.module_pass(opt_level=0, name="PairInTiles")
class PairInTiles:
    """Make one kernel of a dense or depthwise convolution and the 1x1 one that alone reads it.

    Before, in blocks of channels as ``PackLayout`` chooses them::

        lv = R.tvm_fusion.conv2d(x, w1, b1, ..., groups=64, out_layout="NCHW32c")
        lv1 = R.tvm_fusion.conv2d(lv, w2, b2, ..., data_layout="NCHW32c", out_layout="NCHW32c")

    After::

        lv1 = R.tvm_fusion.conv2d_pair(x, w1, b1, w2, b2, workload=...)

    The intermediate stays in a core's caches, some rows at a time. Convolutions of bytes and of
    bfloat16 whose second layer tile registers take; what else they may be
    :func:`schedules.cpu.cost.tile_pair_knobs.takes_pair` says. Each candidate is recorded in the
    module's attribute ``tvm_fusion.fusion_report``, as by :class:`relay_passes.FuseConv2D`.

    Parameters
    ----------
    fuse : str | Callable[[FusedConv2DWorkload, Target], bool | Decision]
        Choice as in :class:`relay_passes.FuseConv2D`.
    target : Target | None
        The CPU; the current target for None.
    """

    def __init__(self, fuse: str | Chooser = "auto", target: Target | None = None) -> None:
        check_fuse(fuse, "PairInTiles")
        self.fuse = fuse
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = pass_target(self.target, "PairInTiles")
        cpu = CPUInfo.from_target(target)
        if not cpu.tiles:
            return mod
        entries: list[Entry] = []

        def ask(kernel: Conv2DKernel) -> Decision:
            return asked_decision(
                *("PairInTiles", self.fuse, workload_of(kernel), target),
                lambda: decide_pair(kernel, cpu),
            )

        result = mod.clone()
        for name, graph in function_graphs(mod):
            rule = _rule(cpu, ask, str(name.name_hint), entries)
            if graph.sweep(dict.fromkeys(LAYERS, [rule])):
                result.update_func(name, graph.to_function())
        return (
            write_report(result, merge_reports(read_fusion_report(mod), entries))
            if entries
            else mod
        )


def _rule(
    cpu: CPUInfo, ask: Callable[[Conv2DKernel], Decision], function: str, entries: list[Entry]
) -> Callable[[Graph, relax.Expr], Value]:
    """The rule of one function, which notes its decisions."""

    def rule(graph: Graph, second: relax.Expr) -> Value:
        data = second.args[0]
        first = graph.definition(data, *LAYERS)
        if first is None or not graph.has_one_use(data):
            return None
        kernel = joined_kernel(first, second)
        if kernel is None or not takes_pair(kernel, cpu):
            return None
        decision = ask(kernel)
        entries.append(
            {
                "function": function,
                "first": data.name,
                "second": graph.current.name,
                "input_shape": [kernel.batch or "batch", kernel.layers[0].in_channels]
                + [kernel.height, kernel.width],
                "layer1": str(kernel.layers[0]),
                "layer2": str(kernel.layers[1]),
                "fused": decision.fuse,
                "reason": decision.reason,
                **cost_fields(workload_of(kernel)),
            }
        )
        return conv2d_pair(first, second) if decision.fuse else None

    return rule


def workload_of(kernel: Conv2DKernel) -> FusedConv2DWorkload:
    """The pair, of one image if the batch is symbolic."""
    size = kernel.batch or 1, int(kernel.height or 1), int(kernel.width or 1)
    first, second = kernel.layers
    return FusedConv2DWorkload(*size, first, second, kernel.residual, kernel.dtype)


def decide_pair(kernel: Conv2DKernel, cpu: CPUInfo) -> Decision:
    """Predict whether one kernel in tile registers is faster than two."""
    knobs, workload = default_pair_knobs(kernel, cpu), workload_of(kernel)
    in_tiles = takes_tiles(kernel.apart()[0], cpu)
    ops = "cpu.tile_conv2d" if in_tiles else "cpu.conv2d", "cpu.tile_conv2d"
    apart = list(map(_call, ops, separate_cycles(kernel, cpu)))
    comparison = compare(
        "fuse",
        f"{workload.layer1}, {workload.layer2} @{workload.height}x{workload.width}",
        {
            "fused": [_call("cpu.tile_pair", tile_pair_cycles(kernel, knobs, cpu))],
            "separate": apart,
        },
        LEAST_GAIN,
    )
    kib, width = workload.mid_bytes() / 1024, workload.out_size[1]
    reason = f"predicted {comparison.gain:+.1%}: "
    if comparison.chosen == "fused":
        reason += f"{kib:.0f} KiB between the layers stay in cache, {knobs.height}x{width} pixels"
    else:
        reason += "separate kernels share the cores and the weights better"
    return Decision(comparison.chosen == "fused", reason, comparison.gain)


def _call(op: str, cycles: float) -> KernelCall:
    return KernelCall(op, {"cycles": cycles})
