# SPDX-License-Identifier: Apache-2.0
"""Decision whether a convolution uses Winograd's algorithm, and the size of its tiles.

The algorithm needs fewer multiplications (2.25 times fewer in tiles of 2x2 outputs, 4 times in
4x4), but transforms of its data and output, and weights 1.8 or 4 times as large; and it rounds
differently. The compared times are predicted: by :mod:`schedules.cpu.cost.winograd_knobs`, and by
:func:`.direct_roofline.direct_cycles`. Traffic of the data and the output is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.winograd_knobs import WinogradShape, best_plan
from schedules.errors import OpError
from schedules.workload.conv2d import ConvLayer
from schedules.workload.winograd_matrices import TILE_SIZES

from .direct_roofline import direct_cycles

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


def decide_winograd(
    layer: ConvLayer, batch: int, height: int, width: int, dtype: str, target: Target
) -> WinogradDecision | None:
    """Predict the best tile size of a packed layer with constant weights.

    Parameters
    ----------
    layer : ConvLayer
        The convolution.
    batch, height, width : int
        Of its input.
    dtype : str
        Element type.
    target : Target
        The machine.

    Returns
    -------
    WinogradDecision | None
        A function of the arguments alone; None where the algorithm or its schedule does not apply:
        kernels other than 3x3, strides, dilation, groups, other types than float32, data of fewer
        channels than a vector has lanes (which stay in NCHW), and targets that are no CPU.
    """
    if target.kind.name != "llvm" or not layer.suits_winograd or dtype != "float32":
        return None
    cpu = CPUInfo.from_target(target)
    lanes, out_size = cpu.lanes(dtype), layer.output_size(height, width)
    if layer.in_channels < lanes or min(out_size) < 1:
        return None
    plans = {
        tile: best_plan(WinogradShape.of(layer, batch, out_size, tile, lanes, dtype), cpu)
        for tile in TILE_SIZES
    }
    tile, plan = min(plans.items(), key=lambda item: item[1].cycles)
    direct = direct_cycles(layer, batch, out_size, cpu, dtype)
    found = compare(
        "winograd",
        f"{layer} @{height}x{width}",
        {
            f"tiles of {tile}x{tile}": [KernelCall("cpu.winograd_conv2d", {"cycles": plan.cycles})],
            "direct": [KernelCall("cpu.conv2d", {"cycles": direct})],
        },
        LEAST_GAIN,
    )
    return WinogradDecision(tile, plan.cycles, found.gain, found.chosen != "direct")
