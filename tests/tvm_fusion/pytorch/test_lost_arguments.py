# SPDX-License-Identifier: Apache-2.0
"""Arguments of ops that PyTorch's exporter to ONNX drops, and those that it heeds, by numbers."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
onnxscript = pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.onnx._internal.exporter._registration import ONNXRegistry  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import tvm_fusion  # noqa: E402
from tvm_fusion.torch.lost_arguments import FORMS  # noqa: E402

OPSET = 20
"""Opset that ``torch.onnx.export`` writes; newer translations of torchlib are for later ones."""

ALWAYS_HARMLESS = frozenset(
    """cudnn_enable cudnn_enabled device generator layout memory_format non_blocking pin_memory
    requires_grad scale_grad_by_freq sparse sparse_grad""".split()
)
"""Arguments on which no value of an inference depends, whatever the op."""

HARMLESS = {
    (
        "aten::_scaled_dot_product_flash_attention",
        "return_debug_mask",
    ): "of an output for debuggers",
    ("aten::_unique", "sorted"): "eager mode sorts as well",
    ("aten::_unique2", "sorted"): "eager mode sorts as well",
    ("aten::allclose", "equal_nan"): "torch.export has no op whose result is a number of Python",
    ("aten::einsum", "path"): "an order of products that gives the same sums",
    ("aten::embedding", "padding_idx"): "of gradients",
    ("aten::empty_strided", "stride"): "of memory",
    ("aten::expand", "implicit"): "of TorchScript",
    ("aten::multinomial", "replacement"): "random, and refused by the import",
    ("aten::native_group_norm", "C"): "the input's size",
    ("aten::native_group_norm", "HxW"): "the input's size",
    ("aten::new_empty_strided", "stride"): "of memory",
    ("aten::repeat_interleave.self_int", "output_size"): "the result's size, which is computed",
    ("aten::sort", "stable"): "TopK keeps the order of equal elements",
    ("aten::stft", "return_complex"): "complex numbers are pairs of ONNX",
    ("aten::sym_storage_offset", "dim"): "not an argument of the op",
    ("aten::sym_storage_offset", "self"): "of memory",
    ("aten::unique_consecutive", "return_counts"): "of an output that nothing reads",
    ("aten::unique_consecutive", "return_inverse"): "of an output that nothing reads",
    ("aten::unique_dim", "sorted"): "eager mode sorts as well",
    ("quantized_decomposed::dequantize_per_channel", "quant_max"): "of the integers' origin",
    ("quantized_decomposed::dequantize_per_channel", "quant_min"): "of the integers' origin",
}
"""Other arguments that are dropped, each with the reason why no value depends on it."""


def definition(function: Any) -> Callable[..., Any]:
    """The Python function that an ONNX function of onnxscript is made of."""
    return inspect.unwrap(getattr(function, "func", getattr(function, "function", function)))


@functools.cache
def dropped(function: Callable[..., Any]) -> frozenset[str]:
    """Names of parameters that a function does not read, nor a function that it hands them to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    read = {
        node.id
        for node in _reads(tree.body, function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return frozenset(inspect.signature(function).parameters) - read


def _reads(nodes: list[Any], function: Callable[..., Any]) -> Iterator[ast.AST]:
    """All nodes below some but the names that are arguments which a called function drops."""
    for node in nodes:
        yield node
        ignored = _ignored(node, function) if isinstance(node, ast.Call) else []
        below = ast.iter_child_nodes(node)
        yield from _reads([inner for inner in below if inner not in ignored], function)


def _ignored(call: ast.Call, function: Callable[..., Any]) -> list[ast.AST]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    called = definition(function.__globals__.get(name))
    if not inspect.isfunction(called) or called is function:
        return []
    unread = dropped(called)
    placed = zip(inspect.signature(called).parameters, call.args, strict=False)
    ignored: list[ast.AST] = [a for name, a in placed if name in unread and type(a) is ast.Name]
    return ignored + [k for k in call.keywords if k.arg in unread and type(k.value) is ast.Name]


def dropped_arguments() -> Iterator[tuple[str, str]]:
    """Each op of the exporter's table with an argument that its translation does not read."""
    for entries in ONNXRegistry.from_torchlib(OPSET).functions.values():
        for entry in entries:
            schema = getattr(entry.fx_target, "_schema", None)
            if schema is not None and not schema.name.startswith("onnx_symbolic"):
                function = definition(entry.onnx_function)
                names = entry.fx_target.name()
                for place, parameter in enumerate(inspect.signature(function).parameters):
                    own = {argument.name for argument in schema.arguments}
                    is_given = place < len(schema.arguments) or parameter in own
                    if parameter in dropped(function) and is_given:
                        yield names, parameter


def test_dropped_arguments_are_handled_or_harmless() -> None:
    handled = {(op.name(), name) for op, form in FORMS.items() for name in form.arguments}
    found = {pair for pair in dropped_arguments() if pair[1] not in ALWAYS_HARMLESS}
    assert ("aten::avg_pool2d", "divisor_override") in found  # else nothing was looked at
    missed = found - handled - set(HARMLESS)
    assert not missed, (
        f"onnxscript {onnxscript.__version__} drops {sorted(missed)}: give each a form in "
        "tvm_fusion/torch/lost_arguments.py, or a reason in HARMLESS of this test"
    )


def _helper(a: int, b: int) -> int:
    del b
    return a


def _caller(a: int, b: int, c: int) -> int:
    return _helper(a, b) + c


def test_the_walk_follows_helpers() -> None:
    assert dropped(_helper) == {"b"} and dropped(_caller) == {"b"}


Case = Callable[..., Any]
"""Function of some tensors of ``inputs``, by their names."""


def inputs() -> dict[str, torch.Tensor]:
    """New random tensors for the cases, and their integers."""
    return {
        "x": torch.randn(3, 4),
        "y": torch.randn(3, 4),
        "part": torch.rand(3, 4) * 0.8 + 0.1,
        "half": torch.randn(3, 4).half() * 100,
        "numbers": torch.randint(-20, 20, (3, 4)),
        "bytes": torch.randint(-9, 9, (3, 4), dtype=torch.int8),
        "divisor": torch.tensor([3, -7, 2, -5]),
        "line": torch.randn(2, 3, 11),
        "image": torch.randn(2, 3, 6, 7),
        "volume": torch.randn(1, 2, 5, 6, 7),
        "grid": torch.rand(2, 3, 4, 2) * 2.6 - 1.3,
        "matrix": torch.randn(4, 5),
        "bias": torch.randn(5),
        "batch": torch.randn(2, 3, 4),
        "factor": torch.randn(2, 4, 5),
        "places": torch.tensor([[0, 1, 1, 2], [2, 2, 0, 0], [1, 1, 1, 1]]),
        "rows": torch.tensor([2, 0, 2]),
        "labels": torch.tensor([1, -100, 3]),
        "weight": torch.rand(4) + 0.1,
        "levels": torch.tensor([0.05, -3.0, 3.0, 0.71, 100.0, -100.0, 0.2]),
        "scale": torch.tensor(0.1),
        "zero": torch.tensor(3),
        "scales": torch.tensor([0.1, 0.2, 0.05]),
        "zeros": torch.zeros(3, dtype=torch.int64),
        "ties": torch.tensor([[3.0, 1.0, 3.0, 2.0, 1.0], [0.0, 0.0, 1.0, 1.0, 0.0]]),
        "signal": torch.randn(2, 40),
        "window": torch.hann_window(16),
        "tokens": torch.tensor([1, 2, 4, 3]),
    }


def pooling() -> Iterator[Case]:
    for ceil in (False, True):
        for own in (False, True):
            options = {"ceil_mode": ceil, "count_include_pad": own}
            yield lambda line, o=options: F.avg_pool1d(line, 3, 2, 1, **o)
            for divisor in (None, 5):
                o = options | {"divisor_override": divisor}
                yield lambda image, o=o: F.avg_pool2d(image, 3, 2, 1, **o)
                yield lambda volume, o=o: F.avg_pool3d(volume, 3, 2, 1, **o)
        yield lambda image, c=ceil: F.max_pool2d(image, 2, 2, 1, 2, c)
    yield lambda image: F.avg_pool2d(image, 2, divisor_override=-3)
    yield lambda volume: F.avg_pool3d(volume, (2, 3, 1), (1, 2, 2), (1, 1, 0), divisor_override=7)
    yield lambda image: F.avg_pool2d(image[0], (2, 3), (1, 2), divisor_override=7)
    yield lambda image: F.lp_pool2d(image, 3, 2, 1, True)


def scattering() -> Iterator[Case]:
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        for own in (True, False):
            o = {"reduce": reduce, "include_self": own}
            yield lambda x, places, y, o=o: x.scatter_reduce(0, places, y, **o)
            yield lambda numbers, places, bytes, o=o: numbers.scatter_reduce(
                0, places, bytes.long(), **o
            )
    yield (
        lambda x, places, y: (
            x.log()
            .nan_to_num(-math.inf)
            .scatter_reduce(0, places, (y * 0).log(), "amax", include_self=False)
        )
    )
    for accumulate in (False, True):
        yield lambda x, zero, y, a=accumulate: x.index_put(
            (torch.stack([zero * 0, zero * 0 + 2]),), y[:2], accumulate=a
        )
    yield lambda x, rows, y: x.index_add(0, rows, y, alpha=3)


def quantisation() -> Iterator[Case]:
    import torch.ao.quantization.fx._decomposed  # registers the ops

    ops = torch.ops.quantized_decomposed
    for dtype, low, high, zero in (
        (torch.int8, -128, 127, 0),
        (torch.int8, -127, 127, 1),
        (torch.int8, -8, 7, 0),
        (torch.uint8, 0, 255, 10),
        (torch.uint8, 3, 9, 5),
        (torch.int16, -100, 100, 0),
        (torch.int32, -1000, 1000, 7),
    ):
        o = (low, high, dtype)
        yield lambda levels, z=zero, o=o: ops.quantize_per_tensor.default(levels, 0.1, z, *o)
        yield lambda levels, z=zero, o=o: ops.dequantize_per_tensor.default(
            ops.quantize_per_tensor.default(levels, 0.1, z, *o), 0.1, z, *o
        )
        yield lambda levels, scale, zero, o=o: ops.dequantize_per_tensor.tensor(
            ops.quantize_per_tensor.tensor(levels, scale, zero, *o), scale, zero, *o
        )
    o = (-8, 7, torch.int8)
    yield lambda x, scales, zeros: ops.quantize_per_channel.default(x, scales, zeros, 0, *o)
    yield lambda bytes, scales: ops.dequantize_per_channel.default(bytes, scales, None, 0, *o)
    yield lambda bytes: ops.dequantize_per_tensor.default(
        bytes, 0.1, 0, *o, out_dtype=torch.float16
    )
    for low, high in ((-128, 127), (0, 255), (0, 127)):
        yield lambda levels, a=low, b=high: torch.fake_quantize_per_tensor_affine(
            levels, 0.1, 3, a, b
        )


def resizing() -> Iterator[Case]:
    for factor in (1.7, 0.6):
        for mode in ("nearest", "nearest-exact"):
            yield lambda image, s=factor, m=mode: F.interpolate(image, scale_factor=s, mode=m)
        for aligned in (True, False):
            o = {"scale_factor": factor, "align_corners": aligned}
            for recompute in (None, True):
                yield lambda line, o=o, r=recompute: F.interpolate(
                    line, mode="linear", recompute_scale_factor=r, **o
                )
            for mode in ("bilinear", "bicubic"):
                for smooth in (True, False):
                    yield lambda image, o=o, m=mode, s=smooth: F.interpolate(
                        image, mode=m, antialias=s, **o
                    )
    for aligned in (True, False):
        yield lambda image, a=aligned: F.interpolate(
            image, (4, 5), mode="bilinear", align_corners=a, antialias=True
        )
    ops = torch.ops.aten
    yield lambda line: ops.upsample_linear1d.default(line, [17], False, 1.6)
    yield lambda volume: ops.upsample_trilinear3d.default(volume, [7, 9, 11], False, 1.5, 1.6, 1.7)
    yield lambda image, grid: F.grid_sample(image, grid, "bilinear", "border", True)


def losses() -> Iterator[Case]:
    for r in ("none", "mean", "sum"):
        for smoothing in (0.0, 0.2):
            o = {"reduction": r, "label_smoothing": smoothing}
            yield lambda x, labels, o=o: F.cross_entropy(x, labels, **o)
            yield lambda x, labels, weight, o=o: F.cross_entropy(x, labels, weight, **o)
            yield lambda x, y, weight, o=o: F.cross_entropy(x, y.softmax(1), weight, **o)
            yield lambda batch, rows, o=o: F.cross_entropy(
                batch.mT, rows[None].repeat(2, 1), ignore_index=0, **o
            )
        yield lambda x, labels, weight, r=r: F.nll_loss(x, labels, weight, reduction=r)
        yield lambda x, y, r=r: F.smooth_l1_loss(x, y, reduction=r, beta=0.3)
        yield lambda x, y, r=r: F.huber_loss(x, y, reduction=r, delta=0.3)
        yield lambda x, part, r=r: F.kl_div(x, part, reduction=r, log_target=True)
        yield lambda part, y, weight, r=r: F.binary_cross_entropy(
            part, y.sigmoid(), weight, reduction=r
        )
        yield lambda x, part, weight, r=r: F.binary_cross_entropy_with_logits(
            x, part, pos_weight=weight, reduction=r
        )


def types() -> Iterator[Case]:
    single = {"dtype": torch.float32}
    for op in (torch.softmax, torch.log_softmax, torch.mean, torch.sum, torch.cumsum, torch.prod):
        yield lambda half, op=op: op(half, 1, **single)
        yield lambda bytes, op=op: op(bytes, 1, **single)
    for op in (torch.sum, torch.prod):
        yield lambda x, op=op: op(3 * x, 1, dtype=torch.int32)
        yield lambda bytes, op=op: op(bytes, dtype=torch.float64)
        yield lambda bytes, op=op: op(bytes, 1)
    yield lambda half: torch.mean(half * 500, dtype=torch.float32)
    yield lambda bytes: torch.mean(bytes, dtype=torch.float64)
    yield lambda x: torch.cumsum(3 * x, 1, dtype=torch.int64)
    yield lambda half: torch.nansum(half, 1, dtype=torch.float32)
    yield lambda half: torch.linalg.vector_norm(half, 2, 1, dtype=torch.float32)


def arithmetic() -> Iterator[Case]:
    for mode in (None, "floor", "trunc"):
        yield lambda x, weight, m=mode: torch.div(x, -weight, rounding_mode=m)
        yield lambda numbers, divisor, m=mode: torch.div(numbers, divisor, rounding_mode=m)
        yield lambda numbers, m=mode: torch.div(numbers, -0.75, rounding_mode=m)
    for op in (torch.add, torch.sub, torch.rsub):
        yield lambda x, y, op=op: op(x, y, alpha=3)
        yield lambda numbers, divisor, op=op: op(numbers, divisor, alpha=-2)
    for beta, alpha in ((2, 3), (0.5, -1.5), (0, 1)):
        o = {"beta": beta, "alpha": alpha}
        yield lambda bias, x, matrix, o=o: torch.addmm(bias, x, matrix, **o)
        yield lambda bias, batch, factor, o=o: torch.baddbmm(bias, batch, factor, **o)
        yield lambda bias, batch, factor, o=o: torch.addbmm(bias, batch, factor, **o)
        yield lambda zeros, x, weight, o=o: torch.addmv(zeros.float() + 1, x, weight, **o)
    yield lambda bias, x, matrix: torch.addmm(bias * torch.nan, x, matrix, beta=0)
    yield lambda x, y, part: torch.addcmul(x, y, part, value=2.5)
    yield lambda x, y, part: torch.addcdiv(x, y, part, value=2.5)
    yield lambda x: torch.round(x, decimals=1)
    yield lambda x: torch.clamp(x, 0.7, -0.3)


def statistics() -> Iterator[Case]:
    for op in (torch.var, torch.std):
        for correction in (0, 1, 2):
            for keep in (True, False):
                o = {"correction": correction, "keepdim": keep}
                yield lambda batch, op=op, o=o: op(batch, (0, 2), **o)
        yield lambda x, op=op: op(x, unbiased=False)
    yield lambda x: torch.var_mean(x, 1, correction=2)
    for p in (0, 1, 3, math.inf, -math.inf, 0.5):
        yield lambda x, p=p: torch.linalg.vector_norm(x, p, 1, keepdim=True)
        yield lambda x, p=p: F.normalize(0.1 * x, p or 2, 1, eps=0.5)
    yield lambda x: F.layer_norm(x, (4,), eps=0.5)
    yield lambda x: F.rms_norm(x, (4,), eps=0.5)
    yield lambda batch, scales: F.group_norm(batch.mT, 2, eps=0.5)
    yield lambda batch, zeros, scales: F.batch_norm(batch, zeros.float(), scales, eps=0.5)
    yield lambda image: F.local_response_norm(image, 3, 0.1, 0.7, 2.0)
    yield lambda x, y: F.cosine_similarity(0.1 * x, 0.1 * y, 1, eps=1.0)
    for keep in (True, False):
        yield lambda x, k=keep: torch.amax(x, (0, 1), keepdim=k)
        yield lambda x, k=keep: torch.argmin(x, 1, keepdim=k)
        yield lambda x, k=keep: torch.any(x > 1, 1, keepdim=k)


def activations() -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        yield lambda x, a=approximate: F.gelu(x, approximate=a)
    yield lambda x: torch.ops.aten.elu(x, 0.3, 1.5, 0.7)
    yield lambda x: F.celu(x, 0.3)
    yield lambda x: F.softplus(x, 2.0, 1.0)
    yield lambda x: F.hardtanh(x, -0.3, 0.7)
    yield lambda x: F.threshold(x, 0.3, -2.0)
    yield lambda part: torch.logit(part, eps=0.2)
    yield lambda x: F.dropout(x, 0.5, training=False)


def order() -> Iterator[Case]:
    for descending in (True, False):
        o = {"dim": 1, "descending": descending, "stable": True}
        yield lambda ties, o=o: torch.sort(ties, **o)
        yield lambda ties, o=o: torch.argsort(ties, **o)
        yield lambda x, d=descending: torch.topk(x, 3, 1, d, True)
    for inverse in (True, False):
        yield lambda numbers, i=inverse: torch.unique(numbers, return_inverse=i, return_counts=True)
    yield lambda numbers, divisor: torch.isin(numbers, divisor, invert=True)
    yield lambda x, y: torch.isclose(x * torch.nan, y * torch.nan, equal_nan=True)
    yield lambda tokens, matrix: F.embedding(tokens - 1, matrix, padding_idx=2)


def spectra() -> Iterator[Case]:
    for o in (
        {"center": True, "pad_mode": "constant"},
        {"center": False, "normalized": True},
        {"onesided": False},
    ):
        yield lambda signal, window, o=o: torch.view_as_real(
            torch.stft(signal, 16, 4, window=window, return_complex=True, **o)
        )
    for norm in ("backward", "ortho", "forward"):
        yield lambda signal, n=norm: torch.view_as_real(torch.fft.rfft(signal, n=30, norm=n))


class Cases(nn.Module):
    """Many functions of the same inputs; all their outputs."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases = cases

    def forward(self, **given: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for case in self.cases:
            names = [
                n for n, p in inspect.signature(case).parameters.items() if p.default is p.empty
            ]
            results += pytree.tree_leaves(case(*(given[name] for name in names)))
        return [result.clone() for result in results]


GROUPS = (
    pooling,
    scattering,
    quantisation,
    resizing,
    losses,
    types,
    arithmetic,
    statistics,
    activations,
    order,
    spectra,
)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_arguments_of_ops(group: Callable[[], Iterator[Case]]) -> None:
    model = Cases(list(group()))
    names = {
        name
        for case in model.cases
        for name, parameter in inspect.signature(case).parameters.items()
        if parameter.default is parameter.empty
    }
    given = {name: value for name, value in inputs().items() if name in names}
    wanted = model(**given)
    compiled = tvm_fusion.compile(torch.export.export(model, (), given), threads=1)
    found = compiled(**given)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert str(one.dtype) == str(other.dtype).removeprefix("torch."), place
        tolerance = 2e-2 if one.dtype == np.float16 else 1e-4
        error = f"output {place} of {len(wanted)}"
        np.testing.assert_allclose(
            one, other.numpy(), rtol=tolerance, atol=tolerance, err_msg=error
        )
