# SPDX-License-Identifier: Apache-2.0
"""tvm-fusion: compile ONNX models for CPUs and GPUs, with convolutions and reductions fused.

>>> import tvm_fusion
>>> compiled = tvm_fusion.compile("model.onnx")     # doctest: +SKIP
>>> y = compiled(x)                                 # doctest: +SKIP
>>> compiled.save("model.so")                       # doctest: +SKIP

Loading and running a saved model needs no compiler, so TVM's compiler is imported on first use of
a name that needs it, such as :func:`compile` or :func:`explain`. ``import tvm`` registers the ops,
the schedule rules, and the pipeline as ``relax.get_pipeline("tvm_fusion")``; see ``plugin.py``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import errors, plugin
from .compiler.interrupts import interrupts_kept
from .compiler.registry import BACK_ENDS, FRONT_ENDS, FrontEnd, RankCompiler
from .version import __version__

if TYPE_CHECKING:
    from . import pipeline as pipeline
    from .bench.comparison import Comparison, TensorErrors, compare
    from .bench.profiler import profile
    from .bench.race import Arena, EngineSpec, Plan, RaceResult, race
    from .compiler.compile import compile
    from .compiler.explain import explain, explain_kernels
    from .compiler.specialized_model import SpecializedModel, specialize
    from .compiler.targets import resolve as resolve_target
    from .prediction.model.ask import predict
    from .prediction.model.predict_model import ModelPrediction
    from .runtime.compiled_model import CompiledModel, Latency, load
    from .runtime.host_arrays import aligned_empty
    from .tuning.job import TaskState, TuneResult, tune

__all__ = [
    "Arena",
    "Comparison",
    "CompiledModel",
    "EngineSpec",
    "Latency",
    "ModelPrediction",
    "Plan",
    "RaceResult",
    "SpecializedModel",
    "TaskState",
    "TensorErrors",
    "TuneResult",
    "__version__",
    "aligned_empty",
    "compare",
    "compile",
    "errors",
    "explain",
    "explain_kernels",
    "load",
    "predict",
    "profile",
    "race",
    "resolve_target",
    "specialize",
    "tune",
]

_LATER = {
    **dict.fromkeys(("Arena", "EngineSpec", "Plan", "RaceResult", "race"), "bench.race"),
    **dict.fromkeys(("TaskState", "TuneResult", "tune"), "tuning.job"),
    **dict.fromkeys(("CompiledModel", "Latency", "load"), "runtime.compiled_model"),
    **dict.fromkeys(("Comparison", "TensorErrors", "compare"), "bench.comparison"),
    "aligned_empty": "runtime.host_arrays",
    "compile": "compiler.compile",
    **dict.fromkeys(("explain", "explain_kernels"), "compiler.explain"),
    **dict.fromkeys(("SpecializedModel", "specialize"), "compiler.specialized_model"),
    "ModelPrediction": "prediction.model.predict_model",
    "predict": "prediction.model.ask",
    "profile": "bench.profiler",
    "resolve_target": "compiler.targets",
}
"""Public names, and the modules that are imported when they are asked for."""


def __getattr__(name: str) -> Any:
    """Import on first use what needs TVM."""
    if name in _LATER:
        module = _imported(_LATER[name])
        return getattr(module, "resolve" if name == "resolve_target" else name)
    if name == "pipeline":
        return _imported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(name: str) -> ModuleType:
    """Import a module of this package; extensions crash where Ctrl-C ends their own import."""
    with interrupts_kept(), plugin.without_torch():
        return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return sorted({*globals(), *__all__, "pipeline"})


def _torch() -> FrontEnd:
    from .torch import front_end

    return front_end


def _ranks() -> RankCompiler:
    with plugin.without_torch():
        from .distributed import build_network

    return build_network


FRONT_ENDS["torch.export"] = _torch
BACK_ENDS["ranks"] = _ranks

if "tvm" in sys.modules:
    plugin.register()
