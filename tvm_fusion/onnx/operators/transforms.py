# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms and determinants.

DFT and STFT are products with a matrix that numpy's transforms of unit vectors give::

    DFT:   y = Reshape(x, [..., n * parts]) @ M
    STFT:  y = Reshape(Gather(signal, frames) * window, ...) @ M

Determinants have a kernel of our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tvm import relax

from schedules.cpu.loops.determinants import determinants

from ..model.expansion import Expansion
from ..model.graph_edits import all_graphs, attribute, is_default_domain, set_attributes
from ..model.tensor_facts import GraphFacts
from .casts import widen_sum
from .operator import Operator, operators

LONGEST = 4096
"""Longest transform; a matrix of its square is stored."""


def write_sides(model: onnx.ModelProto) -> None:
    """Write the default ``onesided`` of each STFT; onnx infers shapes by another default."""
    for graph in all_graphs(model):
        for node in graph.node:
            if node.op_type == "STFT" and is_default_domain(node):
                set_attributes(node, onesided=attribute(node, "onesided", 1))


def expand_dft(expansion: Expansion) -> None:
    """Replace a DFT that :func:`fourier_problem` accepts."""
    facts = expansion.facts
    if fourier_problem(expansion.node, facts) is not None:
        return
    x = expansion.input(0)
    shape = list(facts.shape(x) or ())
    axis = _axis(expansion.node, facts) % len(shape)
    onesided, inverse = (bool(expansion.get(n, 0)) for n in ("onesided", "inverse"))
    count = shape[axis]
    length = _length(expansion.node, facts, count, onesided and inverse)
    last = len(shape) - 2
    perm = [i for i in range(len(shape) - 1) if i != axis]
    if axis != last:
        x = expansion.emit("Transpose", x, perm=[*perm, axis, len(shape) - 1])
    outer = [shape[i] for i in perm]
    matrix = _matrix(count, length, shape[-1], onesided, inverse)
    kind = helper.tensor_dtype_to_np_dtype(facts.dtype(expansion.input(0)))
    flat = expansion.emit("Reshape", x, _ints(expansion, *outer, count * shape[-1]))
    columns = matrix.reshape(count * shape[-1], -1).astype(kind)
    product = expansion.emit("MatMul", flat, expansion.constant("transform", columns))
    result = expansion.emit("Reshape", product, _ints(expansion, *outer, *matrix.shape[2:]))
    if axis != last:
        back = [*range(axis), last, *range(axis, last), last + 1]
        result = expansion.emit("Transpose", result, perm=back)
    expansion.finish(result)


