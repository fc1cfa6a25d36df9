# SPDX-License-Identifier: Apache-2.0
"""Statements that kernels share: branches, and the fence of x86 that ends streaming stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.script.ir_builder import tirx as T


@contextmanager
def when(*conditions: tirx.Expr | bool | None) -> Iterator[None]:
    """Emit the code built inside under all conditions; None and True always hold."""
    open_ones = [given for given in conditions if given is not None and given is not True]
    if not open_ones:
        yield
        return
    with T.If(tirx.all(*open_ones) if len(open_ones) > 1 else open_ones[0]), T.Then():
        yield


STORE_FENCE = "tvm_fusion_stream_end"
"""Name of the fence's function."""

STORE_FENCE_LLVM = f"""
define i32 @{STORE_FENCE}() {{
  call void @llvm.x86.sse.sfence()
  ret i32 0
}}
declare void @llvm.x86.sse.sfence()
"""


def store_fence() -> tirx.Stmt:
    """Call the fence's function, which the kernel imports."""
    return tirx.Evaluate(tirx.call_extern("int32", STORE_FENCE))
