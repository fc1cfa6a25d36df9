# SPDX-License-Identifier: Apache-2.0
"""Models of many equal layers: a few of them are imported and lowered, and stand for all.

A language model is a run of equal layers in its graph. A model of three of them and one of four
differ by the operators of one; that difference, once more for each layer that was left out, gives
those of all. Where the two differ by anything else the whole model is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ...errors import InvalidModelError, TVMFusionError
from ...onnx.frontend import ImportedModel, ShapesOfGraph, import_onnx
from ...onnx.model.graph_edits import nested_graphs
from ...onnx.model.loader import (
    check_external_data,
    load_all_external_data,
    load_external_data,
    parse_model,
    read_model,
)
from ...onnx.model.weights import to_array
from ...runtime.host_arrays import refuse_open_shapes
from .eager import EagerRun, lower_to_ranks
from .lowered import LoweredOp

FEW = 3
"""Layers that are lowered; the same with one more tells what a layer is."""

_LEAST_LAYERS = FEW + 3
_LEAST_NODES = 64
"""Nodes that must be saved, or the whole model is as fast."""

_FACTORS = {
    "MatMul": (0, 1),
    "Gemm": (0, 1),
    "Conv": (1,),
    "MatMulInteger": (1,),
    "DequantizeLinear": (0,),
    "MatMulNBits": (1, 2, 3),
}
"""Inputs of operators whose values no time depends on."""

_FLOATS = tuple(onnx.TensorProto.DataType.Value(x) for x in ("FLOAT", "FLOAT16", "BFLOAT16"))

Shapes = Mapping[str, Any]


class StaticModel:
    """A model whose shapes are all known, imported as far as an engine asks for it."""

    def __init__(
        self,
        model: Any,
        # Sizes of open dimensions, see :func:`.frontend.import_onnx`.
        shapes: ShapesOfGraph | None = None,
    ) -> None:
        self._model, self._shapes = model, shapes

    @cached_property
    def whole(self) -> ImportedModel:
        """The whole model, imported.

        Raises ``InvalidModelError`` if a dimension is open: the message names it, and the option
        that binds it.
        """
        return _import(self._model, self._shapes, {})

    @cached_property
    def _parts(self) -> tuple[ImportedModel, ImportedModel, int] | None:
        """Models of a few layers and of one more, and how many more the model has."""
        try:
            proto = parse_model(read_model(self._model))
            is_path = not isinstance(self._model, bytes | onnx.ModelProto)
            check_external_data(proto, Path(self._model) if is_path else None)
        except TVMFusionError:
            return None  # import of the whole says why
        shapes = self._shapes(proto.graph) if callable(self._shapes) else self._shapes
        run = find_layers(proto.graph, shapes or {})
        if run is None:
            return None
        try:
            few, more = (_import(*shortened(proto, run, n, shapes or {})) for n in (FEW, FEW + 1))
        except TVMFusionError:
            return None
        return few, more, run.count - FEW

    def lower(self, kind: str, ranks: int, fused: Collection[str]) -> EagerRun:
        """Operators as eager PyTorch runs them, see :func:`.eager.lower_to_ranks`."""
        found = None
        if self._parts is not None:
            few, more, times = self._parts
            less, rest = (lower_to_ranks(one.mod, kind, ranks, fused) for one in (few, more))
            found = continued(less, rest, times)
        return found or lower_to_ranks(self.whole.mod, kind, ranks, fused)


def _import(model: Any, shapes: Any, weights: Mapping[str, np.ndarray]) -> ImportedModel:
    imported = import_onnx(model, shapes, weights)
    remedy = "a prediction needs sizes: bind each name, as in shapes={'batch': 1} (--shape batch=1)"
    refuse_open_shapes(imported.inputs, InvalidModelError, remedy)
    return imported


@dataclass(frozen=True)
class Layers:
    """A run of equal layers in a graph."""

    start: int
    period: int
    count: int
    """``start``, ``period`` and ``count``: first node, nodes of a layer, and layers."""

    def removed(self, kept: int) -> range:
        """Nodes of all layers but the first ``kept``."""
        return range(self.start + kept * self.period, self.start + self.count * self.period)


def find_layers(
    graph: onnx.GraphProto,
    shapes: Shapes,  # Sizes, of which those of whole inputs count as parts of their kinds.
) -> Layers | None:
    """The run of equal layers by which a graph can be shortened most; None if there is none.

    Nodes are equal that have the same operator and attributes, and read the same tensor or
    tensors of the same kind from equal places: results, inputs, and weights of one shape.
    """
    nodes = graph.node
    if any(nested_graphs(node) for node in nodes) or len(graph.sparse_initializer):
        return None
    table = _signatures(graph, shapes)
    if table is None:
        return None
    kind, origin, name = table
    best, saved = None, _LEAST_NODES
    for period in range(1, len(nodes) // _LEAST_LAYERS + 1):
        same = kind[period:] == kind[:-period]
        # What was made farther before is made by other nodes than layers in the model of a few.
        is_near = origin[period:] <= (FEW - 2) * period
        is_alike = (origin[period:] == origin[:-period]) & is_near
        same &= is_alike | (name[period:] == name[:-period])
        start, length = _longest(same.all(axis=1))
        found = Layers(start, period, (length + period) // period)
        fewer = (found.count - FEW - 1) * period
        if found.count >= _LEAST_LAYERS and fewer > saved and _is_apart(graph, found):
            best, saved = found, fewer
    return best


def _longest(same: np.ndarray) -> tuple[int, int]:
    """Begin and length of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])


