# SPDX-License-Identifier: Apache-2.0
"""Rules that give the nodes of ONNX back as the operators that PyTorch had, attention among them.

::

    x * (erf(x / sqrt(2)) + 1) / 2                            ->   nn.gelu(x)
    x * sigmoid(x), x * clip(x + 3, 0, 6) / 6                 ->   nn.silu(x), hardswish(x)
    c = x - mean(x); c / sqrt(mean(c * c) + e) * g + b        ->   nn.layer_norm(x, g, b)
    clip(x * a + b, 0, 1), clip(x + 3, 0, 6) / 6              ->   sigmoid(x), which costs the same
    where(isnan(softmax(x)), 0, softmax(x))                   ->   nn.softmax(x)
    matmul(softmax(f(matmul(query, key))), value)    ->   scaled_dot_product_attention(q, k, v)

The result is counted, never run. Attention is the one kernel that a library has for it, with an
element-wise ``f``, such as a scale and a mask. Keys and values that are repeated for the heads of a
group are read once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from relay_passes.attention.region import MOVES, AttentionRegion, read_region
from relay_passes.core.constants import array_of, numbers, scaled, shifted, uniform
from relay_passes.core.expressions import Value, op_name, operands
from relay_passes.core.graph import Graph, Rule
from relay_passes.simplify.elementwise import canonicalize_activation, canonicalize_clip
from relay_passes.simplify.fold_constant import fold_constant
from relay_passes.simplify.simplify_inference import CLIPS
from schedules.cost.kernel_call import KernelCall, element_bytes


def layer_norm(graph: Graph, call: relax.Expr) -> Value:
    """Recognise a layer norm whose last node is the addition ``call``."""
    for unshifted, beta in _both_ways(call):
        product = graph.definition(unshifted, "relax.multiply")
        if product is None or not _is_constant(beta):
            continue
        for normal, gamma in _both_ways(product):
            quotient = graph.definition(normal, "relax.divide")
            if quotient is None or not _is_constant(gamma):
                continue
            centred = graph.definition(quotient.args[0], "relax.subtract")
            root = graph.definition(quotient.args[1], "relax.sqrt")
            if centred is None or root is None:
                continue
            mean = graph.definition(centred.args[1], "relax.mean")
            if mean is None or not mean.args[0].same_as(centred.args[0]):
                continue
            if _is_variance(graph, root.args[0], quotient.args[0]):
                axes = [int(axis) for axis in mean.attrs.axis]
                return relax.op.nn.layer_norm(centred.args[0], gamma, beta, axes)
    return None


def _is_variance(graph: Graph, expr: relax.Expr, centred: relax.Expr) -> bool:
    """Return whether a value is the mean of the squares of ``centred``, plus a number."""
    shifted = graph.definition(expr, "relax.add")
    if shifted is None:
        return False
    for mean, epsilon in _both_ways(shifted):
        found = graph.definition(mean, "relax.mean")
        if found is None or not _is_constant(epsilon):
            continue
        square = graph.definition(found.args[0], "relax.multiply", "relax.power")
        if square is not None and square.args[0].same_as(centred):
            return op_name(square) == "relax.power" or square.args[1].same_as(centred)
    return False


def softmax_of_nothing(graph: Graph, call: relax.Expr) -> Value:
    """Recognise a softmax whose NaN, of rows that are all masked, ``call`` replaces."""
    test, _, kept = call.args
    isnan = graph.definition(test, "relax.isnan")
    if isnan is None or not isnan.args[0].same_as(kept):
        return None
    return graph.definition(kept, "relax.nn.softmax")


def hard_sigmoid(graph: Graph, call: relax.Expr) -> Value:
    """Recognise a clipped line; ``call`` is the clip, or the division by 6 after it."""
    divides = op_name(call) == "relax.divide"
    if divides and uniform(numbers(call.args[1])) != 6:
        return None
    clip = graph.definition(call.args[0], "relax.clip") if divides else call
    if clip is None or not graph.has_one_use(clip.args[0]):
        return None
    line = shifted(graph.definition(clip.args[0], "relax.add"))
    if line is None or uniform(line[1]) is None:
        return None
    if divides:
        return relax.op.sigmoid(line[0])
    product = scaled(graph.definition(line[0], "relax.multiply"))
    if product is None or uniform(product[1]) is None:
        return None
    return relax.op.sigmoid(product[0])


def _both_ways(call: relax.Expr) -> list[tuple[relax.Expr, relax.Expr]]:
    return [(call.args[0], call.args[1]), (call.args[1], call.args[0])]


def _is_constant(expr: relax.Expr) -> bool:
    return isinstance(expr, GenericConst)


EAGER_RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (fold_constant, ("relax.isnan", "relax.where")),  # the importer writes bounds by them
    (softmax_of_nothing, ("relax.where",)),
    (canonicalize_clip, CLIPS),
    (canonicalize_activation, ("relax.multiply", "relax.divide")),
    (hard_sigmoid, ("relax.clip", "relax.divide")),
    (layer_norm, ("relax.add",)),
)


_MAX_HEAD = 256
"""Largest head of the kernels."""

_REORDERS = ("relax.permute_dims", "relax.broadcast_to")
_CHANGES = (
    *_REORDERS,
    *("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.astype"),
)
_COMPARISONS = tuple(f"relax.{name}" for name in ("less", "less_equal", "greater", "greater_equal"))
_TRIANGLES = ("relax.tril", "relax.triu")
_OPAQUE = ("relax.matmul", "relax.nn.softmax")
"""Operators behind which no mask is looked for."""

_MASKED = -1e4
"""Scores from which on downwards a mask leaves nothing of a weight."""

_Bindings = Mapping[relax.Var, relax.Expr]


@dataclass(frozen=True)
class FusedAttention:
    """One attention."""

    call: KernelCall  # ``attention``; its size ``full`` is 1 where no causal mask was found.
    inside: frozenset[relax.Var]
    """Variables that the kernel computes on the way, before its result."""


def find_attentions(mod: tvm.IRModule) -> dict[relax.Var, FusedAttention]:
    """Attentions of the function ``main`` by the variable of the second product.

    Left out are those that the kernels do not take: heads of more than 256 elements, and values of
    another size than the keys.
    """
    graph = Graph(mod, mod["main"])
    bindings = {
        binding.var: binding.value
        for block in graph.func.body.blocks
        for binding in block.bindings
        if isinstance(binding, relax.VarBinding)
    }
    uses = Counter(operands(graph.func.body.body))
    uses.update(var for value in bindings.values() for var in operands(value))
    attentions: dict[relax.Var, FusedAttention] = {}

    def note(graph: Graph, last: relax.Expr) -> None:
        region = read_region(graph, last)
        if region is not None:
            _add(region, bindings, uses, attentions)

    graph.sweep(dict.fromkeys((*MOVES, "relax.astype", "relax.matmul"), [note]))
    return attentions


def _add(
    region: AttentionRegion,
    bindings: _Bindings,
    uses: Counter[relax.Var],
    attentions: dict[relax.Var, FusedAttention],
) -> None:
    """Note a region whose kernel there is."""
    products = [var for var, value in region.values.items() if op_name(value) == "relax.matmul"]
    scores, result = products[0], products[-1]
    call = _call(bindings, scores, result)
    if call is None:
        return
    factors = (*bindings[scores].args, bindings[result].args[1])
    between = [var for var in region.values if var in bindings]
    moved = (var for each in factors for var in list(_line(bindings, each))[:-1])
    inside: set[relax.Var] = set()
    reads = Counter(operands(bindings[result]))
    for var in (*reversed(between), *moved):
        if var not in inside and reads[var] == uses[var] and var in bindings and var in reads:
            inside.add(var)
            reads.update(operands(bindings[var]))
    attentions[result] = FusedAttention(call, frozenset(inside))


def _call(bindings: _Bindings, scores: relax.Var, result: relax.Var) -> KernelCall | None:
    query, key = bindings[scores].args
    value = bindings[result].args[1]
    *outer, length, keys = _shape(scores)
    size = _shape(query)[-1]
    if not outer or _shape(result)[-1] != size or size > _MAX_HEAD:
        return None
    batch, heads, length = _heads(bindings, query, (outer[0], prod(outer[1:]), length))
    shared = max(1, _least(bindings, key) // (batch * keys * size))
    if heads % shared:
        return None
    dtype = str(result.ty.dtype)
    sizes = {"B": batch, "L": length, "S": keys, "H": heads, "KV": shared, "D": size}
    pairs = length * keys
    if length > 1 and not _is_causal(bindings, scores, result, (length, keys)):
        sizes["full"] = 1
    elif length > 1:
        pairs -= length * (length - 1) // 2
    written = prod(_shape(result)) * element_bytes(dtype)
    read = (_least(bindings, key) + _least(bindings, value)) * element_bytes(dtype) + written
    flops = 4.0 * batch * heads * size * pairs
    return KernelCall("attention", sizes, dtype, flops, read, written)


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in expr.ty.shape)


def _heads(
    bindings: _Bindings, query: relax.Expr, known: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Batch, heads and queries, as they were before heads of a group, or a batch's, were merged."""
    size = _shape(query)[-1]
    for each in _line(bindings, query):
        shape = _shape(each)
        if len(shape) == 4 and shape[-1] == size and shape[1] > known[1]:
            known = shape[:3]
        if op_name(bindings.get(each)) in _REORDERS:
            break
    return known


