# SPDX-License-Identifier: Apache-2.0
"""The entry of an operator in the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from tvm import relax

from ..model.expansion import Expansion
from ..model.tensor_facts import GraphFacts

Rule = Callable[[Expansion], str | None]
"""Emits what replaces a node, or changes it; a node for which nothing was emitted stays.

A rule of an operator that onnx does not know may return the reason why it cannot.
"""

Translation = Callable[[relax.BlockBuilder, Sequence[Any], dict[str, Any]], relax.Expr | None]
"""Expression of a node by its inputs and attributes; None leaves the node to TVM's converter."""

ML_DOMAIN = "ai.onnx.ml"


@dataclass(frozen=True)
class Operator:
    """All that is known of an operator, in the order in which its nodes are asked.

    An entry of only a name says that TVM's converter is right.
    """

    name: str
    domain: str = ""
    """Empty for ONNX's own operators."""

    refuse: Callable[[onnx.NodeProto], str | None] | None = None
    """Returns the reason why a node cannot be imported whatever its inputs are, if any."""

    is_foreign: bool = False
    """Whether onnx knows no shapes of it, so that ``expand`` comes before all shapes."""

    needs_shapes: bool = False
    """Whether ``expand`` of a foreign operator needs the shapes of its inputs."""

    outputs: int | None = None
    """Outputs that are computed, of those that are optional; others must have no readers."""

    defect: Callable[[onnx.NodeProto], str | None] | None = None
    """Returns the defect of a node that onnx's checker accepts, if any."""

    is_defined: bool = False
    """Whether its nodes become those by which ONNX defines it."""

    widen: Rule | None = None
    """Computes in a wider type; asked before constants are folded."""

    reshape: Rule | None = None
    """Replaces a node whose result has another shape than onnx infers."""

    choose: Rule | None = None
    """Computes all results among which an input from data chooses."""

    expand: Rule | None = None
    """Replaces a node by others, of which those of another operator are asked again."""

    shape_inputs: Sequence[int] = ()
    """Inputs that decide a shape or a place in memory; they must not depend on data."""

    scalars: Sequence[int] = ()
    """Inputs of one element, whatever their rank, which onnx does not check; the rules rely on
    that."""

    check: Callable[[onnx.NodeProto, GraphFacts], str | None] | None = None
    """Returns the reason why a node that is still there cannot be translated, if any."""

    translate: Translation | None = None
    """Translates a node; by default TVM's converter does."""


def operators(names: str, **common: Any) -> list[Operator]:
    """Entries that differ in nothing but their names, which are separated by spaces."""
    return [Operator(name, **common) for name in names.split()]