def _signatures(
    graph: onnx.GraphProto, shapes: Shapes
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(nodes, 1 + inputs) each: kinds, how many nodes before they were made or first read, names.

    The first column is the node itself. None if a node reads what a later one makes.
    """
    made = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    kinds = _kinds(graph, shapes)
    results = {value.name for value in graph.output}
    numbers: dict[Any, int] = {}
    width = 1 + max((len(node.input) for node in graph.node), default=0)
    kind, origin, named = (np.full((len(graph.node), width), -1) for _ in range(3))
    first: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(graph.node):
        attributes = tuple(sorted(entry.SerializeToString() for entry in node.attribute))
        outputs = tuple(bool(name) + (name in results) for name in node.output)
        own = (node.domain, node.op_type, attributes, outputs, len(node.input))
        kind[index, 0] = numbers.setdefault(own, len(numbers))
        for slot, name in enumerate(node.input, 1):
            if not name:
                continue
            what: Any
            if name in made:
                since, what = made[name], list(graph.node[made[name]].output).index(name)
                if since >= index:
                    return None
            else:
                since, place = first.setdefault(name, (index, slot))
                what = (place, kinds.get(name, name))
            kind[index, slot] = numbers.setdefault(what, len(numbers))
            origin[index, slot] = index - since
            named[index, slot] = numbers.setdefault(name, len(numbers))
    return kind, origin, named


def _kinds(graph: onnx.GraphProto, shapes: Shapes) -> dict[str, Any]:
    """Kinds of tensors by name, which tell inputs and weights apart."""
    kinds: dict[str, Any] = {
        value.name: (value.type.SerializeToString(), str(shapes.get(value.name)))
        for value in graph.input
    }
    factors = _factors(graph)
    for tensor in graph.initializer:
        content = None if tensor.name in factors else _content(tensor)
        kinds[tensor.name] = tensor.data_type, tuple(tensor.dims), content
    return kinds


def _factors(graph: onnx.GraphProto) -> set[str]:
    """Names of tensors whose values no time depends on; also tables that an input's rows choose."""
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS}
    inputs = {value.name for value in graph.input}
    factors, others = set[str](), set[str]()
    for node in graph.node:
        free = _FACTORS.get(node.op_type, ())
        if node.op_type == "Gather" and len(node.input) > 1:
            is_table = node.input[0] in floats and node.input[1] in inputs
            free = (0,) if is_table else ()
        for slot, name in enumerate(node.input):
            (factors if slot in free else others).add(name)
    return factors - others


