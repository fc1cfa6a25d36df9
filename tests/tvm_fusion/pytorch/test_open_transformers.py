# SPDX-License-Identifier: Apache-2.0
"""Transformers with open batch and length, as programs and as ONNX files: any size at call."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_reference import assert_same, run_onnx

import tvm_fusion

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

# Its import takes half a second of every process that collects tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

from torch.export import Dim, ExportedProgram  # noqa: E402

from examples.torch_zoo import TORCH_ZOO  # noqa: E402

NAMES = ("bert", "gpt2", "llama")
SIZES = ((2, 7), (1, 12), (3, 1), (2, 7))
"""Batch and length of calls; the first ones are those of the export."""


def tokens(batch: int, length: int) -> dict[str, np.ndarray]:
    """Tokens, and a mask that hides the last places of the first sequence."""
    rng = np.random.default_rng([batch, length])
    mask = np.ones((batch, length), np.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"input_ids": rng.integers(0, 100, (batch, length)), "attention_mask": mask}


def exported(name: str) -> tuple[torch.nn.Module, ExportedProgram]:
    torch.manual_seed(0)
    module = TORCH_ZOO[name](False).module.eval()
    inputs = tuple(map(torch.from_numpy, tokens(*SIZES[0]).values()))
    is_open = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    with torch.no_grad():
        return module, torch.export.export(module, inputs, dynamic_shapes=((is_open, is_open),))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_program_of_open_sizes(name: str) -> None:
    module, program = exported(name)
    model = tvm_fusion.specialize(program, variants=2, threads=1)
    for sizes in SIZES:
        feed = tokens(*sizes)
        with torch.no_grad():
            wanted = module(*map(torch.from_numpy, feed.values()))
        assert_same(model(*feed.values()), [wanted.numpy()])
    assert len(model.variants) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_file_of_open_sizes(name: str, tmp_path: Path) -> None:
    _, program = exported(name)
    path = tmp_path / "model.onnx"
    file = torch.onnx.export(program, input_names=list(tokens(1, 1)), dynamo=True, verbose=False)
    assert file is not None
    file.save(path)
    model = tvm_fusion.specialize(path, variants=2, threads=1)
    for sizes in SIZES:
        feed = tokens(*sizes)
        assert_same(model(feed), run_onnx(onnx.load(path), feed))
    assert len(model.variants) == 2
