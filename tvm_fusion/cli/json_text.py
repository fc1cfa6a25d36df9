# SPDX-License-Identifier: Apache-2.0
"""Results as standard JSON, which has no infinities."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """Indented JSON of ``value``; a float that is not finite becomes "inf", "-inf" or "nan"."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
