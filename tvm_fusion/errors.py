# SPDX-License-Identifier: Apache-2.0
"""Every exception that tvm-fusion raises on purpose, all of them under ``TVMFusionError``.

``EagerModeWarning`` and ``SlowPathWarning`` are the categories of what it warns of.
"""

from __future__ import annotations

from schedules.errors import (
    ArtifactError,
    CompilationError,
    EagerModeWarning,
    EngineError,
    InvalidInputError,
    InvalidModelError,
    OpError,
    SlowPathWarning,
    TargetError,
    TVMFusionError,
    UnsupportedOperatorError,
)

__all__ = [
    "ArtifactError",
    "CompilationError",
    "EagerModeWarning",
    "EngineError",
    "InvalidInputError",
    "InvalidModelError",
    "OpError",
    "SlowPathWarning",
    "TVMFusionError",
    "TargetError",
    "UnsupportedOperatorError",
]
