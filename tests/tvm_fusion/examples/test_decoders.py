# SPDX-License-Identifier: Apache-2.0
"""Steps of decoders: their numbers, and the sizes of their matrices."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import tvm_fusion
from examples.decoders import STEPS, in_few_bits
from examples.onnx_builder import random_inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("bits", "level", "tolerance"), [(0, 0, 1e-4), (4, 4, 1e-2)])
def test_steps(name: str, bits: int, level: int, tolerance: float) -> None:
    model = STEPS[name](past=5, layers=1)
    size = model.ByteSize()
    if bits:
        model = in_few_bits(model, bits, level)
        assert model.ByteSize() < 0.2 * size
    feed = random_inputs(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found = tvm_fusion.compile(model)(**feed)
    for one, other in zip(found, session.run(None, feed), strict=True):
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()
