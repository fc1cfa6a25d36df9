# SPDX-License-Identifier: Apache-2.0
"""Modules of 16-bit types, and autocast: types and numbers of eager mode, nothing left eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import tvm_fusion  # noqa: E402
from tests.tvm_fusion.pytorch.torch_modules import convolutions  # noqa: E402
from tvm_fusion.torch.backend import tvm_fusion as backend  # noqa: E402

SHORT = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


class Ops(nn.Module):
    """Ops whose types the exporter changes, or that ONNX lacks of bfloat16; norms of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.features = convolutions()
        self.norm = nn.BatchNorm2d(3).eval()
        self.groups = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.results(x))

    def results(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        scores = self.features(x)
        yield from (scores, self.groups(x), self.norm(x.relu()))
        best, places = scores.topk(3)  # equal scores may come in another order
        yield from (best, scores.gather(-1, places))
        yield torch.einsum("bi,bj->ij", scores, scores)
        yield from (x.sort(-1)[0], x.sum(), x.prod(-1), x.cumsum(1), x.nansum((1, 2)))
        yield from torch.aminmax(x, dim=-1)
        yield x.amax(-1) @ x.amin(-2).transpose(-1, -2)
        yield from (F.mse_loss(x, x.relu()), F.cosine_similarity(x, x.relu() + 1))
        yield x[0].index_add(0, torch.tensor([2, 0, 2]), x[0])


def assert_as_eager(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    limit = 3e-2 if dtype is torch.bfloat16 else 4e-3
    for one, other in zip(found, wanted, strict=True):
        scale = limit * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=scale)


@pytest.mark.slow
@SHORT
def test_module_of_a_short_type(kept_models: list[Any], dtype: torch.dtype) -> None:
    model, x = Ops().to(dtype).eval(), torch.randn(2, 3, 12, 12).to(dtype)
    with torch.no_grad():
        fast = torch.compile(model, backend=backend, options={"threads": 1})
        assert_as_eager(fast(x), model(x), dtype)
    assert len(kept_models) == 1


@pytest.mark.slow
@SHORT
def test_autocast(kept_models: list[Any], dtype: torch.dtype) -> None:
    model, x = Ops().eval(), torch.randn(2, 3, 12, 12)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        fast = torch.compile(model, backend=backend, options={"threads": 1})
        assert_as_eager(fast(x), model(x), dtype)
    assert len(kept_models) == 1


class Cast(nn.Module):
    """Autocast within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = convolutions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)


@pytest.mark.slow
def test_program_with_autocast() -> None:
    model, x = Cast().eval(), torch.randn(2, 3, 12, 12)
    compiled = tvm_fusion.compile(torch.export.export(model, (x,)), threads=1)
    found = torch.from_dlpack(compiled.tensors(x))
    assert_as_eager([found], [model(x)], torch.bfloat16)


class CastSequence(nn.Module):
    """Autocast around a convolution of one dimension, whose types the tracer notes without it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(4, 8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(self.convolution(x).mean(-1))


@pytest.mark.slow
def test_module_with_autocast(kept_models: list[Any]) -> None:
    model, x = CastSequence().eval(), torch.randn(2, 4, 9)
    with torch.no_grad():
        fast = torch.compile(model, backend=backend, options={"threads": 1})
        assert_as_eager([fast(x)], [model(x)], torch.bfloat16)
    assert len(kept_models) == 1
