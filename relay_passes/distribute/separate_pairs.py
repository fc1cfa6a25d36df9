# SPDX-License-Identifier: Apache-2.0
"""Pass ``SeparatePairs``: fused convolutions with large weights become two again."""

from __future__ import annotations

import math

import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.workload.conv2d import Conv2DKernel

from ..core.expressions import op_name
from ..op.conv2d import conv2d
from ..op.conv_types import read_kernel
from ..op.fused_conv2d import FUSED_CONV2D

_LARGE = 4  # times the bytes of the images; estimated


@tvm.transform.module_pass(opt_level=0, name="SeparatePairs")
class SeparatePairs:
    """Take fused pairs apart whose layers ranks had better share by channels.

    Before::

        lv = R.tvm_fusion.fused_conv2d(x, w1, b1, w2, b2, residual)

    After::

        lv = R.tvm_fusion.conv2d(x, w1, b1)
        lv1 = R.tvm_fusion.conv2d(lv, w2, b2, residual)

    That is where weights are many times as large as the images: of the few rows there, one rank has
    more than another, and each reads all weights. Results have the same bits. Left alone: pairs of
    which a layer has several groups, whose channels are not shared, and those that are not packed.
    It runs on ``main`` after ``PackLayout``, before ``DistributeRows``.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with more convolutions."""
        if "main" not in [name.name_hint for name in mod.get_global_vars()]:
            return mod
        separator = _Separator(mod)
        separator.builder_.update_func(
            mod.get_global_var("main"), separator.visit_expr(mod["main"])
        )
        return separator.builder_.get()


@mutator
class _Separator(PyExprMutator):
    """Replaces calls of pairs."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Two calls in the place of one."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != FUSED_CONV2D.name:
            return call
        kernel = read_kernel(call, FUSED_CONV2D)
        if not _is_apart(kernel):
            return call
        layer1, layer2 = kernel.layers
        first = conv2d(
            *call.args[:3],
            **layer1.to_attrs(),
            data_layout=kernel.data_layout,
            out_layout=kernel.out_layout,
            in_channels=layer1.in_channels,
            out_channels=layer1.out_channels,
        )
        return conv2d(
            self.builder_.emit(first),
            *call.args[3:],
            **layer2.to_attrs(),
            data_layout=kernel.out_layout,
            out_layout=kernel.out_layout,
            in_channels=layer2.in_channels,
            out_channels=layer2.out_channels,
        )


def _is_apart(kernel: Conv2DKernel) -> bool:
    if not kernel.is_static or kernel.out_layout == "NCHW":
        return False
    if any(layer.groups > 1 for layer in kernel.layers):
        return False
    assert kernel.height is not None and kernel.width is not None
    size = kernel.height, kernel.width
    images = [kernel.layers[0].in_channels * math.prod(size)]
    for layer in kernel.layers:
        size = layer.output_size(*size)
    images.append(kernel.layers[-1].out_channels * math.prod(size))
    weights = [one.in_channels * one.out_channels * math.prod(one.kernel) for one in kernel.layers]
    return sum(weights) > _LARGE * (kernel.batch or 1) * sum(images)
