# SPDX-License-Identifier: Apache-2.0
"""Arguments of ops that PyTorch's exporter to ONNX does not heed, and what is computed instead.

The exporter translates such an op as if the argument had its default, without a word, or into ONNX
that is not valid. With other arguments the op is written out by ops that are translated in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers ops
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.nn import functional

from .fast_paths import scaled_dot_product_attention

_ATEN = torch.ops.aten
_QUANTIZED = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Form:
    """Another form of an op."""

    arguments: tuple[str, ...]  # Names of the arguments that the exporter does not heed.
    compute: Callable[..., Any]
    """Function of the op's arguments that computes the same by other ops."""
    is_lost: Callable[[Mapping[str, Any]], bool] | None = None
    """Function from all arguments by their names that returns whether the exporter would compute
    something else; by default, whether one of ``arguments`` differs from its default."""


def lost_arguments(node: fx.Node) -> tuple[str, ...]:
    """Names of the arguments of a node that the exporter would not heed."""
    form = FORMS.get(node.target)
    if form is None:
        return ()
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    given = _named(node.target, args, kwargs)
    return form.arguments if _is_lost(node.target, form, given) else ()


def decomposition(op: torch._ops.OpOverload, form: Form) -> Callable[..., Any]:
    """Entry of a decomposition table that writes an op out where an argument would be lost."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if not _is_lost(op, form, _named(op, args, kwargs)):
            return NotImplemented
        return form.compute(*args, **kwargs)

    return decompose


def _is_lost(op: torch._ops.OpOverload, form: Form, given: Mapping[str, Any]) -> bool:
    if form.is_lost is not None:
        return form.is_lost(given)
    defaults = {argument.name: argument.default_value for argument in op._schema.arguments}
    return any(given[name] != defaults[name] for name in form.arguments)


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """All arguments of a call by their names, with defaults."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {a.name: a.default_value for a in op._schema.arguments} | given


def _of_type(op: torch._ops.OpOverload) -> Form:
    """Form of an op that is to convert its input first: the exporter converts the result."""

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        given = _named(op, args, kwargs)
        return op(given.pop("self").to(given["dtype"]), **given)

    return Form(
        ("dtype",), compute, lambda given: given["dtype"] not in (None, given["self"].dtype)
    )


