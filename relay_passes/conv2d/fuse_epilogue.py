# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseEpilogue``: fusion of a convolution with its epilogue."""

from __future__ import annotations

from functools import partial

import tvm
from tvm import IRModule, relax

from schedules.errors import OpError

from .chain_rewriter import Rewrites, rewrite_chains
from .conv_chain import find_chains, find_users


@tvm.transform.module_pass(opt_level=0, name="FuseEpilogue")
class FuseEpilogue:
    """Replace every convolution by one call that includes its bias, residual and activation.

    Before::

        lv0 = R.nn.conv2d(x, weight, padding=[1, 1, 1, 1])
        lv1 = R.add(lv0, bias)                    # [1, C, 1, 1]
        lv2 = R.add(lv1, residual)
        lv3 = R.nn.relu(lv2)

    After::

        lv3 = R.tvm_fusion.conv2d(
            x, weight, bias, residual, padding=[1, 1, 1, 1], activation="relu"
        )

    A convolution without an epilogue becomes such a call too, with a bias of zeros. So do those of
    bfloat16 that give float32, if ``halves``, with a rounding at the end. Left alone: other layouts
    than NCHW and OIHW, other element types than float32, symbolic channels or kernels, convolutions
    outside of dataflow blocks (``relax.transform.ConvertToDataflow`` makes them), and the rest of
    an epilogue after a value with a second consumer.

    Parameters
    ----------
    halves : bool
        Whether the target has kernels of bfloat16 with sums of float32, as CPUs have.
    """

    def __init__(self, halves: bool = False) -> None:
        self.halves = halves

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite all Relax functions."""
        return rewrite_chains(mod, partial(_plan, self.halves))


def _plan(halves: bool, _name: str, block: relax.DataflowBlock) -> Rewrites:
    rewrites, users = Rewrites(), find_users(block)
    chains = find_chains(block, users)
    if halves:
        chains += find_chains(block, users, "bfloat16", "float32")
    for chain in chains:
        try:
            rewrites.calls[chain.output] = chain.to_call()
        except OpError:
            continue  # for example a kernel larger than its padded input
        rewrites.dead.update(chain.dead)
    return rewrites
