# SPDX-License-Identifier: Apache-2.0
"""Training steps of GPT models on clusters: data, tensor and pipeline parallel, in 16 bits.

A rank is ``(pipeline stage, replica, tensor share)``, tensor shares first, so that those of a layer
are neighbours, then replicas, then stages, as Megatron-LM numbers them. Stages run one forward and
one backward in turn; gradients are summed over the replicas after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schedules.cost.decisions import predict
from schedules.cost.kernel_call import KernelCall

from ..errors import PredictionError
from .cluster import Cluster

DTYPE = "float16"
WIDTH = 2

STATE_BYTES = 18
"""Bytes of a weight and its gradient in 16 bits, and of the optimizer's copy of the weight, its two
moments, and a gradient in 32 bits (Rajbhandari et al., ZeRO, 2020)."""
UPDATE_BYTES = 40
"""Bytes that an update of the optimizer reads and writes of a weight."""
BACKWARD = 2.0
"""Work of a backward pass over that of the forward pass: a product each for weights and inputs."""


LAYER_HOST, STEP_HOST = 1.65e-3, 5e-3
"""Seconds of the host for a layer in a forward or a backward pass, which no kernels can undercut,
and for a step. Fitted to trainings of Megatron-DeepSpeed on 8 A100 (VIA-Research/vTrain, MIT)."""


@dataclass(frozen=True)
class GPTTraining:
    """A GPT model, its batch, and how it is shared out.

    Parameters
    ----------
    hidden, heads, layers, sequence, vocabulary : int
        Sizes of the model, and tokens of a sequence.
    global_batch, micro_batch : int
        Sequences of a step, and of a pass through a stage.
    tensor, data, pipeline : int
        GPUs that share a layer, replicas, and stages.
    recompute : bool
        Whether a backward pass computes the layer again instead of keeping its activations.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    global_batch: int
    micro_batch: int
    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    vocabulary: int = 51200
    recompute: bool = False

    def __post_init__(self) -> None:
        divided = {
            "heads of tensor": (self.heads, self.tensor),
            "hidden of heads": (self.hidden, self.heads),
            "layers of pipeline": (self.layers, self.pipeline),
            "global_batch of micro_batch x data": (
                self.global_batch,
                self.micro_batch * self.data,
            ),
        }
        for name, (whole, parts) in divided.items():
            if not 0 < parts <= whole or whole % parts:
                raise PredictionError(f"{name}: {whole} is no multiple of {parts}")

    @property
    def weights(self) -> float:
        """Weights of a rank of the first stage."""
        layer = 12 * self.hidden**2 + 13 * self.hidden
        embedding = (self.vocabulary / self.tensor + self.sequence) * self.hidden
        return layer * self.layers / self.pipeline / self.tensor + embedding

    @property
    def memory_bytes(self) -> float:
        """Peak of a rank of the first stage: weights, gradients, optimizer, and activations.

        Activations of a layer as Korthikanti et al. (2022) count them; the first stage keeps those
        of as many passes as there are stages.
        """
        tokens = self.sequence * self.micro_batch * self.hidden
        scores = 5 * self.heads * self.sequence / self.hidden
        layer = tokens * (10 + (24 + scores) / self.tensor)
        layers = self.layers / self.pipeline
        kept = 2 * tokens * layers + layer if self.recompute else layer * layers
        return STATE_BYTES * self.weights + kept * min(self.pipeline, self.passes)

    @property
    def passes(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.global_batch // (self.micro_batch * self.data)


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step of a training."""

    seconds: float  # The whole step.
    compute: float
    tensor: float
    pipeline: float
    data: float
    optimizer: float
    """``compute``, ``tensor``, ``pipeline``, ``data`` and ``optimizer``: seconds of kernels or of
    the host where that is slower, of all-reduces within layers, of sends between stages with what
    stages wait, of the all-reduce of gradients, and of the update."""
    memory_bytes: float  # Peak of a rank.
    fits: bool  # Whether the machine has as much.


def predict_training(training: GPTTraining, cluster: Cluster) -> StepPrediction:
    """Predict a step.

    Raises
    ------
    PredictionError
        If the cluster has fewer GPUs than ranks, or its machine lacks a figure.
    """
    t, d, p = training.tensor, training.data, training.pipeline
    total = cluster.nodes * cluster.gpus_per_node
    if t * d * p > total:
        raise PredictionError(
            f"tensor x data x pipeline is {t * d * p} ranks; cluster {cluster.name!r} has {total}"
        )
    passes, layers = training.passes, training.layers // p
    again = 1.0 if training.recompute else 0.0
    layer = _layer_seconds(training, cluster)
    message = float(WIDTH * training.micro_batch * training.sequence * training.hidden)
    reduce = cluster.predict("all_reduce", range(t), message).seconds
    forward = max(layer + 2 * reduce, LAYER_HOST)
    backward = max((BACKWARD + again) * (layer + reduce), LAYER_HOST)
    shared = (4 + 2 * again) * reduce * layers
    stage = layers * (forward + backward)
    head = (1 + BACKWARD) * _head_seconds(training, cluster)
    send = cluster.predict("send_recv", (0, t * d), message).seconds if p > 1 else 0.0
    # The stage with the vocabulary is the slowest, and all others wait for it in every pass.
    waits = (p - 1) * (stage + 2 * send) + 2 * send * passes
    replicas = range(0, t * d, t)
    data = cluster.predict("all_reduce", replicas, WIDTH * training.weights).seconds
    optimizer = _streamed(UPDATE_BYTES / 2 * training.weights, cluster, "float32")
    seconds = passes * (stage + head) + waits + data + optimizer + STEP_HOST
    compute = passes * (stage + head - shared)
    memory = training.memory_bytes
    fits = memory <= cluster.machine["capacity.memory"]
    return StepPrediction(seconds, compute, passes * shared, waits, data, optimizer, memory, fits)


def _layer_seconds(training: GPTTraining, cluster: Cluster) -> float:
    """Kernels of one layer in a forward pass of a rank."""
    s, b, h, t = training.sequence, training.micro_batch, training.hidden, training.tensor
    heads, rows = training.heads // t, b * s
    size = h // training.heads
    gemm = _gemm(cluster)
    products = [
        (rows, 3 * h // t, h),
        (rows, h, h // t),
        (rows, 4 * h // t, h),
        (rows, h, 4 * h // t),
    ]
    seconds = sum(gemm(1, *shape) for shape in products)
    seconds += gemm(b * heads, s, s, size) + gemm(b * heads, s, size, s)
    whole, scores = float(WIDTH * rows * h), float(WIDTH * b * heads * s * s)
    # Two norms; bias, dropout and residual twice; bias and GELU; scale, mask, softmax and dropout.
    moved = [
        2 * whole,
        2 * whole,
        3.5 * whole,
        3.5 * whole,
        8 * whole / t,
        2 * scores,
        2.5 * scores,
    ]
    return seconds + sum(_streamed(shape / 2, cluster, DTYPE) for shape in moved)


def _head_seconds(training: GPTTraining, cluster: Cluster) -> float:
    """Product with the vocabulary, and the loss, in a forward pass of the last stage."""
    rows, columns = training.micro_batch * training.sequence, training.vocabulary // training.tensor
    logits = float(4 * rows * columns)
    return _gemm(cluster)(1, rows, columns, training.hidden) + _streamed(logits, cluster, "float32")


def _gemm(cluster: Cluster) -> Callable[[int, int, int, int], float]:
    def seconds(b: int, m: int, n: int, k: int) -> float:
        op = "gemm" if b == 1 else "bmm"
        call = KernelCall(op, {"B": b, "M": m, "N": n, "K": k}, DTYPE)
        return predict(call, cluster.machine).device_seconds

    return seconds


def _streamed(half: float, cluster: Cluster, dtype: str) -> float:
    """Seconds of an element-wise kernel that reads and writes so many bytes each."""
    call = KernelCall("elementwise", {}, dtype, 0.0, half, half)
    return predict(call, cluster.machine).device_seconds
