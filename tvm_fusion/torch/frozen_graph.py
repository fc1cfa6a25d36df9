# SPDX-License-Identifier: Apache-2.0
"""Graph of ``torch.compile`` whose weights become part of compiled models.

Dynamo passes parameters and buffers as arguments. A compiled model has them packed for its kernels,
so it is for these tensors and their present values: other tensors get a model of their own, and
changed values a new one.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock

from ..errors import TVMFusionError
from .exported_program import changed_in_place
from .lowering import Choices, Run, bind_input, export, lower, lower_whole, warn_once
from .outputs import Outputs, value_of

MOST_VARIANTS = 8
"""Compiled models of a graph that are kept, and times that changed weights are compiled anew."""

_STATIC = "_dynamo_static_input_type"
"""Key by which Dynamo marks parameters, buffers and other tensors of modules."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Variant:
    """Compiled form of a graph for certain weights."""

    run: Run  # Function from the other arguments to the computed outputs.
    inputs: tuple[int, ...]  # Positions of those arguments.
    weights: tuple[torch.Tensor, ...]
    """The weights; kept, so that no other tensor gets their identity."""
    versions: list[Any]  # Their versions, see ``_versions``.
    changes_inputs: bool  # Whether it changes arguments in place.


class FrozenGraph:
    """Callable that compiles a graph of Dynamo in its first call.

    Parameters
    ----------
    graph : torch.fx.GraphModule
        The graph.
    choices : Choices
        The user's options.
    """

    def __init__(self, graph: fx.GraphModule, choices: Choices) -> None:
        self._graph = graph
        self._choices = choices
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._names = [node.name for node in nodes]
        self._static = [i for i, node in enumerate(nodes) if _STATIC in _tensor_dict(node)]
        self._floats = [i for i, node in enumerate(nodes) if _is_float(node)]
        self._own = [*graph.parameters(), *graph.buffers()]
        self._has_open_shape = any(_is_symbolic(node) for node in nodes)
        self._can_stay_open = self._has_open_shape
        is_single = _is_single(nodes)
        self._open_floats = [i for i in self._floats if is_single and _is_operand(nodes[i])]
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._updates = 0
        self._is_eager = False
        self._lock = threading.RLock()
        self._outputs: Outputs | None = None

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Compute all outputs of the graph."""
        if self._is_eager:
            return self._graph(*arguments)
        weights = self._weights(arguments)
        variant = self._variants.get(self._key(arguments, weights))
        if variant is None or variant.versions != _versions(weights):
            # Tracing replaces functions of PyTorch, also for other threads that trace.
            with self._lock, compile_lock:
                variant = self._make(arguments)
        if variant is None or (variant.changes_inputs and _share_memory(arguments)):
            return self._graph(*arguments)
        assert self._outputs is not None, "the graph was compiled"
        results = variant.run(*[arguments[place] for place in variant.inputs])
        return self._outputs.join(arguments, results)

    def _weights(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        return [*(arguments[place] for place in self._static), *self._own]

    def _key(self, arguments: Sequence[Any], weights: Sequence[torch.Tensor]) -> Any:
        """Key of a variant: identities of the weights, numbers, and shapes if these are fixed."""
        key: list[Any] = [*map(id, weights)]
        fixed = [place for place in self._floats if place not in self._open_floats]
        key += [float(arguments[place]) for place in fixed]
        if self._has_open_shape and not self._can_stay_open:
            key += [x.shape if isinstance(x, torch.Tensor) else x for x in arguments]
        return tuple(key)

    def _make(self, arguments: Sequence[Any]) -> Variant | None:
        """Compile the graph for these weights; None if it stays in eager mode."""
        if self._is_eager:
            return None
        stale = self._variants.pop(self._key(arguments, self._weights(arguments)), None)
        self._updates += stale is not None
        if self._updates > MOST_VARIANTS:
            self._give_up(f"its weights have changed {self._updates} times")
            return None
        try:
            run, inputs, changes_inputs = self._compile(arguments)
        except Exception as error:  # PyTorch's tracers raise anything
            text = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, TVMFusionError) else f"{type(error).__name__}: "
            self._give_up(kind + text[0])
            return None
        weights = self._weights(arguments)  # Weights that are left, see _compile.
        variant = Variant(run, tuple(inputs), tuple(weights), _versions(weights), changes_inputs)
        self._variants[self._key(arguments, weights)] = variant
        if len(self._variants) > MOST_VARIANTS:
            self._variants.popitem(last=False)
        return variant

    def _give_up(self, reason: str) -> None:
        self._is_eager = True
        self._variants.clear()
        warn_once(f"torch.compile runs a graph in eager mode: {reason}")

    def _compile(self, arguments: Sequence[Any]) -> tuple[Run, list[int], bool]:
        """A compiled form, the positions of its arguments, and whether it changes some of them."""
        if any(map(_differentiates, self._graph.graph.nodes)):
            raise TVMFusionError("it differentiates a function")
        self._outputs = self._outputs or Outputs.of(self._graph, self._names)
        while self._can_stay_open or self._open_floats:
            try:
                return self._compile_open(arguments)
            except TVMFusionError as error:
                _LOG.info("a model for each shape, at most %d are kept: %s", MOST_VARIANTS, error)
                # First each float has a model of its own, then each shape, too.
                self._can_stay_open &= bool(self._open_floats)
                self._open_floats = []
        while True:
            module, inputs = self._frozen(arguments)
            program = export(module, [arguments[place] for place in inputs])
            changed = set(program.graph_signature.buffers_to_mutate.values())
            kept = [place for place in self._static if _buffer(place) not in changed]
            if kept == self._static:
                return lower(program, self._choices), inputs, bool(changed_in_place(program))
            # A buffer that the graph itself changes is an input from now on, not a weight.
            self._static = kept

    def _compile_open(self, arguments: Sequence[Any]) -> tuple[Run, list[int], bool]:
        is_open = self._can_stay_open
        module, inputs = self._frozen(arguments, is_open)
        open_dimensions = None
        if is_open:
            nodes = {node.name: node for node in self._graph.graph.nodes}
            open_dimensions = tuple(_open_dimensions(nodes[self._names[place]]) for place in inputs)
        program = export(module, [arguments[place] for place in inputs], open_dimensions)
        return lower_whole(program, self._choices), inputs, False

    def _frozen(
        self, arguments: Sequence[Any], is_open: bool = False
    ) -> tuple[fx.GraphModule, list[int]]:
        """The graph with weights as buffers and sizes as numbers, and the remaining inputs."""
        module = fx.GraphModule(self._graph, copy.deepcopy(self._graph.graph))
        nodes = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
        assert self._outputs is not None, "asked for before"
        self._outputs.drop_arguments(module.graph)
        inputs = []
        for place, name in enumerate(self._names):
            if place in self._static:
                bind_input(module, nodes[name], _buffer(place), arguments[place])
            elif place in self._open_floats:
                for user in list(nodes[name].users):
                    _replace_by_tensor(module.graph, user, nodes[name])
                inputs.append(place)
            elif place in self._floats:
                for user in list(nodes[name].users):
                    _replace_by_number(module.graph, user, float(arguments[place]))
                module.graph.erase_node(nodes[name])
            elif isinstance(arguments[place], torch.Tensor):
                inputs.append(place)
            elif is_open and _is_symbolic(nodes[name]):
                _compute_size(module.graph, nodes[name])
            else:
                _replace_by_number(module.graph, nodes[name], arguments[place])
        module.recompile()
        return module, inputs


def _versions(weights: Sequence[torch.Tensor]) -> list[Any]:
    """Version counters, which each change in place raises, and addresses.

    A new tensor as ``weight.data`` only changes the address. Inference tensors have no counter.
    """
    try:
        counters = [weight._version for weight in weights]
    except RuntimeError:
        counters = [-1 if weight.is_inference() else weight._version for weight in weights]
    return [counters, [weight.data_ptr() for weight in weights]]


def _share_memory(arguments: Sequence[Any]) -> bool:
    """Return whether two arguments are in one memory: what changes one may change the other."""
    places = [x.untyped_storage()._cdata for x in arguments if isinstance(x, torch.Tensor)]
    return len(set(places)) < len(places)


def _differentiates(node: fx.Node) -> bool:
    """Return whether a node is about derivatives, within a graph that itself needs none."""
    target = str(getattr(node.target, "__name__", node.target))
    return "_grad_" in target or "_jvp_" in target


def _is_operand(node: fx.Node) -> bool:
    """Return whether a float is only an operand of arithmetic on tensors."""
    return all(
        getattr(user.target, "__module__", None) == "_operator"
        and isinstance(value_of(user), torch.Tensor)
        for item in node.users
        for user in item.users
    )


def _is_single(nodes: Sequence[fx.Node]) -> bool:
    """Return whether no input is of double precision, so that a float may be a tensor instead."""
    doubles = (torch.float64, torch.complex128)
    values = [value_of(node) for node in nodes if not _is_float(node)]
    return not any(isinstance(x, torch.Tensor) and x.dtype in doubles for x in values)


def _buffer(place: int) -> str:
    return f"static_{place}"


def _tensor_dict(node: fx.Node) -> dict[str, Any]:
    return node.meta.get("tensor_dict") or {}


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.SymInt)


def _is_float(node: fx.Node) -> bool:
    """Return whether an input is a Python float, which Dynamo passes as a tensor."""
    argument = node.meta.get("grapharg")
    is_passed = argument is not None and argument.pass_arg_as_tensor
    return is_passed and all(user.target == "item" for user in node.users)


def _shape(node: fx.Node) -> Sequence[Any]:
    value = value_of(node)
    return value.shape if isinstance(value, torch.Tensor) else ()


def _open_dimensions(node: fx.Node) -> dict[int, Any]:
    """Request that each symbolic dimension of an input stays open."""
    is_open = [_is_open(size) for size in _shape(node)]
    return {axis: torch.export.Dim.DYNAMIC for axis, found in enumerate(is_open) if found}


def _is_open(size: Any) -> bool:
    """Return whether a size is symbolic, and was not found to be a number later."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _compute_size(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an input that is a size by the size of a tensor."""
    if not node.users:
        graph.erase_node(node)
        return
    expression = value_of(node).node.expr
    inputs = [other for other in graph.nodes if other.op == "placeholder"]
    for other in inputs:
        for axis, size in enumerate(_shape(other)):
            if _is_open(size) and size.node.expr == expression:
                with graph.inserting_after(inputs[-1]):
                    known = graph.call_function(torch.ops.aten.sym_size.int, (other, axis))
                node.replace_all_uses_with(known)
                graph.erase_node(node)
                return
    raise TVMFusionError(f"the size {expression} is not that of an input")


def _replace_by_tensor(graph: fx.Graph, item: fx.Node, node: fx.Node) -> None:
    """Replace the number in a tensor of float64 by a tensor that computes as a number does."""
    with graph.inserting_before(item):
        single = graph.call_method("to", (node, torch.get_default_dtype()))
    item.replace_all_uses_with(single)
    graph.erase_node(item)


def _replace_by_number(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    replace: Callable[[fx.Node], Any] = lambda other: value if other is node else other  # noqa: E731
    for user in list(node.users):
        user.args = fx.map_arg(user.args, replace)
        user.kwargs = fx.map_arg(user.kwargs, replace)
    graph.erase_node(node)
