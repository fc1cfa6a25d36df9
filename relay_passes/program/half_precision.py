# SPDX-License-Identifier: Apache-2.0
"""Pass ``HalfPrecision``: computes products and convolutions of float32 in float16."""

from __future__ import annotations

import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..core.expressions import op_name


@tvm.transform.module_pass(opt_level=0, name="HalfPrecision")
class HalfPrecision:
    """Cast operands of products and convolutions to float16; their sums stay float32.

    Before::

        y = R.matmul(x, w)                                         # float32

    After::

        y = R.astype(R.matmul(R.astype(x, "float16"), w16, out_dtype="float32"), "float16")

    TVM's ``ToMixedPrecision`` says what is float16 between them: element-wise ops, pools and
    changes of layout are, norms, softmax and sums are not. It fails on ``clip``, whose bounds are
    no tensors, so that becomes a minimum of a maximum first. Equal casts become one; those of
    constants are left to ``SimplifyInference``. The types of ``main`` stay as they are.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite ``main``."""
        function = _ClipToMinimum().visit_expr(mod["main"])
        changed = mod.clone()
        changed.update_func(mod.get_global_var("main"), function)
        passes = [
            relax.transform.ToMixedPrecision(out_dtype="float32"),
            relax.transform.EliminateCommonSubexpr(),
        ]
        return tvm.transform.Sequential(passes)(changed)


@mutator
class _ClipToMinimum(PyExprMutator):
    """Writes ``clip`` with tensors as bounds."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != "relax.clip":
            return call
        x, low, high = call.args
        least, greatest = (relax.const(bound.value, str(x.ty.dtype)) for bound in (low, high))
        return relax.op.minimum(relax.op.maximum(x, least), greatest)
