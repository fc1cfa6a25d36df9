# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.hardswish``: the activation of MobileNet-V3 as one node.

::

    hardswish(x) = x * clip(x + 3, 0, 6) / 6        any shape, any float type
"""

from __future__ import annotations

from tvm import relax, te

from schedules.compute.conv2d import activate
from schedules.workload.conv2d import Activation

from .register import float_tensor_type, is_typed, register_op


def hardswish(data: relax.Expr) -> relax.Call:
    """Apply ``x * clip(x + 3, 0, 6) / 6`` to every element.

    Parameters
    ----------
    data : relax.Expr
        A tensor of a floating-point type.

    Returns
    -------
    relax.Call
        A tensor of the same type and shape.
    """
    call = relax.Call(_HARDSWISH, [data])
    if is_typed(data):
        float_tensor_type(call)
    return call


def _hardswish(data: te.Tensor) -> te.Tensor:
    activation = Activation("hardswish")
    return te.compute(
        data.shape, lambda *index: activate(data(*index), activation, data.dtype), name="hardswish"
    )


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(_hardswish, call.args[0], primfunc_name_hint="hardswish")


_HARDSWISH = register_op(
    "relax.tvm_fusion.hardswish", "x * clip(x + 3, 0, 6) / 6.", float_tensor_type, _legalize
)
