# SPDX-License-Identifier: Apache-2.0
"""Chains of reductions for the tests: each in Relax, and in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax

op = relax.op


@dataclass(frozen=True)
class Chain:
    """A function of tensors of one shape and of vectors along the reduced axis.

    Parameters
    ----------
    relax, numpy : Callable
        Functions of the tensors and the axis that return a list of results; numpy's in float64.
    inputs : str
        A letter for each tensor: ``t`` of the whole shape, ``v`` a vector along the axis, ``b``
        a mask of the whole shape.
    """

    relax: Callable
    numpy: Callable
    inputs: str = "t"


def _keep(function: Callable, data: relax.Expr, axis: int) -> relax.Expr:
    return function(data, [axis], keepdims=True)


def _softmax(x, axis):
    e = op.exp(op.subtract(x, _keep(op.max, x, axis)))
    return [op.divide(e, _keep(op.sum, e, axis))]


def _numpy_softmax(x, axis):
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis, keepdims=True))
    return [e / e.sum(axis, keepdims=True)]


def _log_softmax(x, axis):
    shifted = op.subtract(x, _keep(op.max, x, axis))
    return [op.subtract(shifted, op.log(_keep(op.sum, op.exp(shifted), axis)))]


def _numpy_log_softmax(x, axis):
    return [np.log(_numpy_softmax(x, axis)[0])]


def _masked_softmax(x, mask, residual, axis):
    dtype = x.ty.dtype
    scaled = op.multiply(op.add(x, residual), relax.const(0.125, dtype))
    return _softmax(op.where(mask, scaled, relax.const(-30000.0, dtype)), axis)


def _numpy_masked_softmax(x, mask, residual, axis):
    return _numpy_softmax(np.where(mask, (x + residual) * 0.125, -30000.0), axis)


def _layer_norm(x, scale, shift, axis):
    """Norm by two passes, in float32."""
    dtype = x.ty.dtype
    wide = op.astype(x, "float32")
    centred = op.subtract(wide, _keep(op.mean, wide, axis))
    variance = _keep(op.mean, op.multiply(centred, centred), axis)
    normal = op.multiply(centred, op.rsqrt(op.add(variance, relax.const(1e-5, "float32"))))
    return [op.add(op.multiply(op.astype(normal, dtype), scale), shift)]


def _numpy_layer_norm(x, scale, shift, axis):
    centred = x - x.mean(axis, keepdims=True)
    return [centred / np.sqrt(x.var(axis, keepdims=True) + 1e-5) * scale + shift]


def _residual_layer_norm(x, residual, axis):
    """Norm by sums of values and squares; sum of both tensors, mean and deviation are results."""
    total = op.add(x, residual)
    wide = op.astype(total, "float32")
    mean = _keep(op.mean, wide, axis)
    square = _keep(op.mean, op.multiply(wide, wide), axis)
    variance = op.subtract(square, op.multiply(mean, mean))
    deviation = op.sqrt(op.add(variance, relax.const(0.1, "float32")))
    normal = op.divide(op.subtract(wide, mean), deviation)
    return [op.astype(normal, x.ty.dtype), total, mean, deviation]


def _numpy_residual_layer_norm(x, residual, axis):
    total = x + residual
    mean, deviation = (
        total.mean(axis, keepdims=True),
        np.sqrt(total.var(axis, keepdims=True) + 0.1),
    )
    return [(total - mean) / deviation, total, mean, deviation]


def _rms_norm(x, scale, axis):
    wide = op.astype(x, "float32")
    square = _keep(op.mean, op.multiply(wide, wide), axis)
    factor = op.rsqrt(op.add(square, relax.const(1e-6, "float32")))
    return [op.multiply(op.astype(op.multiply(wide, factor), x.ty.dtype), scale)]


def _numpy_rms_norm(x, scale, axis):
    return [x / np.sqrt((x * x).mean(axis, keepdims=True) + 1e-6) * scale]


def _variance(x, axis):
    """Results of one element a row alone."""
    centred = op.subtract(x, _keep(op.mean, x, axis))
    variance = op.mean(op.multiply(centred, centred), [axis])
    return [op.sqrt(variance), variance, op.max(x, [axis])]


def _numpy_variance(x, axis):
    return [x.std(axis), x.var(axis), x.max(axis)]


def _p_norm(x, axis):
    """Division by the norm with p = 4, scaled by the largest element against overflow."""
    largest = _keep(op.max, op.abs(x), axis)
    scaled = op.divide(x, largest)
    square = op.multiply(scaled, scaled)
    norm = op.sqrt(op.sqrt(_keep(op.sum, op.multiply(square, square), axis)))
    return [op.divide(scaled, norm), op.squeeze(op.multiply(norm, largest), [axis])]


def _numpy_p_norm(x, axis):
    norm = (x**4).sum(axis, keepdims=True) ** 0.25
    return [x / norm, norm.squeeze(axis)]


def _three_stages(x, axis):
    """The deviation of the softmax from its mean, and where that is largest."""
    soft = _softmax(x, axis)[0]
    apart = op.abs(op.subtract(soft, _keep(op.mean, soft, axis)))
    return [op.argmax(apart, axis), op.multiply(apart, _keep(op.max, apart, axis))]


def _numpy_three_stages(x, axis):
    soft = _numpy_softmax(x, axis)[0]
    apart = np.abs(soft - soft.mean(axis, keepdims=True))
    return [None, apart * apart.max(axis, keepdims=True)]  # ties: see the test of argmax


CHAINS = {
    "softmax": Chain(_softmax, _numpy_softmax),
    "log_softmax": Chain(_log_softmax, _numpy_log_softmax),
    "masked_softmax": Chain(_masked_softmax, _numpy_masked_softmax, "tbt"),
    "layer_norm": Chain(_layer_norm, _numpy_layer_norm, "tvv"),
    "residual_layer_norm": Chain(_residual_layer_norm, _numpy_residual_layer_norm, "tt"),
    "rms_norm": Chain(_rms_norm, _numpy_rms_norm, "tv"),
    "variance": Chain(_variance, _numpy_variance),
    "p_norm": Chain(_p_norm, _numpy_p_norm),
    "three_stages": Chain(_three_stages, _numpy_three_stages),
}


def input_shape(letter: str, shape, axis: int) -> tuple:
    """Shape of an input; vectors have as many axes as needed to be broadcast."""
    if letter != "v":
        return tuple(shape)
    return tuple(size if k == axis else 1 for k, size in enumerate(shape))
