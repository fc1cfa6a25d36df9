# SPDX-License-Identifier: Apache-2.0
"""Every exception that tvm-fusion raises on purpose, all of them under ``TVMFusionError``.

``EagerModeWarning``, ``ModelWarning``, ``RecordWarning`` and ``SlowPathWarning`` are categories of
warnings.
"""

from __future__ import annotations

from schedules.errors import (
    ArtifactError,
    CompilationError,
    DistributedError,
    EagerModeWarning,
    EngineError,
    InvalidInputError,
    InvalidModelError,
    ModelWarning,
    OpError,
    PredictionError,
    RecordWarning,
    SlowPathWarning,
    TargetError,
    TuningError,
    TVMFusionError,
    UnsupportedOperatorError,
)

__all__ = [
    "ArtifactError",
    "CompilationError",
    "DistributedError",
    "EagerModeWarning",
    "EngineError",
    "InvalidInputError",
    "InvalidModelError",
    "ModelWarning",
    "OpError",
    "PredictionError",
    "RecordWarning",
    "SlowPathWarning",
    "TVMFusionError",
    "TargetError",
    "TuningError",
    "UnsupportedOperatorError",
]
