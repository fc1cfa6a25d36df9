# SPDX-License-Identifier: Apache-2.0
"""Door through which TVM finds this package at ``import tvm``, by the entry point ``tvm.backends``.

>>> import tvm                                                      # doctest: +SKIP
>>> tvm.relax.get_pipeline("tvm_fusion", target=target)             # doctest: +SKIP
>>> tvm.s_tir.dlight.ApplyDefaultSchedule(*tvm.s_tir.dlight.tvm_fusion.cpu.RULES)  # doctest: +SKIP

Only names are registered; what stands behind one is imported when it is used.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PIPELINE = "tvm_fusion"
OPS = tuple(
    f"relax.tvm_fusion.{name}"
    for name in """byte_matmul channel_norm channel_shuffle channel_slice checked_indices
    coalesced_reduce conv2d conv2d_pair dynamic_quantize fused_conv2d fused_quantized_conv2d
    hardswish pack quantized_conv2d recurrence round_clip sort_key take_widened unpack widen_weight
    winograd_conv2d""".split()
)
"""The ops of ``relay_passes.op``."""

_LEVEL = 5
"""Priority of our stand-ins, below that of the functions that replace them."""


class NoTorch(MetaPathFinder):
    """Finder by which a thread, or every one, finds no PyTorch."""

    def __init__(self, thread: int | None = None) -> None:
        self._thread = thread

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Refuse PyTorch, and leave all else to other finders."""
        if name == "torch" and self._thread in (None, threading.get_ident()):
            raise ModuleNotFoundError("this does without PyTorch", name=name)
        return None


@contextmanager
def without_torch() -> Iterator[None]:
    """Keep imports of TVM in this thread from importing PyTorch: 500 MiB, and seconds."""
    finder = NoTorch(threading.get_ident())
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _Later(ModuleType):
    """Stand-in for a module, which is imported when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self.__name__))


_SCRIPT = "tvm.relax.script"


class _AfterImport(MetaPathFinder):
    """Finder that gives TVMScript the names of our ops when it is imported, which takes a while."""

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        """Find the module by the other finders, and leave."""
        if fullname != _SCRIPT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_ops(module)

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


def _add_ops(script: Any) -> None:
    script.tvm_fusion = script.parser.tvm_fusion = _Later("relay_passes.op")


def register() -> None:
    """Make the pipeline, the ops and the schedule rules known to TVM, once."""
    import tvm

    if tvm._RUNTIME_ONLY or PIPELINE in tvm.relax.pipeline.PIPELINE_MAP:
        return
    for name in set(OPS).difference(tvm.ir.Op.list_op_names()):
        tvm.ir._ffi_api.RegisterOp(name, "Op of tvm-fusion.")
        for key in ("FInferType", "FLegalize"):
            tvm.ir.register_op_attr(name, key, _function_of(name, key), level=_LEVEL)
        tvm.ir.register_op_attr(name, "FPurity", True, level=_LEVEL)
    if _SCRIPT in sys.modules:
        _add_ops(sys.modules[_SCRIPT])
    else:
        sys.meta_path.insert(0, _AfterImport())
    rules: Any = ModuleType("tvm_fusion", "Schedule rules of tvm-fusion.")
    rules.cpu, rules.gpu = _Later("schedules.cpu"), _Later("schedules.gpu")
    tvm.s_tir.dlight.tvm_fusion = rules
    tvm.relax.register_pipeline(PIPELINE)(_pipeline)


def _function_of(name: str, key: str) -> Callable[[Any, Any], Any]:
    """A function of an op that puts the op's own in its place, and calls that."""

    def call_own(first: Any, second: Any) -> Any:
        importlib.import_module("relay_passes.op")
        return importlib.import_module("tvm").ir.Op.get(name).get_attr(key)(first, second)

    return call_own


def _pipeline(*arguments: Any, **options: Any) -> Any:
    """Make the pass; see :func:`tvm_fusion.pipeline.tvm_fusion_pipeline`."""
    family = importlib.import_module("tvm_fusion.compiler.pipeline")
    return family.tvm_fusion_pipeline(*arguments, **options)


def hide_torch() -> None:
    """Let this process not find PyTorch."""
    sys.meta_path.insert(0, NoTorch())


def allow_torch() -> None:
    """Let this process find PyTorch again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, NoTorch)]
