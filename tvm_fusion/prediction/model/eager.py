# SPDX-License-Identifier: Apache-2.0
"""Operators and library kernels of a model that PyTorch runs eagerly, from the imported graph.

Each operator launches its kernels by itself: nothing is fused but the bias of a linear layer. What
ONNX writes out in several nodes and PyTorch has as one operator (GELU, SiLU, hardswish, layer
norms) counts as one. Reshapes and transposes are views as long as strides allow; then a copy is
due, as ``Tensor.reshape`` makes one. Parts of the graph on constants are parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
from tvm import relax

from relay_passes.core.expressions import TUPLE_GET_ITEM, op_name, operands
from relay_passes.simplify.simplify_inference import simplify
from schedules.cost.kernel_call import KernelCall

from .eager_rules import EAGER_RULES
from .library import Tensor, conv2d, elementwise, gather, gemm, rows
from .lowered import LoweredKernel, LoweredOp
from .strides import contiguous, is_contiguous, view

ELEMENTWISE = {
    **{f"relax.{name}": name for name in ("exp", "log", "sqrt", "rsqrt", "erf", "tanh", "sigmoid")},
    **{f"relax.{name}": name for name in ("abs", "negative", "round", "floor", "ceil", "sign")},
    **{f"relax.{name}": name for name in ("sin", "cos", "clip", "maximum", "minimum", "where")},
    **{f"relax.{name}": name for name in ("equal", "less", "greater", "less_equal", "not_equal")},
    **{f"relax.{name}": name for name in ("greater_equal", "logical_and", "logical_or", "isnan")},
    **{f"relax.nn.{name}": name for name in ("relu", "relu6", "gelu", "silu", "leakyrelu")},
    **{"relax.add": "add", "relax.subtract": "sub", "relax.multiply": "mul"},
    **{"relax.divide": "div", "relax.power": "pow", "relax.logical_not": "logical_not"},
    **{"relax.astype": "to", "relax.tvm_fusion.hardswish": "hardswish"},
    "relax.nn.gelu_tanh": "gelu",
}
"""Element-wise operators, and PyTorch's names for them."""
REDUCTIONS = ("sum", "mean", "max", "min", "prod", "variance", "std", "argmax", "argmin")
POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
VIEWS = ("relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.reshape")


@dataclass(frozen=True)
class _Value:
    """A tensor of the graph with its strides in elements; constants are parameters."""

    tensor: Tensor
    strides: tuple[int, ...]
    constant: bool = False


def lower_to_eager(mod: tvm.IRModule, kind: str = "gpu") -> list[LoweredOp]:
    """Operators of an imported module in order, each with the kernels that it launches.

    Parameters
    ----------
    mod : tvm.IRModule
        An imported module of static shapes, before our passes; it is not changed.
    kind : str
        ``gpu``, where a convolution adds its bias by a kernel of its own, or ``cpu``.

    Returns
    -------
    list of LoweredOp
        An operator that is unknown here has one kernel of its own name, whose bytes are those of
        its operands and results.
    """
    tidy = tvm.transform.Sequential(
        [
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.DeadCodeElimination(),
        ]
    )
    return _Eager(tidy(simplify(tidy(mod), EAGER_RULES))["main"], kind).ops


