# SPDX-License-Identifier: Apache-2.0
"""Limits of chains that are one kernel, where a block or a cluster processes a whole row."""

from __future__ import annotations

from schedules.gpu.core.machine import GPUInfo

# Bytes that a block reads as fast as a kernel is launched, however few rows there are: four in
# each register in which 1024 threads keep a row.
SHORT_ROW = 1 << 16  # bytes
# What eight blocks of a cluster read during the launches of two more kernels: four bytes in each
# of 32 registers of 1024 threads, which leave room for a value computed from each element.
CLUSTER_SHARE = 1 << 17  # bytes of a block
SEGMENT = 64  # neighbouring bytes that a block reads of each row in form *y*


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
    columns = max(1, SEGMENT // itemsize) if form == "y" else 1
    short = SHORT_ROW
    if gpu.max_cluster > 1:
        short = gpu.max_cluster * (SHORT_ROW if form == "y" else CLUSTER_SHARE)
    if reduced is not None and reduced * columns * itemsize <= short:
        return True
    return outputs is None or 2 * outputs >= columns * gpu.multiprocessors
