# SPDX-License-Identifier: Apache-2.0
"""Fence of x86 that ends streaming stores: what is stored after it is seen after them."""

from __future__ import annotations

from tvm import tirx

STORE_FENCE = "tvm_fusion_stream_end"
"""Name of its function."""

STORE_FENCE_LLVM = f"""
define i32 @{STORE_FENCE}() {{
  call void @llvm.x86.sse.sfence()
  ret i32 0
}}
declare void @llvm.x86.sse.sfence()
"""


def store_fence() -> tirx.Stmt:
    """Call the function, which the kernel imports."""
    return tirx.Evaluate(tirx.call_extern("int32", STORE_FENCE))
