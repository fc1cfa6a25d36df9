# SPDX-License-Identifier: Apache-2.0
"""Networks of PyTorch that neither torchvision nor transformers has: U-Nets, speech, ranking."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Segmentation network (Ronneberger et al. 2015) of two levels, for images [n, 3, h, w]."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.first, self.second = self._double(3, width), self._double(width, 2 * width)
        self.middle = self._double(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.after_second = self._double(4 * width, 2 * width)
        self.after_first = self._double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(channels: int, width: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for given in (channels, width):
            layers += [nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes, [n, classes, h, w]."""
        first = self.first(image)
        second = self.second(functional.max_pool2d(first, 2))
        middle = self.middle(functional.max_pool2d(second, 2))
        second = self.after_second(torch.cat([second, self.up_second(middle)], 1))
        return self.head(self.after_first(torch.cat([first, self.up_first(second)], 1)))


class DiffusionBlock(nn.Module):
    """Part of a latent diffusion U-Net (Rombach et al. 2022): residual, attention, down and up."""

    def __init__(self, width: int = 64, heads: int = 4, context: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.down = _Residual(width, 2 * width, width)
        self.smaller = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.attention = _CrossAttention(2 * width, heads, context)
        self.up = _Residual(3 * width, width, width)
        self.bigger = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(8, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, latent: Tensor, step: Tensor, context: Tensor) -> Tensor:
        """Noise, [n, 4, h, w], of a latent image at a step, given [n, tokens, context]."""
        frequencies = torch.exp(-torch.arange(16) * 0.6)
        angles = step[:, None].float() * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        stem = self.stem(latent)
        inner = self.attention(self.smaller(self.down(stem, time)), context)
        inner = self.bigger(functional.interpolate(inner, scale_factor=2.0, mode="nearest"))
        result = self.up(torch.cat([inner, stem], 1), time)
        return self.head(functional.silu(self.norm(result)))


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.skip = nn.Linear(time, width), nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x)))
        inner = inner + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(inner)))


class _CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.itself = nn.MultiheadAttention(width, heads, batch_first=True)
        self.other = nn.MultiheadAttention(
            width, heads, kdim=context, vdim=context, batch_first=True
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.gate, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        inner = self.norms[0](tokens)
        tokens = tokens + self.itself(inner, inner, inner, need_weights=False)[0]
        inner = self.norms[1](tokens)
        tokens = tokens + self.other(inner, context, context, need_weights=False)[0]
        value, gate = self.gate(self.norms[2](tokens)).chunk(2, -1)
        tokens = tokens + self.out(value * functional.gelu(gate))
        return x + tokens.transpose(1, 2).reshape(x.shape)


class SpeechLSTM(nn.Module):
    """Acoustic model in the manner of Deep Speech 2: convolutions, then recurrent layers.

    ``cell`` is ``nn.LSTM`` or ``nn.GRU``; frames are [n, time, 40].
    """

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM, width: int = 48) -> None:
        super().__init__()
        self.front = nn.Conv1d(40, width, 5, stride=2, padding=2)
        self.recurrent = cell(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, frames: Tensor) -> Tensor:
        """Log probabilities of characters, [n, time / 2, 29]."""
        inner = functional.relu(self.front(frames.transpose(1, 2))).transpose(1, 2)
        return functional.log_softmax(self.head(self.recurrent(inner)[0]), -1)


class WideAndDeep(nn.Module):
    """Cheng et al. 2016: a linear model of crossed features beside a perceptron on embeddings."""

    def __init__(self, features: int = 8, rows: int = 100, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(features))
        self.wide = nn.Embedding(rows, 1)
        sizes = (features * width + 13, 64, 32, 1)
        layers = [(nn.Linear(*pair), nn.ReLU()) for pair in zip(sizes, sizes[1:], strict=False)]
        self.deep = nn.Sequential(*[part for layer in layers for part in layer][:-1])

    def forward(self, numbers: Tensor, categories: Tensor, crossed: Tensor) -> Tensor:
        """Probability of a click, [n, 1]."""
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        deep = self.deep(torch.cat([numbers, *looked_up], 1))
        return torch.sigmoid(deep + self.wide(crossed).sum(1))


class DLRM(nn.Module):
    """Naumov et al. 2019: embeddings and a perceptron, all pairs of which interact."""

    def __init__(self, features: int = 8, rows: int = 100, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(features))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = (features + 1) * features // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(features + 1, features + 1, -1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Probability of a click, [n, 1]."""
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *looked_up], 1)
        products = vectors @ vectors.transpose(1, 2)
        interactions = products[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([dense, interactions], 1)))


class Conformer(nn.Module):
    """Encoder of Gulati et al. 2020: half perceptrons around attention and a convolution."""

    def __init__(self, width: int = 48, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.front = nn.Linear(40, width)
        self.blocks = nn.ModuleList(_ConformerBlock(width, heads) for _ in range(blocks))

    def forward(self, frames: Tensor) -> Tensor:
        """Features, [n, time, width], of frames [n, time, 40]."""
        inner = self.front(frames)
        for block in self.blocks:
            inner = block(inner)
        return inner


class _ConformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.SiLU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.widen, self.narrow = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.depthwise = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.halves[0](x)
        inner = self.norms[0](x)
        x = x + self.attention(inner, inner, inner, need_weights=False)[0]
        inner = functional.glu(self.widen(self.norms[1](x).transpose(1, 2)), 1)
        inner = functional.silu(self.norm(self.depthwise(inner)))
        x = x + self.narrow(inner).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.halves[1](x))
