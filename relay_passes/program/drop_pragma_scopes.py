# SPDX-License-Identifier: Apache-2.0
"""Pass ``DropPragmaScopes``: removes annotations that code generators for CPUs do not know."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import IRModule, tirx


@tvm.transform.module_pass(opt_level=0, name="DropPragmaScopes")
class DropPragmaScopes:
    """Remove the attribute ``pragma_scope`` from statements.

    Before::

        with T.attr(0, "pragma_scope", "seq"):
            for i in T.parallel(9): ...

    After::

        for i in T.parallel(9): ...

    TVM's scatters have it; on a CPU it means nothing, but LLVM's code generator writes a warning of
    it to standard error in each compilation. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite the functions of TensorIR."""
        result = mod.clone()
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                result.update_func(
                    name, tvm_ffi.structural_map(func, (tirx.AttrStmt, _without_pragma))
                )
        return result


def _without_pragma(stmt: tirx.AttrStmt) -> tirx.Stmt:
    return stmt.body if stmt.attr_key == "pragma_scope" else stmt
