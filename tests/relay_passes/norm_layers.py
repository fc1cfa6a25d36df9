# SPDX-License-Identifier: Apache-2.0
"""A feed-forward layer with norms between its products, as a module and in float64."""

from __future__ import annotations

import numpy as np
from tvm import IRModule, relax, tirx
from tvm.relax import op

F32 = "float32"
EPSILON = 1e-5


class NormLayer:
    """``norm(x @ w0 + b0 + x)``, twice read: by a product, and as the residual of another one.

    Parameters
    ----------
    rows : tuple[int, ...]
        Leading extents of ``x``.
    width, hidden : int
        Columns of ``x``, and of what lies between the two products behind the norm.
    dtype : str
        Type of all tensors.
    offset, spread : float
        Mean and deviation of what is normalised, roughly.
    scale, center : bool
        Whether the norms have these weights.
    keep : bool
        Whether the first norm is a result, too.
    is_short : bool
        Whether the product behind the first norm is the result.
    """

    def __init__(
        self,
        rows: tuple[int, ...] = (1, 37),
        width: int = 96,
        hidden: int = 128,
        dtype: str = F32,
        offset: float = 0.0,
        spread: float = 1.0,
        scale: bool = True,
        center: bool = True,
        keep: bool = False,
        is_short: bool = False,
    ) -> None:
        rng = np.random.default_rng()
        self.rows, self.width, self.dtype, self.keep = rows, width, dtype, keep
        self.scale, self.center, self.is_short = scale, center, is_short

        def draw(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> np.ndarray:
            return (mean + deviation * rng.standard_normal(shape)).astype(dtype)

        self.x = draw(*rows, width, deviation=spread)
        self.w = [
            draw(*shape, deviation=shape[0] ** -0.5)
            for shape in ((width, width), (width, hidden), (hidden, width), (width, 64))
        ]
        self.b = [draw(width, mean=offset), draw(hidden), draw(width)]
        self.gamma, self.beta = ([draw(width, mean=m) for _ in range(2)] for m in (1.0, 0.0))

    def module(self, rows: tuple[tirx.Expr, ...] = (), free: bool = False) -> IRModule:
        """``main``, with other extents of ``x``, or a weight behind the norm as a parameter."""
        x = relax.Var("x", relax.TensorType((*(rows or self.rows), self.width), self.dtype))
        weights = [relax.const(weight) for weight in self.w]
        if free:
            weights[1] = relax.Var("w", weights[1].ty)
        builder = relax.BlockBuilder()
        emit = builder.emit

        def dense(value: relax.Expr, number: int) -> relax.Expr:
            product = emit(op.matmul(value, weights[number]))
            if number >= len(self.b):
                return product
            return emit(op.add(relax.const(self.b[number]), product))

        def norm(value: relax.Expr, number: int) -> relax.Expr:
            weights = relax.const(self.gamma[number]), relax.const(self.beta[number])
            kinds = {"scale": self.scale, "center": self.center}
            return emit(op.nn.layer_norm(value, *weights, [-1], EPSILON, **kinds))

        with builder.function("main", [x, weights[1]] if free else [x]):
            with builder.dataflow():
                first = norm(emit(op.add(dense(x, 0), x)), 0)
                results = [dense(first, 1)]
                if not self.is_short:
                    behind = emit(op.add(dense(emit(op.nn.relu(*results)), 2), first))
                    results = [dense(norm(behind, 1), 3)]
                results += [first] if self.keep else []
                result = builder.emit_output(relax.Tuple(results) if self.keep else results[0])
            builder.emit_func_output(result)
        return builder.get()

    def exact(self) -> np.ndarray:
        """The result in float64."""
        x, *_ = wide = [each.astype("float64") for each in (self.x, *self.w)]
        w, b = wide[1:], [each.astype("float64") for each in self.b]
        first = self._norm(x @ w[0] + b[0] + x, 0)
        behind = first @ w[1] + b[1]
        if self.is_short:
            return behind
        return self._norm(np.maximum(behind, 0) @ w[2] + b[2] + first, 1) @ w[3]

    def _norm(self, value: np.ndarray, number: int) -> np.ndarray:
        mean = value.mean(-1, keepdims=True)
        variance = np.square(value - mean).mean(-1, keepdims=True)
        result = (value - mean) / np.sqrt(variance + EPSILON)
        result = result * self.gamma[number] if self.scale else result
        return result + self.beta[number] if self.center else result
