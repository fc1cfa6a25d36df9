# SPDX-License-Identifier: Apache-2.0
"""Whole models: what is packed of them, and PyTorch's models of the same sizes, as peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fusion.errors import EngineError

from ..engine import Engine, Launcher, Sets, module

GROUP = "model"


@dataclass(frozen=True)
class PackedModel:
    """A model that is measured with the outputs that ONNX Runtime has computed where it was packed.

    Parameters
    ----------
    name : str
        The group, a slash, and a name within the group.
    builder : str
        Key of ``examples.zoo.ZOO``.
    sizes : mapping
        Arguments of the builder.
    tolerance : float
        Largest error relative to the largest magnitude of an output.
    options : mapping
        Options of ``tvm_fusion.compile``.
    is_specific : bool
        Whether it is compiled for what only its architecture has: products of warpgroups.
    """

    name: str
    builder: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 1e-3
    options: Mapping[str, Any] = field(default_factory=dict)
    is_specific: bool = False

    @property
    def group(self) -> str:
        """Group of the case."""
        return GROUP

    @property
    def file(self) -> str:
        """Name of the model's library."""
        specific = "_warpgroups" if self.is_specific else ""
        return f"{self.builder}{self.options.get('precision', '')}{specific}.so"

    def arrays(self, folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The inputs, and the outputs for them."""
        with np.load(folder / f"{self.file}.npz", allow_pickle=False) as stored:
            names = sorted(stored.files)
            inputs = [stored[name] for name in names if name.startswith("x")]
            return inputs, [stored[name] for name in names if name.startswith("y")]


_HALF = {"precision": "fp16"}
MODELS = (
    PackedModel("model/resnet-50 float16, batch 8", "resnet_50", {"batch": 8}, 2e-2, _HALF),
    PackedModel(
        "model/resnet-50 float16 warpgroups, batch 8",
        "resnet_50",
        {"batch": 8},
        2e-2,
        _HALF,
        is_specific=True,
    ),
    PackedModel("model/bert-base float16", "bert_base", {}, 2e-2, _HALF),
    PackedModel("model/bert-base float16 warpgroups", "bert_base", {}, 2e-2, _HALF, True),
)


class TorchModel(Engine):
    """PyTorch's model of the same size with weights of its own; only its time counts.

    Parameters
    ----------
    title : str
        Its name in tables.
    compiled : bool
        Whether to use torch.compile, with fixed shapes.
    """

    package = "torch"

    def __init__(self, title: str, compiled: bool = False) -> None:
        self.title, self.compiled = title, compiled

    def prepare(self, case: Any, sets: Sets) -> Launcher:
        """Make the model in the type of the case; images have their channels last.

        Raises
        ------
        EngineError
            If there is no such model here.
        """
        torch = module("torch")
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if case.builder not in ("resnet_50", "bert_base"):
            raise EngineError(f"no model of PyTorch for {case.builder}")
        is_image = case.builder == "resnet_50"
        net = module("examples.benchmarks.gpu.offline.torch_models").make(case.builder)
        dtype = torch.float16 if case.options.get("precision") == "fp16" else torch.float32
        net = net.eval().to(sets[0][0].device, dtype)
        inputs = [tensors[0] for tensors in sets]
        if is_image:
            net = net.to(memory_format=torch.channels_last)
            inputs = [x.to(dtype).contiguous(memory_format=torch.channels_last) for x in inputs]
        run = torch.compile(net, dynamic=False) if self.compiled else net

        def launch(number: int) -> tuple[Any, ...]:
            with torch.no_grad():
                return (run(inputs[number]),)

        return Launcher(launch)

    def release(self) -> None:
        """Forget compiled models."""
        if self.compiled:
            module("torch").compiler.reset()
