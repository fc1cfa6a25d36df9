# SPDX-License-Identifier: Apache-2.0
"""Count of the kernels that the functions of a module launch on a GPU, from their IR."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx

from schedules.gpu.core.kernel_function import RULE

_CALLS = ("relax.call_tir", "relax.call_tir_inplace")


@dataclass(frozen=True)
class KernelUse:
    """Launches of one function in a call of a model.

    Parameters
    ----------
    name : str
        The function.
    rule : str
        The rule that scheduled it; ``"none"`` if it came with a schedule.
    calls : int
        Calls of the function in a call of the model.
    launches : int
        Kernels that all these calls launch.
    """

    name: str
    rule: str
    calls: int
    launches: int


def kernel_uses(mod: tvm.IRModule) -> list[KernelUse]:
    """The functions that ``main`` calls, in their order, before ``call_tir`` is lowered.

    Both sides of a branch count, and the body of a host's loop of unknown length counts once.
    """
    called: Counter[str] = Counter()

    def visit(call: relax.Call) -> None:
        if isinstance(call.op, tvm.ir.Op) and call.op.name in _CALLS:
            called[call.args[0].name_hint] += 1

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(
                func, lambda node: visit(node) if isinstance(node, relax.Call) else None
            )
    uses = []
    for name, count in called.items():
        func = mod[name]
        if isinstance(func, tirx.PrimFunc):
            rule = str((func.attrs or {}).get(RULE, "none"))
            uses.append(KernelUse(name, rule, count, count * launches(func.body)))
    return uses


def launches(body: tirx.Stmt) -> int:
    """Kernels that a statement of the host launches: its outermost bindings of threads."""
    count = 0

    def visit_for(loop: tirx.For) -> tvm_ffi.WalkResult:
        nonlocal count
        if loop.kind == tirx.ForKind.THREAD_BINDING:
            count += 1
        else:
            extent = loop.extent.value if isinstance(loop.extent, tirx.IntImm) else 1
            count += max(0, extent) * launches(loop.body)
        return tvm_ffi.WalkResult.SKIP

    def visit_attribute(statement: tirx.AttrStmt) -> tvm_ffi.WalkResult:
        nonlocal count
        if statement.attr_key != "thread_extent":
            return tvm_ffi.WalkResult.ADVANCE
        count += 1
        return tvm_ffi.WalkResult.SKIP

    callbacks = [(tirx.For, visit_for), (tirx.AttrStmt, visit_attribute)]
    tvm_ffi.structural_walk(body, callbacks, order="pre")
    return int(count)
