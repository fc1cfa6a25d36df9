# SPDX-License-Identifier: Apache-2.0
"""Pass ``KeepBytes``: quantised weights of convolutions of floats stay bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.cost_model import default_conv2d_knobs, estimate
from schedules.workload.conv2d import Conv2DKernel

from ...core.constants import numbers, tensor_constant
from ...core.expressions import op_name
from ...core.graph import pass_target
from ...core.integer_weights import integer_weights, rounded_weights
from ...op.conv2d import CONV2D
from ...op.conv_types import read_kernel
from ...op.widen_weight import LEAST_ELEMENTS

MOST_TIME = 1.02
"""Predicted time by bytes, by that by floats, up to which they are kept."""


@tvm.transform.module_pass(opt_level=0, name="KeepBytes")
class KeepBytes:
    """Store weights of packed convolutions in 8 bits, where they are multiples of these.

    Before::

        lv = R.tvm_fusion.conv2d(x, w, bias, ...)              # rows of w: scale * integers

    After::

        lv = R.tvm_fusion.conv2d(x, w8, bias, scale, ...)      # w8: [B, B', kh, kw, x, x] int8

    The kernel widens a vector of them in registers for all pixels of its tile, so they take a
    quarter of the file, of the memory and of the traffic, and some more time where arithmetic
    decides. On CPUs, after ``ChooseWinograd``, which takes floats; before it where few bytes matter
    more than time. Left alone: layers that are predicted to take more than 1.02 times as long by
    bytes, and those whose sizes are open; small weights; groups within a block of channels, first
    layers on images in NCHW, fused pairs; weights that are not constants, or no multiples of
    integers.

    Parameters
    ----------
    target : Target | None
        Target of the module; None takes the current target.
    rounds : bool
        Whether few bytes matter more than time: then only the forms of layers count, and other
        weights are rounded to multiples, -127 to 127, of a scale for each output channel.
    """

    def __init__(self, target: Target | None = None, rounds: bool = False) -> None:
        self.target, self.rounds = target, rounds

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = pass_target(self.target, "KeepBytes")
        rewriter = _Rewriter(mod, target, self.rounds)
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        return rewriter.builder_.get()


Stored = tuple[relax.Expr, relax.Expr]
"""Integers and scales."""


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Replaces weights of the direct op; equal ones once."""

    def __init__(self, mod: IRModule, target: Target, rounds: bool) -> None:
        super().__init__(mod)
        self._cpu, self._rounds = CPUInfo.from_target(target), rounds
        self._stored: dict[GenericConst, Stored | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Replace one call, or leave it."""
        call = super().visit_call_(call)
        if op_name(call) != CONV2D.name or not isinstance(call.args[1], GenericConst):
            return call
        kernel, weight = read_kernel(call, CONV2D), call.args[1]
        if not _has_form(kernel) or not (self._rounds or _pays(kernel, self._cpu)):
            return call
        if weight not in self._stored:
            self._stored[weight] = _in_bytes(weight, self._rounds)
        stored = self._stored[weight]
        if stored is None:
            return call
        integers, scale = stored
        operands = [call.args[0], integers, call.args[2], scale, *call.args[3:]]
        return relax.Call(call.op, operands, call.attrs)


def _has_form(kernel: Conv2DKernel) -> bool:
    """Return whether kernels of a layer can read weights of 8 bits."""
    (layer,), is_float = kernel.layers, kernel.dtype == "float32" and kernel.data_dtype is None
    if not is_float or "NCHW" in (kernel.data_layout, kernel.out_layout):
        return False
    return not layer.group_lanes(kernel.lanes) and layer.weight_elements() >= LEAST_ELEMENTS


def _pays(kernel: Conv2DKernel, cpu: CPUInfo) -> bool:
    """Return whether a layer is predicted to take no more time by weights of 8 bits."""
    if not kernel.height or not kernel.width:
        return False
    kernel = replace(kernel, batch=kernel.batch or 1)
    both = kernel, replace(kernel, weight_dtype="int8")
    floats, narrowed = (
        estimate(each, default_conv2d_knobs(each, cpu), cpu).cycles for each in both
    )
    return narrowed <= MOST_TIME * floats


def _in_bytes(weight: GenericConst, rounds: bool) -> Stored | None:
    """A packed weight ``[O/x, .., x]`` as integers, with a scale ``[O/x, x]``."""
    values = numbers(weight)
    if values is None or not np.isfinite(values).all():
        return None
    rows = np.moveaxis(values, -1, 1)
    flat = rows.reshape(rows.shape[0] * rows.shape[1], -1)
    found = integer_weights(flat[:1]) and integer_weights(flat)
    if found is None and rounds:
        found = rounded_weights(flat)
    if found is None:
        return None
    integers = np.moveaxis(found.integers.reshape(rows.shape), 1, -1)
    scales = found.scales.reshape(rows.shape[:2])
    return tensor_constant(integers, "int8"), tensor_constant(scales, "float32")
