# SPDX-License-Identifier: Apache-2.0
"""Kernel calls, as the models of kernels know them, of traced kernels and of a CPU's operators.

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

from .kineto import BATCHED, DeviceEvent, HostEvent

_DTYPES = {
    "float": "float32",
    "float32": "float32",
    "double": "float64",
    "half": "float16",
    "c10::half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16",
    "longint": "int64",
    "long": "int64",
    "int64": "int64",
    "int": "int32",
    "int32": "int32",
    "short": "int16",
    "byte": "uint8",
    "unsignedchar": "uint8",
    "char": "int8",
    "signedchar": "int8",
    "bool": "bool",
}
_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2}
_BYTES |= {"uint8": 1, "int8": 1, "bool": 1}

Shapes = Sequence[tuple[int, ...]]


def dtype_of(name: str) -> str:
    """Dtype of a tensor by the name that a trace gives it, ``Tensor(c10::Half)`` or ``float``."""
    bare = name.replace(" ", "").removeprefix("Tensor(").removesuffix(")").lower()
    return _DTYPES.get(bare, "float32")


def bytes_of(name: str) -> int:
    """Bytes of an element by the name of its type; 4 for an unknown one."""
    return _BYTES.get(dtype_of(name), 4)


def kernel_call(around: list[HostEvent], device: DeviceEvent) -> KernelCall | None:
    """Call of a kernel, by the innermost operator that launched it.

    None where the trace has no shapes, as without ``record_shapes``.
    """
    if device.copies:
        moved = device.bytes
        return KernelCall("copy", {}, "float32", 0.0, moved, moved, device.name) if moved else None
    for event in reversed(around):
        if any(map(is_shape, event.shapes)):
            call = _batched_lookups(event) if event.name.startswith(BATCHED) else None
            return call or call_of(event.name, event.shapes, event.types)
    return None


def is_shape(shape: object) -> bool:
    """Return whether a value is a tensor's shape."""
    return isinstance(shape, tuple) and bool(shape) and all(type(size) is int for size in shape)


@functools.lru_cache(maxsize=1 << 16)
def call_of(op: str, operands: tuple, types: tuple) -> KernelCall:
    """Call of an operator; equal ones are one object, since traces repeat them."""
    shapes = [shape for shape in operands if is_shape(shape)]
    dtype = dtype_of(str(types[0])) if types else "float32"
    item_bytes = _BYTES.get(dtype, 4)
    name = op.removeprefix("aten::").rstrip("_")
    if name in _PRODUCTS:
        found = _PRODUCTS[name](shapes)
        if found is not None:
            return _product(found, dtype, item_bytes, op)
    if name in _LOOKUPS:
        lookups = _lookups(_LOOKUPS[name], shapes, dtype, item_bytes, op)
        if lookups is not None:
            return lookups
    read = float(sum(map(math.prod, shapes)) * item_bytes)
    written = float(max(map(math.prod, shapes)) * item_bytes)
    rows = {"_softmax": "softmax", "softmax": "softmax", "native_layer_norm": "layer_norm"}
    if name in rows:
        width = shapes[0][-1]
        sizes = {"B": math.prod(shapes[0]) // max(width, 1), "H": width}
        return KernelCall(rows[name], sizes, dtype, written / item_bytes, read, written, op)
    known = name if name in _POINTWISE else "elementwise"
    return KernelCall(known, {}, dtype, written / item_bytes, read, written, op)


_POINTWISE = {"add", "sub", "mul", "div", "relu", "gelu", "tanh", "sigmoid", "exp", "copy"}

Product = tuple[int, int, int, int]
"""Batch, rows, columns and inner dimension of a matrix product."""


def _matrices(first: int) -> Callable[[Shapes], Product | None]:
    """Product of operands ``first`` and the one after it, with or without a batch."""

    def product(shapes: Shapes) -> Product | None:
        if len(shapes) < first + 2:
            return None
        left, right = shapes[first], shapes[first + 1]
        if len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
            return None
        return (left[0] if len(left) == 3 else 1), left[-2], right[-1], left[-1]

    return product


_PRODUCTS: dict[str, Callable[[Shapes], Product | None]] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "addmm": lambda shapes: _matrices(len(shapes) - 2)(shapes),
    "baddbmm": lambda shapes: _matrices(len(shapes) - 2)(shapes),
}


def _product(found: Product, dtype: str, each: int, name: str) -> KernelCall:
    batch, rows, columns, inner = found
    sizes = {"B": batch, "M": rows, "N": columns, "K": inner}
    read = batch * (rows * inner + inner * columns) * each
    written = batch * rows * columns * each
    flops = 2.0 * batch * rows * columns * inner
    return KernelCall("gemm" if batch == 1 else "bmm", sizes, dtype, flops, read, written, name)


