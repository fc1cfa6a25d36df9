# SPDX-License-Identifier: Apache-2.0
"""Decision on a pair of convolutions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decision:
    """Decision whether a pair is fused, with its reason.

    Parameters
    ----------
    fuse : bool
        Whether it is fused.
    reason : str
        One line for the report.
    gain : float
        Predicted time of the separate kernels over that of the fused one, minus one; measured by a
        record.
    saved : float | None
        Seconds that fusion saves by a record; None without one.
    record : dict
        The record, for reports; empty without one.
    """

    fuse: bool
    reason: str
    gain: float = 0.0
    saved: float | None = None
    record: dict[str, Any] = field(default_factory=dict)
