# SPDX-License-Identifier: Apache-2.0
"""The one function that says how long a kernel takes on a machine."""

from __future__ import annotations

from collections.abc import Callable

from .kernel_call import KernelCall
from .kernels.attention import predict_attention
from .kernels.conv2d import predict_conv2d
from .kernels.cpu_kernels import predict_cpu_kernel, predict_cpu_library
from .kernels.elementwise import BY_BYTES, STREAMING, predict_streaming
from .kernels.embedding import predict_embedding_bag, predict_gather
from .kernels.gemm import predict_bmm, predict_gemm
from .kernels.gpu_kernels import predict_gpu_kernel
from .kernels.row_kernels import predict_layer_norm, predict_softmax
from .machine import Machine
from .prediction import Prediction, roofline

__all__ = ["MODELS", "KernelModel", "Prediction", "predict"]

KernelModel = Callable[[KernelCall, Machine], Prediction | None]
"""Model of some operators: a prediction, or None where it has none for the call or the machine."""

MODELS: dict[str, KernelModel] = {
    **dict.fromkeys(sorted(STREAMING | BY_BYTES), predict_streaming),
    "gemm": predict_gemm,
    "bmm": predict_bmm,
    "attention": predict_attention,
    "conv2d": predict_conv2d,
    "softmax": predict_softmax,
    "layer_norm": predict_layer_norm,
    "embedding_bag": predict_embedding_bag,
    "embedding_bag_backward": predict_embedding_bag,
    "gather": predict_gather,
}
"""Kernel models by operator."""

_OURS: dict[str, KernelModel] = {"cpu.": predict_cpu_kernel, "gpu.": predict_gpu_kernel}


def predict(call: KernelCall, machine: Machine) -> Prediction:
    """Predict the time of one launch, by the operator's model, else by the roofline.

    Raises
    ------
    PredictionError
        If the machine lacks a figure that the roofline needs, or the call a size of its model.
    """
    model = _OURS.get(call.op[:4], MODELS.get(call.op))
    prediction = None if model is None else model(call, machine)
    if machine.kind == "cpu" and (prediction is None or not prediction.in_range):
        prediction = predict_cpu_library(call, machine) or prediction
    return prediction or _by_roofline(call, machine)


def _by_roofline(call: KernelCall, machine: Machine) -> Prediction:
    seconds, bound = roofline(call, machine)
    floor = machine.launch_floor
    if floor > seconds:
        bound = "latency"
    least = max(seconds, floor)
    return Prediction(least, least, 4 * least, bound, seconds, "roofline", False)
