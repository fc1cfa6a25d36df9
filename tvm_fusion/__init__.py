# SPDX-License-Identifier: Apache-2.0
"""tvm-fusion: compile ONNX models for CPUs, with neighbouring convolutions fused.

>>> import tvm_fusion
>>> compiled = tvm_fusion.compile("model.onnx")     # doctest: +SKIP
>>> y = compiled(x)                                 # doctest: +SKIP
>>> compiled.save("model.so")                       # doctest: +SKIP

Importing the package registers its ops, and its pipeline as ``relax.get_pipeline("tvm_fusion")``.
"""

from __future__ import annotations

from . import errors
from . import pipeline as pipeline
from .compiler import compile
from .runtime import CompiledModel, load
from .version import __version__

__all__ = ["CompiledModel", "__version__", "compile", "errors", "load"]
