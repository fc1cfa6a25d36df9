# SPDX-License-Identifier: Apache-2.0
"""Engines of ``torch_models.py``: PyTorch on a model of torchvision, by a backend of its compiler.

The worker of such an engine runs this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fusion.bench import engines

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

IMAGE = ("image", (1, 3, 224, 224), "float32")


class TorchEngine(engines.Engine):
    """A model of torchvision, named by the file name of its path, by one backend.

    Parameters
    ----------
    backend : str
        ``"eager"``, or one of ``torch.compile``; Inductor freezes the weights.
    """

    def __init__(self, backend: str) -> None:
        if backend == "inductor":
            os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        import torch

        # The checkout has it; it imports PyTorch, which reads the variable above.
        from examples.torchvision_ops import import_torchvision

        self._torchvision = import_torchvision()
        self.version = torch.__version__
        self._backend = backend
        self._torch = torch

    def load(
        self, path: str, shapes: engines.Shapes, threads: int, options: Mapping[str, Any]
    ) -> None:
        """Make the model with random weights, the same in each process; compile by running."""
        torch = self._torch
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = self._torchvision.models.get_model(Path(path).name, weights=None).eval()
        is_eager = self._backend == "eager"
        self._model = model if is_eager else torch.compile(model, backend=self._backend)
        self.inputs = [engines.Input(*IMAGE)]
        with torch.inference_mode():
            self._model(torch.zeros(IMAGE[1]))

    def feed(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """The image as a tensor."""
        return self._torch.from_numpy(arrays[IMAGE[0]])

    def run(self, feed: Any) -> Sequence[Any]:
        """Call the model."""
        with self._torch.inference_mode():
            return [self._model(feed).numpy()]


engines.ENGINES |= {
    f"torch-{backend}": engines.EngineKind(
        partial(TorchEngine, backend), title, "torch", program=__file__
    )
    for backend, title in (
        ("tvm_fusion", "tvm-fusion"),
        ("inductor", "Inductor, freezing"),
        ("eager", "eager"),
    )
}

if __name__ == "__main__":
    engines.main()
