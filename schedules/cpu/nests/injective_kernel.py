# SPDX-License-Identifier: Apache-2.0
"""Opened kernels of injective functions, which a rule that does not take one leaves to the next.

To open a function, to inline its blocks and to collect their facts takes longer than to schedule
it, where a concatenation has many inputs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tvm import tirx
from tvm.target import Target

from ..core.machine import CPUInfo
from .blocks import BlockFacts, Kernel, block_facts, open_kernel
from .loop_transforms import inline_blocks


@dataclass
class InjectiveKernel:
    """A kernel of injective blocks, inlined where that is possible.

    Parameters
    ----------
    func : PrimFunc
        The function.
    kernel : Kernel
        Its schedule, without any other transformation, and the blocks that are left.
    facts : list[BlockFacts | None]
        Facts of each block.
    """

    func: tirx.PrimFunc
    kernel: Kernel
    facts: list[BlockFacts | None]

    def leave(self) -> None:
        """Keep this one, which is still as it was opened, for the rule that is asked next."""
        _LEFT.found = self


class _Left(threading.local):
    """The kernel that a rule of this thread left last."""

    found: InjectiveKernel | None = None


_LEFT = _Left()


def open_injective(func: tirx.PrimFunc, target: Target) -> InjectiveKernel | None:
    """Open an injective function and inline its blocks; None for any other function."""
    left, _LEFT.found = _LEFT.found, None
    if left is not None and left.func is func and left.kernel.cpu == CPUInfo.from_target(target):
        return left
    kernel = open_kernel(func, target)
    if kernel is None or not all(info.is_injective() for info in kernel.blocks):
        return None
    infos = inline_blocks(kernel)
    facts = [block_facts(kernel.sch, info.block_rv) for info in infos]
    return InjectiveKernel(func, kernel, facts)
