# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseLayerNorm``: layer norms as parts of the products before and behind them."""

from __future__ import annotations

import math

import tvm
from tvm import IRModule, relax
from tvm.target import Target

from schedules.compute.norms import SEGMENT
from schedules.gpu.core.machine import GPUInfo, gpu_target
from schedules.gpu.gemm.matmul.statistics_cost import (
    moments_cycles,
    norm_cycles,
    reading_cycles,
    takes_statistics,
)

from ..core.expressions import Value
from ..core.graph import Graph, Rule, function_graphs
from .norm_function import NAME, LoweredFunctions, NormFunction, NormInputs
from .norm_plan import EPILOGUE, Bindings, Norm

_FUSIBLE, _OPAQUE = 4, 8  # tvm::relax::OpPatternKind: a product with an epilogue, and anything


@tvm.transform.module_pass(opt_level=0, name="FuseLayerNorm")
class FuseLayerNorm:
    """Make layer norms between products parts of these.

    Before::

        lv = R.add(R.add(R.matmul(a, w), b), residual)     # R.Tensor((1, 128, 768))
        lv1 = R.nn.layer_norm(lv, gamma, beta, axes=[-1])
        lv2 = R.add(R.matmul(lv1, w1), b1)
        lv3 = R.add(R.add(R.matmul(f(lv2), w2), b2), lv1)

    After::

        lv, sums, squares = R.call_tir(matmul_of_norm, (a, w, b, residual))
        moved = R.call_tir(matmul_of_norm1, (lv, sums, squares, gamma * w1, beta @ w1))
        lv2 = R.add(moved, b1)
        lv3 = R.call_tir(matmul_of_norm2, (f(lv2), w2, b2 + beta, lv, sums, squares, gamma))

    The first product also stores the sum of each 32 neighbours of a row, and the sum of their
    squared differences from their mean. Those that read the norm combine these to mean and variance
    of the row. As left factor they subtract the mean from each element on its way to the product,
    and scale the result; weights contain gamma, and a vector beta. In the epilogue they compute the
    norm itself. The rule :class:`schedules.gpu.Matmul` schedules the functions.

    A norm is fused where the estimates of :mod:`schedules.gpu.gemm.matmul.statistics_cost` promise
    a gain. Left alone: norms of other values than products with sums, quotients and extrema; norms
    that anything but products of constant matrices, or such an epilogue, reads; types other than
    float32, since the data of a product on 16-bit tensor cores would be float32 and its tile would
    take twice the bytes; rows of symbolic length or number, of more than 2048 columns or no
    multiple of 32; products of up to eight rows; functions that another pass has claimed, and all
    modules for other targets than ``cuda`` and ``opencl``. It runs before
    ``DecomposeNormalization``, which would take norms apart. The pass is idempotent.

    Parameters
    ----------
    target : Target | None
        Target of the module; the current target if None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        target = gpu_target(self.target)
        if target is None:
            return mod
        builder = relax.BlockBuilder(mod)
        rewritten = {
            name: graph.to_function()
            for name, graph in function_graphs(mod)
            if graph.sweep(_Fusion(Bindings(graph.func), target).rules(builder))
        }
        result = builder.get()
        result.update(rewritten)
        return result


class _Fusion:
    """Norms that are fused, and the functions of the products that take part.

    Parameters
    ----------
    bindings : Bindings
        Those of the function.
    target : Target
        Target of the functions.

    Attributes
    ----------
    inputs : dict[relax.Var, NormInputs]
        From the data of the norms to what replaces these.
    products : dict[relax.Var, NormProduct]
        The products, by their last values.
    functions : dict[relax.Var, NormFunction]
        Their functions.
    """

    def __init__(self, bindings: Bindings, target: Target) -> None:
        self.gpu = GPUInfo.from_target(target)
        norms, known = bindings.norms(), LoweredFunctions()
        while True:
            self.inputs = {norm.data: _placeholders(norm) for norm in norms}
            inputs = {norm.result: self.inputs[norm.data] for norm in norms}
            self.products = bindings.products(norms)
            with target:
                self.functions = {
                    end: NormFunction(product, bindings.values, inputs, known)
                    for end, product in self.products.items()
                }
            losing = [norm for norm in norms if not self._gains(norm)]
            if not losing:
                return
            norms = [norm for norm in norms if norm not in losing]

    def _gains(self, norm: Norm) -> bool:
        """Return whether a norm is predicted to cost less as a part of its products."""
        cycles = 0.0
        for end, product in self.products.items():
            is_read, is_data = norm.result in product.norms, end.same_as(norm.data)
            if not is_read and not is_data:
                continue
            matmul = self.functions[end].matmul
            if matmul is None or not takes_statistics(matmul, self.gpu):
                return False
            cycles += reading_cycles(matmul, self.gpu) if is_read else 0
            cycles += moments_cycles(matmul, self.gpu) if is_data else 0
        *rows, columns = map(int, norm.data.ty.shape.values)
        return cycles < norm_cycles(math.prod(rows), columns, self.gpu)

    def rules(self, builder: relax.BlockBuilder) -> dict[str, list[Rule]]:
        """Rules that replace the last values of the products; they add functions to ``builder``."""
        known: dict[relax.Expr, relax.Expr] = {}

        def rule(graph: Graph, _: relax.Expr) -> Value:
            end = graph.current
            if end not in self.functions:
                return None
            function, given = self.functions[end], self.inputs.get(end)
            pattern = _FUSIBLE if given is None else _OPAQUE
            assert function.func is not None, "the product was read from it"
            name = builder.add_func(function.func.with_attr("op_pattern", pattern), NAME)
            arguments = [known.get(argument, argument) for argument in function.arguments]
            if given is None:
                return relax.call_tir(name, arguments, end.ty)
            types = [given.data.ty, given.sums.ty, given.squares.ty]
            results = graph.emit(relax.call_tir(name, arguments, types))
            for number, placeholder in enumerate((given.sums, given.squares), start=1):
                known[placeholder] = graph.emit(relax.TupleGetItem(results, number))
            return relax.TupleGetItem(results, 0)

        return dict.fromkeys(("relax.matmul", *EPILOGUE), [rule])


def _placeholders(norm: Norm) -> NormInputs:
    """The tensors that a norm is computed from; variables for those that are still to be bound."""
    *rows, columns = norm.data.ty.shape.values
    kind = relax.TensorType((columns // SEGMENT, *rows), "float32")
    return NormInputs(norm.data, *(relax.Var(name, kind) for name in ("sums", "squares")))
