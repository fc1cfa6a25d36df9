# SPDX-License-Identifier: Apache-2.0
"""ONNX's activations against float64, relative to each single result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx_cases import one_node

import tvm_fusion

Values = NDArray[np.float64]


def logistic(v: Values) -> Values:
    e = np.exp(-np.abs(v))
    return np.where(v > 0, 1, e) / (1 + e)


def elu(v: Values, alpha: float = 1.0, scale: float = 1.0) -> Values:
    return np.where(v > 0, v, alpha * np.expm1(np.minimum(v, 0) / scale))


CASES: dict[str, tuple[str, int, dict[str, Any], Callable[[Values], Values]]] = {
    "softplus": ("Softplus", 13, {}, lambda v: np.logaddexp(0, v)),
    "mish": ("Mish", 18, {}, lambda v: v * np.tanh(np.logaddexp(0, v))),
    "sigmoid": ("Sigmoid", 13, {}, logistic),
    "swish": ("Swish", 24, {}, lambda v: v * logistic(v)),
    "swish_half": ("Swish", 24, {"alpha": 0.5}, lambda v: v * logistic(v / 2)),
    "tanh": ("Tanh", 13, {}, np.tanh),
    "erf": ("Erf", 13, {}, np.vectorize(math.erf)),
    "elu": ("Elu", 13, {"alpha": 0.5}, lambda v: elu(v, 0.5)),
    "celu": ("Celu", 13, {"alpha": 1.5}, lambda v: elu(v, 1.5, 1.5)),
    "selu": ("Selu", 13, {}, lambda v: 1.0507009873554805 * elu(v, 1.6732632423543772)),
    "softsign": ("Softsign", 13, {}, lambda v: v / (1 + np.abs(v))),
    "hardsigmoid": ("HardSigmoid", 13, {"alpha": 0.25}, lambda v: np.clip(v / 4 + 0.5, 0, 1)),
    "hardswish": ("HardSwish", 14, {}, lambda v: v * np.clip(v / 6 + 0.5, 0, 1)),
    "atanh": ("Atanh", 13, {}, np.arctanh),
    "sinh": ("Sinh", 13, {}, np.sinh),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", CASES)
def test_each_result_is_right_to_the_last_digits(case):
    op_type, opset, attributes, reference = CASES[case]
    generator = np.random.default_rng()
    # Tails and numbers near zero; results stay in float32's normal range.
    tiny = np.exp(generator.uniform(-80, 0, 1000)) * generator.choice([-1, 1], 1000)
    x = np.concatenate([generator.uniform(-80, 80, 1000), tiny, [0]]).astype("float32")[None]
    model = one_node(op_type, x.shape, opset=opset, **attributes)
    with np.errstate(invalid="ignore"):
        exact = reference(x.astype("float64"))
    found = tvm_fusion.compile(model, threads=1)(x)
    # Where a result lies near a root that is not at zero, only its distance counts.
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=3e-8 if "hard" in case else 0)
