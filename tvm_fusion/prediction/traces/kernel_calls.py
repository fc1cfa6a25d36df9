# SPDX-License-Identifier: Apache-2.0
"""Kernel calls, as the models of kernels know them, of traced kernels."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence

from schedules.cost.kernel_call import KernelCall

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
    each = _BYTES.get(dtype, 4)
    name = op.removeprefix("aten::").rstrip("_")
    if name in _PRODUCTS:
        found = _PRODUCTS[name](shapes)
        if found is not None:
            return _product(found, dtype, each, op)
    if name in _LOOKUPS:
        lookups = _lookups(_LOOKUPS[name], shapes, dtype, each, op)
        if lookups is not None:
            return lookups
    read = float(sum(map(math.prod, shapes)) * each)
    written = float(max(map(math.prod, shapes)) * each)
    rows = {"_softmax": "softmax", "softmax": "softmax", "native_layer_norm": "layer_norm"}
    if name in rows:
        width = shapes[0][-1]
        sizes = {"B": math.prod(shapes[0]) // max(width, 1), "H": width}
        return KernelCall(rows[name], sizes, dtype, written / each, read, written, op)
    known = name if name in _POINTWISE else "elementwise"
    return KernelCall(known, {}, dtype, written / each, read, written, op)


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


def _lookups(kind: str, shapes: Shapes, dtype: str, each: int, name: str) -> KernelCall | None:
    """Lookups of a table's rows, which move the rows read and not the table."""
    if len(shapes) < 2 or len(shapes[0]) != 2 or not all(map(math.prod, shapes[:2])):
        return None
    (rows, width), count = shapes[0], math.prod(shapes[1])
    sizes = {"E": rows, "L": count, "D": width}
    read, written = float(count * (width * each + 8)), float(count * width * each)
    if kind == "embedding_bag":
        bags = shapes[2][0] if len(shapes) > 2 and len(shapes[2]) == 1 else shapes[1][0]
        sizes |= {"B": bags, "T": 1, "L": max(round(count / max(bags, 1)), 1)}
        written = float(bags * width * each)
    return KernelCall(kind, sizes, dtype, float(count * width), read, written, name)


_BATCHED_LOOKUPS = re.compile(r"embedding_\w*lookup\w*_function")


def _batched_lookups(event: HostEvent) -> KernelCall | None:
    """Lookups in T tables at once, as of FBGEMM, of which only the sum of the sizes is known.

    Operands are weights in one or several memories, places, ``D_offsets`` (T + 1), total D, largest
    D, two more, indices (of all bags and tables), and offsets (T B + 1).
    """
    shapes = event.shapes
    at = next((n for n, one in enumerate(event.values) if str(one).isdecimal()), 0)
    if not _BATCHED_LOOKUPS.search(event.name) or at < 2 or len(shapes) <= at + 5:
        return None
    vectors = shapes[at - 1], shapes[at + 4], shapes[at + 5]
    if not all(is_shape(vector) and len(vector) == 1 for vector in vectors):
        return None
    (tables, count, bags), columns = (vector[0] for vector in vectors), int(event.values[at])
    tables -= 1
    bags = (bags - 1) // max(tables, 1)
    weights = zip(shapes[: at - 1], event.types, strict=False)
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
