# SPDX-License-Identifier: Apache-2.0
"""The answer to whether a pair of convolutions becomes one kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Whether a pair is fused.

    Parameters
    ----------
    fuse : bool
        The answer.
    reason : str
        One line for the report.
    gain : float
        Predicted time of the separate kernels over that of the fused one, minus one.
    """

    fuse: bool
    reason: str
    gain: float = 0.0
