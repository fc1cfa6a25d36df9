# SPDX-License-Identifier: Apache-2.0
"""Operators and library kernels of a model that PyTorch runs eagerly, from the imported graph.

Each operator launches its kernels by itself: nothing is fused but the bias of a linear layer. What
ONNX writes out in several nodes and PyTorch has as one operator (GELU, SiLU, hardswish, layer
norms) counts as one. Reshapes and transposes are views as long as strides allow; then a copy is
due, as ``Tensor.reshape`` makes one. Parts of the graph on constants are parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
from tvm import relax

from relay_passes.core.expressions import TUPLE_GET_ITEM, op_name, operands
from relay_passes.simplify.simplify_inference import simplify
from schedules.cost.kernel_call import KernelCall

from .eager_rules import EAGER_RULES, FusedAttention, find_attentions
from .lowered import LoweredKernel, LoweredOp, Tensor, conv2d, elementwise, gather, gemm, rows

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
    split: bool = False  # each rank has its share


def lower_to_eager(mod: tvm.IRModule, kind: str = "gpu") -> list[LoweredOp]:
    """Operators of an imported module; see :func:`lower_to_ranks`."""
    return lower_to_ranks(mod, kind).ops


@dataclass(frozen=True)
class EagerRun:
    """Operators of one rank, and the memory that they need."""

    ops: list[LoweredOp]  # Operators in order.
    weight_bytes: float  # Parameters of a rank.
    held: tuple[float, ...]
    """Most bytes that inputs and results hold at once before the first operator, and at each; of
    repeated layers only in the first and in the last of them."""

    @property
    def activation_bytes(self) -> float:
        """The most that inputs and results hold at once."""
        return max(self.held)


def lower_to_ranks(
    mod: tvm.IRModule,  # An imported module of static shapes, before our passes; it is not changed.
    # ``gpu``, where a convolution adds its bias by a kernel of its own, or ``cpu``.
    kind: str = "gpu",
    ranks: int = 1,  # GPUs that share the model.
    # Types of tensors for which the library has attention as one kernel.
    fused: Collection[str] = (),
) -> EagerRun:
    """Operators of an imported module in order, each with the kernels that it launches.

    Over several ranks linear layers are shared out as tensor parallelism does (Megatron-LM): the
    columns of one whose input every rank has, the rows of the next, whose results are summed by an
    all-reduce. What lies between, such as the heads of an attention, is shared out, too.

    An operator that is unknown here has one kernel of its own name, whose bytes are those of its
    operands and results.
    """
    tidy = tvm.transform.Sequential(
        [
            relax.transform.Normalize(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.DeadCodeElimination(),
        ]
    )
    tidied = tidy(simplify(tidy(mod), EAGER_RULES))
    main = tidied["main"]
    attentions = {
        var: found
        for var, found in (find_attentions(tidied) if fused else {}).items()
        if found.call.dtype in fused
    }
    walk = _Eager(main, kind, ranks, attentions)
    if walk.cached:
        walk = _Eager(main, kind, ranks, attentions, walk.cached)
    return EagerRun(walk.ops, walk.weight_bytes, tuple(walk.held))


class _Eager:
    """Walks over the bindings of ``main``."""

    def __init__(
        self,
        main: relax.Function,
        kind: str,
        ranks: int,
        attentions: Mapping[relax.Var, FusedAttention],
        cached: Collection[relax.Var] = (),
    ) -> None:
        self.cached: set[relax.Var] = set()
        """Inputs that a step appends to, such as keys: each rank has its own part of them."""
        self._params = set(main.params)
        self.ops: list[LoweredOp] = []
        self.weight_bytes, self.held = 0.0, [0.0]
        self._kind, self._ranks, self._shared = kind, ranks, False
        self._attentions = attentions
        self._inside = {var: end for end, one in attentions.items() for var in one.inside}
        """Variables that no kernel of their own computes, and the attentions whose kernels do."""
        self._weights: set[relax.Expr] = set()
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
            value = _fresh(param.ty)
            self._values[param] = replace(value, split=True) if param in cached else value
        last = self._last_uses()
        ends: dict[int, list[relax.Expr]] = {}
        for root, number in last.items():
            ends.setdefault(number, []).append(root)
        alive = {param: self._held(self._values[param]) for param in main.params if param in last}
        held = sum(self._held(self._values[param]) for param in main.params)
        for number, (var, value) in enumerate(self._bindings.items()):
            self._values[var] = self._visit(var, value)
            root = self._root(var)
            if root not in alive and var not in self._inside:
                alive[root] = self._held(self._values[var])
                held += alive[root]
            self._note_held(held)
            for each in ends.get(number, ()) if root in last else (*ends.get(number, ()), root):
                held -= alive.pop(each, 0.0)
        result = main.body.body
        result = self._bindings.get(result, result)
        for field in result.fields if isinstance(result, relax.Tuple) else [main.body.body]:
            made = self._bindings.get(field)
            if op_name(made) == "relax.concat" and self.cached.intersection(operands(made)):
                continue  # the next step of this rank reads it
            value = self._value(field)
            for part in value if isinstance(value, tuple) else (value,):
                self._whole(part)
        self._note_held(held)

    def _note_held(self, held: float) -> None:
        """Note the bytes of now for the operators that are new, or for the last one."""
        new = 1 + len(self.ops) - len(self.held)
        if new > 0:
            self.held += new * [held]
        self.held[-1] = max(self.held[-1], held)

    def _last_uses(self) -> dict[relax.Expr, int]:
        """Number of the binding by which each tensor is read for the last time."""
        numbers = {var: number for number, var in enumerate(self._bindings)}
        last: dict[relax.Expr, int] = {}
        for var, value in self._bindings.items():
            number = numbers[self._inside.get(var, var)]
            for root in map(self._root, operands(value)):
                last[root] = max(last.get(root, 0), number)
        return last

    def _root(self, expr: relax.Expr) -> relax.Expr:
        """The tensor that a view shows."""
        while (value := self._bindings.get(expr)) is not None:
            is_view = op_name(value) in (*VIEWS, *_VIEWS, TUPLE_GET_ITEM)
            shown = value if isinstance(value, relax.Var) else next(iter(operands(value)), None)
            if shown is None or not (is_view or shown is value):
                break
            expr = shown
        return expr

    def _held(self, value: _Value | tuple[_Value, ...]) -> float:
        """Bytes on a rank."""
        parts = value if isinstance(value, tuple) else (value,)
        return sum(
            part.tensor.bytes / (self._ranks if part.split else 1)
            for part in parts
            if not part.constant
        )

    def _visit(self, var: relax.Var, value: relax.Expr) -> Any:
        if isinstance(value, relax.Var):
            return self._values[value]
        if isinstance(value, relax.Tuple):
            return tuple(self._value(field) for field in value.fields)
        name = op_name(value)
        if name == TUPLE_GET_ITEM:
            whole = self._values[value.tuple_value]
            return whole[value.index] if isinstance(whole, tuple) else whole
        if var in self._inside or var in self._attentions:
            return self._fused(var, value, name or "unknown")
        return self._operator(var, value, name or "unknown")

    def _fused(self, var: relax.Var, value: relax.Expr, name: str) -> Any:
        """A value of an attention: only the last one has a kernel."""
        count = len(self.ops)
        fused = self._operator(var, value, name)
        del self.ops[count:]
        if var not in self._attentions:
            return fused
        call = self._attentions[var].call
        self._shared = fused.split
        self._add("scaled_dot_product_attention", call)
        self._shared = False
        *outer, heads, length, size = fused.tensor.shape
        if length != call.sizes["L"]:
            return fused
        # In memory the heads of a query lie one after the other.
        *along, query, head, element = contiguous((*outer, length, heads, size))
        return replace(fused, strides=(*along, head, query, element))

    def _operator(self, var: relax.Var, value: relax.Expr, name: str) -> Any:
        args = [self._value(arg) for arg in _tensors(value)]
        if name == "relax.concat" and any(arg.split for arg in args):
            self.cached |= self._params.intersection(_tensors(value))
        if isinstance(var.ty, relax.TensorType) and all(arg.constant for arg in args):
            return replace(_fresh(var.ty), constant=True)
        if not isinstance(var.ty, relax.TensorType | relax.TupleType):
            return _Value(Tensor((), "int64"), ())
        return self._call(var, value, name, args)

    def _call(self, var: relax.Var, call: relax.Call, name: str, args: list[_Value]) -> Any:
        out = _fresh(var.ty)
        first = out[0] if isinstance(out, tuple) else out
        if name in ELEMENTWISE and any(self._is_whole(arg, first) for arg in args):
            args = [self._whole(arg) for arg in args]
        self._shared = any(arg.split for arg in args)
        handler: Callable[..., Any] | None = _HANDLERS.get(name)
        lowered = self._plain(var, call, name, args) if handler is None else None
        if handler is not None:
            lowered = handler(self, var, call, args)
        split, self._shared = self._shared, False
        parts = lowered if isinstance(lowered, tuple) else (lowered,)
        parts = tuple(replace(part, split=split) for part in parts)
        return parts if isinstance(lowered, tuple) else parts[0]

    def _is_whole(self, arg: _Value, out: _Value) -> bool:
        """Return whether every rank has all of an operand as large as the result."""
        is_large = arg.tensor.elements == out.tensor.elements > 1
        return is_large and not arg.constant and not arg.split

    def _whole(self, value: _Value) -> _Value:
        """The value on every rank."""
        if not value.split:
            return value
        self._exchange("all_gather", value.tensor)
        return replace(value, split=False)

    def _exchange(self, kind: str, tensor: Tensor) -> None:
        """Add a collective, whose message is the tensor."""
        call = KernelCall(kind, {"ranks": self._ranks}, tensor.dtype, 0.0, tensor.bytes, 0.0, kind)
        self.ops.append(LoweredOp(f"c10d::{kind}", (LoweredKernel(call, _label(call)),)))

    def _plain(self, var: relax.Var, call: relax.Call, name: str, args: list[_Value]) -> Any:
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
        """Add an operator; of one that is shared out every rank has the same part."""
        named = [replace(call, name=call.name or name) for call in calls]
        if self._shared:
            named = [_share(call, self._ranks) for call in named]
        kernels = tuple(LoweredKernel(call, _label(call)) for call in named)
        self.ops.append(LoweredOp(f"aten::{name}", kernels))

    def _value(self, expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Var):
            return self._values[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field) for field in expr.fields)
        found = replace(_fresh(expr.ty), constant=True)
        if expr not in self._weights:
            self._weights.add(expr)
            self.weight_bytes += found.tensor.bytes
        return found

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
        if right.constant and len(right.tensor.shape) == 2 and self._ranks > 1:
            self._linear(left, right.tensor, out.tensor)
        elif right.constant and len(right.tensor.shape) <= 2:
            self._add("linear", gemm(left.tensor, right.tensor, out.tensor, batched=False))
        elif len(out.tensor.shape) <= 2:
            self._add("mm", gemm(left.tensor, right.tensor, out.tensor, batched=False))
        else:
            left, right = self._batched(left), self._batched(right)
            self._add("matmul", gemm(left.tensor, right.tensor, out.tensor, batched=True))
        return out

    def _linear(self, left: _Value, right: Tensor, out: Tensor) -> None:
        """Share out a linear layer: its rows if its input is shared out, else its columns."""
        rows, columns = right.shape
        by_rows, ranks = left.split, self._ranks
        if (rows if by_rows else columns) % ranks:
            left, by_rows = self._whole(left), False
        self._shared = False
        if not by_rows and columns % ranks:
            self._add("linear", gemm(left.tensor, right, out, batched=False))
            return
        self.weight_bytes -= right.bytes * (1 - 1 / ranks)
        x, w, y = left.tensor.shape, right.shape, out.shape
        if by_rows:
            x, w = (*x[:-1], x[-1] // ranks), (rows // ranks, columns)
        else:
            w, y = (rows, columns // ranks), (*y[:-1], y[-1] // ranks)
        parts = (Tensor(x, out.dtype), Tensor(w, right.dtype), Tensor(y, out.dtype))
        self._add("linear", gemm(*parts, batched=False))
        if by_rows:
            self._exchange("all_reduce", out)
        self._shared = not by_rows

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
            if name == "relax.matmul" and self._is_linear_last():
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

    def _is_linear_last(self) -> bool:
        """Return whether the last kernel is of a linear layer, before its collective."""
        names = [op.name for op in self.ops[-2:] if not op.name.startswith("c10d::")]
        return names[-1:] == ["aten::linear"]

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
        whole, self._shared = self._whole(args[0]), False
        data = self._dense(whole).tensor
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


_VIEWS = ("relax.permute_dims", "relax.broadcast_to", "relax.strided_slice", "relax.split")
"""Operators that view their operand, besides ``VIEWS``."""


def _share(call: KernelCall, ranks: int) -> KernelCall:
    """One rank's part of a call."""
    sizes = dict(call.sizes)
    for name in ("H", "KV") if call.op == "attention" else ("B",):
        if name in sizes:
            sizes[name] = max(1, sizes[name] // ranks)
    flops, read, written = (x / ranks for x in (call.flops, call.read_bytes, call.written_bytes))
    return KernelCall(call.op, sizes, call.dtype, flops, read, written, call.name)


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


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a tensor in row-major order."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor lies in row-major order; strides of unit axes do not matter."""
    pairs = zip(shape, strides, contiguous(shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)


def view(
    shape: Sequence[int], strides: Sequence[int], new: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of a view with another shape; None if the elements must be copied.

    Axes that lie one after the other in memory are merged to runs; each new axis must divide one.
    """
    kept = [(size, step) for size, step in zip(shape, strides, strict=True) if size != 1]
    runs: list[list[int]] = []
    for size, step in kept:
        if runs and runs[-1][1] == size * step:
            runs[-1] = [runs[-1][0] * size, step]
        else:
            runs.append([size, step])
    reversed_strides: list[int] = []
    for size in reversed(new):
        if size == 1:
            reversed_strides.append(reversed_strides[-1] if reversed_strides else 1)
            continue
        while runs and runs[-1][0] == 1:
            runs.pop()
        if not runs or runs[-1][0] % size:
            return None
        reversed_strides.append(runs[-1][1])
        runs[-1] = [runs[-1][0] // size, runs[-1][1] * size]
    return tuple(reversed(reversed_strides))
