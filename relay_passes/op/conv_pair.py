# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.conv2d_pair``: two packed convolutions in tile registers of a CPU.

::

    mid = conv1(data, weight1, bias1[, scale1])
    out = conv2(mid, weight2, bias2[, scale2][, residual])

Each is a packed call of ``relax.tvm_fusion.conv2d`` or ``relax.tvm_fusion.quantized_conv2d``, with
the operands and the numbers of that. The kernel is the attribute ``workload``, as JSON. Batch may
be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te
from tvm.ir import Op

from schedules.errors import OpError
from schedules.workload.conv2d import Conv2DKernel, from_json, to_json

from ..core.expressions import op_name
from .conv2d import CONV2D
from .conv2d import compute_layer as compute_floats
from .conv_call import Known, legalize_kernel
from .conv_types import kernel_output_type, read_kernel
from .quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from .quantized_conv2d import compute_layer as compute_bytes
from .register import register_op

NAME = "relax.tvm_fusion.conv2d_pair"
LAYERS = CONV2D.name, QUANTIZED_CONV2D.name


def joined_kernel(first: relax.Call, second: relax.Call) -> Conv2DKernel | None:
    """The kernel of a pair of calls of ``LAYERS``; None where they are none for one kernel."""
    kernels = [
        read_quantized(call)
        if op_name(call) == QUANTIZED_CONV2D.name
        else read_kernel(call, CONV2D)
        for call in (first, second)
    ]
    return kernels[0].joined(kernels[1])


def conv2d_pair(first: relax.Call, second: relax.Call) -> relax.Call:
    """Join two calls, the second of which reads the result of the first.

    Parameters
    ----------
    first, second : relax.Call
        Packed convolutions of bytes or of bfloat16, or a depthwise first one.

    Returns
    -------
    relax.Call
        The call; its type is inferred when it is emitted.

    Raises
    ------
    OpError
        If a kernel of both computes something else.
    """
    kernel = joined_kernel(first, second)
    if kernel is None:
        raise OpError(
            f"{NAME}: the calls are no pair; expected packed convolutions of static sizes and of "
            "one type, the first without a residual"
        )
    attrs = {"workload": to_json(kernel)}
    return relax.Call(Op.get(NAME), [*first.args, *second.args[1:]], attrs)


def read_pair(call: relax.Call) -> Conv2DKernel:
    """The kernel of a call."""
    return from_json(str(call.attrs["workload"]))


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    return kernel_output_type(call, read_pair(call), NAME)


def compute_pair(
    kernel: Conv2DKernel, operands: Sequence[te.Tensor], residual: te.Tensor | None
) -> te.Tensor:
    """The computation of a pair."""
    data, start = operands[0], kernel.second_weight
    parts = (operands[1:start], None), (operands[start:], residual)
    for layer, (parameters, added) in zip(kernel.apart(), parts, strict=True):
        compute = compute_bytes if layer.is_quantized else compute_floats
        data = compute(layer, [data, *parameters], added)
    return data


def legalize(
    builder: relax.BlockBuilder, call: relax.Call, known: Known | None = None
) -> relax.Expr:
    """Replace a call, as :func:`.conv_call.legalize_kernel` does."""
    return legalize_kernel(builder, call, NAME, read_pair(call), compute_pair, known)


register_op(NAME, "Two packed convolutions in tile registers.", _infer_type, legalize)