class _Eager:
    """Walks over the bindings of ``main``."""

    def __init__(self, main: relax.Function, kind: str) -> None:
        self.ops: list[LoweredOp] = []
        self._kind = kind
        self._values: dict[relax.Var, _Value | tuple[_Value, ...]] = {}
        self._bindings = {
            binding.var: binding.value
            for block in main.body.blocks
            for binding in block.bindings
            if isinstance(binding, relax.VarBinding)
        }
        self._uses = Counter(
            operand for value in self._bindings.values() for operand in operands(value)
        )
        for param in main.params:
            self._values[param] = _fresh(param.ty)
        for var, value in self._bindings.items():
            self._values[var] = self._visit(var, value)

    def _visit(self, var: relax.Var, value: relax.Expr) -> Any:
        if isinstance(value, relax.Var):
            return self._values[value]
        if isinstance(value, relax.Tuple):
            return tuple(self._value(field) for field in value.fields)
        name = op_name(value)
        if name == TUPLE_GET_ITEM:
            whole = self._values[value.tuple_value]
            return whole[value.index] if isinstance(whole, tuple) else whole
        args = [self._value(arg) for arg in _tensors(value)]
        if isinstance(var.ty, relax.TensorType) and all(arg.constant for arg in args):
            return replace(_fresh(var.ty), constant=True)
        if not isinstance(var.ty, relax.TensorType | relax.TupleType):
            return _Value(Tensor((), "int64"), ())
        return self._call(var, value, name or "unknown", args)

    def _call(self, var: relax.Var, call: relax.Call, name: str, args: list[_Value]) -> Any:
        handler: Callable[..., Any] | None = _HANDLERS.get(name)
        if handler is not None:
            return handler(self, var, call, args)
        short = name.rpartition(".")[2]
        if name in VIEWS:
            return self._reshaped(args[0], _fresh(var.ty).tensor)
        out = _fresh(var.ty)
        first = out[0] if isinstance(out, tuple) else out
        if name in ELEMENTWISE:
            known = ELEMENTWISE[name]
            self._add(known, elementwise(_kernel(known), _of(args), first.tensor))
        elif short in REDUCTIONS:
            work = args[0].tensor.elements / max(1, first.tensor.elements)
            self._add(short, elementwise("reduce", _of(args), first.tensor, work))
        elif short in POOLS:
            window = prod(int(size) for size in getattr(call.attrs, "pool_size", ()))
            self._add(short, elementwise("pool", _of(args), first.tensor, window or 1))
        else:
            self._add(short, elementwise(short, _of(args), first.tensor))
        return out

    def _add(self, name: str, *calls: KernelCall) -> None:
        named = [replace(call, name=call.name or name) for call in calls]
        kernels = tuple(LoweredKernel(call, _label(call)) for call in named)
        self.ops.append(LoweredOp(f"aten::{name}", kernels))

    def _value(self, expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Var):
            return self._values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field) for field in expr.fields)
        return replace(_fresh(expr.ty), constant=True)

    def _dense(self, value: _Value) -> _Value:
        """The tensor itself if it is contiguous, else a copy."""
        if is_contiguous(value.tensor.shape, value.strides):
            return value
        self._add("contiguous", elementwise("copy", [value.tensor], value.tensor))
        return _Value(value.tensor, contiguous(value.tensor.shape))

    def _reshaped(self, value: _Value, out: Tensor) -> _Value:
        strides = view(value.tensor.shape, value.strides, out.shape)
        if strides is None:
            value = self._dense(value)
            strides = contiguous(out.shape)
        self.ops.append(LoweredOp("aten::reshape"))
        return _Value(out, strides)

    # Handlers of single operators

    def _permute(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        (value,) = args
        axes = call.attrs.axes
        order = [int(axis) for axis in axes] if axes else range(len(value.strides))[::-1]
        self.ops.append(LoweredOp("aten::permute"))
        return _Value(_fresh(var.ty).tensor, tuple(value.strides[axis] for axis in order))

    def _broadcast(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        out, value = _fresh(var.ty).tensor, args[0]
        self.ops.append(LoweredOp("aten::expand"))
        missing = len(out.shape) - len(value.strides)
        sizes = (1,) * missing + value.tensor.shape
        kept = (0,) * missing + value.strides
        pairs = zip(sizes, kept, out.shape, strict=True)
        return _Value(out, tuple(0 if old != new else stride for old, stride, new in pairs))

    def _slice(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        self.ops.append(LoweredOp("aten::slice"))
        return _Value(_fresh(var.ty).tensor, args[0].strides)

    def _split(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> tuple[_Value, ...]:
        self.ops.append(LoweredOp("aten::split"))
        return tuple(_Value(_fresh(field).tensor, args[0].strides) for field in var.ty.fields)

    def _take(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        table, indices = args[0], args[1]
        out = _fresh(var.ty)
        if indices.constant and indices.tensor.elements == 1:
            self.ops.append(LoweredOp("aten::select"))
            axis = int(call.attrs.axis or 0)
            kept = [stride for number, stride in enumerate(table.strides) if number != axis]
            strides = tuple(kept) if len(kept) == len(out.strides) else out.strides
            return _Value(out.tensor, strides)
        name = "embedding" if table.constant else "index_select"
        self._add(name, gather(table.tensor, indices.tensor, out.tensor))
        return out

    def _same(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        """Indices: PyTorch's kernels check those that they use."""
        return args[0]

    def _concat(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        out = _fresh(var.ty)
        self._add("cat", elementwise("concat", _of(args), out.tensor))
        return out

    def _matmul(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        left, right = args
        out = _fresh(var.ty)
        if right.constant and len(right.tensor.shape) <= 2:
            self._add("linear", gemm(left.tensor, right.tensor, out.tensor, batched=False))
        elif len(out.tensor.shape) <= 2:
            self._add("mm", gemm(left.tensor, right.tensor, out.tensor, batched=False))
        else:
            left, right = self._batched(left), self._batched(right)
            self._add("matmul", gemm(left.tensor, right.tensor, out.tensor, batched=True))
        return out

    def _batched(self, value: _Value) -> _Value:
        """A factor as ``bmm`` takes it: its outer axes merged, with a copy where that needs one."""
        shape = value.tensor.shape
        if len(shape) <= 3 or value.constant:
            return value
        merged = (prod(shape[:-2]), *shape[-2:])
        if view(shape, value.strides, merged) is None:
            return self._dense(value)
        return value

    def _add_or_bias(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        """Give an addition; the bias of a linear layer before it is part of that kernel."""
        out = _fresh(var.ty)
        for data, other in ((0, 1), (1, 0)):
            operand, bias = call.args[data], args[other]
            before = self._bindings.get(operand) if isinstance(operand, relax.Var) else None
            if not bias.constant or self._uses[operand] != 1:
                continue
            name, channels = op_name(before), bias.tensor.elements
            if name == "relax.matmul" and self.ops[-1].name == "aten::linear":
                if channels == out.tensor.shape[-1] == bias.tensor.shape[-1]:
                    return out
            if name == "relax.nn.conv2d" and self.ops[-1].name == "aten::conv2d":
                if channels == out.tensor.shape[1] and self._kind == "cpu":
                    return out
                if channels == out.tensor.shape[1]:
                    convolution = self.ops.pop().kernels[0].call
                    biased = elementwise("add", [out.tensor, bias.tensor], out.tensor)
                    self._add("conv2d", convolution, replace(biased, name="add_"))
                    return out
        self._add("add", elementwise("add", _of(args), out.tensor))
        return out

    def _conv2d(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        data, weight = self._dense(args[0]), args[1]
        out, groups = _fresh(var.ty), int(call.attrs.groups)
        self._add("conv2d", conv2d(data.tensor, weight.tensor, out.tensor, groups))
        return out

    def _batch_norm(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> Any:
        data = args[0].tensor
        self._add("batch_norm", elementwise("batch_norm", _of(args), data))
        return tuple(_fresh(field) for field in var.ty.fields)

    def _softmax(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        data = self._dense(args[0]).tensor
        out = _fresh(var.ty)
        self._add("softmax", rows("softmax", data, data.shape[int(call.attrs.axis)], out.tensor))
        return out

    def _layer_norm(self, var: relax.Var, call: relax.Call, args: list[_Value]) -> _Value:
        data = self._dense(args[0]).tensor
        out, extra = _fresh(var.ty), sum(arg.tensor.bytes for arg in args[1:])
        reduced = prod(data.shape[int(axis)] for axis in call.attrs.axes)
        self._add("layer_norm", rows("layer_norm", data, reduced, out.tensor, extra))
        return out


_HANDLERS: dict[str, Callable[..., Any]] = {
    "relax.permute_dims": _Eager._permute,
    "relax.broadcast_to": _Eager._broadcast,
    "relax.strided_slice": _Eager._slice,
    "relax.split": _Eager._split,
    "relax.take": _Eager._take,
    "relax.tvm_fusion.checked_indices": _Eager._same,
    "relax.concat": _Eager._concat,
    "relax.matmul": _Eager._matmul,
    "relax.add": _Eager._add_or_bias,
    "relax.nn.conv2d": _Eager._conv2d,
    "relax.nn.batch_norm": _Eager._batch_norm,
    "relax.nn.softmax": _Eager._softmax,
    "relax.nn.log_softmax": _Eager._softmax,
    "relax.nn.layer_norm": _Eager._layer_norm,
}


def _kernel(name: str) -> str:
    """Kernel of an element-wise operator: a conversion is a copy."""
    return "copy" if name == "to" else name


def _label(call: KernelCall) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in call.sizes.items())
    return f"{call.op} {sizes}" if sizes else f"{call.op}, {call.moved_bytes / 1e6:.3g} MB"


def _of(values: list[Any]) -> list[Tensor]:
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [value.tensor for value in flat if value.tensor.shape]


def _tensors(value: relax.Expr) -> list[relax.Expr]:
    """Tensors among the operands of a call; those of a tuple one by one."""
    found: list[relax.Expr] = []
    for arg in getattr(value, "args", ()):
        found += arg.fields if isinstance(arg, relax.Tuple) else [arg]
    return [arg for arg in found if isinstance(getattr(arg, "ty", None), relax.TensorType)]


def _fresh(ty: relax.Type) -> Any:
    """A contiguous tensor of a type, or several."""
    if isinstance(ty, relax.TupleType):
        return tuple(_fresh(field) for field in ty.fields)
    shape = tuple(int(dim) for dim in ty.shape) if ty.shape is not None else ()
    return _Value(Tensor(shape, str(ty.dtype)), contiguous(shape))
