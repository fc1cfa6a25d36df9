# SPDX-License-Identifier: Apache-2.0
"""What a model says of one launch: its time, interval, bound, and which model said so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """Time of one launch.

    Parameters
    ----------
    seconds : float
        Most likely time.
    low, high : float
        Interval that holds four of five measured times, in seconds.
    bound : str
        ``compute``, ``memory`` or ``latency``.
    roofline_seconds : float
        Least time by the machine's peak and bandwidth.
    model : str
        Model that said so: ``roofline``, or the name of a kernel model and its origin.
    in_range : bool
        Whether the sizes lie in the range that the model was fitted to.
    """

    seconds: float
    low: float
    high: float
    bound: str
    roofline_seconds: float
    model: str
    in_range: bool

    @property
    def roofline_share(self) -> float:
        """Share of the roofline that is reached."""
        return self.roofline_seconds / self.seconds
