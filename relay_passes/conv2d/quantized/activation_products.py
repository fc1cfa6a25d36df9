# SPDX-License-Identifier: Apache-2.0
"""Products of two quantised tensors that are both known only at run time, with their epilogues."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from schedules.cost.cpu_kernels import CYCLES
from schedules.cost.decisions import compare
from schedules.cost.kernel_call import KernelCall
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.byte_product import ByteFactor, ByteProduct, ByteResult
from schedules.tir.extents import constant, extent_of

from ...core.constants import array_of, numbers, scaled, shifted, tensor_constant, uniform
from ...core.expressions import Value, op_name, permutation
from ...core.graph import Graph
from ...op.byte_matmul import BYTES, NAME, byte_matmul, changed, product_of
from ...op.elementwise import bounds_of, in_bytes
from .byte_tensors import ByteTensor, bytes_of, rounding_of

QUANTIZE, TURN = "relax.quantize", "relax.permute_dims"
_FLOATS = ("float32", "float64")  # the latter of long sums of integers


class ActivationProducts:
    """Products of a function that are computed in bytes; the cost model decides about each."""

    def __init__(self, cpu: CPUInfo) -> None:
        self._cpu = cpu
        self._taken: set[relax.Var] = set()

    def roundings(self, graph: Graph, call: relax.Call) -> list[relax.Var]:
        """The rounded numbers that a product reads, if it is to be computed in bytes."""
        found: list[relax.Var] = []
        factors: list[ByteFactor] = []
        for operand in call.args:
            rounding = rounding_of(graph, operand)
            source = None if rounding is not None else _runtime_bytes(graph, operand)
            if rounding is None and source is None or not _is_matrix(operand):
                return []
            axes = _axes_in_memory(graph, operand)
            shape = [operand.ty.shape.values[axis] for axis in np.argsort(axes)]
            zero = source is not None and source.zero is not None
            dtype = "uint8" if source is None else str(source.data.ty.dtype)
            low = (
                int(bounds_of(graph.definition(rounding))[0]) if source is None else int(source.low)
            )
            factors.append(ByteFactor(tuple(map(extent_of, shape)), axes, dtype, low, zero))
            found += [rounding] * (rounding is not None)
        rank = max(len(factor.shape) for factor in factors)
        left, right = factors
        product = ByteProduct(left, right, ByteResult(tuple(range(rank))))
        is_fit = str(call.ty.dtype) in _FLOATS and not product.misfit(self._cpu)
        if is_fit and self._gains(product):
            self._taken.add(graph.current)
            return found
        return []

    def takes(self, graph: Graph) -> bool:
        """Return whether the current product was found to be faster in bytes."""
        return graph.current in self._taken

    def multiply(self, graph: Graph, call: relax.Call) -> Value:
        """Multiply bytes."""
        left, right = (_runtime_bytes(graph, operand) for operand in call.args)
        if left is None or right is None:
            return None
        dtype = str(call.ty.dtype)
        scale = _joined(np.multiply, left.scale, right.scale, dtype)
        if scale is None:
            return None
        (left_data, left_axes), (right_data, right_axes) = (
            graph.unturned(source.data, range(source.data.ty.ndim)) for source in (left, right)
        )
        in_floats = dtype == "float32"
        product = byte_matmul(
            left_data,
            right_data,
            left_axes=left_axes,
            right_axes=right_axes,
            offsets=(int(left.low), int(right.low)),
            zeros=(_byte_zero(graph, left), _byte_zero(graph, right)),
            scale=scale if in_floats else 1.0,
        )
        if in_floats:
            return product
        sums = graph.emit(changed(product, out_dtype="int32"))
        floats = relax.op.astype(sums, dtype)
        if scale == 1:
            return floats
        return relax.op.multiply(graph.emit(floats), tensor_constant(np.array(scale), dtype))

    def _gains(self, product: ByteProduct) -> bool:
        """Predict whether a product of bytes is faster than one of float32."""
        cycles = {
            "bytes": product.cycles(self._cpu),
            "float32": product.separate_cycles(self._cpu),
        }
        calls = {name: [KernelCall(CYCLES, {"cycles": each})] for name, each in cycles.items()}
        return compare("product", product.title, calls, 0.0).chosen == "bytes"


def fold_scale(graph: Graph, call: relax.Call) -> Value:
    """Multiply by, or divide by, a number in the product: a constant, or one scalar."""
    match = scaled(call)
    operands = [*call.args] if match is None else [match[0]]
    for data, other in zip(operands, reversed(call.args), strict=False):
        product = _open_product(graph, data)
        if product is None:
            continue
        if match is None:
            is_scalar = not isinstance(other, GenericConst) and other.ty.ndim == 0
            if op_name(call) != "relax.multiply" or not is_scalar or product.attrs["has_factor"]:
                return None
            return changed(product, [other], has_factor=True)
        operand = (
            call.args[1] if call.args[0] is data or call.args[0].same_as(data) else call.args[0]
        )
        number = uniform(numbers(operand))
        if number is None or operand.ty.ndim > data.ty.ndim:
            return None
        operation = np.divide if op_name(call) == "relax.divide" else np.multiply
        scale = _joined(operation, float(product.attrs["scale"]), number)
        return None if scale is None else changed(product, scale=scale)
    return None


def fold_rounding(graph: Graph, call: relax.Call) -> Value:
    """End the product with the rounding of its result to bytes."""
    data, *parameters = call.args
    dtype, by, low, high = "uint8", 1.0, 0.0, 0.0
    if parameters:
        scale, point = parameters
        dtype, number = str(call.attrs.out_dtype), uniform(numbers(scale))
        zero = uniform(array_of(point)) if isinstance(point, GenericConst) else None
        if dtype not in BYTES or not number or zero is None:
            return None
        limits = np.iinfo(dtype)
        by, low, high = number, limits.min - zero, limits.max - zero
    else:
        low, high = bounds_of(call)
        if high - low > 255:
            return None
    product = _open_product(graph, data)
    if product is None or product.attrs["has_factor"]:
        return None
    scale = _joined(np.divide, float(product.attrs["scale"]), by)
    if scale is None:
        return None
    rounded = changed(product, scale=scale, low=low, high=high, out_dtype=dtype)
    if parameters or in_bytes(call):
        return rounded
    return ByteTensor(graph.emit(rounded), low=low).floats(graph)


def fold_rescaling(graph: Graph, call: relax.Call) -> Value:
    """Multiply rounded numbers by a constant in the product, and add a tensor that is broadcast.

    The sum of a mask and rounded scores is so one with their product.
    """
    for data, added in (call.args, reversed(call.args)):
        match = scaled(_only(graph, data, "relax.multiply"))
        source, factor = (data, 1.0) if match is None else (match[0], uniform(match[1]) or 0.0)
        product = _rounded_product(graph, source)
        if product is None or not factor or not _broadcasts(added, call, product):
            continue
        whole = [1] * (call.ty.ndim - added.ty.ndim) + [*added.ty.shape.values]
        if added.ty.ndim < call.ty.ndim:
            added = graph.emit(relax.op.reshape(added, whole))
        attrs = {"rescale": factor, "is_added_to": True, "out_dtype": "float32"}
        return changed(product, [added], **attrs)
    return None


def fold_multiple(graph: Graph, call: relax.Call) -> Value:
    """Multiply rounded numbers by a constant in the product, whose result then has floats."""
    match = scaled(call)
    product = None if match is None else _rounded_product(graph, match[0])
    factor = None if match is None else uniform(match[1])
    if product is None or not factor or "low" not in product.attrs.keys():
        return None
    return changed(product, rescale=factor, out_dtype="float32")


def _rounded_product(graph: Graph, expr: relax.Expr) -> Value:
    """A product that nothing else reads, whose floats, or the numbers of whose bytes, are given."""
    low = 0.0
    if (match := shifted(_only(graph, expr, "relax.add"))) is not None:
        expr, low = match[0], uniform(match[1]) or 0.0
    cast = _only(graph, expr, "relax.astype")
    product = _only(graph, expr if cast is None else cast.args[0], NAME)
    if product is None or bool(product.attrs["is_added_to"]):
        return None
    is_rounded = "low" in product.attrs.keys()
    kind = "uint8" if is_rounded else "float32"
    stands_for = low == (float(product.attrs["low"]) if is_rounded else 0.0)
    is_alike = str(product.attrs["out_dtype"]) == kind and (cast is not None) == is_rounded
    return product if is_alike and stands_for else None


def _broadcasts(added: relax.Expr, call: relax.Call, product: relax.Call) -> bool:
    """Return whether a tensor has one element, or as many as the product, along each of its axes.

    The product's axes are in order, and the sum has no other ones.
    """
    shapes = added.ty.shape, call.ty.shape
    known = all(isinstance(shape, relax.ShapeExpr) for shape in shapes)
    if not known or str(added.ty.dtype) != "float32":
        return False
    sums = product_of(product)
    is_whole = tuple(map(constant, call.ty.shape.values)) == sums.extents
    in_order = sums.result.axes == tuple(range(len(sums.extents)))
    if not (is_whole and in_order) or isinstance(added, GenericConst) and added.ty.ndim == 0:
        return False
    extents = [constant(extent) for extent in added.ty.shape.values]
    sizes = [constant(extent) for extent in call.ty.shape.values][
        len(call.ty.shape) - len(extents) :
    ]
    return all(extent in (1, size) for extent, size in zip(extents, sizes, strict=True))


def _only(graph: Graph, expr: relax.Expr, name: str) -> Value:
    """The call of an op whose result nothing else reads."""
    return graph.definition(expr, name) if graph.has_one_use(expr) else None


def fold_order(graph: Graph, call: relax.Call) -> Value:
    """Store the result in another order of axes, of which the last one stays."""
    product = _only(graph, call.args[0], NAME)
    if product is None:
        return None
    axes, order = [*map(int, product.attrs["axes"])], permutation(call)
    stored = [axes[axis] for axis in order]
    return changed(product, axes=stored) if stored[-1] == len(axes) - 1 else None


def _joined(operation: np.ufunc, left: float, right: float, dtype: str = "float32") -> float | None:
    """The result for two constants in a type; None if it is no normal number of that."""
    kind = np.dtype(dtype).type
    result = operation(kind(left), kind(right))
    is_lost = bool(left) and bool(right) and abs(result) < np.finfo(kind).tiny
    return float(result) if np.isfinite(result) and not is_lost else None


def _open_product(graph: Graph, expr: relax.Expr) -> relax.Call | None:
    """A product in float32 whose result nothing else reads."""
    product = _only(graph, expr, NAME)
    is_open = product is not None and str(product.attrs["out_dtype"]) == "float32"
    return product if is_open and not bool(product.attrs["is_added_to"]) else None


def _runtime_bytes(graph: Graph, expr: relax.Expr) -> ByteTensor | None:
    """The bytes of a factor, whose zero point may be a byte that is known at run time."""
    source = bytes_of(graph, expr, BYTES)
    if source is None or not np.isfinite(np.float32(source.scale)):
        return None
    if source.zero is not None and (source.low or _byte_zero(graph, source) is None):
        return None
    return source


def _byte_zero(graph: Graph, source: ByteTensor) -> relax.Expr | None:
    """The zero point of the bytes in their own type."""
    cast = None if source.zero is None else graph.definition(source.zero, "relax.astype")
    is_alike = cast is not None and str(cast.args[0].ty.dtype) == str(source.data.ty.dtype)
    return cast.args[0] if cast is not None and is_alike else None


def _is_matrix(expr: relax.Expr) -> bool:
    """Return whether a factor has two dimensions of known size, and elements."""
    if not isinstance(expr.ty.shape, relax.ShapeExpr) or expr.ty.ndim < 2:
        return False
    return all(constant(extent) for extent in expr.ty.shape.values)


def _axes_in_memory(graph: Graph, expr: relax.Expr) -> tuple[int, ...]:
    """Order of the axes of a factor in memory, past element-wise steps in front of it."""
    order = [*range(expr.ty.ndim)]
    value = graph.definition(expr)
    steps = (TURN, "relax.multiply", "relax.divide", "relax.add", "relax.subtract")
    while op_name(value) in steps and value.ty.ndim == expr.ty.ndim:
        if op_name(value) == TURN:
            inner = permutation(value)
            order = [inner[axis] for axis in order]
        value = graph.definition(value.args[0])
    return tuple(order)
