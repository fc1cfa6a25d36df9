# SPDX-License-Identifier: Apache-2.0
"""Kernel calls of operators that a CPU runs, by the shapes of their operands.

A trace of a CPU has no kernels: an operator is one. Operators of autograd do not tell shapes; what
they compute is the longest operator inside of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from schedules.cost.kernel_call import FLOPS_PER_ELEMENT, KernelCall, element_bytes

from .kernel_calls import call_of, dtype_of, is_shape
from .kineto import HostEvent

Shape = tuple[int, ...]


def host_call(op: HostEvent, nested: Sequence[HostEvent]) -> KernelCall | None:
    """Call of an operator on the CPU; None for views, and where the trace has no shapes."""
    inside = [op] if _shapes(op.shapes) else nested
    known = [one for one in inside if one.kind == "op" and _shapes(one.shapes)]
    known = [one for one in known if one.name.startswith("aten::")] or known[:1]
    longest = max(known, key=lambda one: one.end - one.start, default=None)
    if longest is None:
        return None
    if longest.name.removeprefix("aten::").rstrip("_") in _VIEWS:
        copies = (one for one in nested if one.name in _COPIES and _shapes(one.shapes))
        longest = next(copies, None)
        if longest is None:
            return None
    call = _host_call(longest.name, longest.shapes, longest.types, longest.values)
    is_backward = "Backward" in op.name and call.op in ("gemm", "bmm")
    return replace(call, op=f"{call.op}_backward") if is_backward else call


@functools.lru_cache(maxsize=1 << 16)
def _host_call(name: str, operands: tuple, types: tuple, values: tuple) -> KernelCall:
    shapes = _shapes(operands)
    stem = name.removeprefix("aten::").rstrip("_")
    rule = _RULES.get(stem)
    found = rule(shapes, values) if rule is not None else None
    dtype = dtype_of(str(types[0])) if types else "float32"
    if found is None:
        call = call_of(name, tuple(shapes), types)
        op = _NAMES.get(stem, call.op)
        moved = call.read_bytes if op == "concat" else call.written_bytes
        stem = op.removesuffix("_backward")
        if stem in FLOPS_PER_ELEMENT:
            elements = moved / element_bytes(dtype)
            call = replace(call, flops=FLOPS_PER_ELEMENT[stem] * elements)
        return replace(call, op=op, written_bytes=moved)
    op, sizes, flops, read, written = found
    each = element_bytes(dtype)
    return KernelCall(
        op, sizes, dtype, float(flops), float(read * each), float(written * each), name
    )


def _shapes(operands: object) -> list[Shape]:
    """Shapes of all operands, those in lists one by one."""
    if is_shape(operands):
        return [operands]  # type: ignore[list-item]
    found = []
    for one in operands if isinstance(operands, tuple) else ():
        found += _shapes(one)
    return found


_Found = tuple[str, dict[str, int], float, float, float]
"""Operator, sizes, floating-point operations, and elements that are read and written."""

_Rule = Callable[[list[Shape], tuple], _Found | None]


def _linear(shapes: list[Shape], values: tuple) -> _Found | None:
    if len(shapes) < 2 or len(shapes[1]) != 2 or shapes[0][-1] != shapes[1][1]:
        return None
    data, (n, k) = shapes[0], shapes[1]
    m = math.prod(data[:-1])
    return "gemm", {"B": 1, "M": m, "N": n, "K": k}, 2.0 * m * n * k, m * k + n * k, m * n


def _matmul(shapes: list[Shape], values: tuple) -> _Found | None:
    if len(shapes) < 2 or min(map(len, shapes[:2])) < 2 or shapes[0][-1] != shapes[1][-2]:
        return None
    (*_, m, k), (*outer, _, n) = shapes[:2]
    b = math.prod(shapes[0][:-2])
    if not outer:
        return _linear([shapes[0], (n, k)], values)
    sizes = {"B": b, "M": m, "N": n, "K": k}
    return "bmm", sizes, 2.0 * b * m * n * k, b * (m * k + k * n), b * m * n


def _convolution(shapes: list[Shape], values: tuple) -> _Found | None:
    """Data, weight; stride, padding and dilation are among the values, else of the same size."""
    if len(shapes) < 2 or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) not in (3, 4):
        return None
    data, weight = shapes[:2]
    lists = [list(map(int, re.findall(r"\d+", str(one)))) for one in values if "[" in str(one)]
    stride, pad, dilation = (lists + [[], [], []])[:3]
    out = []
    for at, (size, window) in enumerate(zip(data[2:], weight[2:], strict=True)):
        step, around, apart = (
            one[min(at, len(one) - 1)] if one else default
            for one, default in ((stride, 1), (pad, window // 2), (dilation, 1))
        )
        out.append(max((size + 2 * around - apart * (window - 1) - 1) // max(step, 1) + 1, 1))
    groups = max(data[1] // max(weight[1], 1), 1)
    return _of_layer(data, weight, tuple(out), groups)


def _of_layer(data: Shape, weight: Shape, out: Shape, groups: int) -> _Found:
    b, inputs, outputs = data[0], data[1], weight[0]
    result = b * outputs * math.prod(out)
    flops = 2.0 * result * math.prod(weight[1:])
    read = math.prod(data) + math.prod(weight)
    if len(data) == 3:
        return "conv1d", {"B": b}, flops, read, result
    names = ("B", "IC", "OC", "H", "W", "FH", "FW", "OH", "OW", "groups")
    each = (b, inputs, outputs, *data[2:], *weight[2:], *out, groups)
    return "conv2d", dict(zip(names, each, strict=True)), flops, read, result


def _convolution_backward(shapes: list[Shape], values: tuple) -> _Found | None:
    """Gradient of the result, data, weight: twice the arithmetic for both gradients."""
    if len(shapes) < 3 or not len(shapes[0]) == len(shapes[1]) == len(shapes[2]):
        return None
    gradient, data, weight = shapes[:3]
    groups = max(data[1] // max(weight[1], 1), 1)
    op, sizes, flops, read, result = _of_layer(data, weight, gradient[2:], groups)
    return f"{op}_backward", sizes, 2 * flops, read + result, read


def _rows(op: str) -> _Rule:
    def rule(shapes: list[Shape], values: tuple) -> _Found | None:
        if not shapes:
            return None
        count, width = math.prod(shapes[0]), shapes[0][-1]
        sizes = {"B": count // max(width, 1), "H": width}
        is_backward = op.endswith("backward")
        times = 2 if is_backward else 1
        flops = float(times * FLOPS_PER_ELEMENT[op.removesuffix("_backward")] * count)
        return op, sizes, flops, times * count, count

    return rule


def _embedding_bag_backward(shapes: list[Shape], values: tuple) -> _Found | None:
    """Gradient (bags, width), indices; the rows of the table are the seventh operand."""
    rows = str(values[6]) if len(values) > 6 else ""
    if len(shapes) < 2 or len(shapes[0]) != 2 or not rows.isdecimal():
        return None
    (bags, width), count = shapes[0], math.prod(shapes[1])
    each = max(round(count / max(bags, 1)), 1)
    sizes = {"B": bags, "T": 1, "E": int(rows), "L": each, "D": width}
    read = bags * width + count * (width + 2)
    return "embedding_bag_backward", sizes, 2.0 * count * width, read, count * width


_RULES: dict[str, _Rule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    **dict.fromkeys(("conv1d", "conv2d", "convolution", "_convolution"), _convolution),
    "mkldnn_convolution": _convolution,
    **dict.fromkeys(("convolution_backward", "mkldnn_convolution_backward"), _convolution_backward),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _rows("softmax")),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"), _rows("softmax_backward")
    ),
    **dict.fromkeys(("layer_norm", "native_layer_norm"), _rows("layer_norm")),
    "native_layer_norm_backward": _rows("layer_norm_backward"),
    "_embedding_bag_backward": _embedding_bag_backward,
}

_VIEWS = frozenset(
    "view reshape flatten transpose t permute unsqueeze squeeze unbind select slice narrow split"
    " chunk as_strided expand detach arange empty empty_like size".split()
)
"""Operators that compute nothing; some copy where strides do not allow a view."""

_COPIES = ("aten::clone", "aten::copy_")

_NAMES = {
    **dict.fromkeys(("batch_norm", "native_batch_norm"), "batch_norm"),
    "native_batch_norm_backward": "batch_norm_backward",
    **dict.fromkeys(("dropout", "native_dropout"), "dropout"),
    "native_dropout_backward": "dropout_backward",
    "threshold_backward": "relu_backward",
    "gelu_backward": "gelu_backward",
    "tanh_backward": "tanh_backward",
    **dict.fromkeys(("tril", "triu"), "tril"),
    **dict.fromkeys(("cat", "concat", "stack"), "concat"),
    **dict.fromkeys(("clone", "contiguous"), "copy"),
}
"""Kernels whose bytes say all, by the operator."""
