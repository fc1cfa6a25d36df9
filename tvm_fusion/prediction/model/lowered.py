# SPDX-License-Identifier: Apache-2.0
"""A model as operators of the host, each with the kernels that it launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from schedules.cost.kernel_call import KernelCall, element_bytes

PRECISIONS = {"fp32": "float32", "tf32": "tfloat32", "fp16": "float16", "bf16": "bfloat16"}
"""Types of floats by the names that users give them."""
_MATRIX_OPS = ("gemm", "bmm", "conv2d", "attention")


@dataclass(frozen=True)
class LoweredKernel:
    """One launch.

    Parameters
    ----------
    call : KernelCall
        Operator, sizes, FLOPs and bytes.
    label : str
        What it computes.
    like : KernelCall | None
        For an estimate: the library's kernel whose share of the roofline it is assumed to reach.
    """

    call: KernelCall
    label: str
    like: KernelCall | None = None


@dataclass(frozen=True)
class LoweredOp:
    """One operator that the host calls.

    Parameters
    ----------
    name : str
        Name by which its overheads are found, such as ``aten::linear``.
    kernels : tuple of LoweredKernel
        In order; none for a view.
    """

    name: str
    kernels: tuple[LoweredKernel, ...] = ()


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
