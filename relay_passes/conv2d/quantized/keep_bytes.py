# SPDX-License-Identifier: Apache-2.0
"""Pass ``KeepBytes``: quantised weights of convolutions of floats stay bytes."""

from __future__ import annotations

from math import prod

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.direct_roofline import direct_cycles
from schedules.workload.conv2d import Conv2DKernel

from ...core.constants import numbers, tensor_constant
from ...core.expressions import op_name
from ...core.pass_target import pass_target
from ...op.conv2d import CONV2D
from ...op.conv_types import read_kernel
from ...op.widen_weight import LEAST_ELEMENTS
from ..winograd_decision import decide_winograd
from .integer_weights import integer_weights, rounded_weights


@tvm.transform.module_pass(opt_level=0, name="KeepBytes")
class KeepBytes:
    """Store weights of packed convolutions in 8 bits, where they are multiples of these.

    Before::

        lv = R.tvm_fusion.conv2d(x, w, bias, ...)              # rows of w: scale * integers

    After::

        lv = R.tvm_fusion.conv2d(x, w8, bias, scale, ...)      # w8: [B, B', kh, kw, x, x] int8

    The kernel widens a vector of them in registers for all pixels of its tile, so they take a
    quarter of the file, of the memory and of the traffic. On CPUs, before ``ChooseWinograd``. Left
    alone: layers whose weights are fewer than the elements of their data and output, and those that
    Winograd's algorithm, whose weights are sums of these, is predicted to compute faster; small
    weights; groups within a block of channels, first layers on images in NCHW, fused pairs; weights
    that are not constants, or no multiples of integers.

    Parameters
    ----------
    target : Target | None
        Target of the module; None takes the current target.
    winograd : str
        Choice of :class:`.ChooseWinograd`, which comes first with ``always``.
    rounds : bool
        Whether few bytes matter more than time: then only the forms of layers count, and other
        weights are rounded to multiples, -127 to 127, of a scale for each output channel.
    """

    def __init__(
        self, target: Target | None = None, winograd: str = "auto", rounds: bool = False
    ) -> None:
        self.target, self.winograd, self.rounds = target, winograd, rounds

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = pass_target(self.target, "KeepBytes")
        rewriter = _Rewriter(mod, target, self.winograd, self.rounds)
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function):
                rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        return rewriter.builder_.get()


Stored = tuple[relax.Expr, relax.Expr]
"""Integers and scales."""


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Replaces weights of the direct op; equal ones once."""

    def __init__(self, mod: IRModule, target: Target, winograd: str, rounds: bool) -> None:
        super().__init__(mod)
        self._choice = target, winograd, rounds
        self._stored: dict[GenericConst, Stored | None] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Replace one call, or leave it."""
        call = super().visit_call_(call)
        if op_name(call) != CONV2D.name or not isinstance(call.args[1], GenericConst):
            return call
        kernel, weight = read_kernel(call, CONV2D), call.args[1]
        if not _keeps(kernel, *self._choice):
            return call
        if weight not in self._stored:
            self._stored[weight] = _in_bytes(weight, rounds=self._choice[-1])
        stored = self._stored[weight]
        if stored is None:
            return call
        integers, scale = stored
        operands = [call.args[0], integers, call.args[2], scale, *call.args[3:]]
        return relax.Call(call.op, operands, call.attrs)


def _keeps(kernel: Conv2DKernel, target: Target, winograd: str, rounds: bool) -> bool:
    """Return whether a layer is to read weights of 8 bits, if it has such."""
    (layer,), is_float = kernel.layers, kernel.dtype == "float32" and kernel.data_dtype is None
    weights = layer.weight_elements()
    if not is_float or "NCHW" in (kernel.data_layout, kernel.out_layout):
        return False
    if layer.group_lanes(kernel.lanes) or weights < LEAST_ELEMENTS:
        return False
    if not kernel.height or not kernel.width:
        return True
    batch, size = kernel.batch or 1, (kernel.height, kernel.width)
    out_size = layer.output_size(*size)
    moved = prod(size) * layer.in_channels + prod(out_size) * layer.out_channels
    if not rounds and weights < batch * moved:
        return False
    decision = decide_winograd(layer, batch, *size, kernel.dtype, target)
    if decision is None or winograd == "never":
        return True
    if rounds or winograd == "always":
        return winograd != "always"
    cpu = CPUInfo.from_target(target)
    cycles = direct_cycles(layer, batch, out_size, cpu, kernel.dtype, "int8")
    return not decision.pays or cycles <= decision.cycles


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
