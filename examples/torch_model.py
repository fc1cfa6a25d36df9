# SPDX-License-Identifier: Apache-2.0
"""A model of PyTorch, compiled in two ways: by ``torch.compile``, and as an exported program.

    python examples/torch_model.py

Needs the extra ``torch``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import tvm_fusion


def network() -> nn.Module:
    """A small network of convolutions, in evaluation mode."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).eval()


def main() -> int:
    """Compile, compare with eager mode, save and load; the exit code is 1 if they differ."""
    model, images = network(), torch.randn(4, 3, 32, 32)
    fast = torch.compile(model, backend="tvm_fusion")
    with torch.inference_mode():
        expected = model(images)
        first = (fast(images) - expected).abs().max().item()

    batch = {"input": {0: torch.export.Dim("batch")}}
    program = torch.export.export(model, (images,), dynamic_shapes=batch)
    compiled = tvm_fusion.compile(program)
    with tempfile.TemporaryDirectory() as folder:
        compiled.save(Path(folder, "model.so"))
        loaded = tvm_fusion.load(Path(folder, "model.so"))
        second = (torch.from_numpy(loaded(images)) - expected).abs().max().item()

    print(compiled)
    print(f"largest difference: torch.compile {first:.1e}, exported program {second:.1e}")
    return 0 if max(first, second) < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())
