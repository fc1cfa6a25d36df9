# SPDX-License-Identifier: Apache-2.0
"""Ops on elements: hardswish, rounding, quantisation by a range, sorting keys, checked indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax, te, tirx, topi
from tvm.target import Target

from schedules.compute.conv2d import activate, activate_to_bytes
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.checked_indices import check_indices
from schedules.cpu.loops.dynamic_quantize import dynamic_quantize as dynamic_quantize_kernel
from schedules.errors import OpError
from schedules.tir.extents import Extent, constant
from schedules.workload.conv2d import Activation

from .register import float_tensor_type, is_typed, register_op


def hardswish(data: relax.Expr) -> relax.Call:
    """Apply ``x * clip(x + 3, 0, 6) / 6``, the activation of MobileNet-V3, to every element.

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


def _legalize_hardswish(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    return builder.call_te(_hardswish, call.args[0], primfunc_name_hint="hardswish")


_HARDSWISH = register_op(
    "relax.tvm_fusion.hardswish",
    "x * clip(x + 3, 0, 6) / 6.",
    float_tensor_type,
    _legalize_hardswish,
)


BYTE = 255
"""Largest difference of numbers that bytes stand for."""


def round_clip(
    data: relax.Expr, low: float, high: float, out_dtype: str | None = None
) -> relax.Call:
    """Round every element, and bound it.

    ::

        round_clip(x, low, high) = min(max(round(x), low), high)        any shape, any float type
        round_clip(x, low, high, "uint8") = min(max(round(x), low), high) - low, as bytes

    Halves are rounded to even. NaN stays NaN as part of a convolution, and on CPUs; as a byte it
    is 0.

    Parameters
    ----------
    data : relax.Expr
        A tensor of a floating-point type.
    low, high : float
        Whole numbers, ``low <= high``.
    out_dtype : str | None
        ``uint8`` for the differences from ``low``, of which the largest is 255; the type of
        ``data`` if None.

    Returns
    -------
    relax.Call
        A tensor of the same shape.

    Raises
    ------
    OpError
        If ``data`` is no tensor of floats, the bounds are the wrong way round, or bytes cannot
        hold the differences.
    """
    bounds = Activation("round_clip", float(low), float(high))
    attrs: dict[str, float | str] = {"low": bounds.low, "high": bounds.high}
    if out_dtype is not None:
        check_bytes(bounds, out_dtype, "round_clip")
        attrs["out_dtype"] = out_dtype
    call = relax.Call(_ROUND_CLIP, [data], attrs)
    if is_typed(data):
        _infer_round_clip(call)
    return call


def check_bytes(activation: Activation, out_dtype: str, op: str) -> None:
    """Reject an output of bytes that do not hold the numbers of its activation."""
    span = activation.high - activation.low
    if out_dtype != "uint8" or activation.kind != "round_clip" or span > BYTE:
        raise OpError(
            f"{op}: out_dtype is {out_dtype!r} after {activation}; expected 'uint8' after a "
            f"round_clip whose bounds are at most {BYTE} apart"
        )


def in_bytes(call: relax.Call) -> bool:
    """Return whether a call gives bytes."""
    return "out_dtype" in call.attrs.keys()


def bounds_of(call: relax.Call) -> tuple[float, float]:
    """Return the bounds of a call."""
    return float(call.attrs["low"]), float(call.attrs["high"])


def _infer_round_clip(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    ty = float_tensor_type(call)
    return relax.TensorType(ty.shape, "uint8", ty.vdevice) if in_bytes(call) else ty


def _legalize_round_clip(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    low, high = bounds_of(call)

    def rounded(data: te.Tensor) -> te.Tensor:
        if in_bytes(call):
            bounds = Activation("round_clip", low, high)
            return te.compute(
                data.shape, lambda *index: activate_to_bytes(data(*index), bounds, data.dtype)
            )
        # Extremes name their operand once, where choices would double it at each of a chain.
        return topi.clip(te.compute(data.shape, lambda *index: tirx.round(data(*index))), low, high)

    return builder.call_te(rounded, call.args[0], primfunc_name_hint="round_clip")


_ROUND_CLIP = register_op(
    "relax.tvm_fusion.round_clip",
    "min(max(round(x), low), high).",
    _infer_round_clip,
    _legalize_round_clip,
)


RANGE = "relax.tvm_fusion.dynamic_quantize"


def dynamic_quantize(data: relax.Expr) -> relax.Call:
    """Quantise a tensor by its own range, as ONNX's DynamicQuantizeLinear.

    ::

        scale = (max(0, x) - min(0, x)) / 255, or 1 where that is 0; extremes of all elements
        point = round(-min(0, x) / scale)
        bytes, zero = saturate(round(x / scale) + point), saturate(point)

    Halves are rounded to even. NaN becomes 0 as a byte. For GPUs reductions find the extremes.

    Parameters
    ----------
    data : relax.Expr
        A tensor of float32, any shape.

    Returns
    -------
    relax.Call
        A tuple: uint8 of the same shape; the scale, a scalar of float32; the zero point, a scalar
        of uint8.

    Raises
    ------
    OpError
        If ``data`` is no tensor of float32 of a known rank.
    """
    call = relax.Call(_RANGE, [data])
    if is_typed(data):
        _infer_range(call)
    return call


def _infer_range(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TupleType:
    ty = call.args[0].ty
    is_tensor = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    if not is_tensor or str(ty.dtype) != "float32":
        raise OpError(f"{RANGE}: data is {ty}; expected a tensor of float32 of a known rank")
    fields = [ty.shape, "uint8"], [[], "float32"], [[], "uint8"]
    return relax.TupleType([relax.TensorType(*field) for field in fields])


def _legalize_range(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    data, target = call.args[0], Target.current(allow_none=True) or Target("llvm")
    if target.kind.name != "llvm":
        return by_reductions(data, builder.emit)
    kernel = dynamic_quantize_kernel(data.ty.shape.values, CPUInfo.from_target(target))
    function = builder.add_func(kernel, "dynamic_quantize")
    return relax.call_tir(function, [data], [*_infer_range(call).fields])


def by_reductions(data: relax.Expr, emit: Callable[[relax.Expr], relax.Expr]) -> relax.Expr:
    """The tuple of a ``dynamic_quantize`` by ops of Relax, which ``emit`` binds."""
    ops = relax.op
    zero, one, most = (relax.const(value, "float32") for value in (0, 1, 255))
    high = emit(ops.maximum(emit(ops.max(data)), zero))
    low = emit(ops.minimum(emit(ops.min(data)), zero))
    unit = emit(ops.divide(emit(ops.subtract(high, low)), most))
    scale = emit(ops.where(emit(ops.equal(unit, zero)), one, unit))

    def to_bytes(value: relax.Expr) -> relax.Expr:
        known = emit(ops.where(emit(ops.isnan(value)), zero, value))
        return emit(ops.astype(emit(ops.clip(known, 0, 255)), "uint8"))

    point = emit(ops.round(emit(ops.negative(emit(ops.divide(low, scale))))))
    levels = emit(ops.round(emit(ops.divide(data, scale))))
    return relax.Tuple([to_bytes(emit(ops.add(levels, point))), scale, to_bytes(point)])


_RANGE = register_op(
    RANGE, "Bytes of a tensor by its range, scale and zero point.", _infer_range, _legalize_range
)


def sort_key(data: relax.Expr) -> relax.Call:
    """Return the keys of a tensor's elements.

    ::

        sort_key(x) = b if b >= 0 else b ^ 0x7fffffff      b being the bits of a float
        sort_key(x) = x ^ 0x80000000                       of integers without sign

    ``b`` being the bits of a float. Both zeros have one key, and NaN the largest, as numpy and
    PyTorch sort them: kernels that compare floats would lose elements beside NaN. The key has 32
    bits, or 64 of types with so many.

    Parameters
    ----------
    data : relax.Expr
        Numbers or bools, any shape.

    Returns
    -------
    relax.Call
        The same shape; int64 of types of 64 bits, else int32.
    """
    call = relax.Call(_SORT_KEY, [data])
    if is_typed(data):
        _infer_sort_key(call)
    return call


def _infer_sort_key(call: relax.Call, _: relax.BlockBuilder | None = None) -> relax.TensorType:
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.dtype is None:
        raise OpError(f"{call.op.name}: data is {ty}; expected a tensor of a known type")
    dtype = _key_type(str(ty.dtype))
    if ty.shape is None:
        return relax.TensorType(None, dtype, ty.vdevice, ty.ndim)
    return relax.TensorType(ty.shape, dtype, ty.vdevice)


def _key_type(dtype: str) -> str:
    return "int64" if dtype.endswith("64") else "int32"


def _key(value: tirx.Expr, dtype: str) -> tirx.Expr:
    key = _key_type(dtype)
    most, least = tirx.max_value(key), tirx.min_value(key)
    if dtype in ("uint32", "uint64"):
        return tirx.reinterpret(key, value) ^ least
    if "float" not in dtype:
        return value.astype(key)
    if not dtype.endswith("64"):
        value = value.astype("float32")
    bits = tirx.reinterpret(key, value)
    ordered = tirx.Select(bits < tirx.const(0, key), bits ^ most, bits)
    is_zero = value == tirx.const(0.0, value.ty.dtype)
    ordered = tirx.Select(is_zero, tirx.const(0, key), ordered)
    return tirx.Select(tirx.isnan(value), most, ordered)


def _legalize_sort_key(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    def keys(data: te.Tensor) -> te.Tensor:
        dtype = str(data.dtype)
        return te.compute(data.shape, lambda *index: _key(data(*index), dtype), name="sort_key")

    return builder.call_te(keys, call.args[0], primfunc_name_hint="sort_key")


_SORT_KEY = register_op(
    "relax.tvm_fusion.sort_key",
    "An integer ordered as the number.",
    _infer_sort_key,
    _legalize_sort_key,
)


OP = "relax.tvm_fusion.checked_indices"


def checked_indices(
    indices: relax.Expr,
    extents: Sequence[Extent],
    message: str,
    guarded: bool = False,
    taken: relax.Expr | None = None,
) -> relax.Call:
    """Check indices, and count those that are negative from the beginning.

    ``indices``: int32 or int64. With one extent, any shape; with several, [..., len(extents)],
    coordinates. ``extents``: sizes of the indexed dimensions; they may be symbolic. The indices of
    one go from ``-extent`` to ``extent - 1``. ``message``: the error's; where it is empty, the
    nearest index inside takes the place of one outside. ``guarded``: whether the reader reads no
    element where an extent is 0, which has no nearest index. ``taken``: bool of one element: where
    it is false, the nearest index inside takes the place of one outside, too. Returns indices from
    0 to ``extent - 1``, of the shape and the type of ``indices``. Raises OpError if the indices
    have another type or shape; when it is legalized without an error to raise, if an extent is
    symbolic and the reader is not guarded.
    """
    attributes = {"message": message, "guarded": int(guarded)}
    conditions = [] if taken is None else [taken]
    arguments = [indices, relax.ShapeExpr(extents), *conditions]
    call = relax.Call(_CHECKED_INDICES, arguments, attributes)
    if all(map(is_typed, (indices, *conditions))):
        _infer_type(call, None)
    return call


def is_checked(builder: relax.BlockBuilder, value: relax.Expr) -> bool:
    """Return whether a variable is the result of this op."""
    bound = builder.lookup_binding(value) if isinstance(value, relax.Var) else None
    return isinstance(bound, relax.Call) and bound.op == _CHECKED_INDICES


def _infer_type(call: relax.Call, _: relax.BlockBuilder | None) -> relax.TensorType:
    indices, extents, *taken = call.args
    ty, count = indices.ty, len(extents.values)
    if not isinstance(ty, relax.TensorType) or str(ty.dtype) not in ("int32", "int64"):
        raise OpError(f"{OP}: the indices are {ty}; expected int32 or int64")
    if not isinstance(ty.shape, relax.ShapeExpr):
        raise OpError(f"{OP}: the indices are {ty}; expected a known rank")
    for condition in taken:
        is_bool = isinstance(condition.ty, relax.TensorType) and str(condition.ty.dtype) == "bool"
        sizes = condition.ty.shape.values if is_bool and condition.ty.shape is not None else [0]
        if any(constant(size) != 1 for size in sizes):
            raise OpError(f"{OP}: the condition is {condition.ty}; expected a bool of one element")
    if count > 1 and (not ty.shape.values or constant(ty.shape.values[-1]) != count):
        raise OpError(f"{OP}: the indices are {ty}; expected {count} coordinates in the last axis")
    return ty


def _legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    indices, extents = call.args[0], list(call.args[1].values)
    target = Target.current(allow_none=True) or Target("llvm")
    message = str(call.attrs["message"])
    if target.kind.name != "llvm" or not message:
        if not call.attrs["guarded"] and any(constant(extent) is None for extent in extents):
            raise OpError(
                f"{OP}: the size of an indexed dimension is open, and {target.kind.name!r} has no "
                "error to raise here; expected a number: give the model's inputs sizes"
            )
        return builder.call_te(_nearest, indices, extents, primfunc_name_hint="indices_in_bounds")
    ty = _infer_type(call, None)
    taken = call.args[2:]
    sizes = taken[0].ty.shape.values if taken else None
    is_guarded = bool(call.attrs["guarded"])
    kernel = check_indices(ty.shape.values, extents, str(ty.dtype), message, sizes, is_guarded)
    function = builder.add_func(kernel, "checked_indices")
    open_extents = [extent for extent in extents if constant(extent) is None]
    return relax.call_tir(function, [indices, *taken, *open_extents], ty)


def _nearest(indices: te.Tensor, extents: Sequence[tirx.Expr]) -> te.Tensor:
    """The nearest index from 0 to ``extent - 1``; 0 where the extent is."""

    def index(*place: tirx.Var) -> tirx.Expr:
        bound = extents[0]
        for axis, extent in enumerate(extents[1:], start=1):
            bound = tirx.Select(place[-1] == axis, extent, bound)
        value = tirx.Cast("int64", indices(*place))
        from_start = tirx.Select(value < 0, value + bound, value)
        return tirx.Cast(indices.dtype, tirx.max(tirx.min(from_start, bound - 1), 0))

    return te.compute(indices.shape, index, name="indices_in_bounds")


_CHECKED_INDICES = register_op(
    OP, "Indices from the beginning, checked to be within bounds.", _infer_type, _legalize
)
