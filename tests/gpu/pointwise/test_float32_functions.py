# SPDX-License-Identifier: Apache-2.0
"""Functions of float32 in GPU kernels: their instructions, and the errors that follow from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import count, cuda_source, opcodes, sass
from graph_cases import CUDA, run, scheduled
from tvm import relax
from tvm.relax import op

APPROXIMATE = ("MUFU.TANH", "MUFU.SIN", "MUFU.COS", "MUFU.LG2")
F64 = np.float64

CUDA_ULPS = {"tanh": 2, "exp": 1, "log": 1, "sin": 2, "pow": 4, "erf": 2, "divide": 2}
"""Largest errors in the tables of the CUDA C++ Programming Guide, without --use_fast_math."""
TANH_INSTRUCTION = 2.0**-11
"""Largest relative error of ``tanh.approx.f32`` in the PTX manual."""


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x)


def gelu(x: np.ndarray, tanh: Callable[[np.ndarray], np.ndarray] = np.tanh) -> np.ndarray:
    return 0.5 * x * (1 + tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


Function = tuple[Callable[[relax.Expr], relax.Expr], Callable[[np.ndarray], np.ndarray], int]
# The error is the one in ulp that OpenCL allows; that of gelu is in units of the input's.
FUNCTIONS: dict[str, Function] = {
    "tanh": (op.tanh, np.tanh, 5),
    "exp": (op.exp, np.exp, 3),
    "log": (lambda x: op.log(op.abs(x)), lambda x: np.log(np.abs(x)), 3),
    "sin": (op.sin, np.sin, 4),
    "pow": (lambda x: op.power(x, relax.const(3.0, "float32")), lambda x: x**3, 16),
    "sigmoid": (op.sigmoid, sigmoid, 8),
    "gelu": (op.nn.gelu, lambda x: 0.5 * x * (1 + erf(x / 2**0.5)), 16),
    "gelu_tanh": (op.nn.gelu_tanh, gelu, 16),
}


def source(name: str) -> str:
    [func] = scheduled(FUNCTIONS[name][0], ((1 << 16,), "float32"), target=CUDA).values()
    return cuda_source(func)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_machine_code_has_no_approximate_function(name: str) -> None:
    text = source(name)
    [code] = sass(text).values()
    assert not [each for each in opcodes(code) if each in APPROXIMATE]
    # Exponentials have the same instruction, in __expf without the steps around it.
    assert not re.search(r"\b__\w+f\(", text[text.rindex("__global__") :])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instruction"),
    [("tanh", "MUFU.TANH"), ("gelu_tanh", "MUFU.TANH"), ("sin", "MUFU.SIN")],
)
def test_fast_math_on_request(name: str, instruction: str) -> None:
    [code] = sass(source(name), fast_math=True).values()
    assert count(opcodes(code), instruction) > 0


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(name: str) -> None:
    build, expected, ulps = FUNCTIONS[name]
    x = np.random.default_rng().uniform(-8, 8, 4096).astype("float32")
    x[:8] = [0.0, -0.0, 1e-6, -1e-6, 0.55, -0.55, 8.0, -8.0]
    x = x[np.abs(x) > 1e-7] if name == "log" else x
    [found] = run(build, [x])
    exact = expected(x.astype(F64))
    unit = np.spacing(np.abs(x if "gelu" in name else exact).astype("float32"))
    assert np.all(np.abs(found - exact) <= ulps * unit.astype(F64) + 2.0**-126)


def rounded(exact: np.ndarray, ulps: float, rng: np.random.Generator) -> np.ndarray:
    """A float32 result with an error of at most ``ulps``."""
    unit = np.spacing(np.abs(exact).astype("float32")).astype(F64)
    return (exact + ulps * rng.uniform(-1, 1, exact.shape) * unit).astype("float32")


def emulated_gelu(
    x: np.ndarray, tanh: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """GELU by float32 operations, and its error in units of the input's last place."""
    one, half = np.float32(1), np.float32(0.5)
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    found = half * x * (one + tanh(inner))
    return found, np.abs(found - gelu(x.astype(F64))) / np.spacing(np.abs(x)).astype(F64)


def test_the_error_of_gelu_follows_from_cudas_bounds() -> None:
    rng = np.random.default_rng()
    x = rng.uniform(-6, 6, 1 << 16).astype("float32")
    _, error = emulated_gelu(x, lambda u: rounded(np.tanh(u.astype(F64)), CUDA_ULPS["tanh"], rng))
    assert error.max() <= 4

    def by_instruction(u: np.ndarray) -> np.ndarray:
        exact = np.tanh(u.astype(F64))
        return (exact * (1 + TANH_INSTRUCTION * rng.uniform(-1, 1, u.shape))).astype("float32")

    _, error = emulated_gelu(x, by_instruction)
    assert error.max() > 1000  # what the accurate function is for


def test_the_error_of_sigmoid_follows_from_cudas_bounds() -> None:
    rng = np.random.default_rng()
    x = rng.uniform(-20, 20, 1 << 16).astype("float32")
    power = rounded(np.exp(-x.astype(F64)), CUDA_ULPS["exp"], rng)
    found = rounded(1 / (np.float32(1) + power).astype(F64), CUDA_ULPS["divide"], rng)
    exact = sigmoid(x.astype(F64))
    # Twice 1 ulp of the power and half of two roundings, 2 ulp of the quotient, its rounding.
    assert np.all(np.abs(found - exact) <= 7 * np.spacing(exact.astype("float32")).astype(F64))
