# SPDX-License-Identifier: Apache-2.0
"""Start of each Python process of tests that run under the name of another CPU.

Python imports this file where its folder is in ``PYTHONPATH``. It has TVM tell the name that
``TVM_FUSION_TEST_CPU`` holds, as soon as TVM is imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_ASKED = "tvm.target.codegen"


class _Renamed:
    """Finder of the module that asks LLVM for the name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _ASKED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, f"no {name}"
        execute = spec.loader.exec_module

        def execute_renamed(module: ModuleType) -> None:
            execute(module)
            module.llvm_get_system_cpu = lambda: os.environ["TVM_FUSION_TEST_CPU"]

        spec.loader.exec_module = execute_renamed
        return spec


sys.meta_path.insert(0, _Renamed())
