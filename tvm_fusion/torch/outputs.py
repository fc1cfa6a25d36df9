# SPDX-License-Identifier: Apache-2.0
"""Outputs of a graph of ``torch.compile``: what is computed, and what is made of it in eager mode.

A compiled model returns new, contiguous tensors. In eager mode an output may be a view of an
argument or of another output, and whoever changes one changes both; it may have other strides, or
be a number that is computed from sizes. So the model computes only the tensors whose memory the
outputs are in, and a second graph, of views and numbers alone, makes the outputs of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..errors import TVMFusionError

_SHAPE_CHANGERS = frozenset(
    """as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_
    unsqueeze_""".split()
)
"""Methods that change a tensor's shape or strides in place."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of a graph."""

    plan: tuple[tuple[str, Any], ...]
    """Origin of each output: ``("argument", place)``, ``("constant", value)``, ``("computed",
    index)`` or ``("made", index)``."""
    computed: tuple[str, ...]  # Names of the nodes that a model computes.
    orders: tuple[tuple[int, ...] | None, ...]
    """Axes of each of them from the outermost in memory to the innermost; None if the tensor is
    contiguous."""
    maker: fx.GraphModule | None
    """Function of all arguments, and a list of the computed tensors, that returns what is made of
    these."""

    @classmethod
    def of(cls, graph: fx.GraphModule, inputs: Sequence[str]) -> Outputs:
        """Outputs of a graph whose inputs have these names.

        Raises
        ------
        TVMFusionError
            If one cannot be made of what a model computes.
        """
        maker = _Maker(graph, inputs)
        plan: list[tuple[str, Any]] = []
        for value in graph.graph.output_node().args[0]:
            if not isinstance(value, fx.Node):
                plan.append(("constant", value))
            elif value.op == "placeholder":
                plan.append(("argument", inputs.index(value.name)))
            elif maker.is_made(value):
                plan.append(("made", maker.make(value)))
            else:
                plan.append(("computed", maker.compute(value)))
        orders = tuple(_order(value_of(node)) for node in maker.computed)
        names = tuple(node.name for node in maker.computed)
        return cls(tuple(plan), names, orders, maker.finish())

    def drop_arguments(self, graph: fx.Graph) -> None:
        """Let a copy of the graph return the computed tensors only."""
        nodes = {node.name: node for node in graph.nodes}
        graph.output_node().args = (tuple(nodes[name] for name in self.computed),)

    def join(self, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """All outputs, in order."""
        results = [
            result if order is None else _ordered(result, order)
            for result, order in zip(results, self.orders, strict=True)
        ]
        made = () if self.maker is None else self.maker.forward(*arguments, results)
        sources = {"argument": arguments, "computed": results, "made": made}
        return tuple(
            value if kind == "constant" else sources[kind][value] for kind, value in self.plan
        )


def value_of(node: fx.Node) -> Any:
    """The tensor without data, or the number, that stands for a node's result."""
    return node.meta.get("example_value", node.meta.get("val"))


class _Maker:
    """Builder of the second graph, and of the list of what a model computes for it.

    Parameters
    ----------
    graph : torch.fx.GraphModule
        The whole graph.
    inputs : sequence of str
        Names of its inputs.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[str]) -> None:
        self.computed: list[fx.Node] = []
        self._owners: dict[int, fx.Node] = {}
        for node in graph.graph.nodes:
            memory = _memory(value_of(node))
            if memory is not None:
                self._owners.setdefault(memory, node)
        users: dict[fx.Node, set[fx.Node]] = {}
        for node in graph.graph.output_node().all_input_nodes:
            users.setdefault(self._owner(node), set()).add(node)
        self._shared = {owner for owner, nodes in users.items() if len(nodes) > 1}
        self._module = graph
        self._graph = fx.Graph(graph)
        self._nodes: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self._nodes[node] = self._graph.placeholder(node.name)
        self._computed = self._graph.placeholder("computed")
        self._made: list[fx.Node] = []

    def is_made(self, node: fx.Node) -> bool:
        """Return whether an output is a number, or in memory that is not its own alone."""
        owner = self._owner(node)
        is_given = owner.op in ("placeholder", "get_attr")
        return is_given or owner in self._shared or not _is_tensor(node)

    def make(self, node: fx.Node) -> int:
        """Add an output of the second graph; its number."""
        self._made.append(self._copied(node))
        return len(self._made) - 1

    def compute(self, node: fx.Node) -> int:
        """Let the model compute a node; the number of its result."""
        if node not in self.computed:
            self.computed.append(node)
        return self.computed.index(node)

    def finish(self) -> fx.GraphModule | None:
        """The second graph; None if nothing is made."""
        if not self._made:
            return None
        self._graph.output(tuple(self._made))
        return fx.GraphModule(self._module, self._graph)

    def _owner(self, node: fx.Node) -> fx.Node:
        """The first node in the memory of this one."""
        memory = _memory(value_of(node))
        return node if memory is None else self._owners[memory]

    def _copied(self, node: fx.Node) -> fx.Node:
        """The node of the second graph that has the value of a node of the whole one."""
        if node not in self._nodes:
            self._nodes[node] = self._copy(node)
        return self._nodes[node]

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            return self._graph.node_copy(node, self._copied)
        if str(node.target).rpartition(".")[2] in ("item", "_local_scalar_dense"):
            raise TVMFusionError("an output is a number that is computed from data")
        if _is_tensor(node):
            if self._owner(node) is node:
                index = self.compute(node)
                return self._graph.call_function(operator.getitem, (self._computed, index))
            if str(node.target) in _SHAPE_CHANGERS:
                raise TVMFusionError(f"{node.target} changes the shape of an output in place")
            for source in node.all_input_nodes:
                if _is_same_view(value_of(source), value_of(node)):
                    return self._copied(source)  # what changes a tensor in place returns it
        return self._graph.node_copy(node, self._copied)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _memory(value: Any) -> int | None:
    """Identity of a tensor's memory; None for what has none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _is_same_view(first: Any, other: Any) -> bool:
    """Return whether two tensors are the same elements in the same shape."""
    memory = _memory(first)
    if memory is None or memory != _memory(other) or first.dtype != other.dtype:
        return False
    if first.is_conj() != other.is_conj() or first.is_neg() != other.is_neg():
        return False
    return _geometry(first) == _geometry(other)


def _geometry(value: torch.Tensor) -> tuple[str, ...]:
    """Shape, strides and offset; as text, since comparing symbolic sizes would add guards."""
    return tuple(map(str, (*value.shape, "by", *value.stride(), "from", value.storage_offset())))


def _order(value: Any) -> tuple[int, ...] | None:
    """Axes of a dense tensor from the outermost in memory to the innermost; None if in order."""
    sizes, strides = _hints(value.shape), _hints(value.stride())
    if sizes is None or strides is None or 0 in sizes:
        return None
    axes = [axis for axis in range(len(sizes)) if sizes[axis] > 1]
    axes.sort(key=lambda axis: -strides[axis])
    dense = 1
    for axis in reversed(axes):
        if strides[axis] != dense:
            return None
        dense *= sizes[axis]
    if axes == sorted(axes):
        return None
    return tuple(axes) + tuple(axis for axis in range(len(sizes)) if sizes[axis] == 1)


def _hints(sizes: Sequence[Any]) -> list[int] | None:
    """Sizes of the traced call; None if one is not known."""
    hints = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
    return None if None in hints else hints


def _ordered(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor with its axes in this order in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(back)
