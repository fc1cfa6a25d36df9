# SPDX-License-Identifier: Apache-2.0
"""Softmax and layer normalisation of libraries on GPUs: B rows of H elements.

GPUs that were measured have a learned model each, all others a law whose constants are fitted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..features import Limits, divisibility
from ..kernel_call import KernelCall, element_bytes
from ..learned import LearnedKernel, Sizes, predict_learned
from ..machine import PORT_BYTES, Machine
from ..prediction import Prediction
from .elementwise import predict_streaming

_WARPS = (1, 4, 8, 32)

_SHARPNESS = 4.0
"""Exponent by which the longer of instructions and bytes hides the other."""

_WARP_ROW = 1024
"""Longest row that a warp has in its registers; longer ones have a block each."""


def _work(sizes: Sizes, width: int) -> tuple[np.ndarray, np.ndarray]:
    elements = sizes["B"] * sizes["H"]
    return 0.0 * elements, 2.0 * width * elements


def _law(sizes: Sizes, machine: Limits, width: int, constants: np.ndarray) -> np.ndarray:
    """Seconds of rows whose bytes fit into the second-level cache or do not.

    Constants, of short rows and of long ones: cycles of a multiprocessor for a row, and what
    reading rows again costs; then the cycles for each 32 elements.
    """
    b, h = sizes["B"], sizes["H"]
    _, moved = _work(sizes, width)
    is_long = h > _WARP_ROW
    row, again = (np.where(is_long, constants[at + 1], constants[at]) for at in (0, 2))
    ports = 0.5 * PORT_BYTES * machine.multiprocessors * machine.clock
    # Measured element-wise sweeps: all stays in the cache up to two thirds of it, and nothing does
    # of what is as large, since rows are evicted before the next launch reads them.
    kept = np.clip(3 * (1 - moved / machine.cache), 0, 1)
    near = kept / np.maximum(ports, machine.bandwidth)
    streamed = again * moved * (near + (1 - kept) / machine.bandwidth)
    cycles = row + constants[4] * np.ceil(h / 32)
    issued = b * cycles / (machine.multiprocessors * machine.clock)
    longer, shorter = np.maximum(streamed, issued), np.minimum(streamed, issued)
    return longer * (1 + (shorter / longer) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _features(sizes: Sizes, machine: Limits, roofline: np.ndarray, width: int) -> np.ndarray:
    b, h = sizes["B"], sizes["H"]
    moved = 2.0 * width * b * h
    columns = [np.log(b), np.log(h), np.log(moved), np.log(roofline), np.log(moved / machine.cache)]
    columns += [divisibility(b), divisibility(h), h, h / 2.0 ** np.ceil(np.log2(h))]
    for warps in _WARPS:
        threads = 32.0 * warps
        rounds = b * threads / (2048.0 * machine.multiprocessors)
        columns += [np.log(rounds), rounds / np.ceil(rounds)]
        columns.append(h / (np.ceil(h / threads) * threads))
    return np.stack(columns + machine.features(len(b)), axis=1)


def _kernel(name: str) -> LearnedKernel:
    return LearnedKernel(
        name,
        ("B", "H"),
        _work,
        _features,
        lambda sizes: np.zeros(len(sizes["B"]), int),
        law=_law,
        start=(20.0, 500.0, 1.2, 1.5, 10.0),
    )


SOFTMAX = _kernel("softmax")
LAYER_NORM = _kernel("layer_norm")


def predict_softmax(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a softmax over rows."""
    return _predict(SOFTMAX, call, machine)


def predict_layer_norm(call: KernelCall, machine: Machine) -> Prediction | None:
    """Predict a layer normalisation of rows."""
    return _predict(LAYER_NORM, call, machine)


def _predict(kernel: LearnedKernel, call: KernelCall, machine: Machine) -> Prediction | None:
    """By the learned model; of dtypes without one, by the bytes of the rows."""
    found = predict_learned(kernel, call, machine)
    if found is not None or machine.kind != "gpu":
        return found
    moved = float(call.size("B") * call.size("H") * element_bytes(call.dtype))
    streamed = KernelCall("elementwise", {}, call.dtype, 0.0, moved, moved, call.name)
    found = predict_streaming(streamed, machine)
    return found and replace(found, in_range=False)
