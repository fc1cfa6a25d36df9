# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of single ops: operands, and a module around a call."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx


def tensor(name: str, *shape: relax.Expr | int, dtype: str = "float32") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def module_of(call: relax.Call, parameters: Sequence[relax.Var]) -> tvm.IRModule:
    """A module whose ``main`` returns one call."""
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()


def function_names(mod: tvm.IRModule) -> list[str]:
    """Names of all PrimFuncs."""
    return [n.name_hint for n, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
