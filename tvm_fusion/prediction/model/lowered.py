# SPDX-License-Identifier: Apache-2.0
"""A model as operators of the host, each with the kernels that it launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import tvm

from schedules.cost.kernel_call import FLOPS_PER_ELEMENT, KernelCall, element_bytes
from schedules.workload.conv2d import ConvLayer

PRECISIONS = {"fp32": "float32", "tf32": "tfloat32", "fp16": "float16", "bf16": "bfloat16"}
"""Types of floats by the names that users give them."""
_MATRIX_OPS = ("gemm", "bmm", "conv2d", "attention")


@dataclass(frozen=True)
class LoweredKernel:
    """One launch."""

    call: KernelCall  # Operator, sizes, FLOPs and bytes.
    label: str  # What it computes.
    like: KernelCall | None = None
    """Library's kernel whose share of the roofline an estimate assumes."""


@dataclass(frozen=True)
class LoweredOp:
    """One operator that the host calls."""

    name: str  # Name by which its overheads are found, such as ``aten::linear``.
    kernels: tuple[LoweredKernel, ...] = ()  # Kernels in order; none for a view.


def bytes_share(precision: str) -> float:
    """Bytes of a tensor in a type of ``PRECISIONS``, over those in float32."""
    return 1.0 if precision == "tf32" else element_bytes(PRECISIONS[precision]) / 4


def in_precision(ops: Sequence[LoweredOp], precision: str) -> list[LoweredOp]:
    """The operators with their float32 tensors in another type of ``PRECISIONS``.

    TF32 is only of what multiplies matrices, and moves as many bytes as float32.
    """
    dtype, share = PRECISIONS[precision], bytes_share(precision)

    def cast(call: KernelCall) -> KernelCall:
        if call.dtype != "float32" or (precision == "tf32" and call.op not in _MATRIX_OPS):
            return call
        read, written = share * call.read_bytes, share * call.written_bytes
        return replace(call, dtype=dtype, read_bytes=read, written_bytes=written)

    def kernel(one: LoweredKernel) -> LoweredKernel:
        return replace(one, call=cast(one.call), like=one.like and cast(one.like))

    return [replace(op, kernels=tuple(map(kernel, op.kernels))) for op in ops]


class Tensor(NamedTuple):
    """Shape and element type."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return self.elements * max(1, tvm.DataType(self.dtype).bits // 8)


def gemm(left: Tensor, right: Tensor, out: Tensor, batched: bool, bias: int = 0) -> KernelCall:
    """A product of matrices; of all rows with one matrix if not ``batched``."""
    depth = left.shape[-1]
    rows = left.shape[-2] if len(left.shape) > 1 else 1
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    count = out.elements // max(1, rows * columns)
    if not batched:
        rows, count = rows * count, 1
    sizes = {"B": count, "M": rows, "N": columns, "K": depth}
    flops = 2.0 * out.elements * depth
    read = left.bytes + right.bytes + bias
    return KernelCall("bmm" if batched else "gemm", sizes, out.dtype, flops, read, out.bytes)


def conv2d_sizes(batch: int, layer: ConvLayer, size: tuple[int, int]) -> dict[str, int]:
    """Sizes of a convolution of ``batch`` images of ``size`` pixels."""
    channels = layer.in_channels, layer.out_channels
    return _sizes(batch, channels, size, layer.kernel, layer.output_size(*size), layer.groups)


def conv2d(data: Tensor, weight: Tensor, out: Tensor, groups: int) -> KernelCall:
    """A convolution of NCHW images, without bias."""
    outputs, inside, *window = weight.shape
    channels = data.shape[1], outputs
    sizes = _sizes(data.shape[0], channels, data.shape[2:], window, out.shape[2:], groups)
    flops = 2.0 * out.elements * inside * prod(window)
    return KernelCall("conv2d", sizes, out.dtype, flops, data.bytes + weight.bytes, out.bytes)


def _sizes(
    batch: int,
    channels: Sequence[int],
    size: Sequence[int],
    window: Sequence[int],
    out: Sequence[int],
    groups: int,
) -> dict[str, int]:
    names = ("B", "IC", "OC", "H", "W", "FH", "FW", "OH", "OW", "groups")
    return dict(zip(names, (batch, *channels, *size, *window, *out, groups), strict=True))


def rows(op: str, data: Tensor, axis_elements: int, out: Tensor, extra: int = 0) -> KernelCall:
    """A softmax or a norm of rows of ``axis_elements``."""
    sizes = {"B": data.elements // max(1, axis_elements), "H": axis_elements}
    flops = float(data.elements * FLOPS_PER_ELEMENT[op])
    return KernelCall(op, sizes, out.dtype, flops, data.bytes + extra, out.bytes)


def elementwise(op: str, inputs: Sequence[Tensor], out: Tensor, flops: float = 1.0) -> KernelCall:
    """A kernel that computes each element of its output once; also copies, pooling, reductions."""
    each = FLOPS_PER_ELEMENT.get(op.removesuffix("_backward"), flops)
    read = sum(tensor.bytes for tensor in inputs)
    return KernelCall(op, {}, out.dtype, each * out.elements, read, out.bytes)


def gather(table: Tensor, indices: Tensor, out: Tensor) -> KernelCall:
    """Rows of a table that indices choose; only these rows are read."""
    width = prod(table.shape[1:])
    sizes = {"E": table.shape[0], "L": indices.elements, "D": width}
    return KernelCall("gather", sizes, out.dtype, 0.0, out.bytes + indices.bytes, out.bytes)
