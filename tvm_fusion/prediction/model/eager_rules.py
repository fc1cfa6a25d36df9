# SPDX-License-Identifier: Apache-2.0
"""Rules that give the nodes of ONNX back as the operators that PyTorch had.

::

    x * (erf(x / sqrt(2)) + 1) / 2                            ->   nn.gelu(x)
    x * sigmoid(x), x * clip(x + 3, 0, 6) / 6                 ->   nn.silu(x), hardswish(x)
    c = x - mean(x); c / sqrt(mean(c * c) + e) * g + b        ->   nn.layer_norm(x, g, b)
    clip(x * a + b, 0, 1), clip(x + 3, 0, 6) / 6              ->   sigmoid(x), which costs the same
    where(isnan(softmax(x)), 0, softmax(x))                   ->   nn.softmax(x)

The result is counted, never run.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import GenericConst

from relay_passes.core.constants import numbers, scaled, shifted, uniform
from relay_passes.core.expressions import Value, op_name
from relay_passes.core.graph import Graph, Rule
from relay_passes.simplify.elementwise.canonicalize_activation import canonicalize_activation
from relay_passes.simplify.elementwise.canonicalize_clip import canonicalize_clip
from relay_passes.simplify.fold_constant import fold_constant
from relay_passes.simplify.simplify_inference import CLIPS


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
