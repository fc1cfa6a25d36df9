# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGathers``: gathers are fused like other injective functions."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, s_tir, tirx

_INJECTIVE, _OPAQUE = 2, 8
"""``tvm::relax::OpPatternKind``: kInjective and kOpaque."""


@tvm.transform.module_pass(opt_level=0, name="AnnotateGathers")
class AnnotateGathers:
    """Call functions injective that ``AnnotateTIROpPattern`` calls opaque for their subscripts.

    Before::

        @T.prim_func(private=True)
        def take(table: T.Buffer((50, 5)), rows: T.Buffer((3,), "int64"), out: T.Buffer((3, 5))):
            T.func_attr({"op_pattern": 8})
            for i, j in T.grid(3, 5):
                with T.sblock("take"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    out[vi, vj] = table[rows[vi], vj]

    After, the attribute ``op_pattern`` is 2, so that ``FuseOps`` puts it into one kernel with what
    computes the subscripts before it, and with what reads its result.

    A function is changed if it is one block whose axes are all spatial and which stores one element
    at exactly these axes: every output element is then computed once, from whatever it reads.

    Left alone: everything else, such as scatters, sorts and functions of several blocks. Applied
    twice the pass does what it does once.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Change the attributes of every gather."""
        result = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and _is_opaque(func) and _is_gather(func):
                result.update_func(name, func.with_attr("op_pattern", _INJECTIVE))
        return result


def _is_opaque(func: tirx.PrimFunc) -> bool:
    return "op_pattern" in (func.attrs or {}) and int(func.attrs["op_pattern"]) == _OPAQUE


def _is_gather(func: tirx.PrimFunc) -> bool:
    blocks: list[s_tir.SBlock] = []
    effects: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(
        func.body,
        [(s_tir.SBlock, blocks.append), (tirx.Evaluate, effects.append)],
    )
    inner = [block for block in blocks if block.iter_vars]
    if effects or len(inner) != 1 or any(block.alloc_buffers for block in blocks):
        return False
    (block,) = inner
    store = block.body
    return (
        isinstance(store, tirx.BufferStore)
        and block.init is None
        and all(axis.iter_type == tirx.IterVar.DataPar for axis in block.iter_vars)
        and len(store.indices) == len(block.iter_vars)
        and all(
            index.same_as(axis.var)
            for index, axis in zip(store.indices, block.iter_vars, strict=True)
        )
    )
