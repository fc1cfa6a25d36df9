# SPDX-License-Identifier: Apache-2.0
"""Replacement of the operators of ``com.microsoft``."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from tvm_fusion.errors import UnsupportedOperatorError

from ...model.graph_edits import default_opset, is_default_domain, node_label, replace_nodes
from ...model.shapes import infer_shapes
from ...model.tensor_facts import GraphFacts
from .attention import attention, multi_head_attention
from .contrib_expansion import ContribExpansion
from .grouped_attention import group_query_attention
from .integers import (
    dequantize,
    dynamic_matmul,
    integer_matmul,
    matmul_of_few_bits,
    pool_quantized,
    qgemm,
    qlinear_binary,
    qlinear_concat,
    qlinear_unary,
    quantize,
)
from .pointwise import (
    Refusal,
    bias_gelu,
    embed_layer_norm,
    fast_gelu,
    fused_conv,
    fused_gemm,
    fused_matmul,
    gelu,
    quick_gelu,
    rms_norm,
    skip_layer_norm,
    skip_rms_norm,
)
from .rotary import rotary_embedding

DOMAIN = "com.microsoft"

CONTRIB: dict[str, Callable[[ContribExpansion], Refusal]] = {
    "Attention": attention,
    "BiasGelu": bias_gelu,
    "DequantizeLinear": dequantize,
    "DynamicQuantizeMatMul": dynamic_matmul,
    "EmbedLayerNormalization": embed_layer_norm,
    "FastGelu": fast_gelu,
    "FusedConv": fused_conv,
    "FusedGemm": fused_gemm,
    "FusedMatMul": fused_matmul,
    "Gelu": gelu,
    "GroupQueryAttention": group_query_attention,
    "MatMulIntegerToFloat": integer_matmul,
    "MatMulNBits": matmul_of_few_bits,
    "MultiHeadAttention": multi_head_attention,
    "QGemm": qgemm,
    "QLinearAdd": qlinear_binary,
    "QLinearAveragePool": pool_quantized,
    "QLinearConcat": qlinear_concat,
    "QLinearGlobalAveragePool": pool_quantized,
    "QLinearLeakyRelu": qlinear_unary,
    "QLinearMul": qlinear_binary,
    "QLinearSigmoid": qlinear_unary,
    "QLinearSoftmax": qlinear_unary,
    "QuantizeLinear": quantize,
    "QuickGelu": quick_gelu,
    "RotaryEmbedding": rotary_embedding,
    "SimplifiedLayerNormalization": rms_norm,
    "SkipLayerNormalization": skip_layer_norm,
    "SkipSimplifiedLayerNormalization": skip_rms_norm,
}
"""Function of each operator that writes it by others, or says why it cannot."""

OF_ONNX_RUNTIME = frozenset({"SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime puts into ONNX's own domain, where ONNX has none of this name."""

WAITING = frozenset(
    {"Attention", "FusedMatMul", "GroupQueryAttention", "MultiHeadAttention", "RotaryEmbedding"}
)
"""Operators that need the shapes of their inputs."""


def is_contrib(node: onnx.NodeProto) -> bool:
    """Return whether the node can be replaced by :func:`expand_contrib`."""
    if is_default_domain(node):
        return node.op_type in OF_ONNX_RUNTIME
    return node.domain == DOMAIN and node.op_type in CONTRIB


def expand_contrib(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with ONNX's own operators only.

    Raises
    ------
    UnsupportedOperatorError
        If a node uses an operator in a way that has no translation.
    """
    if not any(map(is_contrib, model.graph.node)):
        return model
    _replace(model, frozenset(CONTRIB) - WAITING)
    while any(map(is_contrib, model.graph.node)):
        model = infer_shapes(model)
        if not _replace(model, WAITING):
            break
        del model.graph.value_info[:]
    return model


def _replace(model: onnx.ModelProto, names: frozenset[str]) -> bool:
    """Replace the named operators whose first inputs have ranks, if they need any."""
    facts, opset = GraphFacts(model, {}), default_opset(model) or 1
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        is_ready = node.op_type not in WAITING or facts.dims(node.input[0]) is not None
        if not is_contrib(node) or node.op_type not in names or not is_ready:
            nodes.append(node)
            continue
        parts = ContribExpansion(node, opset, facts)
        reason = CONTRIB[node.op_type](parts)
        if reason is not None:
            raise UnsupportedOperatorError(
                f"{node_label(node)}: {node.op_type} of {node.domain or 'ai.onnx'}: {reason}"
            )
        nodes += parts.nodes
        changed = True
    if changed:
        replace_nodes(model.graph, nodes)
    return changed
