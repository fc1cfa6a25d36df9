# SPDX-License-Identifier: Apache-2.0
"""tvm-fusion: compile ONNX models for CPUs and GPUs, with convolutions and reductions fused.

>>> import tvm_fusion
>>> compiled = tvm_fusion.compile("model.onnx")     # doctest: +SKIP
>>> y = compiled(x)                                 # doctest: +SKIP
>>> compiled.save("model.so")                       # doctest: +SKIP

Loading and running a saved model needs no compiler, so TVM's compiler is imported when something is
compiled. Importing ``tvm_fusion.pipeline``, or this package after ``tvm``, registers the ops, and
the pipeline as ``relax.get_pipeline("tvm_fusion")``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import errors
from .version import __version__

if TYPE_CHECKING:
    from . import pipeline as pipeline
    from .compiler.compile_model import compile
    from .runtime.compiled_model import CompiledModel, load

__all__ = ["CompiledModel", "__version__", "compile", "errors", "load"]


def __getattr__(name: str) -> Any:
    """Import on first use what needs TVM."""
    if name in ("CompiledModel", "load"):
        return getattr(importlib.import_module(".runtime.compiled_model", __name__), name)
    if name == "compile":
        return importlib.import_module(".compiler.compile_model", __name__).compile
    if name == "pipeline":
        return importlib.import_module(".pipeline", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "tvm" in sys.modules:
    importlib.import_module(".pipeline", __name__)
