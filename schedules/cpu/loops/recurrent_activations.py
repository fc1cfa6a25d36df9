# SPDX-License-Identifier: Apache-2.0
"""Activations of recurrent layers, on vectors of hidden units."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .recurrent_tile import LANES

Activation = Callable[[tirx.Expr, float, float], tirx.Expr]


def like(x: tirx.Expr, value: float) -> tirx.Expr:
    """A number in all lanes of a vector's type."""
    return T.broadcast(tirx.const(value, str(x.ty.dtype).partition("x")[0]), LANES)


def _hard_sigmoid(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    return tirx.max(like(x, 0), tirx.min(like(x, 1), x * like(x, alpha) + like(x, beta)))


def _elu(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    below = like(x, alpha) * (tirx.exp(tirx.min(x, like(x, 0))) - like(x, 1))
    return tirx.Select(x > like(x, 0), x, below)


def _softplus(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    size = tirx.max(x, like(x, 0) - x)
    return tirx.max(x, like(x, 0)) + tirx.log(like(x, 1) + tirx.exp(like(x, 0) - size))


ACTIVATIONS: dict[str, Activation] = {
    "Affine": lambda x, a, b: x * like(x, a) + like(x, b),
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda x, a, b: tirx.Select(x < like(x, 0), x * like(x, a), x),
    "Relu": lambda x, a, b: tirx.max(x, like(x, 0)),
    "ScaledTanh": lambda x, a, b: like(x, a) * tirx.tanh(x * like(x, b)),
    "Sigmoid": lambda x, a, b: tirx.sigmoid(x),
    "Softplus": _softplus,
    "Softsign": lambda x, a, b: x / (like(x, 1) + tirx.max(x, like(x, 0) - x)),
    "Tanh": lambda x, a, b: tirx.tanh(x),
    "ThresholdedRelu": lambda x, a, b: tirx.Select(x >= like(x, a), x, like(x, 0)),
}
"""Functions of a vector and the two parameters that ONNX calls alpha and beta."""
