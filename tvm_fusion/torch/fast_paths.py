# SPDX-License-Identifier: Apache-2.0
"""Ops of attention that PyTorch calls at inference, written out by others that can be exported.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` call one op each where no gradients are
needed. Such an op has neither a decomposition nor a form in ONNX. The exporter has one of
``scaled_dot_product_attention``, which gives the mean of the values, or NaN, to queries without a
key.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def encoder_layer(
    x: Tensor,
    width: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """A layer of a transformer's encoder: attention and a network, each with norm and residual."""

    def attended(y: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, out_weight, out_bias)
        return attention(y, y, y, width, heads, *weights, mask, False, True, mask_type)[0]

    def network(y: Tensor) -> Tensor:
        inner = functional.linear(y, weight_1, bias_1)
        inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
        return functional.linear(inner, weight_2, bias_2)

    def first(y: Tensor) -> Tensor:
        return functional.layer_norm(y, (width,), norm_weight_1, norm_bias_1, eps)

    def second(y: Tensor) -> Tensor:
        return functional.layer_norm(y, (width,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attended(first(x))
        return x + network(second(x))
    x = first(x + attended(x))
    return second(x + network(x))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several heads, ``batch_first``; a mask is true, or not 0, where none is paid."""
    given = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
        for x, weight, bias in given
    )
    scores = q @ k.transpose(-2, -1) * (width // heads) ** -0.5
    if mask is not None:
        is_left_out = mask.to(torch.bool)
        is_left_out = is_left_out[:, None, None, :] if mask_type == _OF_KEYS else is_left_out
        scores = scores.masked_fill(is_left_out, -torch.inf)
    weights = scores.softmax(-1)
    result = functional.linear((weights @ v).transpose(1, 2).flatten(2), out_weight, out_bias)
    shown = weights.mean(1) if average else weights
    return result, shown if need_weights else torch.empty(0, dtype=query.dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose result is 0 for a query that all keys are masked for.

    The results are replaced, not the weights: nothing but softmax is between the two products, so
    that these are one kernel on a GPU.
    """
    return _attention_and_scores(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )[0]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithms of the sums of its exponentials."""
    result, scores = _attention_and_scores(
        query, key, value, attn_mask, dropout_p, is_causal, scale
    )
    return result, scores.float().logsumexp(-1)


def _attention_and_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    if enable_gqa:
        key, value = (_repeated(x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5  # Both factors get it, so that products of 16-bit types stay in range.
    scores = (query * math.copysign(root, scale)) @ (key.transpose(-2, -1) * root)
    has_key = None
    if is_causal:
        past = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~past, torch.finfo(scores.dtype).min)
    elif mask is not None and mask.dtype is torch.bool:
        has_key = mask.any(-1, keepdim=True)
        scores = scores + torch.where(mask, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
    elif mask is not None:
        has_key = mask.amax(-1, keepdim=True) != -torch.inf
        scores = scores + mask
    weights = functional.dropout(scores.softmax(-1), dropout).to(value.dtype)
    result = weights @ value
    return result if has_key is None else result.where(has_key, 0), scores


def _repeated(x: Tensor, times: int) -> Tensor:
    """Keys or values of ``times`` heads of queries each."""
    wider = x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:])
    return wider.flatten(-4, -3)


_OF_KEYS = 1
"""PyTorch's number of a mask [batch, length]; others broadcast to the scores."""

FAST_PATHS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
    torch.ops.aten._native_multi_head_attention.default: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
}
"""Ops, and what computes the same."""
