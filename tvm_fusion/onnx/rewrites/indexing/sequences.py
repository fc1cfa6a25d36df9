# SPDX-License-Identifier: Apache-2.0
"""Write ReverseSequence and TensorScatter, whose places along one axis depend on the batch.

::

    ReverseSequence:  t = [0 ... time);    y = GatherElements(x, Where(t < n, n - 1 - t, t))
    TensorScatter:    t = [0 ... length) - start, or that modulo length;
                      y = Where(0 <= t < steps, GatherElements(update, Clip(t)), past)

Where an update does not fit behind its start, its end is left out.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from ...model.graph_edits import attribute
from ...model.tensor_facts import GraphFacts
from ..expansion import Expansion


def expand_reverse_sequence(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a ReverseSequence of known shape."""
    x, lengths = node.input
    shape = expansion.facts.shape(x)
    time, batch = (attribute(node, n, d) for n, d in (("time_axis", 0), ("batch_axis", 1)))
    if shape is None or not 0 <= min(time, batch) < max(time, batch) < len(shape):
        return
    steps = _along(expansion, np.arange(shape[time]), time, len(shape))
    count = _batched(expansion, lengths, batch, len(shape))
    last = expansion.emit("Sub", count, _number(expansion, 1))
    inside = expansion.emit("Less", steps, count)
    places = expansion.emit("Where", inside, expansion.emit("Sub", last, steps), steps)
    expansion.finish(_gather(expansion, x, places, shape, time))


def expand_tensor_scatter(node: onnx.NodeProto, expansion: Expansion) -> None:
    """Replace a TensorScatter of known shapes."""
    facts = expansion.facts
    past, update, starts = [*node.input, ""][:3]
    shape, part = facts.shape(past), facts.shape(update)
    if shape is None or part is None:
        return
    axis = attribute(node, "axis", -2) % len(shape)
    length, steps = shape[axis], part[axis]
    places = _along(expansion, np.arange(length), axis, len(shape))
    if starts:
        start = _batched(expansion, starts, 0, len(shape))
        places = expansion.emit("Sub", places, start)
        if attribute(node, "mode", "linear") == "circular":
            places = expansion.emit("Mod", places, _number(expansion, length))
    low, high = _number(expansion, 0), _number(expansion, steps - 1)
    within = expansion.emit("Min", expansion.emit("Max", places, low), high)
    is_new = expansion.emit("Equal", within, places)
    new = _gather(expansion, update, within, shape, axis)
    expansion.finish(expansion.emit("Where", is_new, new, past))


def sequence_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a node of this family cannot be written out, if any."""
    names = node.input[: 1 if node.op_type == "ReverseSequence" else 2]
    unknown = [name for name in names if facts.shape(name) is None]
    if unknown:
        return f"the shape of {unknown[0]!r} is only known at run time"
    if node.op_type == "ReverseSequence":  # all others were replaced
        return "its time_axis and batch_axis are not two of the dimensions of its input"
    return None


def _number(expansion: Expansion, value: int) -> str:
    return expansion.constant("number", np.array(value, np.int64))


def _along(expansion: Expansion, values: np.ndarray, axis: int, rank: int) -> str:
    """Numbers along one axis of several."""
    sizes = [1] * rank
    sizes[axis] = -1
    return expansion.constant("steps", values.astype(np.int64).reshape(sizes))


def _batched(expansion: Expansion, name: str, axis: int, rank: int) -> str:
    """A vector of whole numbers along the axis of the batch."""
    sizes = np.ones(rank, np.int64)
    sizes[axis] = -1
    wide = expansion.emit("Cast", name, to=TensorProto.INT64)
    return expansion.emit("Reshape", wide, expansion.constant("sizes", sizes))


def _gather(expansion: Expansion, x: str, places: str, shape: tuple[int, ...], axis: int) -> str:
    """Elements at places that broadcast to the shape of the result."""
    sizes = expansion.constant("sizes", np.array(shape, np.int64))
    whole = expansion.emit("Expand", places, sizes)
    expansion.facts.declare(whole, TensorProto.INT64, shape)
    return expansion.emit("GatherElements", x, whole, axis=axis)
