# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of GPU kernels."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, other ones at every run."""
    return np.random.default_rng()
