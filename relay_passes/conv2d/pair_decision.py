# SPDX-License-Identifier: Apache-2.0
"""Decision on a pair of convolutions."""

from __future__ import annotations

from dataclasses import dataclass


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
        Predicted time of the separate kernels over that of the fused one, minus one.
    """

    fuse: bool
    reason: str
    gain: float = 0.0
