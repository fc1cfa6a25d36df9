# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenProducts``: computes products and convolutions of 16-bit floats in float32."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..core.expressions import op_name

NARROW = frozenset({"float16", "bfloat16"})

PRODUCTS = frozenset(
    ["relax.matmul"]
    + [f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]
)


@tvm.transform.module_pass(opt_level=0, name="WidenProducts")
class WidenProducts:
    """Cast 16-bit operands of products and convolutions to float32, and the results back.

    Before::

        y = R.matmul(x, w)                                         # float16

    After::

        y = R.astype(R.matmul(R.astype(x, "float32"), R.astype(w, "float32")), "float16")

    For CPUs, whose kernels sum in the type of their operands: in float16, 2048 and 1 are 2048.
    Casts of constants are left to ``SimplifyInference``. Products that name their type of sums, and
    those of other element types, stay.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax."""
        rewriter = _Rewriter(mod)
        for var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(var, rewriter.visit_expr(function))
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        dtypes = [_dtype(operand) for operand in call.args]
        is_narrow = op_name(call) in PRODUCTS and dtypes[0] in NARROW and dtypes[0] == dtypes[1]
        if not is_narrow or call.attrs.out_dtype is not None:
            return call
        wide = [self.builder_.emit(relax.op.astype(operand, "float32")) for operand in call.args]
        product = self.builder_.emit(relax.Call(call.op, wide, call.attrs, call.ty_args))
        return relax.op.astype(product, dtypes[0])


def _dtype(operand: relax.Expr) -> str:
    return str(operand.ty.dtype) if isinstance(operand.ty, relax.TensorType) else ""