_LOOKUPS = {
    **dict.fromkeys(("embedding", "index_select"), "gather"),
    **dict.fromkeys(
        ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), "embedding_bag"
    ),
}


def _lookups(
    kind: str, shapes: Shapes, dtype: str, item_bytes: int, name: str
) -> KernelCall | None:
    """Lookups of a table's rows, which move the rows read and not the table."""
    if len(shapes) < 2 or len(shapes[0]) != 2 or not all(map(math.prod, shapes[:2])):
        return None
    (rows, width), count = shapes[0], math.prod(shapes[1])
    sizes = {"E": rows, "L": count, "D": width}
    read, written = float(count * (width * item_bytes + 8)), float(count * width * item_bytes)
    if kind == "embedding_bag":
        bags = shapes[2][0] if len(shapes) > 2 and len(shapes[2]) == 1 else shapes[1][0]
        sizes |= {"B": bags, "T": 1, "L": max(round(count / max(bags, 1)), 1)}
        written = float(bags * width * item_bytes)
    return KernelCall(kind, sizes, dtype, float(count * width), read, written, name)


_BATCHED_LOOKUPS = re.compile(r"embedding_\w*lookup\w*_function")


def _batched_lookups(event: HostEvent) -> KernelCall | None:
    """Lookups in T tables at once, as of FBGEMM, of which only the sum of the sizes is known.

    Operands are weights in one or several memories, places, ``D_offsets`` (T + 1), total D, largest
    D, two more, indices (of all bags and tables), and offsets (T B + 1).
    """
    shapes = event.shapes
    first = next((n for n, one in enumerate(event.values) if str(one).isdecimal()), 0)
    if not _BATCHED_LOOKUPS.search(event.name) or first < 2 or len(shapes) <= first + 5:
        return None
    vectors = shapes[first - 1], shapes[first + 4], shapes[first + 5]
    if not all(is_shape(vector) and len(vector) == 1 for vector in vectors):
        return None
    (tables, count, bags), columns = (vector[0] for vector in vectors), int(event.values[first])
    tables -= 1
    bags = (bags - 1) // max(tables, 1)
    weights = zip(shapes[: first - 1], event.types, strict=False)
    floats = [shape for shape, type_ in weights if "float" in str(type_) and is_shape(shape)]
    held = sum(shape[0] for shape in floats if len(shape) == 1)
    if min(tables, bags, count, columns, held) < 1:
        return None
    sizes = {
        "B": bags,
        "T": tables,
        "E": max(held // columns, 1),
        "L": max(round(count / (tables * bags)), 1),
        "D": max(columns // tables, 1),
    }
    read, written = float(count * (sizes["D"] * 4 + 8)), float(bags * columns * 4)
    flops = float(count * sizes["D"])
    return KernelCall("embedding_bag", sizes, "float32", flops, read, written, event.name)


Shape = tuple[int, ...]


def host_call(op: HostEvent, nested: Sequence[HostEvent]) -> KernelCall | None:
    """Call of an operator on the CPU; None for views, and where the trace has no shapes."""
    inside = [op] if _shapes(op.shapes) else nested
    known = [part for part in inside if part.kind == "op" and _shapes(part.shapes)]
    known = [part for part in known if part.name.startswith("aten::")] or known[:1]
    longest = max(known, key=lambda part: part.end - part.start, default=None)
    if longest is None:
        return None
    if longest.name.removeprefix("aten::").rstrip("_") in _VIEWS:
        copies = (part for part in nested if part.name in _COPIES and _shapes(part.shapes))
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
    described = rule(shapes, values) if rule is not None else None
    dtype = dtype_of(str(types[0])) if types else "float32"
    if described is None:
        call = call_of(name, tuple(shapes), types)
        op = _NAMES.get(stem, call.op)
        moved = call.read_bytes if op == "concat" else call.written_bytes
        stem = op.removesuffix("_backward")
        if stem in FLOPS_PER_ELEMENT:
            elements = moved / element_bytes(dtype)
            call = replace(call, flops=FLOPS_PER_ELEMENT[stem] * elements)
        return replace(call, op=op, written_bytes=moved)
    op, sizes, flops, read, written = described
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
    lists = [
        list(map(int, re.findall(r"\d+", str(numbers))))
        for numbers in values
        if "[" in str(numbers)
    ]
    stride, pad, dilation = (lists + [[], [], []])[:3]
    out = []
    for at, (size, window) in enumerate(zip(data[2:], weight[2:], strict=True)):
        step, around, apart = (
            numbers[min(at, len(numbers) - 1)] if numbers else default
            for numbers, default in ((stride, 1), (pad, window // 2), (dilation, 1))
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
