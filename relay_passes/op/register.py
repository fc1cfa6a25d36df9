# SPDX-License-Identifier: Apache-2.0
"""Registration of the ops of this package in TVM's registry, and whether a call can be checked."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax
from tvm.ir import Op

from schedules import attributes
from schedules.errors import OpError


def register_op(
    name: str,
    description: str,
    infer_type: Callable[[relax.Call, relax.BlockBuilder], relax.Type],
    legalize: Callable[[relax.BlockBuilder, relax.Call], relax.Expr],
) -> Op:
    """Register a pure op with its type inference and legalization.

    ``name``: full name, ``relax.tvm_fusion.<op>``. ``description``: one line for TVM's registry.
    ``infer_type``: ``FInferType``: the type of a call. ``legalize``: ``FLegalize``: the expression
    that replaces a call in ``LegalizeOps``. Returns the op; one that is registered already is
    returned unchanged, so that a reload is harmless.
    """
    if name not in Op.list_op_names():
        tvm.ir._ffi_api.RegisterOp(name, description)
    op = Op.get(name)
    # has_attr tells whether any op has it; without it, there may be stand-ins for the functions.
    if not (op.has_attr(attributes.REGISTERED) and op.get_attr(attributes.REGISTERED)):
        tvm.ir.register_op_attr(name, attributes.REGISTERED, True)
        tvm.ir.register_op_attr(name, "FInferType", infer_type)
        tvm.ir.register_op_attr(name, "FLegalize", legalize)
        tvm.ir.register_op_attr(name, "FPurity", True)
    return op


def is_typed(*arguments: relax.Expr) -> bool:
    """Return whether all types are known: a nested call gets its type when it is emitted."""
    missing = tvm.ir.Type.missing()
    return not any(argument.ty.same_as(missing) for argument in arguments)


def float_tensor_type(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    """Return the type of the only operand, which is that of an element-wise op on floats.

    Raises OpError if it is no tensor of a floating-point type.
    """
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType):
        raise OpError(f"{call.op.name}: data is {ty}; expected a tensor")
    if ty.dtype is not None and not str(ty.dtype).startswith(("float", "bfloat")):
        raise OpError(
            f"{call.op.name}: data has dtype {ty.dtype}; expected a floating-point type: cast it "
            "with relax.astype first"
        )
    return ty
