# SPDX-License-Identifier: Apache-2.0
"""Errors of a compilation that name the nodes of the model, and say what to do.

The importer names the variables of the program by the nodes that compute them. Passes keep most of
these names up to the kernels; ``NoteKernels`` writes down which kernels they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tvm
from tvm import relax, tirx

from schedules import attributes
from schedules.errors import reason

from ..errors import CompilationError, TVMFusionError
from ..onnx.translate import NODE_VARIABLE
from .interrupts import interrupts_kept

MOST_NAMED = 4
_KERNEL = re.compile(r"the kernel '([^']+)'")
ADVICE = (
    "the model is valid, and this is a defect of TVM or of tvm-fusion: please report the model; "
    "until then try fuse='none', winograd='never', or another target"
)


def with_nodes(mod: tvm.IRModule, nodes: Sequence[str]) -> tvm.IRModule:
    """Return an imported module with the labels of the nodes that its variables stand for."""
    return mod.with_attr(attributes.NODES, json.dumps(list(nodes))) if nodes else mod


def without_nodes(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module as it is compiled."""
    return mod.without_attr(attributes.NODES).without_attr(attributes.KERNELS)


@tvm.transform.module_pass(opt_level=0, name="NoteKernels")
class NoteKernels:
    """Note which nodes of the model each kernel computes.

    It runs before and after ``FuseOps``, which forgets the names of its results: before it,
    variables of ``main`` have names of nodes, after it the functions that it makes call the kernels
    that are known by then. A variable without such a name counts as part of those that it reads.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with more notes."""
        if attributes.NODES not in (mod.attrs or {}):
            return mod
        notes: dict[str, list[int]] = json.loads(str(mod.attrs.get(attributes.KERNELS, "{}")))
        programs = {v: f for v, f in mod.functions_items() if isinstance(f, relax.Function)}
        for var, func in programs.items():
            is_fused = "Primitive" in (func.attrs or {})
            _note(var.name_hint if is_fused else None, func, notes)
        return mod.with_attr(attributes.KERNELS, json.dumps(notes))


def _note(name: str | None, func: relax.Function, notes: dict[str, list[int]]) -> None:
    """Note the callees of a program, or a function that was made of such callees."""
    known: dict[relax.Var, list[int]] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            value = getattr(binding, "value", None)
            called = _callee(value)
            if name is not None:
                found = set(notes.get(name, [])).union(notes.get(called or "", []))
                notes[name] = sorted(found)
                continue
            number = re.match(NODE_VARIABLE.format(r"(\d+)"), binding.var.name)
            numbers = [int(number[1])] if number else _numbers_read(value, known)
            known[binding.var] = numbers
            if called is not None:
                notes[called] = sorted({*notes.get(called, []), *numbers})


def _callee(value: relax.Expr) -> str | None:
    """Name of the function that a binding calls."""
    if not isinstance(value, relax.Call):
        return None
    called = value.args[0] if isinstance(value.op, tvm.ir.Op) and value.args else value.op
    return called.name_hint if isinstance(called, tvm.ir.GlobalVar) else None


def _numbers_read(value: relax.Expr, known: dict[relax.Var, list[int]]) -> list[int]:
    read = relax.analysis.free_vars(value) if value is not None else []
    return sorted({number for var in read for number in known.get(var, [])})[-MOST_NAMED:]


@contextmanager
def own_errors(stage: str, mod: tvm.IRModule) -> Iterator[None]:
    """Turn exceptions of TVM into our errors, and name the nodes of a kernel that fails.

    Interrupts pass unchanged.

    Raises CompilationError if TVM fails.
    """
    try:
        with interrupts_kept():
            yield
    except TVMFusionError as error:
        found = _KERNEL.search(str(error))  # TVM hands on no more of an error than its text
        if found is not None and ADVICE not in str(error):
            advice = f"; {ADVICE}" if isinstance(error, CompilationError) else ""
            error.args = (f"{error}{_place(mod, found[1])}{advice}",)
        raise
    except Exception as error:  # TVM raises anything from ValueError to tvm.error
        text = f"the stage {stage!r} failed: {reason(error)}; {ADVICE}"
        raise CompilationError(text) from error


def _place(mod: tvm.IRModule, kernel: str) -> str:
    """The arguments of a kernel and the nodes that it computes, as far as they are known."""
    text = ""
    func = next((f for v, f in mod.functions_items() if v.name_hint == kernel), None)
    if isinstance(func, tirx.PrimFunc):
        shapes = [
            f"{param.dtype}[{', '.join(map(str, map(_size, param.shape)))}]"
            for param in func.params
            if hasattr(param, "shape")
        ]
        text += f"; its arguments are {', '.join(shapes)}"
    attrs = mod.attrs or {}
    labels = json.loads(str(attrs.get(attributes.NODES, "[]")))
    numbers = json.loads(str(attrs.get(attributes.KERNELS, "{}"))).get(kernel, [])
    names = [labels[number] for number in numbers]
    if names:
        rest = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        text += f"; it comes from {', '.join(names[:MOST_NAMED])}{rest}"
    return text


def _size(extent: tirx.Expr) -> int | str:
    return int(extent) if isinstance(extent, tirx.IntImm) else str(extent)
