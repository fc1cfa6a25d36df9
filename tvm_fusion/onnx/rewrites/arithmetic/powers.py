# SPDX-License-Identifier: Apache-2.0
"""Rewriting of Pow for TVM: products for small integer exponents, else operands of one type.

A power function is slow, and with fast arithmetic on a GPU it loses negative bases.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ...model.graph_edits import is_default_domain, replace_nodes
from ...model.tensor_facts import INTEGER_TYPES, GraphFacts
from ..expansion import Expansion

LARGEST_PRODUCT = 8
"""Largest exponent that becomes products, at most four of them."""

WIDER: dict[int | None, int] = {
    TensorProto.BFLOAT16: TensorProto.FLOAT,
    **dict.fromkeys(INTEGER_TYPES, TensorProto.DOUBLE),
}
"""Types that TVM has no power of, and the one that it is computed in."""


def replace_powers(model: onnx.ModelProto, facts: GraphFacts) -> None:
    """Write powers of floats with a small integer exponent as products; cast other exponents."""
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        exponent = _small_exponent(node, facts)
        if exponent is None:
            _cast_exponent(node, facts)
            nodes.append(node)
        else:
            nodes += _products(node, exponent, facts)
    replace_nodes(model.graph, nodes)


def expand_power(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Compute a power in a type that TVM has it in, and one with exponents from data in one type.

    ::

        integers:  Cast(Pow(Cast(x, double), Cast(y, double)))
        bfloat16:  Cast(Pow(Cast(x, float), Cast(y, float)))
        floats:    Pow(x, Cast(y))
    """
    base, exponent = (expansion.facts.dtype(name) for name in node.input)
    kind = WIDER.get(base)
    if kind is not None and _small_exponent(node, expansion.facts) is None:
        wide = [expansion.emit("Cast", name, to=kind) for name in node.input]
        expansion.finish(expansion.emit("Cast", expansion.emit("Pow", *wide), to=base))
    elif exponent != base and expansion.facts.constant(node.input[1]) is None:
        cast = expansion.emit("Cast", node.input[1], to=base)
        expansion.finish(expansion.emit("Pow", node.input[0], cast))


def _is_power_of_floats(node: onnx.NodeProto, facts: GraphFacts) -> bool:
    """Return whether the node is a Pow of floats."""
    if not is_default_domain(node) or node.op_type != "Pow":
        return False
    base = facts.dtype(node.input[0])
    return bool(base) and base not in INTEGER_TYPES


def _small_exponent(node: onnx.NodeProto, facts: GraphFacts) -> int | None:
    if not _is_power_of_floats(node, facts):
        return None
    exponent, dims = facts.constant(node.input[1]), facts.dims(node.input[0])
    if exponent is None or exponent.size != 1 or dims is None or exponent.ndim > len(dims):
        return None
    value = float(exponent.reshape(()))
    return int(value) if value in range(2, LARGEST_PRODUCT + 1) else None


def _products(node: onnx.NodeProto, exponent: int, facts: GraphFacts) -> list[onnx.NodeProto]:
    """The products of squares that make up a power."""
    square, result = node.input[0], ""
    pairs: list[tuple[str, str]] = []
    names: list[str] = []

    def multiply(x: str, y: str) -> str:
        pairs.append((x, y))
        names.append(facts.fresh(f"{node.output[0]}/product"))
        return names[-1]

    while exponent:
        if exponent % 2:
            result = multiply(result, square) if result else square
        exponent //= 2
        square = multiply(square, square) if exponent else square
    names[-1] = node.output[0]
    return [
        helper.make_node("Mul", pair, [name], name=f"{node.name}/{index}" if node.name else "")
        for index, (pair, name) in enumerate(zip(pairs, names, strict=True))
    ]


def _cast_exponent(node: onnx.NodeProto, facts: GraphFacts) -> None:
    """Cast the exponent of a Pow to the type of its base, which TVM expects.

    A number becomes a vector of one: of a number from 3 on TVM warns on standard error.
    """
    if not _is_power_of_floats(node, facts):
        return
    base, exponent = facts.dtype(node.input[0]), facts.constant(node.input[1])
    is_number = exponent is not None and exponent.ndim == 0 and bool(facts.dims(node.input[0]))
    if exponent is not None and (is_number or facts.dtype(node.input[1]) != base):
        cast = exponent.astype(helper.tensor_dtype_to_np_dtype(base))
        cast = cast.reshape(1) if is_number else cast
        node.input[1] = facts.add_constant(f"{node.input[1]}/cast", cast)
