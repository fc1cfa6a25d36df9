# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenSums``: computes what accumulates 16-bit floats in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import tvm
from tvm import IRModule, relax
from tvm.ir import GenericConst
from tvm.relax.expr_functor import PyExprMutator, PyExprVisitor, mutator, visitor

from ..core.constants import array_of, tensor_constant
from ..core.expressions import MOVES, op_name

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

ACTIVATIONS = frozenset(
    [f"relax.{name}" for name in "clip sigmoid tanh tvm_fusion.hardswish".split()]
    + [f"relax.nn.{name}" for name in "gelu gelu_tanh leakyrelu prelu silu".split()]
)
"""Other ops that do so where products are cast."""

ELEMENTWISE = frozenset(
    [f"relax.{name}" for name in "abs concat erf exp flatten log maximum minimum".split()]
    + [f"relax.{name}" for name in "negative power rsqrt split sqrt strided_slice".split()]
    + [f"relax.nn.{name}" for name in "max_pool1d max_pool2d max_pool3d pad".split()]
    + ["relax.tvm_fusion.channel_shuffle", *MOVES]
)
"""Ops that compute in float32 what they read from one that does, in types that are not stored."""


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

    With ``stored`` empty, what is computed from a product stays in float32, up to the results of
    the function and to ops that are in no table of this file::

        lv = R.matmul(R.astype(x, "float32"), R.astype(w, "float32"))
        lv1 = R.add(lv, R.astype(b, "float32"))
        z = R.astype(R.matmul(lv1, R.astype(v, "float32")), "float16")

    Parameters
    ----------
    reductions : bool
        Whether to rewrite plain reductions, too: those that ``CoalesceReduction`` left.
    products : str
        ``"cast"``: operands of products are cast, as CPUs compute them. ``"name"``: they stay, and
        the product has ``out_dtype="float32"``, as GPUs compute it.
    stored : collection of str
        Types of 16 bits in which results are stored between two ops that compute in float32.
    """

    def __init__(
        self, *, reductions: bool = True, products: str = "cast", stored: Collection[str] = NARROW
    ) -> None:
        self.reductions, self.products, self.stored = reductions, products, stored

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite all functions of Relax."""
        rewriter = _Rewriter(mod, self.reductions, self.products == "name", self.stored)
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
    def __init__(
        self, mod: IRModule, reductions: bool, names_types: bool, stored: Collection[str]
    ) -> None:
        super().__init__(mod)
        self.ops = SUMS | REDUCTIONS if reductions else SUMS
        self.followers = FOLLOWERS if names_types else FOLLOWERS | ACTIVATIONS
        self.names_types, self.stored = names_types, stored
        self.products: set[relax.Var] = set()
        self.uses = _Uses()

    def visit_call_(self, original: relax.Call) -> relax.Expr:
        """Rewrite one call."""
        call = self.visit_expr_post_order(original)
        name = op_name(call)
        if name in PRODUCTS and any(map(_is_narrow, call.args)):
            return call if call.attrs.out_dtype is not None else self._product(call)
        if name in self.followers:
            return self._follow(call, [self.uses.count[operand] == 1 for operand in original.args])
        if name in ELEMENTWISE | SUMS | REDUCTIONS:
            followed = self._follow(call, [False] * len(call.args))
            if not followed.same_as(call):
                return followed
        if name not in self.ops or not any(map(_is_narrow, call.args)):
            return call
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
            self._before_rounding(operand, is_only)
            for operand, is_only in zip(call.args, is_only_use, strict=True)
        ]
        if all(one.same_as(other) for one, other in zip(operands, call.args, strict=True)):
            return call
        wide = self._wide(call, operands)
        self.products.add(wide)
        return self._rounded(call, wide)

    def _before_rounding(self, operand: relax.Expr, is_only_use: bool = False) -> relax.Expr:
        """The product of which an operand is the rounding; any other operand itself.

        Also itself is the rounding to a type that is stored, unless this is its only use.
        """
        if isinstance(operand, relax.Tuple):
            fields = [self._before_rounding(field) for field in operand.fields]
            is_same = all(a.same_as(b) for a, b in zip(fields, operand.fields, strict=True))
            return operand if is_same else relax.Tuple(fields)
        value = self.lookup_binding(operand) if isinstance(operand, relax.Var) else None
        if isinstance(value, relax.TupleGetItem):
            fields = self.lookup_binding(value.tuple_value)
            value = fields.fields[value.index] if isinstance(fields, relax.Tuple) else None
        if isinstance(value, relax.Var):
            inner = self._before_rounding(value, is_only_use)
            return operand if inner.same_as(value) else inner
        if value is None or op_name(value) != "relax.astype":
            return operand
        if value.args[0] not in self.products:
            return operand
        return value.args[0] if is_only_use or self._stays_wide(operand.ty) else operand

    def _stays_wide(self, wanted: relax.TensorType) -> bool:
        return not self.names_types and str(wanted.dtype) not in self.stored

    def _widened(self, operand: relax.Expr) -> relax.Expr:
        """An operand in float32, if it has 16 bits."""
        operand = self._before_rounding(operand)
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
            return self._as(wide, call.ty)
        fields = [
            self.builder_.emit(
                self._as(self.builder_.emit(relax.TupleGetItem(wide, index)), wanted)
            )
            for index, wanted in enumerate(call.ty.fields)
        ]
        return relax.Tuple(fields)

    def _as(self, wide: relax.Var, wanted: relax.TensorType) -> relax.Expr:
        if wide.ty.dtype == wanted.dtype:
            return wide
        if self._stays_wide(wanted):
            self.products.add(wide)
        return relax.op.astype(wide, str(wanted.dtype))


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
