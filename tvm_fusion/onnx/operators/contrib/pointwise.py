# SPDX-License-Identifier: Apache-2.0
"""Activations, normalisations, embeddings, products and convolutions of ``com.microsoft``."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.expansion import Expansion, conv_attributes
from ...model.loader import CONTRIB_DOMAIN
from ..operator import Operator


def gelu(parts: Expansion) -> str | None:
    """``Gelu(x)``."""
    parts.finish(parts.gelu(parts.input(0)))
    return None


def bias_gelu(parts: Expansion) -> str | None:
    """``Gelu(x + bias)``."""
    parts.finish(parts.gelu(parts.emit("Add", parts.input(0), parts.input(1))))
    return None


def fast_gelu(parts: Expansion) -> str | None:
    """``Gelu(x + bias)`` by a hyperbolic tangent."""
    x = parts.input(0)
    parts.finish(parts.tanh_gelu(parts.emit("Add", x, parts.input(1)) if parts.input(1) else x))
    return None


def quick_gelu(parts: Expansion) -> str | None:
    """``x * sigmoid(alpha * x)``."""
    x = parts.input(0)
    inner = parts.emit("Sigmoid", parts.scaled(x, parts.get("alpha", 1.702)))
    parts.finish(parts.emit("Mul", x, inner))
    return None


def skip_layer_norm(parts: Expansion) -> str | None:
    """``LayerNormalization(x + skip + bias)``, and the sum."""
    if [name for name in parts.node.output[1:3] if name]:
        return "its mean or its deviation is asked for"
    total = _sum(parts, parts.input(0), parts.input(1), parts.input(4))
    epsilon = parts.get("epsilon", 1e-12)
    result = parts.layer_norm(total, parts.input(2), parts.input(3), epsilon)
    parts.finish(result, "", "", total)
    return None


def skip_rms_norm(parts: Expansion) -> str | None:
    """The root-mean-square norm of ``x + skip + bias``, and the sum."""
    if [name for name in parts.node.output[1:3] if name]:
        return "its mean or its deviation is asked for"
    total = _sum(parts, parts.input(0), parts.input(1), parts.input(3))
    result = parts.rms_norm(total, parts.input(2), "", parts.get("epsilon", 1e-12))
    parts.finish(result, "", "", total)
    return None


def rms_norm(parts: Expansion) -> str | None:
    """The root-mean-square norm of the last axis."""
    if parts.missing(1) or parts.get("axis", -1) != -1:
        return "it has a second output, or another axis than the last"
    x, scale = parts.input(0), parts.input(1)
    parts.finish(parts.rms_norm(x, scale, "", parts.get("epsilon", 1e-5)))
    return None


def embed_layer_norm(parts: Expansion) -> str | None:
    """The norm of the sum of the embeddings of words, positions and segments."""
    ids, segments, words, positions, kinds, scale, bias, mask, places = (
        parts.input(position) for position in range(9)
    )
    if parts.get("mask_index_type", 0):
        return f"its mask_index_type is {parts.get('mask_index_type')}"
    if not places:
        axis = parts.integers(1)
        length = parts.emit("Gather", parts.emit("Shape", ids), axis)
        places = parts.emit("Range", parts.integers(0), length, axis)
    total = parts.emit(
        "Add", parts.emit("Gather", words, ids), parts.emit("Gather", positions, places)
    )
    if segments:
        total = parts.emit("Add", total, parts.emit("Gather", kinds, segments))
    elif kinds:
        total = parts.emit("Add", total, parts.emit("Gather", kinds, parts.integers(0)))
    result = parts.layer_norm(total, scale, bias, parts.get("epsilon", 1e-12))
    counts = ""
    if mask and len(parts.node.output) > 1 and parts.node.output[1]:
        counts = parts.emit("ReduceSum", mask, parts.integers([1]), keepdims=0)
    elif len(parts.node.output) > 1 and parts.node.output[1]:
        first = parts.integers([1])
        shape = parts.emit("Slice", parts.emit("Shape", ids), parts.integers([0]), first)
        counts = parts.emit("Cast", parts.emit("ConstantOfShape", shape), to=6)
    parts.finish(result, counts, total)
    return None


def fused_matmul(parts: Expansion) -> str | None:
    """``alpha * A @ B``, each with its last two axes exchanged if asked for."""
    if parts.get("transBatchA", 0) or parts.get("transBatchB", 0):
        return "it transposes batches"
    names = [_turned(parts, position) for position in (0, 1)]
    if None in names:
        return f"the rank of {parts.input(names.index(None))!r} is only known at run time"
    product = parts.emit("MatMul", *(name for name in names if name))
    parts.finish(parts.scaled(product, parts.get("alpha", 1.0)))
    return None


def _turned(parts: Expansion, position: int) -> str | None:
    """An input with its last two axes exchanged if asked for; None if its rank is not known."""
    name = parts.input(position)
    if not parts.get(("transA", "transB")[position], 0):
        return name
    dims = parts.facts.dims(name)
    if dims is None:
        return None
    rank = len(dims)
    if rank < 2:
        return name
    return parts.emit("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])


PARAMETERS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}


def fused_gemm(parts: Expansion) -> str | None:
    """A Gemm and an activation."""
    given = {name: parts.get(name) for name in ("alpha", "beta", "transA", "transB")}
    options = {name: value for name, value in given.items() if value is not None}
    result = parts.emit("Gemm", *filter(None, map(parts.input, range(3))), **options)
    name = parts.get("activation", "")
    count = len(PARAMETERS.get(name, ()))
    values = [parts.get(f"activation_{part}") for part in ("alpha", "beta", "gamma")][:count]
    return _activated(parts, result, name, [value for value in values if value is not None])


def fused_conv(parts: Expansion) -> str | None:
    """A Conv, what is added to it, and an activation."""
    operands = filter(None, map(parts.input, range(3)))
    result = parts.emit("Conv", *operands, **conv_attributes(parts.node))
    if parts.input(3):
        result = parts.emit("Add", result, parts.input(3))
    name, values = parts.get("activation", ""), parts.get("activation_params", [])
    return _activated(parts, result, name, values)


def _activated(parts: Expansion, result: str, name: str, values: Sequence[float]) -> str | None:
    """Finish with an activation of a result."""
    if name == "Clip":
        result = parts.emit("Clip", result, *(parts.number_like(value, result) for value in values))
    elif name in ("Relu", "Sigmoid", "Tanh", *PARAMETERS):
        given = dict(zip(PARAMETERS.get(name, ()), values, strict=False))
        result = parts.emit(name, result, **given)
    elif name:
        return f"its activation is {name!r}"
    parts.finish(result)
    return None


def _sum(parts: Expansion, *names: str) -> str:
    given = [name for name in names if name]
    return parts.emit("Sum", *given)


OPERATORS = [
    # ONNX Runtime puts this one into ONNX's own domain, where ONNX has none of this name.
    Operator("SimplifiedLayerNormalization", is_foreign=True, expand=rms_norm),
    Operator(
        "FusedMatMul", CONTRIB_DOMAIN, is_foreign=True, needs_shapes=True, expand=fused_matmul
    ),
    *(
        Operator(name, CONTRIB_DOMAIN, is_foreign=True, expand=rule)
        for name, rule in (
            ("BiasGelu", bias_gelu),
            ("EmbedLayerNormalization", embed_layer_norm),
            ("FastGelu", fast_gelu),
            ("FusedConv", fused_conv),
            ("FusedGemm", fused_gemm),
            ("Gelu", gelu),
            ("QuickGelu", quick_gelu),
            ("SimplifiedLayerNormalization", rms_norm),
            ("SkipLayerNormalization", skip_layer_norm),
            ("SkipSimplifiedLayerNormalization", skip_rms_norm),
        )
    ),
]
