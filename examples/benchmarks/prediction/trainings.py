# SPDX-License-Identifier: Apache-2.0
"""Small trainings in PyTorch: a step of each is forward, backward and plain SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], None]

TABLES, ROWS, WIDTH, LOOKUPS, DENSE = 8, 100_000, 64, 10, 13


def multilayer_perceptron() -> nn.Module:
    """Four linear layers on 512 features."""
    sizes = (512, 1024, 1024, 512)
    layers = [part for pair in zip(sizes, sizes[1:], strict=False) for part in _hidden(*pair)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def _hidden(inner: int, outer: int) -> list[nn.Module]:
    return [nn.Linear(inner, outer), nn.ReLU()]


class Residual(nn.Module):
    """Two convolutions with batch norms, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Both convolutions, and the sum."""
        hidden = torch.relu(self.norms[0](self.first(data)))
        return torch.relu(data + self.norms[1](self.second(hidden)))


def convolutional_network() -> nn.Module:
    """Three residual blocks on images of 32x32."""
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), Residual(32)]
    for channels in (32, 64):
        parts += [nn.Conv2d(channels, 2 * channels, 3, 2, 1), Residual(2 * channels)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def transformer() -> nn.Module:
    """Two encoder layers of width 256 and a classifier of the first token."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), _First(), nn.Linear(256, 10))


class _First(nn.Module):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data[:, 0]


class RecommendationModel(nn.Module):
    """Lookups in eight tables, dense features, their products, and a perceptron (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(TABLES)
        )
        self.bottom = nn.Sequential(*_hidden(DENSE, 256), *_hidden(256, WIDTH))
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(*_hidden(WIDTH + pairs, 256), nn.Linear(256, 10))
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        self.register_buffer("pairs", rows * (TABLES + 1) + columns)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(batch, 10) of (batch, 13) features and (tables, batch, lookups) rows."""
        hidden = self.bottom(dense)
        found = [table(rows) for table, rows in zip(self.tables, indices, strict=True)]
        vectors = torch.stack([hidden, *found], dim=1)
        return self.top(interact(hidden, vectors, self.pairs))


def interact(hidden: torch.Tensor, vectors: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Dense features (batch, width) and the products of pairs of (batch, tables + 1, width)."""
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return torch.cat([hidden, products[:, pairs]], dim=1)


Inputs = tuple[torch.Tensor, ...]
Training = tuple[Callable[[], nn.Module], Callable[[int], Inputs], tuple[int, ...]]

TRAININGS: dict[str, Training] = {
    "mlp": (multilayer_perceptron, lambda b: (torch.randn(b, 512),), (64, 128, 256, 512)),
    "cnn": (convolutional_network, lambda b: (torch.randn(b, 3, 32, 32),), (8, 16, 32, 64)),
    "transformer": (transformer, lambda b: (torch.randn(b, 64, 256),), (4, 8, 16, 32)),
    "dlrm": (
        RecommendationModel,
        lambda b: (torch.randn(b, DENSE), torch.randint(ROWS, (TABLES, b, LOOKUPS))),
        (128, 256, 512, 1024),
    ),
}
"""Model, inputs of a batch, and the batch sizes."""


def training_step(name: str, batch: int) -> Step:
    """A step of a training, always on the same batch; the same weights for the same name."""
    make, inputs, _ = TRAININGS[name]
    torch.manual_seed(0)
    return sgd_step(make(), inputs(batch), batch)


def sgd_step(model: nn.Module, data: Inputs, samples: int) -> Step:
    """A step of a model on its inputs and random labels: forward, backward and plain SGD."""
    labels = torch.randint(10, (samples,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(*data), labels).backward()
        optimizer.step()

    return step
