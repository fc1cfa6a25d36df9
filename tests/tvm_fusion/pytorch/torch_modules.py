# SPDX-License-Identifier: Apache-2.0
"""Small modules of PyTorch for tests, with random weights and statistics."""

from __future__ import annotations

import torch
from torch import nn


class Convolutions(nn.Module):
    """Conv 3x3, depthwise 3x3, conv 1x1, each but the last with batch norm; then a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
            nn.Conv2d(16, 24, 1),
        )
        self.classifier = nn.Linear(24, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(image).mean((2, 3)))


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, each after a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.network(self.norms[1](x))


class Words(nn.Module):
    """Embedding, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.linear = nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(tokens))


def convolutions() -> Convolutions:
    """Module in evaluation mode, with statistics of a few batches."""
    model = Convolutions()
    with torch.no_grad():
        for _ in range(3):
            model(2 * torch.randn(4, 3, 12, 12) + 1)
    return model.eval()


def image(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 12, 12)
