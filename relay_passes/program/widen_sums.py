# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenSums``: computes what accumulates 16-bit floats in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, PyExprVisitor, mutator, visitor

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name

NARROW = frozenset({"float16", "bfloat16"})

PRODUCTS = frozenset(
    ["relax.matmul"]
    + [f"relax.nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose")]
)

REDUCTIONS = frozenset(
    f"relax.{name}" for name in "collapse_sum_to mean prod std sum variance".split()
)
"""Ops that ``CoalesceReduction`` replaces, with sums of float32, where it knows the shapes."""

SCANS = {"relax.cumprod": relax.op.cumprod, "relax.cumsum": relax.op.cumsum}

SUMS = frozenset(
    [f"relax.{name}" for name in "einsum outer scatter_elements scatter_nd".split()]
    + [f"relax.grad.{name}_backward" for name in "avg_pool2d max_pool2d nll_loss take".split()]
    + [f"relax.image.{name}" for name in "grid_sample resize2d resize3d".split()]
    + [f"relax.nn.{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in (1, 2, 3)]
    + [f"relax.nn.{kind}_norm" for kind in "batch group instance layer rms".split()]
    + [f"relax.nn.{name}" for name in "attention attention_bias log_softmax softmax".split()]
    + [f"relax.nn.{name}" for name in "cross_entropy_with_logits nll_loss".split()]
    + ["relax.vision.roi_align", *SCANS]
)
"""All other ops that accumulate or interpolate."""

_CONV = (
    "strides padding output_padding dilation groups data_layout kernel_layout out_layout".split()
)

FOLLOWERS = frozenset(
    ["relax.nn.relu"] + [f"relax.{name}" for name in "add divide multiply subtract".split()]
)
"""Ops that take a product as it was before it was rounded."""


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
    What alone reads a product or a convolution, to add to it, to multiply it or to take its
    positive part, reads it before it is rounded. Ops that name the type of their sums, scatters
    that do not combine, and other element types stay. The pass is idempotent.

    Parameters
    ----------
    reductions : bool
        Whether to rewrite plain reductions, too: those that ``CoalesceReduction`` left.
    products : str
        ``"cast"``: operands of products are cast, as CPUs compute them. ``"name"``: they stay, and
        the product has ``out_dtype="float32"``, as GPUs compute it.
    """

    def __init__(self, *, reductions: bool = True, products: str = "cast") -> None:
        self.reductions, self.products = reductions, products

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax."""
        rewriter = _Rewriter(mod, self.reductions, self.products == "name")
        for var, function in mod.functions_items():
            if isinstance(function, relax.Function):
                rewriter.uses.visit_expr(function)
                rewritten = rewriter.visit_expr(function)
                if not rewritten.same_as(function):  # what was followed is no longer rounded
                    rewritten = relax.analysis.remove_all_unused(rewritten)
                rewriter.builder_.update_func(var, rewritten)
        return rewriter.builder_.get()


@visitor
class _Uses(PyExprVisitor):
    """Counts the uses of variables."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[relax.Expr] = Counter()

    def visit_var_(self, var: relax.Var) -> None:
        """Count one use."""
        self.count[var] += 1

    visit_dataflow_var_ = visit_var_


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod: IRModule, reductions: bool, names_types: bool) -> None:
        super().__init__(mod)
        self.ops = SUMS | REDUCTIONS if reductions else SUMS
        self.names_types = names_types
        self.products: set[relax.Var] = set()
        self.uses = _Uses()

    def visit_call_(self, given: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(given)
        name = op_name(call)
        if name in FOLLOWERS:
            return self._follow(call, [self.uses.count[operand] == 1 for operand in given.args])
        if name not in self.ops | PRODUCTS or not any(map(_is_narrow, call.args)):
            return call
        if name in PRODUCTS:
            return call if call.attrs.out_dtype is not None else self._product(call)
        if getattr(call.attrs, "reduction", "add") == "update":
            return call
        return self._rounded(call, self._wide(call, call.args))

    def _wide(self, call: relax.Call, operands: Sequence[relax.Expr]) -> relax.Var:
        """Bind a call of operands in float32."""
        wide = [self._widened(operand) for operand in operands]
        name = op_name(call)
        if name in SCANS:
            attrs = call.attrs
            return self.builder_.emit(SCANS[name](*wide, attrs.axis, "float32", attrs.exclusive))
        return self.builder_.emit(relax.Call(call.op, wide, call.attrs, call.ty_args))

    def _product(self, call: relax.Call) -> relax.Expr:
        if self.names_types:
            wide = self.builder_.emit(_with_sums_of_float32(call))
        else:
            wide = self._wide(call, call.args)
        self.products.add(wide)
        return self._rounded(call, wide)

    def _follow(self, call: relax.Call, is_only_use: list[bool]) -> relax.Expr:
        """Compute from a product what alone is computed from it once it is rounded."""
        operands = [
            self._before_rounding(operand) if is_only else operand
            for operand, is_only in zip(call.args, is_only_use, strict=True)
        ]
        if all(one.same_as(other) for one, other in zip(operands, call.args, strict=True)):
            return call
        wide = self._wide(call, operands)
        self.products.add(wide)
        return self._rounded(call, wide)

    def _before_rounding(self, operand: relax.Expr) -> relax.Expr:
        """The product of which an operand is the rounding; any other operand itself."""
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        if not isinstance(value, relax.Call) or op_name(value) != "relax.astype":
            return operand
        return value.args[0] if value.args[0] in self.products else operand

    def _widened(self, operand: relax.Expr) -> relax.Expr:
        """An operand in float32, if it has 16 bits."""
        if isinstance(operand, relax.Tuple):
            return relax.Tuple([self._widened(field) for field in operand.fields])
        if not _is_narrow(operand):
            return operand
        if isinstance(operand, GenericConst):
            return tensor_constant(array_of(operand), "float32")
        return self.builder_.emit(relax.op.astype(operand, "float32"))

    def _rounded(self, call: relax.Call, wide: relax.Var) -> relax.Expr:
        """A result of float32 in the types of ``call``."""
        if not isinstance(call.ty, relax.TupleType):
            return _as(wide, wide.ty, call.ty)
        fields = []
        for index, (found, wanted) in enumerate(zip(wide.ty.fields, call.ty.fields, strict=True)):
            field = self.builder_.emit(relax.TupleGetItem(wide, index))
            fields.append(self.builder_.emit(_as(field, found, wanted)))
        return relax.Tuple(fields)


def _as(value: relax.Expr, found: relax.Type, wanted: relax.Type) -> relax.Expr:
    return value if found.dtype == wanted.dtype else relax.op.astype(value, str(wanted.dtype))


def _with_sums_of_float32(call: relax.Call) -> relax.Call:
    """A product of the same operands that is not rounded."""
    if call.op.name == "relax.matmul":
        return relax.op.matmul(*call.args, "float32")
    make = getattr(relax.op.nn, call.op.name.removeprefix("relax.nn."))
    given = {name: getattr(call.attrs, name) for name in _CONV if hasattr(call.attrs, name)}
    return make(*call.args, **given, out_dtype="float32")


def _is_narrow(operand: relax.Expr) -> bool:
    if isinstance(operand, relax.Tuple):
        return any(map(_is_narrow, operand.fields))
    return isinstance(operand.ty, relax.TensorType) and str(operand.ty.dtype) in NARROW