def _content(tensor: onnx.TensorProto) -> Any:
    """The values of a tensor; of a vector of different floats only that it is one."""
    value = to_array(load_external_data(tensor))
    if value.dtype == object:
        return tuple(value.ravel().tolist())
    is_floats = value.dtype.kind not in "iub"
    if is_floats and value.ndim == 1 and value.size > 1 and (value != value[0]).any():
        return "vector"
    elements = np.ascontiguousarray(value).reshape(-1)
    return sha256(elements.view(np.uint8).data).digest()


def _is_apart(graph: onnx.GraphProto, run: Layers) -> bool:
    """Return whether nothing behind the layers reads what is left out with those to remove.

    That is what they make, but for the last two of them, and weights and inputs of their own.
    """
    removed = run.removed(FEW)
    layers, behind = graph.node[removed.start : removed.stop], graph.node[removed.stop :]
    left_out = {name for node in layers[: -2 * run.period] for name in node.output}
    made = {name for node in graph.node for name in node.output}
    before = {name for node in graph.node[: removed.start] for name in node.input} | made
    left_out |= {name for node in layers for name in node.input if name} - before
    return not any(name in left_out for node in behind for name in node.input)


def shortened(
    model: onnx.ModelProto, run: Layers, kept: int, shapes: Shapes
) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, np.ndarray]]:
    """The model with only so many of its layers, and what the import of it needs.

    Returns the model; the sizes that it takes; and values of its factors, which are zeros, since no
    time depends on them, so that no memory is read or written for them.
    """
    whole, removed = model.graph, run.removed(kept)
    by_name = {
        old: new
        for index in removed[-2 * run.period :]
        for old, new in zip(
            whole.node[index].output, whole.node[index - len(removed)].output, strict=True
        )
    }
    short = onnx.ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
    )
    graph = short.graph
    graph.name = whole.name
    graph.node.extend([*whole.node[: removed.start], *whole.node[removed.stop :]])
    for node in graph.node[removed.start :]:
        node.input[:] = [by_name.get(name, name) for name in node.input]
    gone = {name for index in removed for name in whole.node[index].output if name}
    gone |= {name for index in removed for name in whole.node[index].input}
    gone -= {name for node in graph.node for name in (*node.input, *node.output)}
    for field in ("input", "output", "value_info"):
        values = getattr(whole, field)
        getattr(graph, field).extend(value for value in values if value.name not in gone)
    factors, declared, weights = _factors(whole), {value.name for value in graph.input}, {}
    for tensor in whole.initializer:
        if tensor.name in gone:
            continue
        if tensor.name not in factors:
            graph.initializer.append(tensor)
            continue
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        weights[tensor.name] = np.zeros(tuple(tensor.dims), dtype)
        if tensor.name not in declared:
            names = tensor.name, tensor.data_type, tensor.dims
            graph.input.append(helper.make_tensor_value_info(*names))
    load_all_external_data(short)
    return short, {name: size for name, size in shapes.items() if name not in gone}, weights


def continued(few: EagerRun, more: EagerRun, times: int) -> EagerRun | None:
    """A run of ``times`` layers more than the first, of which the second has one more.

    None if the two differ by anything but the operators of a layer like the one before it.
    """
    size = len(more.ops) - len(few.ops)
    start = _common(few.ops, more.ops)
    layer = more.ops[start : start + size]
    if (
        size <= 0
        or start < size
        or few.ops[start - size : start] != layer
        or few.ops[start:] != more.ops[start + size :]
    ):
        return None
    ops = [*few.ops[:start], *times * layer, *few.ops[start:]]
    weights = few.weight_bytes + times * (more.weight_bytes - few.weight_bytes)
    # What is held at an operator grows alike with each layer, and from layer to layer alike, so
    # that it is most in one of the first or in one of the last. The end may begin as a layer does:
    # only places a layer away from where the runs part are those of the same operators.
    behind = len(few.ops) - start + 2 * size
    ends = [(few.held[: start + 1 - size], more.held), (few.held[::-1][:behind], more.held[::-1])]
    held = [one + times * (other - one) for pair in ends for one, other in zip(*pair, strict=False)]
    return EagerRun(ops, weights, tuple(held))


def _common(one: Sequence[LoweredOp], other: Sequence[LoweredOp]) -> int:
    """Count of first operators that are the same in both."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
