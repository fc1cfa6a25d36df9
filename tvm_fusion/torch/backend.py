# SPDX-License-Identifier: Apache-2.0
"""The backend ``tvm_fusion`` of ``torch.compile``, for inference on CPUs.

>>> fast = torch.compile(model.eval(), backend="tvm_fusion")    # doctest: +SKIP
>>> with torch.inference_mode():                                # doctest: +SKIP
...     y = fast(x)

PyTorch finds it by the entry point group ``torch_dynamo_backends``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..errors import InvalidInputError
from .frozen_graph import FrozenGraph
from .lowering import Choices, warn_once


def tvm_fusion(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo.

    Ops that cannot be compiled run in eager mode, and so does all of a graph that is to be
    differentiated or has tensors elsewhere than on the CPU; a warning says so, once for each model.

    Parameters
    ----------
    graph : torch.fx.GraphModule
        The graph.
    example_inputs : sequence
        Its arguments, of which only device and need of gradients count.
    options : mapping, optional
        ``check``, ``fuse``, ``precision``, ``target``, ``threads``, ``weights`` and ``winograd`` of
        :func:`tvm_fusion.compile`. There are as many threads as PyTorch has,
        ``torch.get_num_threads()``, by default. A graph that fails its check runs in eager mode.
    mode : str, optional
        Only ``"default"``: the others of ``torch.compile`` are sets of options of Inductor.

    Raises
    ------
    InvalidInputError, OpError, TargetError
        If an option is unknown, or has a value that it cannot have.
    """
    if mode not in (None, "default"):
        raise InvalidInputError(
            f"backend 'tvm_fusion' has no mode {mode!r}; leave it out, or use options="
        )
    choices = Choices.of(options)
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    tensors += [*graph.parameters(), *graph.buffers()]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        warn_once(
            "backend 'tvm_fusion' is for inference: a graph that needs gradients runs in eager "
            "mode; call the model under torch.inference_mode() or torch.no_grad()"
        )
        return graph.forward
    others = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
    if others:
        warn_once(
            f"backend 'tvm_fusion' is for CPUs: a graph with tensors on {', '.join(others)} runs "
            "in eager mode"
        )
        return graph.forward
    return FrozenGraph(graph, choices)