def average_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    _count_include_pad: bool = True,
    divisor_override: int = 1,
) -> Tensor:
    """Sums of windows by a divisor of the user's; PyTorch refuses 0.

    The sums are averages of whole windows: the input is padded for those that are cut off.
    """
    axes = len(kernel)
    kernel, stride, padding = (
        tuple(given) * (axes // len(given)) for given in (kernel, stride or kernel, padding)
    )
    pads: list[int] = []
    for size, k, s, p in zip(x.shape[-axes:], kernel, stride, padding, strict=True):
        behind = p
        if ceil_mode:
            count = (size + 2 * p - k + s - 1) // s + 1
            if (count - 1) * s >= size + p:  # a window starts within the input or before it
                count -= 1
            behind = max(p, (count - 1) * s + k - size - p)
        pads = [p, behind, *pads]
    pool = _ATEN.avg_pool2d if axes == 2 else _ATEN.avg_pool3d
    return pool(functional.pad(x, pads), kernel, stride) * (math.prod(kernel) / divisor_override)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Reduction of elements to the places of an index; a mean is a sum by a count."""
    if not include_self:
        x = x.scatter(dim, index, _neutral(reduce, x.dtype))
    if reduce != "mean":
        return x.scatter_reduce(dim, index, source, reduce)
    count = torch.full_like(x, int(include_self)).scatter_add(dim, index, torch.ones_like(source))
    rounding = None if x.dtype.is_floating_point else "floor"
    return x.scatter_add(dim, index, source).div(count.clamp(min=1), rounding_mode=rounding)


def _neutral(reduce: str, dtype: torch.dtype) -> float:
    """The number that a reduction ignores."""
    if reduce not in ("amax", "amin"):
        return int(reduce == "prod")
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


def sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Sequence[Tensor]:
    """Stable sorting, as that by ONNX always is."""
    return _ATEN.sort.default(x, dim, descending)


def argsort(x: Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> Tensor:
    """Places of the sorted elements."""
    return sort(x, stable=stable, dim=dim, descending=descending)[1]


def quantize(
    x: Tensor, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: torch.dtype
) -> Tensor:
    """Quantisation to limits that may be narrower than those of the type."""
    levels = torch.round(x.float() * (1.0 / scale)) + zero_point
    return levels.clamp(quant_min, quant_max).to(dtype)


def dequantize(
    x: Tensor,
    scale: Any,
    zero_point: Any,
    _quant_min: Any,
    _quant_max: Any,
    _dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The reverse of ``quantize``."""
    return ((x.float() - zero_point) * scale).to(out_dtype or torch.float32)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy with labels that are mixed with the uniform distribution, or probabilities."""
    axis = 0 if x.dim() == 1 else 1
    classes = x.shape[axis]
    logs = x.log_softmax(axis)
    weights = torch.ones(classes, dtype=x.dtype) if weight is None else weight
    weighted = -logs * weights.view(-1, *[1] * (x.dim() - axis - 1))
    uniform = weighted.sum(axis) * (label_smoothing / classes)
    if target.is_floating_point():
        loss = (weighted * target).sum(axis) * (1 - label_smoothing) + uniform
        total: Any = loss.numel()
    else:
        is_counted = target != ignore_index
        label = target.where(is_counted, 0)
        own = weighted.gather(axis, label.unsqueeze(axis)).squeeze(axis)
        loss = torch.where(is_counted, own * (1 - label_smoothing) + uniform, 0)
        total = torch.where(is_counted, weights[label], 0).sum()
    if reduction == _NONE:
        return loss
    return loss.sum() if reduction == _SUM else loss.sum() / total


_NONE, _SUM = 0, 2
"""PyTorch's numbers of two reductions of a loss; 1 is the mean."""


def antialiased(reach: int, weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Function that resizes images as PyTorch does with ``antialias=True``.

    Parameters
    ----------
    reach : int
        Distance in pixels from which on a weight is 0.
    weigh : callable
        Function from distances within reach to weights.
    """

    def matrix(size: int, results: int, align_corners: bool, scale: float | None) -> Tensor:
        """Weights of the pixels of a line for each wanted one, [wanted, size]."""
        if align_corners:
            step = (size - 1) / (results - 1) if results > 1 else 0.0
        else:
            step = 1 / scale if scale else size / results
        centers = (torch.arange(results, dtype=torch.float32) + 0.5) * step
        places = torch.arange(size, dtype=torch.float32) + 0.5
        distances = (places - centers[:, None]).abs() / max(step, 1.0)
        weights = torch.where(distances < reach, weigh(distances), 0)
        return weights / weights.sum(1, keepdim=True)

    def resize(
        x: Tensor,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        rows = matrix(x.shape[-2], output_size[0], align_corners, scales_h)
        columns = matrix(x.shape[-1], output_size[1], align_corners, scales_w)
        result = rows @ x.float() @ columns.T
        if not x.dtype.is_floating_point:
            result = result.round().clamp(0, torch.iinfo(x.dtype).max)
        return result.to(x.dtype)

    return resize


def _cubic(x: Tensor) -> Tensor:
    """Weights of the cubic kernel of Keys with -1/2, by distances."""
    near = (1.5 * x - 2.5) * x * x + 1
    return torch.where(x < 1, near, ((-0.5 * x + 2.5) * x - 4) * x + 2)


def _is_aligned_or_scaled(given: Mapping[str, Any]) -> bool:
    return given["align_corners"] or (given["scales_h"], given["scales_w"]) != (None, None)


def _is_narrowed(given: Mapping[str, Any]) -> bool:
    """Return whether a quantisation is not to all values of an 8-bit type."""
    limits = torch.iinfo(given["dtype"])
    is_whole = (given["quant_min"], given["quant_max"]) == (limits.min, limits.max)
    return _is_wide(given) or not is_whole


def _is_wide(given: Mapping[str, Any]) -> bool:
    """Return whether a quantised type is one that ONNX has only from opset 21 on, or not at all."""
    return torch.iinfo(given["dtype"]).bits != 8


def _always(_: Mapping[str, Any]) -> bool:
    """True: the exporter has no translation, or one with constants where such an op has tensors."""
    return True


def _is_reduced_apart(given: Mapping[str, Any]) -> bool:
    return given["reduce"] == "mean" or not given["include_self"]


def _is_of_mixed_labels(given: Mapping[str, Any]) -> bool:
    return bool(given["label_smoothing"]) or given["target"].is_floating_point()


def _is_not_plain(given: Mapping[str, Any]) -> bool:
    """Return whether an attention has a mask or groups, or what the exporter takes for granted."""
    is_masked = given["attn_mask"] is not None or bool(given["dropout_p"])
    is_odd = given["query"].dim() != 4 or (given["scale"] or 1) < 0
    return is_masked or given["enable_gqa"] or is_odd


_POOL = Form(("divisor_override",), average_pool)

_LIMITS = ("quant_min", "quant_max")
_RESIZED = ("align_corners", "scales_h", "scales_w")

_SCALED = {
    op: tuple(argument.name for argument in op._schema.arguments if "scales" in argument.name)
    for op in (
        _ATEN.upsample_linear1d.default,
        _ATEN.upsample_bilinear2d.default,
        _ATEN.upsample_trilinear3d.default,
        _ATEN.upsample_bicubic2d.default,
    )
}
"""Ops that resize, and the names of scales that are not the quotients of the sizes."""

_TYPED = (
    _ATEN.cumsum.default,
    _ATEN.linalg_vector_norm.default,
    _ATEN.log_softmax.int,
    _ATEN.mean.default,
    _ATEN.mean.dim,
    _ATEN.nansum.default,
    _ATEN.prod.default,
    _ATEN.prod.dim_int,
    _ATEN.softmax.int,
    _ATEN.sum.default,
    _ATEN.sum.dim_IntList,
)

FORMS: dict[Any, Form] = {
    **{op: _of_type(op) for op in _TYPED},
    **{op: Form(_SCALED[op], form) for op, form in get_decompositions(list(_SCALED)).items()},
    _ATEN.elu.default: Form(("input_scale",), get_decompositions([_ATEN.elu])[_ATEN.elu.default]),
    _ATEN._upsample_bilinear2d_aa.default: Form(
        _RESIZED, antialiased(1, lambda distances: 1 - distances), _is_aligned_or_scaled
    ),
    _ATEN._upsample_bicubic2d_aa.default: Form(
        _RESIZED, antialiased(2, _cubic), _is_aligned_or_scaled
    ),
    _ATEN.avg_pool2d.default: _POOL,
    _ATEN.avg_pool3d.default: _POOL,
    _ATEN.argsort.stable: Form(("stable",), argsort, _always),
    _ATEN.sort.stable: Form(("stable",), sort, _always),
    _ATEN.scatter_reduce.two: Form(("reduce", "include_self"), scatter_reduce, _is_reduced_apart),
    _ATEN.cross_entropy_loss.default: Form(
        ("label_smoothing", "target"), cross_entropy, _is_of_mixed_labels
    ),
    _ATEN.scaled_dot_product_attention.default: Form(
        ("attn_mask", "dropout_p", "scale", "enable_gqa"),
        scaled_dot_product_attention,
        _is_not_plain,
    ),
    _QUANTIZED.quantize_per_tensor.default: Form(_LIMITS, quantize, _is_narrowed),
    _QUANTIZED.quantize_per_tensor.tensor: Form(_LIMITS, quantize, _always),
    _QUANTIZED.quantize_per_tensor.tensor2: Form(_LIMITS, quantize, _always),
    _QUANTIZED.dequantize_per_tensor.default: Form(_LIMITS, dequantize, _is_wide),
    _QUANTIZED.dequantize_per_tensor.tensor: Form(_LIMITS, dequantize, _always),
    _QUANTIZED.dequantize_per_tensor.tensor2: Form(_LIMITS, dequantize, _always),
}
