# SPDX-License-Identifier: Apache-2.0
"""Random convolution layers for property tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from schedules.workload.conv2d import Activation, ConvLayer

ACTIVATIONS = [
    Activation("none"),
    Activation("relu"),
    Activation("relu6"),
    Activation("clip", -0.5, 0.75),
    Activation("sigmoid"),
    Activation("hardswish"),
    Activation("silu"),
    Activation("gelu"),
]
CHANNELS = st.sampled_from([1, 2, 3, 4, 6, 8, 13])


@st.composite
def layers(draw: st.DrawFn, in_channels: int | None = None) -> ConvLayer:
    """Any convolution of a few channels: dense, grouped or depthwise, with all its attributes."""
    channels = draw(CHANNELS) if in_channels is None else in_channels
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    depthwise = groups == channels and draw(st.booleans())
    out_channels = channels if depthwise else groups * draw(st.sampled_from([1, 2, 3]))
    small = st.integers(1, 3)
    margin = st.integers(0, 2)
    return ConvLayer(
        in_channels=channels,
        out_channels=out_channels,
        kernel=(draw(small), draw(small)),
        strides=(draw(small), draw(small)),
        padding=(draw(margin), draw(margin), draw(margin), draw(margin)),
        dilation=(draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        groups=groups,
        activation=draw(st.sampled_from(ACTIVATIONS)),
    )


@dataclass(frozen=True)
class Parameters:
    """Random weight and bias of one layer."""

    weight: np.ndarray
    bias: np.ndarray

    @classmethod
    def of(cls, layer: ConvLayer, rng: np.random.Generator, dtype: str = "float32") -> Parameters:
        """Parameters of ``layer`` in its plain layout."""
        shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
        weight = rng.standard_normal(shape).astype(dtype)
        return cls(weight, rng.standard_normal(layer.out_channels).astype(dtype))
