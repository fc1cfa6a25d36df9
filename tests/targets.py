# SPDX-License-Identifier: Apache-2.0
"""Compilation for numbers alone: quick, and with as little machine code as may be."""

from __future__ import annotations

from typing import Any

import tvm
from tvm.target import Target

# A third of the time to compile TVM's own kernels, whose numbers do not depend on it.
PLAIN = Target({"kind": "llvm", "opt-level": 0})


def compile_unchecked(mod: Any, target: Target | dict[str, Any] = PLAIN, **options: Any) -> Any:
    """Compile by TVM without the checks of a kernel's arguments, most of a small kernel's code."""
    context = tvm.transform.PassContext.current()
    with tvm.transform.PassContext(
        opt_level=context.opt_level,
        instruments=context.instruments,
        config={**context.config, "tirx.disable_assert": True},
    ):
        return tvm.compile(mod, target, **options)
