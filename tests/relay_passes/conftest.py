# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of passes: well-formedness after every pass, references in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.ir.instrument import WellFormedInstrument

from schedules.workload.conv2d import Activation, ConvLayer
from tests.targets import compile_unchecked


@pytest.fixture(autouse=True)
def _well_formed_modules() -> Iterator[None]:
    """Check every module that a pass leaves; the next pass begins with it."""
    after = WellFormedInstrument(validate_before_transform=False)
    with tvm.transform.PassContext(instruments=[after]):
        yield


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """Convolutions and activations in float64: ``layer(data, weight, bias, layer, residual)``."""
    return SimpleNamespace(layer=_layer, activate=_activate)


@pytest.fixture(scope="session")
def run_module() -> Callable[..., np.ndarray]:
    """Compile a module with TVM's own pipeline and call its ``main`` on arrays."""
    return _run_module


def _run_module(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(compile_unchecked(mod), tvm.cpu())
    return machine["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


def _layer(
    data: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    layer: ConvLayer,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    top, left, bottom, right = layer.padding
    out_h, out_w = layer.output_size(*data.shape[2:])
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    grouped = padded.reshape(len(data), layer.groups, -1, *padded.shape[2:])
    filters = weight.astype("float64").reshape(layer.groups, -1, *weight.shape[1:])
    out = np.zeros((len(data), layer.groups, filters.shape[1], out_h, out_w))
    for row in range(layer.kernel[0]):
        for column in range(layer.kernel[1]):
            first = row * layer.dilation[0], column * layer.dilation[1]
            pixels = grouped[
                ...,
                first[0] : first[0] + (out_h - 1) * layer.strides[0] + 1 : layer.strides[0],
                first[1] : first[1] + (out_w - 1) * layer.strides[1] + 1 : layer.strides[1],
            ]
            out += np.einsum("ngihw,goi->ngohw", pixels, filters[..., row, column])
    out = out.reshape(len(data), layer.out_channels, out_h, out_w)
    out += bias.astype("float64").reshape(1, -1, 1, 1)
    return _activate(out if residual is None else out + residual, layer.activation)


def _activate(values: np.ndarray, activation: Activation) -> np.ndarray:
    return {
        "none": lambda: values,
        "relu": lambda: np.maximum(values, 0),
        "relu6": lambda: np.clip(values, 0, 6),
        "clip": lambda: np.clip(values, activation.low, activation.high),
        "sigmoid": lambda: 1 / (1 + np.exp(-values)),
        "hardswish": lambda: values * np.clip(values + 3, 0, 6) / 6,
        "silu": lambda: values / (1 + np.exp(-values)),
        "gelu": lambda: values * (1 + np.vectorize(math.erf)(values * 0.5**0.5)) / 2,
    }[activation.kind]()
