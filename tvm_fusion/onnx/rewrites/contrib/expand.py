# SPDX-License-Identifier: Apache-2.0
"""Replacement of the operators of ``com.microsoft`` and ``ai.onnx.ml``."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from tvm_fusion.errors import UnsupportedOperatorError

from ...model.graph_edits import default_opset, is_default_domain, node_label, replace_nodes
from ...model.loader import CONTRIB_DOMAIN
from ...model.shapes import infer_shapes
from ...model.tensor_facts import GraphFacts
from ...model.weights import Weights
from ..classical import features, linear, trees
from ..classical.carriers import HAS_TREE_ENSEMBLE, ML_DOMAIN, is_carrier
from .attention import attention, multi_head_attention
from .contrib_expansion import ContribExpansion
from .grouped_attention import group_query_attention
from .integers import (
    dequantize,
    dynamic_matmul,
    integer_matmul,
    matmul_of_16_bits,
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
    "MatMulInteger16": matmul_of_16_bits,
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

CLASSICAL: dict[str, Callable[[ContribExpansion], Refusal]] = {
    "ArrayFeatureExtractor": features.array_feature_extractor,
    "Binarizer": features.binarizer,
    "FeatureVectorizer": features.feature_vectorizer,
    "Imputer": features.imputer,
    "LabelEncoder": features.label_encoder,
    "LinearClassifier": linear.linear_classifier,
    "LinearRegressor": linear.linear_regressor,
    "Normalizer": features.normalizer,
    "OneHotEncoder": features.one_hot_encoder,
    "SVMClassifier": linear.svm_classifier,
    "SVMRegressor": linear.svm_regressor,
    "Scaler": features.scaler,
    "TreeEnsemble": trees.tree_ensemble,
    "TreeEnsembleClassifier": trees.tree_classifier,
    "TreeEnsembleRegressor": trees.tree_regressor,
}
"""The same for ``ai.onnx.ml``; all of these need the types and shapes of their inputs."""

OF_ONNX_RUNTIME = frozenset({"SimplifiedLayerNormalization"})
"""Operators that ONNX Runtime puts into ONNX's own domain, where ONNX has none of this name."""

WAITING = frozenset(
    """Attention FusedMatMul GroupQueryAttention MatMulInteger16 MultiHeadAttention
    RotaryEmbedding""".split()
).union(CLASSICAL)
"""Operators that need the shapes of their inputs."""


def is_classical(node: onnx.NodeProto) -> bool:
    """Return whether the node's operator is one of ``ai.onnx.ml`` that has a translation."""
    return node.domain == ML_DOMAIN and node.op_type in CLASSICAL and not is_carrier(node)


def is_contrib(node: onnx.NodeProto) -> bool:
    """Return whether the node can be replaced by :func:`expand_contrib`."""
    if is_default_domain(node):
        return node.op_type in OF_ONNX_RUNTIME
    return is_classical(node) or (node.domain == CONTRIB_DOMAIN and node.op_type in CONTRIB)


def expand_contrib(model: onnx.ModelProto, weights: Weights) -> onnx.ModelProto:
    """Return the model with ONNX's own operators, and with what stands for operators of ours.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place.
    weights : Weights
        The weights stored outside the model; tables of trees are added.

    Raises
    ------
    UnsupportedOperatorError
        If a node uses an operator in a way that has no translation.
    """
    if not any(map(is_contrib, model.graph.node)):
        return model
    _replace(model, frozenset(CONTRIB) - WAITING, weights)
    while any(map(is_contrib, model.graph.node)):
        model = infer_shapes(model)
        if not (_replace(model, WAITING, weights) or _replace(model, WAITING, weights, False)):
            break
        del model.graph.value_info[:]
    for node in filter(is_classical, model.graph.node):
        raise _refusal(node, f"the shape or type of {node.input[0]!r} is only known at run time")
    return model


def _refusal(node: onnx.NodeProto, reason: str) -> UnsupportedOperatorError:
    domain = node.domain or "ai.onnx"
    return UnsupportedOperatorError(f"{node_label(node)}: {node.op_type} of {domain}: {reason}")


def _replace(
    model: onnx.ModelProto, names: frozenset[str], weights: Weights, is_patient: bool = True
) -> bool:
    """Replace the named operators whose first inputs have ranks, if they need any.

    The number of features of a classical model is waited for; some can do without.
    """
    facts, opset = GraphFacts(model, weights), default_opset(model) or 1
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        dims = facts.dims(node.input[0]) if node.op_type in WAITING else ()
        is_ready = dims is not None
        if dims is not None and is_classical(node):
            is_ready = bool(facts.dtype(node.input[0])) and not (is_patient and None in dims[-1:])
        if not is_contrib(node) or node.op_type not in names or not is_ready:
            nodes.append(node)
            continue
        parts = ContribExpansion(node, opset, facts)
        table = CLASSICAL if is_classical(node) else CONTRIB
        reason = table[node.op_type](parts)
        if reason is not None:
            raise _refusal(node, reason)
        nodes += parts.nodes
        changed = True
    if changed:
        replace_nodes(model.graph, nodes)
    if any(map(is_carrier, nodes)):
        for entry in model.opset_import:
            if entry.domain == ML_DOMAIN:
                entry.version = max(entry.version, HAS_TREE_ENSEMBLE)
    return changed
