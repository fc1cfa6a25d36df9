# SPDX-License-Identifier: Apache-2.0
"""Windows: regions of larger tensors in the place of a function's parameters.

A kernel that writes its result into the rows of a larger tensor, or reads them from there, saves
the copy between them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

import tvm_ffi
from tvm import ir, tirx

from schedules import attributes

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
