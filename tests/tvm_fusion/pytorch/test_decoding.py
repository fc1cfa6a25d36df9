# SPDX-License-Identifier: Apache-2.0
"""Decoding token by token with grouped queries: a cache that grows, and one of fixed size."""

from __future__ import annotations

import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's exporter to ONNX is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tvm_fusion.torch.backend import tvm_fusion  # noqa: E402


class Decoder(nn.Module):
    """A layer with rotary positions; 4 heads of 8 as queries share 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.inner, self.outer = nn.Linear(32, 64, bias=False), nn.Linear(32, 32)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4))

    def attend(self, x: torch.Tensor, places: torch.Tensor, update: Any) -> torch.Tensor:
        angles = places[:, None] * self.frequencies
        angles = torch.cat([angles, angles], 1)
        cos, sin = angles.cos(), angles.sin()

        def turned(y: torch.Tensor) -> torch.Tensor:
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat([-right, left], -1) * sin

        heads = self.inner(x).unflatten(-1, (8, 8)).transpose(1, 2)
        keys, values, mask = update(turned(heads[:, 4:6]), heads[:, 6:])
        result = F.scaled_dot_product_attention(
            turned(heads[:, :4]), keys, values, attn_mask=mask, enable_gqa=True
        )
        return (x + self.outer(result.transpose(1, 2).flatten(2))) @ self.embedding.weight.T


class Growing(Decoder):
    """Keys and values come in and go out."""

    def forward(
        self, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        start, count = keys.shape[2], tokens.shape[1]
        places = torch.arange(count) + start
        mask = torch.arange(start + count) <= places[:, None]
        cache: list[torch.Tensor] = []

        def update(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            cache.extend((torch.cat([keys, k], 2), torch.cat([values, v], 2)))
            return cache[0], cache[1], mask

        logits = self.attend(self.embedding(tokens), places, update)
        return logits[:, -1], cache[0], cache[1]


class Static(Decoder):
    """Keys and values are changed in place, where the counter says, which is so, too."""

    def forward(
        self, tokens: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        places = seen + torch.arange(tokens.shape[1])
        mask = torch.arange(keys.shape[2]) <= places[:, None]

        def update(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return keys.index_copy_(2, places, k), values.index_copy_(2, places, v), mask

        logits = self.attend(self.embedding(tokens), places, update)
        seen.add_(tokens.shape[1])
        return logits[:, -1]


def grow(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    keys = values = torch.zeros(1, 2, 0, 8)
    tokens, made = prompt, []
    for _ in range(count):
        logits, keys, values = model(tokens, keys, values)
        tokens = logits.argmax(-1, keepdim=True)
        made.append(tokens.item())
    return made


def fill(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    keys, values, seen = torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8), torch.zeros(1).long()
    tokens, made = prompt, []
    for _ in range(count):
        tokens = model(tokens, keys, values, seen).argmax(-1, keepdim=True)
        made.append(tokens.item())
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("model", "generate", "most"), [(Growing, grow, 3), (Static, fill, 4)])
def test_few_models_give_the_tokens_of_eager_mode(
    kept_models: list[Any],
    caplog: pytest.LogCaptureFixture,
    model: Any,
    generate: Any,
    most: int,
) -> None:
    decoder, prompt = model().eval(), torch.randint(40, (1, 4))
    fast = torch.compile(decoder, backend=tvm_fusion, options={"threads": 1})
    with torch.inference_mode(), caplog.at_level(logging.INFO, "tvm_fusion.torch"):
        wanted = generate(decoder, prompt, 9)
        assert generate(fast, prompt, 4) == wanted[:4]
        count = len(kept_models)
        assert generate(fast, prompt, 9) == wanted
    assert 0 < count <= most and len(kept_models) == count
    assert "a model for each shape" not in caplog.text
