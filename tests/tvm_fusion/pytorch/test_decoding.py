# SPDX-License-Identifier: Apache-2.0
"""Decoding token by token with grouped queries and a cache of fixed size."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tvm_fusion.torch.backend import tvm_fusion  # noqa: E402


class Decoder(nn.Module):
    """A layer with rotary positions; 4 heads of 8 as queries share 2 of keys and values.

    Keys and values are changed in place, where the counter says, which is so, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.inner, self.outer = nn.Linear(32, 64, bias=False), nn.Linear(32, 32)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4))

    def forward(
        self, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        places = seen + torch.arange(tokens.shape[1])
        mask = torch.arange(keys.shape[2]) <= places[:, None]
        angles = places[:, None] * self.frequencies
        angles = torch.cat([angles, angles], 1)

        def turned(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-right, left], -1) * angles.sin()

        heads = self.inner(x).unflatten(-1, (8, 8)).transpose(1, 2)
        keys.index_copy_(2, places, turned(heads[:, 4:6]))
        values.index_copy_(2, places, heads[:, 6:])
        queries = turned(heads[:, :4])
        result = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        seen.add_(tokens.shape[1])
        return (x + self.outer(result.transpose(1, 2).flatten(2)))[:, -1] @ self.embedding.weight.T


def fill(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    keys, values, seen = torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8), torch.zeros(1).long()
    tokens, made = prompt, []
    for _ in range(count):
        tokens = model(tokens, keys, values, seen).argmax(-1, keepdim=True)
        made.append(tokens.item())
    return made


def test_cache_of_inference_mode_that_is_changed_in_place(kept_models: list[Any]) -> None:
    decoder, prompt = Decoder().eval(), torch.randint(40, (1, 4))
    fast = torch.compile(decoder, backend=tvm_fusion, options={"threads": 1})
    with torch.inference_mode():
        wanted = fill(decoder, prompt, 9)
        assert fill(fast, prompt, 4) == wanted[:4]
        count = len(kept_models)
        assert fill(fast, prompt, 9) == wanted
    assert count and len(kept_models) == count
