# SPDX-License-Identifier: Apache-2.0
"""Pass ``AttentionInTiles``: attention of bfloat16 as one kernel of a CPU's tile registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar
from tvm.target import Target

from schedules.cost.cpu_kernels import CYCLES
from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.tile_attention import AttentionShape, tile_attention

from ..core.constants import array_of
from ..core.expressions import Value, op_name, permutation
from ..core.graph import Graph, Rule, function_graphs, pass_target

_HALF, _FLOAT = "bfloat16", "float32"
_MATMUL, _CAST, _TURN = "relax.matmul", "relax.astype", "relax.permute_dims"
_HEADS_INSIDE = (0, 2, 1, 3)


@tvm.transform.module_pass(opt_level=0, name="AttentionInTiles")
class AttentionInTiles:
    """Make one kernel of the two products of an attention and the softmax between them.

    Before, with factors that ``MultiplyBfloat16`` has rounded, here without their conversions::

        q = R.permute_dims(x, [0, 2, 1, 3])                # x: [1, 128, 12, 64]
        k = R.permute_dims(y, [0, 2, 3, 1])
        v = R.permute_dims(z, [0, 2, 1, 3])
        lv = R.add(R.divide(R.matmul(q, k), R.const(8)), mask)
        lv1 = R.permute_dims(R.matmul(R.nn.softmax(lv), v), [0, 2, 1, 3])

    After::

        lv1 = R.call_tir(cls.tile_attention, (x, y, z, mask))

    Runs after ``MultiplyBfloat16``. Left alone: what the kernel does not take (few rows, values
    whose elements fill no tiles, open extents), or is predicted to be slower with, softmax over
    another axis than the last, anything else than a scale and an addition between the products, and
    CPUs without such registers.

    Parameters
    ----------
    target : Target | None
        The CPU; the current target for None.
    """

    def __init__(self, target: Target | None = None) -> None:
        self.target = target

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        cpu = CPUInfo.from_target(pass_target(self.target, "AttentionInTiles"))
        if _HALF not in cpu.tiles:
            return mod
        fusion = _Fusion(mod, cpu)
        found: list[Rule] = [fusion.rule]
        rules: dict[str, list[Rule]] = {_MATMUL: found, _CAST: found, _TURN: [_turn_once]}
        rewritten = {
            name: graph.to_function() for name, graph in function_graphs(mod) if graph.sweep(rules)
        }
        result = fusion.builder.get()
        result.update(rewritten)
        return result


class _Scores(NamedTuple):
    """The first product, the factor of its result, and what is added to that."""

    product: relax.Call
    scale: float = 1.0
    mask: relax.Expr | None = None


class _Fusion:
    """The rule of the pass, and the kernels that it has made."""

    def __init__(self, mod: IRModule, cpu: CPUInfo) -> None:
        self.builder = relax.BlockBuilder(mod)
        self.cpu = cpu
        self._kernels: dict[AttentionShape, GlobalVar] = {}

    def rule(self, graph: Graph, last: relax.Expr) -> Value:
        """Rewrite the second product, or its rounding to bfloat16 if nothing else reads it."""
        product, dtype = last, str(last.ty.dtype)
        if op_name(last) == _CAST:
            product = _only(graph, last.args[0]) if dtype == _HALF else None
        elif _is_rounded(graph):
            return None
        if op_name(product) != _MATMUL or str(product.ty.dtype) != _FLOAT:
            return None
        weight = _only(graph, product.args[0])
        while op_name(weight) == _CAST:
            weight = _only(graph, weight.args[0])
        is_softmax = op_name(weight) == "relax.nn.softmax"
        if not is_softmax or int(weight.attrs.axis) not in (-1, weight.ty.ndim - 1):
            return None
        scores = _read_scores(graph, weight.args[0])
        if scores is None:
            return None
        shape = _shape_of(scores, product, dtype)
        if shape is None or not shape.fits_tiles(self.cpu) or not self._gains(shape):
            return None
        return self._call(graph, shape, scores, product.args[1])

    def _gains(self, shape: AttentionShape) -> bool:
        """Predict whether one kernel is faster than two products of float32 and a softmax."""
        cycles = {
            "one kernel": shape.cycles(self.cpu),
            "separate": shape.separate_cycles(self.cpu),
        }
        calls = {name: [KernelCall(CYCLES, {"cycles": each})] for name, each in cycles.items()}
        return compare("attention", shape.title, calls, 0.0).chosen != "separate"

    def _call(
        self, graph: Graph, shape: AttentionShape, scores: _Scores, value: relax.Expr
    ) -> relax.Expr:
        query, key = scores.product.args
        operands = [_in_rows(graph, query, _HEADS_INSIDE), _in_rows(graph, key, (0, 3, 1, 2))]
        operands.append(_in_rows(graph, value, _HEADS_INSIDE))
        if scores.mask is not None:
            is_whole = scores.mask.ty.ndim == len(shape.scores)
            mask = scores.mask if is_whole else relax.op.reshape(scores.mask, shape.mask)
            operands.append(mask if is_whole else graph.emit(mask))
        if shape not in self._kernels:
            kernel = tile_attention(shape, self.cpu)
            self._kernels[shape] = self.builder.add_func(kernel, "tile_attention")
        extents = [shape.batch, shape.rows, shape.heads, shape.columns]
        result = relax.TensorType(extents, shape.out_dtype)
        called = graph.emit(relax.call_tir(self._kernels[shape], operands, result))
        return relax.op.permute_dims(called, list(_HEADS_INSIDE))


def _only(graph: Graph, expr: relax.Expr) -> Value:
    """The value of a variable that nothing else reads; else None."""
    return graph.definition(expr) if graph.has_one_use(expr) else None


def _is_rounded(graph: Graph) -> bool:
    """Return whether the only reader of the current variable rounds it."""
    readers = graph.users(graph.current)
    return len(readers) == 1 and op_name(readers[0]) == _CAST and str(readers[0].ty.dtype) == _HALF


def _read_scores(graph: Graph, expr: relax.Expr) -> _Scores | None:
    """Read the scaled product and its addend in the argument of a softmax."""
    value = _only(graph, expr)
    name = op_name(value)
    if name == _MATMUL:
        return _Scores(value)
    if name == "relax.add":
        for scaled, mask in (value.args, [*value.args][::-1]):
            inner = _read_scores(graph, scaled)
            if inner is not None and inner.mask is None and _same_type(scaled, expr):
                return inner._replace(mask=mask)
    if name in ("relax.multiply", "relax.divide"):
        number, inner = _number(value.args[1]), _read_scores(graph, value.args[0])
        if number and inner is not None and inner.mask is None:
            factor = number if name == "relax.multiply" else 1 / number
            return inner._replace(scale=inner.scale * factor)
    return None


def _number(expr: relax.Expr) -> float | None:
    """A constant of one element."""
    if not isinstance(expr, GenericConst) or array_of(expr).size != 1:
        return None
    return float(array_of(expr).reshape(()))


def _same_type(left: relax.Expr, right: relax.Expr) -> bool:
    return bool(left.ty.is_base_of(right.ty))


def _extents(expr: relax.Expr) -> list[int]:
    """Extents of a tensor; none where one is open, or the rank is unknown."""
    shape = expr.ty.shape
    values = list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
    known = all(isinstance(extent, tirx.IntImm) for extent in values)
    return [int(extent) for extent in values] if known else []


def _shape_of(scores: _Scores, product: relax.Call, dtype: str) -> AttentionShape | None:
    """The kernel's extents; None where factors are no matrices of as many heads each."""
    query, key, value = map(_extents, (*scores.product.args, product.args[1]))
    if not len(query) == len(key) == len(value) == 4 or not query[:2] == key[:2] == value[:2]:
        return None
    mask = None
    if scores.mask is not None:
        found = _extents(scores.mask)
        mask = (*[1] * (4 - len(found)), *found)
        extents = [*query[:3], key[3]]
        fits = all(each in (1, whole) for each, whole in zip(mask, extents, strict=False))
        if len(mask) != 4 or not fits or str(scores.mask.ty.dtype) != _FLOAT:
            return None
    (batch, heads, rows, depth), keys, columns = query, key[3], value[3]
    sizes = batch, heads, rows, keys, depth, columns
    return AttentionShape(*sizes, scores.scale, mask, dtype)


def _in_rows(graph: Graph, factor: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    """A factor in bfloat16 with the axes in this order, past all orders before it."""
    value = graph.definition(factor, _CAST)
    if value is not None and str(value.args[0].ty.dtype) == _HALF:
        factor = value.args[0]
    else:
        factor = graph.emit(relax.op.astype(factor, _HALF))
    source, order = graph.unturned(factor, axes)
    if order == sorted(order):
        return source
    return graph.emit(relax.op.permute_dims(source, order))


def _turn_once(graph: Graph, turn: relax.Expr) -> Value:
    """Two orders of axes as one, or none."""
    if graph.definition(turn.args[0], _TURN) is None:
        return None
    source, order = graph.unturned(turn.args[0], permutation(turn))
    return source if order == sorted(order) else relax.op.permute_dims(source, order)