def _least(bindings: _Bindings, factor: relax.Expr) -> int:
    """Elements of keys or values before they were repeated."""
    return min(prod(_shape(each)) for each in _line(bindings, factor))


def _line(bindings: _Bindings, factor: relax.Expr | None) -> Iterator[relax.Expr]:
    """A factor, and what it is computed from by changes of layout and type and by scaling."""
    while factor is not None:
        yield factor
        value = bindings.get(factor)
        name = op_name(value)
        args: Sequence[relax.Expr] = getattr(value, "args", ())
        factor = args[0] if name in _CHANGES else None
        if name == "relax.multiply" and prod(_shape(args[0])) == 1:
            factor = args[1]
        elif name in ("relax.multiply", "relax.divide") and prod(_shape(args[1])) == 1:
            factor = args[0]


def _is_causal(
    bindings: _Bindings, scores: relax.Var, result: relax.Var, shape: tuple[int, int]
) -> bool:
    """Return whether a mask between the products hides the keys behind each query.

    That is a constant that does, or one that a comparison of positions or a triangle is a part of.
    """
    seen, waiting = {scores}, list(_parts(bindings[bindings[result].args[0]]))
    while waiting:
        expr = waiting.pop()
        if expr in seen:
            continue
        seen.add(expr)
        if isinstance(expr, GenericConst):
            if _is_triangle(expr, shape):
                return True
            continue
        value = bindings.get(expr)
        if op_name(value) in _TRIANGLES or _compares_positions(value, shape):
            return True
        if op_name(value) not in _OPAQUE:
            waiting += _parts(value)
    return False


def _compares_positions(value: relax.Expr, shape: tuple[int, int]) -> bool:
    """Return whether a value compares each query's position with each key's."""
    if op_name(value) not in _COMPARISONS or _shape(value)[-2:] != shape:
        return False
    return all(prod(_shape(part)) < prod(shape) for part in value.args)


def _parts(value: relax.Expr) -> Iterator[relax.Expr]:
    """Tensors that a value is computed from."""
    for part in getattr(value, "args", ()):
        if isinstance(getattr(part, "ty", None), relax.TensorType):
            yield part


def _is_triangle(constant: relax.Expr, shape: tuple[int, int]) -> bool:
    """Return whether a constant hides the keys behind each query, and none before it."""
    if _shape(constant)[-2:] != shape:
        return False
    mask = array_of(constant)
    shown = mask if mask.dtype == bool else mask > _MASKED
    return bool((shown == np.tri(*shape, shape[1] - shape[0], dtype=bool)).all())
