# SPDX-License-Identifier: Apache-2.0
"""Rules and GPU kernels of the functions of a module, read from their IR and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx

from schedules import attributes
from schedules.schedule_rule import failed_rules

from ..errors import CompilationError
from .record_reader import record_of

FALLBACK = "Fallback"
"""Rule of CPUs for whatever the others leave."""

_CALLS = ("relax.call_tir", "relax.call_tir_inplace")


@dataclass(frozen=True)
class KernelUse:
    """Launches of one function in a call of a model."""

    name: str  # The function.
    rule: str
    """The rule that scheduled it; ``"none"`` if it came with a schedule, or no rule takes it."""
    calls: int  # Calls of the function in a call of the model.
    launches: int  # Kernels that all these calls launch; none on a CPU.
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by the rules that failed on it."""
    slow: str = ""
    """Why it is likely to be slow: rules failed, or none but one for any function takes it; empty
    for others."""
    record: dict[str, Any] | None = None  # The tuning record that chose its knobs.


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
            rule, failed = str((func.attrs or {}).get(attributes.RULE, "none")), failed_rules(func)
            launched = count * launches(func.body)
            slow = _slow(func, rule, failed)
            uses.append(KernelUse(name, rule, count, launched, failed, slow, record_of(func)))
    return uses


def _slow(func: tirx.PrimFunc, rule: str, failed: Mapping[str, str]) -> str:
    """Return why a function is likely to be slow, or nothing."""
    if failed:
        return "; ".join(f"{name} failed: {reason}" for name, reason in failed.items())
    if rule == FALLBACK:
        return "no other rule takes it"
    if rule.startswith("dlight."):
        return "none of our rules takes it"
    attrs = func.attrs or {}
    is_done = any(
        name in attrs for name in (attributes.RULE, "tirx.is_scheduled", "tirx.is_host_func")
    )
    return "" if is_done or launches(func.body) else "no rule takes it"


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


@tvm.transform.module_pass(opt_level=0, name="RequireKernels")
class RequireKernels:
    """Check that every function runs on the GPU, or is marked for the host.

    Unscheduled functions would run on the host, which cannot read the memory of a GPU.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module, or raise ``CompilationError`` with the function's name."""
        for name, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or "tirx.is_host_func" in func.attrs:
                continue
            if not launches(func.body):
                raise CompilationError(
                    f"no schedule rule for GPUs takes the function {name.name_hint!r}; please "
                    "report the model, or compile it for a CPU"
                )
        return mod
