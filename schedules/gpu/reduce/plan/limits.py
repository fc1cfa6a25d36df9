# SPDX-License-Identifier: Apache-2.0
"""Limits of chains that are one kernel, where a block or a cluster processes a whole row."""

from __future__ import annotations

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS


def chain_fits(
    outputs: int | None, reduced: int | None, itemsize: int, gpu: GPUInfo, form: str = "x"
) -> bool:
    """Return whether a chain of reductions, each using the previous one, should be one kernel.

    One block then keeps a row of ``reduced`` elements to the end, in its registers or, if there are
    too many, in the cache; on devices with clusters several blocks share it. A short row takes less
    time than the saved launches; long rows must be enough to keep the device busy. The limits are
    estimates, not measured on a GPU.

    Parameters
    ----------
    outputs, reduced : int or None
        ``M`` and ``N``; None where symbolic, taken as many rows, and long ones.
    itemsize : int
        Bytes of an element of the input; of the sum of all inputs of ``M x N`` elements, if there
        are several.
    gpu : GPUInfo
        The device.
    form : str
        ``all``, ``x`` or ``y``, of which the last has several neighbouring outputs in a block.

    Returns
    -------
    bool
        Whether it pays off; the rule writes a kernel for a chain of any size.
    """
    columns = max(1, COSTS.segment // itemsize) if form == "y" else 1
    short = COSTS.short_row
    if gpu.max_cluster > 1:
        short = gpu.max_cluster * (COSTS.short_row if form == "y" else COSTS.cluster_share)
    if reduced is not None and reduced * columns * itemsize <= short:
        return True
    return outputs is None or 2 * outputs >= columns * gpu.multiprocessors
