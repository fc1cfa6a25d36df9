# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseEpilogue``: fusion of a convolution with its epilogue."""

from __future__ import annotations

from functools import partial

import tvm
from tvm import IRModule, relax, tirx
from tvm.target import Target

from schedules.errors import OpError
from schedules.gpu.core.machine import GPUInfo, gpu_target
from schedules.gpu.gemm.matmul.tensor_core_tile import DTYPES as HALF

from .chain_rewriter import Rewrites, rewrite_chains
from .conv_chain import ConvChain, find_chains, find_users


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
    bfloat16 that give float32, if ``halves``, with a rounding at the end. For GPUs with tensor
    cores, so do those of 16-bit floats with known height and width, so that :class:`.PackLayout`
    packs them. Left alone: other layouts than NCHW and OIHW, other element types than float32,
    symbolic channels or kernels, convolutions outside of dataflow blocks
    (``relax.transform.ConvertToDataflow`` makes them), and the rest of an epilogue after a value
    with a second consumer.

    Parameters
    ----------
    halves : bool
        Whether the target has kernels of bfloat16 with sums of float32, as CPUs have.
    target : Target | None
        Target of the module; the current target if None.
    """

    def __init__(self, halves: bool = False, target: Target | None = None) -> None:
        self.halves, self.target = halves, target

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite all Relax functions."""
        target = gpu_target(self.target)
        has_cores = target is not None and GPUInfo.from_target(target).has_tensor_cores
        return rewrite_chains(mod, partial(_plan, self.halves, has_cores))


def _plan(halves: bool, has_cores: bool, _name: str, block: relax.DataflowBlock) -> Rewrites:
    rewrites, users = Rewrites(), find_users(block)
    chains = find_chains(block, users)
    if halves:
        chains += find_chains(block, users, "bfloat16", "float32")
    if has_cores:
        found = [chain for dtype in HALF for chain in find_chains(block, users, dtype)]
        chains += filter(_is_packed, found)
    for chain in chains:
        try:
            rewrites.calls[chain.output] = chain.to_call()
        except OpError:
            continue  # Kernels may be larger than their padded input.
        rewrites.dead.update(chain.dead)
    return rewrites


def _is_packed(chain: ConvChain) -> bool:
    """Return whether a convolution of 16-bit floats is computed in blocks of channels."""
    size = chain.data.ty.shape.values[2:]
    return all(isinstance(extent, tirx.IntImm) for extent in size)
