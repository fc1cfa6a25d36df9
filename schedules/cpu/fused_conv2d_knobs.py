# SPDX-License-Identifier: Apache-2.0
"""What the fused template leaves open, and its default."""

from __future__ import annotations

from dataclasses import dataclass

from ..conv2d_workload import ITEM_BYTES, Conv2DKernel
from ..errors import OpError
from .fused_conv2d_limits import takes_plain
from .machine import CPUInfo
from .register_tile import register_tile

LOOPS = ("oc2", "ic_o", "h_o", "w_o")

# Rows at a time where layer one's data is packed on the way: their halo is packed twice.
PLAIN_ROWS = 8


@dataclass(frozen=True)
class FusedConv2DKnobs:
    """What Algorithm 2 leaves open.

    Parameters
    ----------
    pixels1, blocks1, pixels2, blocks2 : int
        Register tiles of the two layers: pixels x channel blocks.
    h_t, w_t, oc_t : int
        Parallel pieces of the output's rows, of the tiles of a row, and of the channel tiles.
    h : int
        Rows of the output in one step of ``h_o``.
    w_o : int
        Pieces of a row in loop ``w_o``.
    ic_o : int
        Pieces of the reduction of layer two; a divisor of its input blocks.
    order : tuple[str, ...]
        Loops 1 to 4, outermost first.
    compute_at : int
        How many of them enclose the computation of layer one, 0 to 4.
    prefetch : bool
        Whether the micro-kernels ask for the weights that come next.
    """

    pixels1: int
    blocks1: int
    pixels2: int
    blocks2: int
    h_t: int
    w_t: int = 1
    oc_t: int = 1
    h: int = 1
    w_o: int = 1
    ic_o: int = 1
    order: tuple[str, ...] = ("h_o", "w_o", "ic_o", "oc2")
    compute_at: int = 1
    prefetch: bool = False

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(LOOPS):
            raise OpError(f"order is {self.order}; expected a permutation of {LOOPS}")
        if not 0 <= self.compute_at <= len(LOOPS):
            raise OpError(f"compute_at is {self.compute_at}; expected 0 to {len(LOOPS)}")


def check_knobs(kernel: Conv2DKernel, knobs: FusedConv2DKnobs) -> None:
    """Refuse knobs under which the kernel cannot change the layouts of its data or output."""
    if not (kernel.plain_data or kernel.plain_out):
        return
    if not takes_plain(kernel, kernel.plain_data, kernel.plain_out):
        raise OpError(
            f"the pair has plain_data={kernel.plain_data} and plain_out={kernel.plain_out}; "
            "expected one for which takes_plain is true"
        )
    if kernel.plain_out:
        for name in ("w_t", "w_o", "ic_o"):
            if getattr(knobs, name) != 1:
                raise OpError(
                    f"{name} is {getattr(knobs, name)}; expected 1, because the kernel unpacks "
                    "whole rows of finished sums"
                )
    layer1, layer2 = kernel.layers
    size = layer1.output_size(int(kernel.height or 1), int(kernel.width or 1))
    rows = layer2.output_size(*size)[0]
    if kernel.plain_data and knobs.h_t > rows:
        raise OpError(f"h_t is {knobs.h_t}; expected at most the {rows} rows of the output")
    if kernel.plain_data and knobs.ic_o > 1 and layer2.in_channels % kernel.lanes:
        raise OpError(
            f"ic_o is {knobs.ic_o}; expected 1, because {layer2.in_channels} channels do not "
            f"fill blocks of {kernel.lanes}"
        )


def chunk_sizes(extent: int, pieces: int) -> tuple[int, ...]:
    """The sizes that :func:`chunk` produces."""
    small, rest = divmod(extent, pieces)
    return (small, small + 1) if rest else (small,)


def mid_extents(
    kernel: Conv2DKernel, knobs: FusedConv2DKnobs, mid_height: int, out_height: int, blocks: int
) -> tuple[int, int, int]:
    """Most output rows, intermediate rows and channel blocks that are alive at the same time.

    All for the range of layer two that is open where layer one is computed.
    """
    layer2 = kernel.layers[1]
    enclosing = knobs.order[: knobs.compute_at]
    out_rows = max(chunk_sizes(out_height, knobs.h_t))
    if "h_o" in enclosing:
        out_rows = min(out_rows, knobs.h)
    reach = (layer2.kernel[0] - 1) * layer2.dilation[0] + 1
    rows = min(mid_height, (out_rows - 1) * layer2.strides[0] + reach)
    return out_rows, rows, blocks // knobs.ic_o if "ic_o" in enclosing else blocks


def default_knobs(kernel: Conv2DKernel, cpu: CPUInfo) -> FusedConv2DKnobs:
    """Knobs from register tiles, cache sizes and even shares for all cores.

    Rows are shared out; channels instead where rows leave cores idle and repeating layer one on
    each core costs less than that. As many rows are taken at a time as keep the intermediate in
    half of the L2 (of the L1, where the second layer's weights are small enough to stay there too).
    """
    layer1, layer2 = kernel.layers
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    mid_h, mid_w = layer1.output_size(height, width)
    out_h, out_w = layer2.output_size(mid_h, mid_w)
    pixels1, blocks1 = register_tile(layer1, mid_w, kernel.lanes, cpu)
    item = ITEM_BYTES[kernel.dtype]
    row_bytes = mid_w * layer1.out_channels * item * layer2.strides[0]
    small_weights = layer2.weight_elements() * item <= cpu.l1d_bytes // 2
    budget = cpu.l1d_bytes // 2 if small_weights else cpu.l2_bytes // 2
    h_t, oc_t = _share_out(kernel, cpu, out_h)
    rows = -(-out_h // h_t)
    h = max(1, min(rows, budget // row_bytes))
    if kernel.plain_data:
        h = min(rows, max(h, PLAIN_ROWS))
    row = h * out_w if layer2.is_pointwise else out_w
    pixels2, blocks2 = register_tile(layer2, row, kernel.lanes, cpu)
    return FusedConv2DKnobs(
        pixels1, blocks1, pixels2, blocks2, h_t=h_t, oc_t=oc_t, h=h, prefetch=True
    )


def _share_out(kernel: Conv2DKernel, cpu: CPUInfo, out_h: int) -> tuple[int, int]:
    """Parallel pieces of rows and of output channels."""
    layer1, layer2 = kernel.layers
    cores, batch = cpu.num_cores, kernel.batch or 1
    if cores == 1 or batch % cores == 0:
        return 1, 1
    height, width = int(kernel.height or 1), int(kernel.width or 1)
    flops1 = layer1.flops(height, width)
    flops2 = layer2.flops(*layer1.output_size(height, width))
    pieces = min(cores, out_h)
    by_rows = (flops1 + flops2) * -(-out_h // pieces) / out_h
    by_channels = flops1 + flops2 / cores
    enough_channels = layer2.out_channels >= 4 * cores * kernel.lanes
    return (1, cores) if enough_channels and by_channels < by_rows else (pieces, 1)
