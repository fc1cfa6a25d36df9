# SPDX-License-Identifier: Apache-2.0
"""Decision whether a convolution uses Winograd's algorithm, and the size of its tiles.

The algorithm needs fewer multiplications (2.25 times fewer in tiles of 2x2 outputs, 4 times in
4x4), but transforms of its data and output, and weights 1.8 or 4 times as large; and it rounds
differently. Where a tuning job has raced the forms of a layer, its record decides
(:func:`recorded_tile`). Elsewhere the compared times are predicted: by
:mod:`schedules.cpu.cost.winograd_knobs` and :mod:`schedules.cpu.cost.direct_roofline`, which leave
out the traffic of the data and the output, the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm.target import Target

from schedules.cost.decisions import by_record, compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.conv2d.forms import RecordedForm, layer_workload, recorded_form
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.direct_roofline import direct_cycles
from schedules.cpu.cost.winograd_knobs import (
    WinogradShape,
    best_plan,
    takes_winograd,
    winograd_sizes,
)
from schedules.errors import OpError
from schedules.tuning.records import Records
from schedules.workload.conv2d import WORDS, Conv2DKernel, ConvLayer

MODES = ("auto", "always", "never")
LEAST_GAIN = 0.05  # predicted, below which a convolution stays direct


@dataclass(frozen=True)
class WinogradDecision:
    """The best size of tiles for a layer.

    Parameters
    ----------
    tile : int
        Height and width of an output tile.
    cycles : float
        Predicted, of the busiest core, without the traffic of the data and the output.
    gain : float
        Predicted time of the direct kernel over that of this one, minus one.
    pays : bool
        Whether the gain exceeds the uncertainty of the prediction.
    """

    tile: int
    cycles: float
    gain: float
    pays: bool


def check_mode(mode: str, owner: str) -> None:
    """Reject values not in ``MODES``; ``owner`` names the recipient in the message."""
    if mode not in MODES:
        raise OpError(f"{owner}: winograd is {mode!r}; expected one of {', '.join(MODES)}")


def recorded_tile(kernel: Conv2DKernel, target: Target, records: Records) -> RecordedForm | None:
    """Look up how a tuning job found a packed convolution to be fastest; None without a record."""
    workload, cpu = layer_workload(kernel), CPUInfo.from_target(target)
    found = recorded_form(records, workload, cpu)
    if found is not None:
        subject = f"{kernel.layers[0]} @{kernel.height}x{kernel.width}"
        chosen, source = found.form.title(1), found.about["source"]
        by_record("winograd", subject, found.seconds, chosen, source)
    return found


def decide_winograd(
    layer: ConvLayer,
    batch: int,
    height: int,
    width: int,
    dtype: str,
    target: Target,
    sizes: Sequence[int] | None = None,
) -> WinogradDecision | None:
    """Predict the best tile size of a packed layer with constant weights.

    Parameters
    ----------
    layer : ConvLayer
        The convolution.
    batch, height, width : int
        Extents of its input.
    dtype : str
        Element type.
    target : Target
        The machine.
    sizes : Sequence[int] | None
        Heights and widths of tiles to choose from; None for those of the type.

    Returns
    -------
    WinogradDecision | None
        A function of the arguments alone; None for targets that are no CPU, and where
        :func:`schedules.cpu.cost.winograd_knobs.takes_winograd` refuses the layer.
    """
    if target.kind.name != "llvm":
        return None
    cpu = CPUInfo.from_target(target)
    if not takes_winograd(layer, (height, width), dtype, cpu):
        return None
    lanes, out_size = cpu.lanes("float32"), layer.output_size(height, width)
    plans = {
        tile: best_plan(WinogradShape.of(layer, batch, out_size, tile, lanes, dtype), cpu)
        for tile in sizes or winograd_sizes(dtype)
    }
    tile, plan = min(plans.items(), key=lambda item: item[1].cycles)
    words = replace(layer, in_channels=-(-layer.in_channels // WORDS.get(dtype, 1)))
    direct = direct_cycles(words, batch, out_size, cpu, "float32")
    comparison = compare(
        "winograd",
        f"{layer} @{height}x{width}",
        {
            f"tiles of {tile}x{tile}": [KernelCall("cpu.winograd_conv2d", {"cycles": plan.cycles})],
            "direct": [KernelCall("cpu.conv2d", {"cycles": direct})],
        },
        LEAST_GAIN,
    )
    return WinogradDecision(tile, plan.cycles, comparison.gain, comparison.chosen != "direct")
