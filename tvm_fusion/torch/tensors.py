# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors as arguments and results of compiled models."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.compiled_model import CompiledModel


def as_argument(tensor: torch.Tensor) -> Any:
    """A numpy array in the memory of ``tensor``, or a tensor of a type that numpy lacks.

    Conjugate and negative views are resolved and strided ones made contiguous, which copies them.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dtype is torch.bfloat16 else tensor.numpy()


def run(model: CompiledModel, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of a model on tensors of the CPU; nothing is copied that need not be."""
    arguments = [as_argument(tensor) for tensor in tensors]
    if any(spec.dtype == "bfloat16" for spec in model.outputs):
        outputs = model.tensors(*arguments)
    else:
        outputs = model(*arguments)  # has a faster path, for numpy arrays
    if len(model.outputs) == 1:
        outputs = (outputs,)
    return [torch.from_dlpack(output) for output in outputs]
