# SPDX-License-Identifier: Apache-2.0
"""Work of a function of TensorIR that FLOPs and sizes of its parameters do not tell."""

from __future__ import annotations

import math
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import ir, tirx

from schedules.tir.expression_walk import nodes
from schedules.tir.vector_math import is_expensive


class KernelWork(NamedTuple):
    """Work of one call.

    Parameters
    ----------
    functions : int
        Elements for which an elementary function such as ``exp`` is computed.
    gathered_bytes : dict of int to int
        Bytes that are read of those parameters whose elements are chosen by data, by position.
    """

    functions: int
    gathered_bytes: dict[int, int]


def count_work(func: tirx.PrimFunc) -> KernelWork:
    """Count the work of a function that has no schedule yet; symbolic loops count once."""
    functions = 0
    gathered: dict[str, int] = {}

    def count(body: tirx.Stmt, times: int) -> None:
        def inside(loop: tirx.For) -> tvm_ffi.WalkResult:
            extent = loop.extent.value if isinstance(loop.extent, tirx.IntImm) else 1
            count(loop.body, times * int(extent))
            return tvm_ffi.WalkResult.SKIP

        def store(node: tirx.BufferStore) -> tvm_ffi.WalkResult:
            nonlocal functions
            functions += times * is_expensive(node.value)
            for load in nodes(node.value, ir.TensorLoad):
                if any(nodes(index, ir.TensorLoad) for index in load.indices):
                    name = load.source.name
                    size = times * tvm.DataType(str(load.source.dtype)).bits // 8
                    gathered[name] = gathered.get(name, 0) + size
            return tvm_ffi.WalkResult.SKIP

        callbacks = [(tirx.For, inside), (tirx.BufferStore, store)]
        tvm_ffi.structural_walk(body, callbacks, order="pre")

    count(func.body, 1)
    found = {}
    for position, param in enumerate(func.params):
        name = getattr(param, "name", "")
        if name in gathered:
            found[position] = min(parameter_bytes(param), gathered[name])
    return KernelWork(functions, found)


def parameter_bytes(param: tirx.Var) -> int:
    """Bytes of a tensor of static shape."""
    bits = tvm.DataType(str(param.dtype)).bits
    return math.prod(int(extent) for extent in param.shape) * bits // 8
