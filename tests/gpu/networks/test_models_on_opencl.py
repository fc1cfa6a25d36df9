# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks with small images, run in OpenCL; kernels that the passes save."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from relax_on_opencl import RelaxOnOpenCL
from tvm import relax

from examples.models import MODELS as NETWORKS
from examples.onnx_builder import random_inputs
from examples.zoo import ZOO
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options, phases, run_phases
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

TRANSFORMER = {"layers": 1, "weights": False}
SIZES: dict[str, dict[str, Any]] = {
    "bert_base": TRANSFORMER,
    "gpt2": TRANSFORMER,
    "wide_and_deep": {"batch": 3, "rows": 50},
    "mobilenet_v3_large": {"image_size": 40, "layers": 8},
    "vgg_16": {"image_size": 32, "width": 6, "features": 37},
    **{name: {"image_size": 40} for name in NETWORKS},
}
CONVOLUTIONAL = [name for name, sizes in SIZES.items() if "image_size" in sizes]
REDUCTIONS = (
    "FuseLayerNorm",
    "DecomposeNormalization",
    "CoalesceReduction",
    "FuseReductions",
    "FuseReductionProducers",
)
TARGET = resolve("opencl")


def launches(mod) -> int:
    """Kernels of a call, reshapes left out that become views."""
    return sum(use.launches for use in kernel_uses(relax.transform.RewriteDataflowReshape()(mod)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_the_numbers_are_those_of_onnx_runtime(name: str, rng: np.random.Generator) -> None:
    model = ZOO[name](**SIZES[name])
    imported = import_onnx(model)
    mod = run_phases(imported.mod, TARGET, phases(TARGET, Options()))
    run = RelaxOnOpenCL(mod, TARGET)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for _ in range(2):  # the second call meets what the first left in memory
        feed = random_inputs(model, int(rng.integers(1 << 30)))
        results = run(*(feed[spec.name] for spec in imported.inputs))
        for result, wanted in zip(results, session.run(None, feed), strict=True):
            assert np.abs(result - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert len(run.launches) == launches(mod)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "gpt2", "wide_and_deep", "mobilenet_v3_large"])
def test_the_passes_for_reductions_save_kernels(name: str) -> None:
    plan = phases(TARGET, Options())
    without = {
        phase: [step for step in steps if str(step.info.name) not in REDUCTIONS]
        for phase, steps in plan.items()
    }
    imported = import_onnx(ZOO[name](**SIZES[name])).mod
    with_them, fewer = (launches(run_phases(imported, TARGET, each)) for each in (plan, without))
    assert with_them < fewer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert_base", "gpt2"])
def test_a_layer_takes_five_kernels(name: str) -> None:
    """Queries, keys and values, attention, and three products, of which two take in the norms."""
    sizes = {"sequence": 12, "width": 32, "heads": 4, "vocabulary": 99}
    counts = []
    for layers in (1, 2):
        imported = import_onnx(ZOO[name](1, layers=layers, **sizes)).mod
        counts.append(launches(run_phases(imported, TARGET, phases(TARGET, Options()))))
    assert counts[1] - counts[0] == 5
