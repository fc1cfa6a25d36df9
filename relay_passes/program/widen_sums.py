# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenSums``: computes what accumulates 16-bit floats in float32."""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name

NARROW = frozenset({"float16", "bfloat16"})

PRODUCTS = frozenset(
    ["relax.matmul"]
    + [f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]
)
"""Products and convolutions, whose kernels for GPUs sum in float32 themselves."""

SCANS = {"relax.cumsum": relax.op.cumsum, "relax.cumprod": relax.op.cumprod}

SUMS = frozenset(
    [f"relax.{name}" for name in "collapse_sum_to einsum mean outer prod std sum variance".split()]
    + [f"relax.{name}" for name in "scatter_elements scatter_nd".split()]
    + [f"relax.grad.{name}_backward" for name in "avg_pool2d max_pool2d nll_loss take".split()]
    + [f"relax.image.{name}" for name in "grid_sample resize2d resize3d".split()]
    + [f"relax.nn.{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in (1, 2, 3)]
    + [f"relax.nn.{kind}_norm" for kind in "batch group instance layer rms".split()]
    + [f"relax.nn.{name}" for name in "attention attention_bias log_softmax softmax".split()]
    + [f"relax.nn.{name}" for name in "cross_entropy_with_logits nll_loss".split()]
    + ["relax.vision.roi_align", *SCANS]
)
"""All other ops that accumulate or interpolate."""


@tvm.transform.module_pass(opt_level=0, name="WidenSums")
class WidenSums:
    """Cast 16-bit operands of ops that accumulate to float32, and the results back.

    Before::

        lv = R.matmul(x, w)                                        # float16
        y = R.add(lv, b)

    After::

        lv = R.matmul(R.astype(x, "float32"), R.astype(w, "float32"))
        y = R.astype(R.add(lv, R.astype(b, "float32")), "float16")

    The kernels of these ops sum in the type of their operands: in float16, 2048 and 1 are 2048.
    What is added to a product or a convolution is added before the result is rounded. Ops that name
    the type of their sums, scatters that do not combine, and other element types stay. The pass is
    idempotent.

    Parameters
    ----------
    ops : Collection[str]
        Names of ops: :data:`PRODUCTS` for CPUs, before their layouts are chosen, and :data:`SUMS`
        for what ``CoalesceReduction`` leaves, which keeps its operands and sums in float32.
    """

    def __init__(self, ops: Collection[str] = PRODUCTS | SUMS) -> None:
        self.ops = ops

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax."""
        rewriter = _Rewriter(mod, self.ops)
        for var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.builder_.update_func(var, rewriter.visit_expr(function))
        return rewriter.builder_.get()


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, ops: Collection[str]) -> None:
        super().__init__(mod)
        self.ops = ops
        self.products: set[relax.Var] = set()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(call)
        name = op_name(call)
        if name == "relax.add":
            return self._added(call)
        if name not in self.ops or _keeps_types(call) or not any(map(_is_narrow, call.args)):
            return call
        wide = [self._widened(operand) for operand in call.args]
        if name in SCANS:
            result = SCANS[name](*wide, call.attrs.axis, "float32", call.attrs.exclusive)
        else:
            result = relax.Call(call.op, wide, call.attrs, call.ty_args)
        return self._rounded(call, result, name in PRODUCTS)

    def _added(self, call: relax.Call) -> relax.Expr:
        """Add to a product what is added to it once it is rounded."""
        operands = [self._product(operand) for operand in call.args]
        if all(one.same_as(other) for one, other in zip(operands, call.args, strict=True)):
            return call
        return self._rounded(call, relax.op.add(*map(self._widened, operands)), True)

    def _product(self, operand: relax.Expr) -> relax.Expr:
        """The product of which an operand is the rounding; any other operand itself."""
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        is_rounded = op_name(value) == "relax.astype" and value.args[0] in self.products
        return value.args[0] if is_rounded else operand

    def _widened(self, operand: relax.Expr) -> relax.Expr:
        """An operand in float32, if it has 16 bits."""
        if isinstance(operand, relax.Tuple):
            return relax.Tuple([self._widened(field) for field in operand.fields])
        if not _is_narrow(operand):
            return operand
        if isinstance(operand, GenericConst):
            return tensor_constant(array_of(operand), "float32")
        return self.builder_.emit(relax.op.astype(operand, "float32"))

    def _rounded(self, call: relax.Call, result: relax.Expr, is_product: bool) -> relax.Expr:
        """A result of float32 in the types of ``call``."""
        wide = self.builder_.emit(result)
        if is_product:
            self.products.add(wide)
        if not isinstance(call.ty, relax.TupleType):
            return _as(wide, wide.ty, call.ty)
        fields = []
        for index, (found, wanted) in enumerate(zip(wide.ty.fields, call.ty.fields, strict=True)):
            field = self.builder_.emit(relax.TupleGetItem(wide, index))
            fields.append(self.builder_.emit(_as(field, found, wanted)))
        return relax.Tuple(fields)


def _as(value: relax.Expr, found: relax.Type, wanted: relax.Type) -> relax.Expr:
    return value if found.dtype == wanted.dtype else relax.op.astype(value, str(wanted.dtype))


def _keeps_types(call: relax.Call) -> bool:
    """Whether a call names the type of its sums, or only moves its operands."""
    attrs = call.attrs
    if op_name(call) in PRODUCTS:
        return attrs.out_dtype is not None
    return getattr(attrs, "reduction", "add") == "update"


def _is_narrow(operand: relax.Expr) -> bool:
    if isinstance(operand, relax.Tuple):
        return any(map(_is_narrow, operand.fields))
    return isinstance(operand.ty, relax.TensorType) and str(operand.ty.dtype) in NARROW
