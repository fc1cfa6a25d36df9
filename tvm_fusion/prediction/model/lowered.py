# SPDX-License-Identifier: Apache-2.0
"""A model as operators of the host, each with the kernels that it launches."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.cost.kernel_call import KernelCall


@dataclass(frozen=True)
class LoweredKernel:
    """One launch.

    Parameters
    ----------
    call : KernelCall
        Operator, sizes, FLOPs and bytes.
    label : str
        What it computes.
    like : KernelCall | None
        For an estimate: the library's kernel whose share of the roofline it is assumed to reach.
    """

    call: KernelCall
    label: str
    like: KernelCall | None = None


@dataclass(frozen=True)
class LoweredOp:
    """One operator that the host calls.

    Parameters
    ----------
    name : str
        Name by which its overheads are found, such as ``aten::linear``.
    kernels : tuple of LoweredKernel
        In order; none for a view.
    """

    name: str
    kernels: tuple[LoweredKernel, ...] = ()
