# SPDX-License-Identifier: Apache-2.0
"""Other parameters of a function: regions of larger tensors, and matrices in another layout.

A kernel that writes its result into the rows of a larger tensor, its window, or reads them from
there, saves the copy between them. A constant is laid out once, when the program is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

import tvm_ffi
from tvm import ir, tirx

from schedules import attributes

from .extents import constant

Window: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end of each dimension."""


def windows_of(func: tirx.PrimFunc) -> dict[int, Window]:
    """Windows of a function's parameters, by position; others are accessed as a whole."""
    text = func.attrs.get(attributes.WINDOWS) if func.attrs else None
    if text is None:
        return {}
    return {int(at): tuple((b, e) for b, e in axes) for at, axes in json.loads(str(text)).items()}


def with_window(
    func: tirx.PrimFunc,  # A function that is not scheduled, whose parameter has no window.
    position: int,  # Place of the parameter; its shape is that of the window.
    shape: Sequence[int],  # Shape of the larger tensor.
    window: Window,
) -> tirx.PrimFunc:
    """The same function on a region of a larger tensor."""
    old = func.params[position]
    new = tirx.decl_buffer(list(shape), str(old.dtype), old.name)

    def place(indices: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        return [_shifted(index, first) for index, (first, _) in zip(indices, window, strict=True)]

    def load(node: ir.TensorLoad) -> ir.TensorLoad:
        return new[tuple(place(node.indices))] if node.source.same_as(old) else node

    def store(node: tirx.BufferStore) -> tirx.BufferStore:
        if not node.buffer.same_as(old):
            return node
        return tirx.BufferStore(new, node.value, place(node.indices))

    def region(node: ir.TensorRegion) -> ir.TensorRegion:
        if not node.source.same_as(old):
            return node
        firsts = place([each.min for each in node.region])
        ranges = zip(firsts, node.region, strict=True)
        extents = [ir.Range.from_min_extent(first, each.extent) for first, each in ranges]
        return tirx.BufferRegion(new, extents)

    rules = [(ir.TensorLoad, load), (tirx.BufferStore, store), (ir.TensorRegion, region)]
    params = [new if number == position else param for number, param in enumerate(func.params)]
    body = tvm_ffi.structural_map(func.body, rules)
    known = {str(at): axes for at, axes in windows_of(func).items()} | {str(position): window}
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs).with_attr(
        attributes.WINDOWS, json.dumps(known, sort_keys=True)
    )


def _shifted(index: tirx.Expr, first: int) -> tirx.Expr:
    return index + tirx.const(first, str(index.ty.dtype)) if first else index


def lay_out_matrix(func: tirx.PrimFunc, place: int, axis: int, lanes: int) -> tirx.PrimFunc:
    """Let a function read one of its matrices in the layout [columns / lanes, depth, lanes].

    Parameters
    ----------
    func : PrimFunc
        A function, which only reads the matrix.
    place : int
        Position of the matrix among the parameters.
    axis : int
        Axis of the columns.
    lanes : int
        Lanes of a vector; they divide the columns. With all of them the matrix is transposed.

    Returns
    -------
    PrimFunc
        The function with another parameter, and the attribute ``LAID_OUT``.
    """
    plain = func.params[place]
    count = plain.shape[axis] // lanes
    shape = [count, plain.shape[1 - axis], lanes]
    matrix = tirx.decl_buffer(shape, str(plain.dtype), plain.name)

    def load(node: ir.TensorLoad) -> ir.TensorLoad:
        if not node.source.same_as(plain):
            return node
        column, depth = node.indices[axis], node.indices[1 - axis]
        if constant(count) == 1:
            return matrix[tirx.const(0, column.ty.dtype), depth, column]
        return matrix[tirx.floordiv(column, lanes), depth, tirx.floormod(column, lanes)]

    def region(node: ir.TensorRegion) -> ir.TensorRegion:
        if not node.source.same_as(plain):
            return node
        return tirx.BufferRegion(matrix, [ir.Range(0, extent) for extent in matrix.shape])

    body = tvm_ffi.structural_map(func.body, [(ir.TensorLoad, load), (ir.TensorRegion, region)])
    params = [matrix if k == place else param for k, param in enumerate(func.params)]
    result = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
    return result.with_attr(attributes.LAID_OUT, [place, axis, lanes])
