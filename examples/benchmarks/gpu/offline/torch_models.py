# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 and BERT-base in plain PyTorch; imported only where there is PyTorch."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


def make(name: str) -> nn.Module:
    """The network of that name, with random weights."""
    return {"resnet_50": resnet_50, "bert_base": Bert}[name]()


def _conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.first, self.second = _conv(inputs, width), _conv(width, width, 3, stride)
        self.third = _conv(width, outputs)
        fits = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if fits else _conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.first(x).relu()).relu()
        return (self.third(inner) + self.shortcut(x)).relu()


def resnet_50() -> nn.Module:
    """ResNet-50 with the stride in the 3x3 convolutions."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            layers.append(_Bottleneck(inputs, 64 << stage, 2 if stage and not index else 1))
            inputs = 256 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.projection(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        context = functional.scaled_dot_product_attention(q, k, v)
        x = self.norms[0](x + self.output(context.transpose(1, 2).reshape(x.shape)))
        return self.norms[1](x + self.down(functional.gelu(self.up(x))))


class Bert(nn.Module):
    """BERT-base without a mask, from tokens to the last hidden state."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30522, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states, [n, tokens, width], of [n, tokens]."""
        return self.layers(self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]]))
