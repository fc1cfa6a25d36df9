# SPDX-License-Identifier: Apache-2.0
"""Pass ``ChooseWinograd``: 3x3 convolutions with fewer multiplications."""

from __future__ import annotations

import json

import tvm
from tvm import relax
from tvm.ir import GenericConst, IRModule, Op
from tvm.target import Target

from schedules import attributes
from schedules.compute.conv2d import WORDS_RANK
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.winograd_knobs import takes_bytes, takes_winograd
from schedules.tuning.records import Records
from schedules.workload.conv2d import WORDS, Conv2DKernel
from schedules.workload.winograd_matrices import (
    TAPS,
    WHOLE_FACTOR,
    WHOLE_TILE,
    transform_weight,
    transform_words,
)

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name
from ..core.graph import pass_target
from ..op.conv2d import CONV2D
from ..op.conv_types import read_kernel
from ..op.quantized_conv2d import MOST_PRODUCTS, QUANTIZED_CONV2D, read_quantized
from ..op.winograd_conv2d import winograd_conv2d
from .fusion_report import Entry
from .winograd_decision import check_mode, decide_winograd, recorded_tile


@tvm.transform.module_pass(opt_level=0, name="ChooseWinograd")
class ChooseWinograd:
    """Compute packed 3x3 convolutions by Winograd's algorithm where that is predicted faster.

    Before::

        lv = R.tvm_fusion.conv2d(                     # weight: a constant [8, 8, 3, 3, 8, 8]
            x, weight, bias, residual, padding=[1, 1, 1, 1], activation="relu",
            data_layout="NCHW8c", out_layout="NCHW8c", in_channels=64, out_channels=64,
        )

    After::

        lv = R.tvm_fusion.winograd_conv2d(            # points: a constant [36, 8, 8, 8, 8]
            x, points, bias, residual, tile=4, padding=[1, 1, 1, 1], activation="relu",
            layout="NCHW8c", in_channels=64, out_channels=64,
        )

    Convolutions of bytes that are multiplied in 16 bits (AVX2) get such weights of int16 and the
    attribute ``winograd=2``; their numbers stay the same, to the bit. Those of bfloat16 take tiles
    of 2x2, where the CPU multiplies pairs faster than float32.
    Left alone: weights that are not constants, symbolic heights and widths, data in NCHW or in
    other blocks than the target's vectors, fused pairs, and layers that
    :func:`relay_passes.conv2d.winograd_decision.decide_winograd` rejects.

    Parameters
    ----------
    winograd : str
        ``auto`` asks :func:`relay_passes.conv2d.winograd_decision.decide_winograd`, ``always``
        takes every convolution with such a kernel, ``never`` none.
    target : Target | None
        Target of the module; None takes the current target.
    records : Records | None
        Winners of tuning jobs, which ``auto`` follows before all predictions; those used are listed
        in the module's attribute ``tvm_fusion.recorded_layers``.
    """

    def __init__(
        self,
        winograd: str = "auto",
        target: Target | None = None,
        records: Records | None = None,
    ) -> None:
        check_mode(winograd, "ChooseWinograd")
        self.records = records or Records()
        self.winograd = winograd
        self.target = target

    def transform_module(self, mod: IRModule, ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = pass_target(self.target, "ChooseWinograd")
        rewriter = _Rewriter(mod, self.winograd, target, self.records)
        if self.winograd != "never":
            for name, func in mod.functions_items():
                if isinstance(func, relax.Function):
                    rewriter.builder_.update_func(name, rewriter.visit_expr(func))
        result = rewriter.builder_.get()
        if rewriter.recorded:
            result = result.with_attr(attributes.RECORDED_LAYERS, json.dumps(rewriter.recorded))
        return result


def can_choose(call: relax.Call, kernel: Conv2DKernel, target: Target) -> bool:
    """Return whether a call of ``relax.tvm_fusion.conv2d`` could be computed by the algorithm."""
    has_form = kernel.data_layout == kernel.out_layout != "NCHW" and kernel.weight_dtype is None
    has_type = kernel.sums is not None or kernel.dtype == "float32" and kernel.out_dtype is None
    if not isinstance(call.args[1], GenericConst) or not (has_form and has_type):
        return False
    if target.kind.name != "llvm" or kernel.height is None or kernel.width is None:
        return False
    cpu, size = CPUInfo.from_target(target), (kernel.height, kernel.width)
    takes = takes_winograd(kernel.layers[0], size, kernel.dtype, cpu)
    return takes and kernel.lanes == cpu.lanes(kernel.sums or kernel.dtype)


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    """Replaces calls of the direct op; equal weights are transformed once."""

    def __init__(self, mod: IRModule, winograd: str, target: Target, records: Records) -> None:
        super().__init__(mod)
        self.winograd, self.target, self.records = winograd, target, records
        self.recorded: list[Entry] = []
        self.points: dict[tuple[GenericConst, int], relax.Expr] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Replace one call, or leave it."""
        if op_name(call) == QUANTIZED_CONV2D.name:
            changed = self._of_bytes(call)
            return super().visit_call_(call) if changed is None else changed
        if not isinstance(call.op, Op) or call.op.name != CONV2D.name:
            return super().visit_call_(call)
        kernel = read_kernel(call, CONV2D)
        tile = self._tile(call, kernel)
        if tile is None:
            return super().visit_call_(call)
        data, weight, *others = call.args
        layer = kernel.layers[0]
        return winograd_conv2d(
            self.visit_expr(data),
            self._transformed(weight, tile),
            *[self.visit_expr(argument) for argument in others],
            tile=tile,
            padding=layer.padding,
            activation=layer.activation.kind,
            low=layer.activation.low,
            high=layer.activation.high,
            layout=kernel.out_layout,
            in_channels=layer.in_channels,
            out_channels=layer.out_channels,
            out_dtype=kernel.out_dtype,
        )

    def _tile(self, call: relax.Call, kernel: Conv2DKernel) -> int | None:
        """Size of the tiles; None where the convolution stays direct."""
        if not can_choose(call, kernel, self.target):
            return None
        layer, size = kernel.layers[0], (int(kernel.height or 0), int(kernel.width or 0))
        if self.winograd == "auto":
            found = recorded_tile(kernel, self.target, self.records)
            if found is not None:
                self.recorded.append({"function": str(layer)} | found.about)
                return found.form.tile1 or None
        decision = decide_winograd(layer, kernel.batch or 1, *size, kernel.dtype, self.target)
        if decision is None or not (decision.pays or self.winograd == "always"):
            return None
        return decision.tile

    def _of_bytes(self, call: relax.Call) -> relax.Call | None:
        """A convolution of bytes by tiles of 2x2, which are exact; None where it stays."""
        kernel, weight = read_quantized(call), call.args[1]
        cpu, (layer,) = CPUInfo.from_target(self.target), kernel.layers
        height, width, products = kernel.height, kernel.width, layer.in_channels * TAPS**2
        has_form = isinstance(weight, GenericConst) and kernel.data_layout == kernel.out_layout
        if not (has_form and kernel.out_layout != "NCHW" and takes_bytes(kernel, cpu)):
            return None
        if height is None or width is None or kernel.winograd:
            return None
        if products > MOST_PRODUCTS // WHOLE_FACTOR:
            return None
        batch, sizes = kernel.batch or 1, [WHOLE_TILE]
        (words,) = kernel.in_words().layers
        size = batch, height, width
        decision = decide_winograd(words, *size, "float32", self.target, sizes)
        if decision is None or not (decision.pays or self.winograd == "always"):
            return None
        if (weight, WHOLE_TILE) not in self.points:
            points = transform_words(weight.value.numpy(), WORDS["int16"])
            self.points[weight, WHOLE_TILE] = relax.const(points)
        operands = [self.visit_expr(argument) for argument in call.args]
        operands[1] = self.points[weight, WHOLE_TILE]
        attrs = {key: value for key, value in call.attrs.items() if key != "limited"}
        return relax.Call(call.op, operands, attrs | {"winograd": WHOLE_TILE})

    def _transformed(self, weight: GenericConst, tile: int) -> relax.Expr:
        if (weight, tile) not in self.points:
            values, dtype = array_of(weight), str(weight.ty.dtype)
            is_halved = values.ndim == WORDS_RANK
            points = (
                transform_words(values, WORDS[dtype], tile)
                if is_halved
                else transform_weight(values, tile)
            )
            self.points[weight, tile] = tensor_constant(points, dtype)
        return self.points[weight, tile]
