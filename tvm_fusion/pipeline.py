# SPDX-License-Identifier: Apache-2.0
"""Public path of :mod:`tvm_fusion.compiler.pipeline`."""

from .compiler.pipeline import (
    NAME,
    Built,
    Options,
    build,
    build_apart,
    lower_to_vm,
    optimize,
    phases,
    run_phases,
    tvm_fusion_pipeline,
)

__all__ = [
    "NAME",
    "Built",
    "Options",
    "build",
    "build_apart",
    "lower_to_vm",
    "optimize",
    "phases",
    "run_phases",
    "tvm_fusion_pipeline",
]