def expand_stft(expansion: Expansion) -> None:
    """Replace an STFT that :func:`fourier_problem` accepts."""
    facts = expansion.facts
    if fourier_problem(expansion.node, facts) is not None:
        return
    signal, step_name, window, length_name = [*expansion.node.input, ""][:4]
    batch, count, parts = facts.shape(signal) or (0, 0, 0)
    length = _frame(facts, window, length_name)
    step = int(facts.constant(step_name).item())  # type: ignore[union-attr]
    starts = np.arange((count - length) // step + 1) * step
    places = starts[:, None] + np.arange(length)
    frames = expansion.emit("Gather", signal, expansion.constant("frames", places), axis=1)
    if window:
        shape = _ints(expansion, 1, 1, length, 1)
        frames = expansion.emit("Mul", frames, expansion.emit("Reshape", window, shape))
    onesided = bool(expansion.get("onesided", 1))
    matrix = _matrix(length, length, parts, onesided, False)
    kind = helper.tensor_dtype_to_np_dtype(facts.dtype(signal))
    flat = expansion.emit("Reshape", frames, _ints(expansion, batch, len(starts), length * parts))
    columns = matrix.reshape(length * parts, -1).astype(kind)
    product = expansion.emit("MatMul", flat, expansion.constant("transform", columns))
    shape = _ints(expansion, batch, len(starts), *matrix.shape[2:])
    expansion.finish(expansion.emit("Reshape", product, shape))


def fourier_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why a transform cannot be written as a product, if any."""
    shape = facts.shape(node.input[0])
    if shape is None:
        return f"the shape of {node.input[0]!r} is only known at run time"
    positions = (1, 3) if node.op_type == "STFT" else (1, 2)
    for position in positions:
        name = node.input[position] if position < len(node.input) else ""
        if name and facts.constant(name) is None:
            return f"its input {name!r} depends on data; expected a constant"
    if node.op_type == "STFT":
        window = node.input[2] if len(node.input) > 2 else ""
        length = _frame(facts, window, node.input[3] if len(node.input) > 3 else "")
        return _too_long(length) if 0 < length <= shape[1] else "it knows no length of its frames"
    axis = _axis(node, facts)
    if not -len(shape) <= axis < len(shape) or axis % len(shape) == len(shape) - 1:
        return f"its axis is {axis}, and {node.input[0]!r} has the shape {shape}"
    return _too_long(shape[axis])


def _too_long(length: int) -> str | None:
    return None if length <= LONGEST else f"its length is {length}; at most {LONGEST} is compiled"


def _frame(facts: GraphFacts, window: str, name: str) -> int:
    """Length of the frames of an STFT; 0 if unknown."""
    if name:
        return int(facts.constant(name).item())  # type: ignore[union-attr]
    shape = facts.shape(window) if window else None
    return shape[0] if shape else 0


def _axis(node: onnx.NodeProto, facts: GraphFacts) -> int:
    if len(node.input) > 2 and node.input[2]:
        return int(facts.constant(node.input[2]).item())  # type: ignore[union-attr]
    # The attribute of older versions, and both versions' defaults.
    entry = attribute(node, "axis")
    return (-2 if len(node.input) > 2 else 1) if entry is None else entry


def _length(node: onnx.NodeProto, facts: GraphFacts, given: int, halved: bool) -> int:
    name = node.input[1] if len(node.input) > 1 else ""
    if name:
        return int(facts.constant(name).item())  # type: ignore[union-attr]
    return 2 * (given - 1) if halved else given


def _matrix(given: int, length: int, parts: int, onesided: bool, inverse: bool) -> np.ndarray:
    """Transforms of all unit vectors: [given, parts of the input, results, parts of them]."""
    units = np.stack([np.eye(given, dtype=complex), 1j * np.eye(given)][:parts], axis=1)
    if inverse and onesided:
        return np.fft.irfft(units, length, axis=-1)[..., None]
    fixed = units[..., :length]
    transform = np.fft.ifft if inverse else np.fft.fft
    found = transform(fixed, length, axis=-1)
    found = found[..., : length // 2 + 1] if onesided else found
    return np.stack([found.real, found.imag], axis=-1)


def _ints(expansion: Expansion, *values: int) -> str:
    return expansion.constant("shape", np.array(values, np.int64))


def translate_determinant(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: dict[str, Any]
) -> relax.Expr:
    """Determinants of [..., size, size]; those of 16-bit numbers are computed in float32."""
    x = inputs[0]
    stored = str(x.ty.dtype)
    dtype = stored if stored == "float64" else "float32"
    *outer, _, size = x.ty.shape
    batch = math.prod(outer) if outer else 1
    x = builder.normalize(relax.op.astype(x, dtype))
    x = builder.normalize(relax.op.reshape(x, (batch, size, size)))
    kernel = builder.add_func(determinants(batch, int(size), dtype), "determinants")
    types = [
        relax.TensorType((batch,), dtype),
        relax.TensorType((batch, size, size), dtype),
        relax.TensorType((batch,), "int64"),
    ]
    all_results = builder.emit(relax.call_tir(kernel, [x], types))
    result = builder.emit(relax.TupleGetItem(all_results, 0))
    return relax.op.astype(builder.normalize(relax.op.reshape(result, outer)), stored)


def determinant_problem(node: onnx.NodeProto, facts: GraphFacts) -> str | None:
    """Return the reason why determinants cannot be computed, if any."""
    dims = facts.dims(node.input[0])
    if dims is None or len(dims) < 2 or None in dims[-2:]:
        return f"the size of its matrices {node.input[0]!r} is only known at run time"
    return "its matrices are empty" if 0 in dims[-2:] else None


OPERATORS = (
    *operators("BlackmanWindow HammingWindow HannWindow", is_defined=True),
    Operator("Det", widen=widen_sum, check=determinant_problem, translate=translate_determinant),
    Operator("DFT", widen=widen_sum, expand=expand_dft, check=fourier_problem),
    Operator("MelWeightMatrix", shape_inputs=(0, 1, 2, 3, 4)),
    Operator("STFT", widen=widen_sum, scalars=(1, 3), expand=expand_stft, check=fourier_problem),
)
