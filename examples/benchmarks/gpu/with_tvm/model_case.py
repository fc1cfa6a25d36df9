# SPDX-License-Identifier: Apache-2.0
"""Whole models as cases: inputs on a device, reference outputs, and their compilation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import tvm
from numpy.typing import NDArray
from onnx import helper
from tvm import relax
from tvm.ir.transform import Pass
from tvm.target import Target

from examples.onnx_builder import random_inputs
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options, phases, run_phases
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import EngineError
from tvm_fusion.onnx.frontend import import_onnx

from ..engine import module
from ..reference import as_torch

TOLERANCE = 1e-3
"""Relative to the largest magnitude of an output."""
REDUCTION_PASSES = (
    "FuseLayerNorm",
    "DecomposeNormalization",
    "CoalesceReduction",
    "FuseReductions",
    "FuseReductionProducers",
    "ConfigureReductions",
)
"""Passes left out to measure their gain: norms and sums are then TVM's own."""

Phases = Mapping[str, Sequence[Pass]]


@dataclass(frozen=True)
class ModelCase:
    """A model to be compared on.

    Parameters
    ----------
    name : str
        Such as ``bert_base``.
    model : onnx.ModelProto
        Model with fixed shapes, made by a builder of ``examples/``.
    """

    name: str
    model: onnx.ModelProto

    @property
    def inputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each input."""
        weights = {item.name for item in self.model.graph.initializer}
        return {
            value.name: _kind(value)
            for value in self.model.graph.input
            if value.name not in weights
        }

    @property
    def outputs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each output."""
        return {value.name: _kind(value) for value in self.model.graph.output}

    def arrays(self, seed: int) -> list[NDArray[Any]]:
        """One set of inputs."""
        return list(random_inputs(self.model, seed).values())

    def tensors(self, seed: int, device: str) -> list[Any]:
        """The same as PyTorch tensors on ``device``."""
        torch = module("torch")
        return [torch.from_numpy(array).to(device) for array in self.arrays(seed)]


def our_phases(arch: str, reductions: bool = True) -> Phases:
    """The pipeline of this project, optionally without its passes for reductions."""
    plan = phases(gpu_target(arch), Options())
    if reductions:
        return plan
    return {
        name: [step for step in steps if str(step.info.name) not in REDUCTION_PASSES]
        for name, steps in plan.items()
    }


def gpu_target(arch: str) -> Target:
    """The target of an architecture such as ``sm_90``, with a host."""
    return resolve(f"cuda -arch={arch}")


def optimize(case: ModelCase, plan: Phases, arch: str) -> tvm.IRModule:
    """Import and optimise: scheduled kernels, and reshapes that are views already."""
    optimised = run_phases(import_onnx(case.model).mod, gpu_target(arch), plan)
    return relax.transform.RewriteDataflowReshape()(optimised)


def launches(mod: tvm.IRModule) -> int:
    """Kernels that a call launches."""
    return sum(use.launches for use in kernel_uses(mod))


def reference(case: ModelCase, seed: int) -> list[NDArray[Any]] | None:
    """The outputs by ONNX Runtime on the CPU; None where it is not installed."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    session = module("onnxruntime").InferenceSession(
        case.model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip(case.inputs, case.arrays(seed), strict=True)))


def judge(
    expected: Sequence[NDArray[Any]] | None,
) -> Callable[[Sequence[Any]], tuple[float, float]]:
    """Function from an engine's outputs to their error in units of the tolerance.

    Without a reference, the outputs of the first engine become it.
    """
    known = None if expected is None else [*expected]

    def error(outputs: Sequence[Any]) -> tuple[float, float]:
        nonlocal known
        computed = [as_torch(output).detach().cpu().numpy() for output in outputs]
        if known is None:
            known = computed
        shapes = [[array.shape for array in arrays] for arrays in (computed, known)]
        if shapes[0] != shapes[1]:
            raise EngineError(f"outputs have shapes {shapes[0]}; expected {shapes[1]}")
        return max(map(_error, computed, known)) / TOLERANCE, TOLERANCE

    return error


def _error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference over the largest magnitude; infinite if either is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(found.astype("float64") - expected).max(initial=0.0)) / scale


def _kind(value: onnx.ValueInfoProto) -> tuple[tuple[int, ...], str]:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    return shape, str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
