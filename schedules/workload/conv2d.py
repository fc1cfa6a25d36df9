# SPDX-License-Identifier: Apache-2.0
"""Shapes and attributes of one convolution and of a fused pair, and their costs.

Ops, passes, schedules and reports share these plain records; they are independent of Relax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import OpError

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1}
WORD_BYTES = 4
"""Bytes of a word: neighbouring channels whose products one instruction adds up."""
WORDS = {
    **{"uint8": WORD_BYTES, "int8": WORD_BYTES},
    **{"int16": WORD_BYTES // 2, "bfloat16": WORD_BYTES // 2},
}
"""Channels in a word by their type: bytes, the same numbers in 16 bits, or bfloat16."""
ACTIVATIONS = (
    *("none", "relu", "relu6", "clip", "sigmoid", "hardswish", "silu", "gelu"),
    "round_clip",
)
BOUNDED = ("clip", "round_clip")
PAIR = 2
"""Layers of a fused kernel."""


@dataclass(frozen=True)
class ChannelBlocks:
    """Channels in a block of each tensor of a network.

    A tensor has as few blocks of at most ``most`` channels as hold its own, and these as narrow as
    possible: 144 channels are three blocks of 48, where blocks are multiples of 16 up to 64.
    """

    least: int
    most: int
    """``least`` and ``most``: blocks are multiples of the former up to the latter."""

    def of(self, channels: int) -> int:
        """Channels in a block of a tensor."""
        blocks = -(-channels // self.most)
        return self.least * -(-channels // (self.least * blocks))

    @property
    def are_equal(self) -> bool:
        """Return whether all tensors have the same."""
        return self.least == self.most


@dataclass(frozen=True)
class Activation:
    """The element-wise function that ends a layer."""

    kind: str = "none"
    """One of ``none``, ``relu``, ``relu6``, ``clip``, ``sigmoid``, ``hardswish``, ``silu``,
    ``gelu``, ``round_clip``, which rounds to whole numbers before it bounds."""
    low: float = 0.0
    high: float = 0.0
    """``low`` and ``high``: the bounds of ``clip`` and ``round_clip``; unused otherwise."""

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise OpError(f"activation is {self.kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        if self.kind in BOUNDED and not self.low <= self.high:
            raise OpError(f"{self.kind} has bounds ({self.low}, {self.high}); expected low <= high")

    def __str__(self) -> str:
        bounds = f"({self.low:g}, {self.high:g})" if self.kind in BOUNDED else ""
        return self.kind + bounds


@dataclass(frozen=True)
class ByteAddition:
    """Addition of a tensor of bytes to an activated layer, rounded to whole numbers.

    ::

        out = round((layer * factor + (bytes + shift) * bytes_factor) / divisor)    within bounds
    """

    factor: float
    bytes_factor: float
    """``factor`` and ``bytes_factor``: scales of both summands."""
    shift: float  # Whole number that the bytes are short of the numbers that they stand for.
    divisor: float  # Scale of the sum.
    low: float
    high: float
    """``low`` and ``high``: bounds of the rounded sum."""
    bytes_first: bool = False
    """Whether the bytes are the first summand; of two products the compiler rounds one."""

    @property
    def activation(self) -> Activation:
        """The rounding of the sum."""
        return Activation("round_clip", self.low, self.high)


@dataclass(frozen=True)
class ByteRounding:
    """Rounding of an image of floats to the bytes that a convolution multiplies.

    ::

        byte = round(number / divisor) - low    within bounds
    """

    divisor: float  # Scale of the whole numbers.
    low: float
    high: float
    """``low`` and ``high``: bounds of these, at most 0 and at least 0."""

    def __post_init__(self) -> None:
        if not (self.divisor and math.isfinite(self.divisor) and self.low <= 0 <= self.high):
            raise OpError(
                f"a rounding to bytes has divisor {self.divisor} and bounds ({self.low}, "
                f"{self.high}); expected a finite divisor other than 0, and bounds around 0"
            )

    @property
    def activation(self) -> Activation:
        """The rounding of the quotient."""
        return Activation("round_clip", self.low, self.high)

    @property
    def zero(self) -> int:
        """The byte that stands for 0."""
        return -int(self.low)


@dataclass(frozen=True)
class ConvLayer:
    """One convolution with its activation; spatial pairs are (height, width)."""

    in_channels: int
    out_channels: int
    """``in_channels`` and ``out_channels``: channels of the whole input and output (not per
    group)."""
    kernel: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # Zero padding at top, left, bottom, right.
    dilation: tuple[int, int] = (1, 1)
    """``kernel``, ``strides`` and ``dilation``: height and width."""
    groups: int = 1
    """Number of channel groups; ``groups == in_channels == out_channels`` is depthwise."""
    activation: Activation = Activation()  # Applied after bias and residual.

    @property
    def is_depthwise(self) -> bool:
        """Return whether each output channel reads exactly its own input channel."""
        return self.groups > 1 and self.groups == self.in_channels == self.out_channels

    def group_lanes(self, lanes: int) -> int:
        """Channels of a group, if each block of ``lanes`` channels reads only itself, else 0.

        That is 1 for depthwise layers, and otherwise a power of two that divides a block.
        """
        if self.is_depthwise:
            return 1
        width = self.in_channels // self.groups
        inside = self.groups > 1 and width < lanes and lanes % width == 0
        alike = self.in_channels == self.out_channels and width & (width - 1) == 0
        return width if inside and alike else 0

    def input_step(self, lanes: int) -> int:
        """Neighbouring input channels that lie in one block wherever a group begins."""
        if self.groups == 1:
            return lanes
        return math.gcd(self.in_channels // self.groups, lanes)

    def groups_met(self, lanes: int) -> int:
        """Most groups that an output block of ``lanes`` channels belongs to."""
        width = self.out_channels // self.groups
        first_lane = width - math.gcd(width, lanes)  # Lane of the block, within its first group.
        return min(self.groups, -(-(first_lane + lanes) // width))

    def mean_groups_met(self, lanes: int) -> float:
        """Groups that an output block of ``lanes`` channels belongs to, mean over a large layer."""
        width = self.out_channels // self.groups
        return 1 + (lanes - math.gcd(width, lanes)) / width

    def fills_blocks(self, lanes: int) -> bool:
        """Return whether each output block of ``lanes`` channels belongs to one group."""
        return self.groups == 1 or self.out_channels // self.groups % lanes == 0

    @property
    def is_pointwise(self) -> bool:
        """Return whether the kernel is 1x1 with stride 1, no padding and one group."""
        return (
            self.kernel == (1, 1)
            and self.strides == (1, 1)
            and not any(self.padding)
            and self.groups == 1
        )

    @property
    def suits_winograd(self) -> bool:
        """Return whether the kernel is 3x3 with stride 1, no dilation and one group."""
        return (
            self.kernel == (3, 3)
            and self.strides == (1, 1)
            and self.dilation == (1, 1)
            and self.groups == 1
        )

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for an input of ``height`` x ``width`` pixels."""
        top, left, bottom, right = self.padding
        reach_h = (self.kernel[0] - 1) * self.dilation[0] + 1
        reach_w = (self.kernel[1] - 1) * self.dilation[1] + 1
        return (
            (height + top + bottom - reach_h) // self.strides[0] + 1,
            (width + left + right - reach_w) // self.strides[1] + 1,
        )

    def weight_elements(self) -> int:
        """Number of weights, bias included."""
        per_output = self.in_channels // self.groups * self.kernel[0] * self.kernel[1]
        return self.out_channels * (per_output + 1)

    def flops(self, height: int, width: int) -> int:
        """Floating-point operations (two a multiply-add) for an image of ``height`` x ``width``."""
        out_h, out_w = self.output_size(height, width)
        per_output = self.in_channels // self.groups * self.kernel[0] * self.kernel[1]
        return 2 * out_h * out_w * self.out_channels * per_output

    def to_attrs(self, suffix: str = "") -> dict[str, Any]:
        """The layer as op attributes, each name ending in ``suffix``; channels are not included."""
        attrs = {
            "strides": list(self.strides),
            "padding": list(self.padding),
            "dilation": list(self.dilation),
            "groups": self.groups,
            "activation": self.activation.kind,
            "low": float(self.activation.low),
            "high": float(self.activation.high),
        }
        return {name + suffix: value for name, value in attrs.items()}

    @classmethod
    def from_attrs(
        cls,
        attrs: Mapping[str, Any],
        in_channels: int,
        out_channels: int,
        kernel: tuple[int, int],
        suffix: str = "",
    ) -> ConvLayer:
        """Read the attributes that :meth:`to_attrs` wrote."""

        def ints(name: str) -> tuple[int, ...]:
            return tuple(int(value) for value in attrs[name + suffix])

        return cls(
            in_channels=int(in_channels),
            out_channels=int(out_channels),
            kernel=(int(kernel[0]), int(kernel[1])),
            strides=ints("strides"),  # type: ignore[arg-type]
            padding=ints("padding"),  # type: ignore[arg-type]
            dilation=ints("dilation"),  # type: ignore[arg-type]
            groups=int(attrs["groups" + suffix]),
            activation=Activation(
                str(attrs["activation" + suffix]),
                float(attrs["low" + suffix]),
                float(attrs["high" + suffix]),
            ),
        )

    def __str__(self) -> str:
        kind = "dw-conv" if self.is_depthwise else "conv"
        text = f"{kind} {self.kernel[0]}x{self.kernel[1]} {self.in_channels}->{self.out_channels}"
        if self.strides != (1, 1):
            text += f" s{self.strides[0]}" if len(set(self.strides)) == 1 else f" s{self.strides}"
        if self.dilation != (1, 1):
            text += f" d{self.dilation}"
        if self.groups > 1 and not self.is_depthwise:
            text += f" g{self.groups}"
        return text if self.activation.kind == "none" else f"{text} {self.activation}"


@dataclass(frozen=True)
class FusedConv2DWorkload:
    """Two neighbouring convolutions on concrete shapes."""

    batch: int
    height: int
    width: int
    """``batch``, ``height`` and ``width``: of the first layer's input."""
    layer1: ConvLayer
    layer2: ConvLayer
    """``layer1`` and ``layer2``: the layers in order."""
    residual: bool = False
    """Whether a tensor of the output's shape is added before the second activation."""
    dtype: str = "float32"  # Element type of every tensor.
    plain_data: bool = False
    plain_out: bool = False
    """``plain_data`` and ``plain_out``: whether the input, or the output, is in NCHW, as those of a
    model are."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def mid_size(self) -> tuple[int, int]:
        """Height and width of the intermediate tensor."""
        return self.layer1.output_size(self.height, self.width)

    @property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the output."""
        return self.layer2.output_size(*self.mid_size)

    def flops(self) -> int:
        """Floating-point operations of both layers, without any recomputation."""
        first = self.layer1.flops(self.height, self.width)
        return self.batch * (first + self.layer2.flops(*self.mid_size))

    def mid_bytes(self) -> int:
        """Bytes of the intermediate tensor."""
        mid_h, mid_w = self.mid_size
        return self.batch * mid_h * mid_w * self.layer1.out_channels * self.item_bytes

    def bytes_fused(self) -> int:
        """Bytes that one kernel must move: input, weights, residual and output, each once."""
        out_h, out_w = self.out_size
        out = self.batch * out_h * out_w * self.layer2.out_channels
        data = self.batch * self.height * self.width * self.layer1.in_channels
        weights = self.layer1.weight_elements() + self.layer2.weight_elements()
        return (data + weights + out * (2 if self.residual else 1)) * self.item_bytes

    def bytes_unfused(self) -> int:
        """Bytes that two kernels must move: the intermediate is written once and read once."""
        return self.bytes_fused() + 2 * self.mid_bytes()


@dataclass(frozen=True)
class Conv2DKernel:
    """Workload of one generated kernel; stored as JSON in a PrimFunc attribute."""

    layers: tuple[ConvLayer, ...]  # One layer, or the two of a fused pair.
    batch: int | None
    height: int | None
    width: int | None
    """``batch``, ``height`` and ``width``: of the first layer's input; None where symbolic."""
    residual: bool = False
    """Whether a tensor of the output's shape is added before the last activation."""
    dtype: str = "float32"
    """Element type of every tensor if it is a float, but for the next ones; ``uint8`` for data of
    bytes with weights of int8, and scales and biases of float32."""
    data_layout: str = "NCHW"
    out_layout: str = "NCHW"
    """``data_layout`` and ``out_layout``: ``NCHW`` or ``NCHW{x}c``."""
    plain_data: bool = False
    plain_out: bool = False
    """``plain_data`` and ``plain_out``: whether the kernel itself packs its data from NCHW, or
    unpacks its output to NCHW."""
    winograd: int = 0
    """Height and width of the output tiles of Winograd's algorithm; 0 for a direct convolution."""
    data_dtype: str | None = None
    """``uint8`` for bytes that a depthwise layer converts to ``dtype``, with a scale for each
    channel after the biases, which multiplies sums and biases; else None."""
    out_dtype: str | None = None
    """Element type of the output, if not ``dtype``. ``uint8`` stands for rounded numbers from which
    the activation's lower bound is subtracted."""
    word: int = WORD_BYTES
    """Channels whose products one instruction adds up; see :data:`WORDS`. 1 for convolutions of
    bfloat16 with ``sums`` whose weights are not in words, as of depthwise layers, and twice as many
    as in a word where it multiplies two pixels by two output channels; see ``has_mmla``."""
    addition: ByteAddition | None = None
    """Sum of a convolution of bytes and its residual, which is of ``uint8``."""
    limited: bool = False
    """Whether the weights are such that two neighbouring products of bytes fit in 16 bits."""
    sums: str | None = None
    """Element type of sums and biases, if not ``dtype``: ``float32`` of bfloat16."""
    rounding: ByteRounding | None = None
    """Rounding by which a convolution of bytes makes these of its data, a float32 image in NCHW."""
    residual_dtype: str | None = None  # Type of the residual, if not ``dtype``: that of the sums.
    weight_dtype: str | None = None
    """``int8`` for weights that are widened to ``dtype`` as they are multiplied, with a scale for
    each output channel after the biases; else None."""
    shifted: bool = False
    """Whether 128 is subtracted from bytes as they are multiplied, and the weights contain what the
    sums lack; see :mod:`schedules.compute.quantized_conv2d`."""
    mid_layout: str | None = None
    """Layout between the two layers of a pair in tile registers; else None."""

    @property
    def is_quantized(self) -> bool:
        """Return whether bytes are multiplied."""
        return self.dtype == "uint8"

    @property
    def has_scale(self) -> bool:
        """Return whether a factor for each channel follows the biases of a layer of floats."""
        return self.weight_dtype is not None or self.data_dtype is not None

    @property
    def has_words(self) -> bool:
        """Return whether channels are multiplied in words: bytes, or pairs of bfloat16."""
        return self.is_quantized or (self.sums is not None and self.word > 1)

    @property
    def has_mmla(self) -> bool:
        """Return whether words of weights have eight bytes, for AArch64's ``mmla``."""
        return self.word == 2 * WORDS["bfloat16" if self.sums else "uint8"]

    def in_words(self) -> Conv2DKernel:
        """The convolution of floats that moves as many bytes by as many instructions.

        That of words of four bytes, with images of one pixel as one row, and with the zeros around
        an image that is rounded as part of it; a convolution of floats of its own lanes is its own.
        Words of eight bytes take half as many instructions.
        """
        if not self.has_words:
            return self
        (layer,) = self.layers
        word = WORDS[self.dtype] if self.has_mmla else self.word
        words = replace(layer, in_channels=-(-layer.in_channels // word))
        is_plain = self.data_layout == f"NCHW{WORD_BYTES}c" and not self.has_mmla
        layout = "NCHW" if is_plain else self.data_layout
        kernel = replace(self, layers=(words,), dtype="float32", data_layout=layout)
        if self.rounding is not None and self.height and self.width:
            top, left, bottom, right = words.padding
            kernel = replace(
                kernel,
                layers=(replace(words, padding=(0, 0, 0, 0)),),
                height=self.height + top + bottom,
                width=self.width + left + right,
            )
        return replace(kernel, batch=1, width=self.batch) if self.is_matrix else kernel

    def apart(self) -> tuple[Conv2DKernel, Conv2DKernel]:
        """The kernels of both layers of a pair in tile registers."""
        first, second = (replace(self, layers=(layer,), mid_layout=None) for layer in self.layers)
        size = self.layers[0].output_size(int(self.height or 1), int(self.width or 1))
        second = replace(second, height=size[0], width=size[1], data_layout=str(self.mid_layout))
        first = replace(first, out_layout=str(self.mid_layout), out_dtype=self.dtype)
        first = replace(first, residual=False, residual_dtype=None, addition=None)
        if self.layers[0].is_depthwise:
            if self.is_quantized:
                return replace(first, dtype="float32", data_dtype=self.dtype), second
            return replace(first, word=1), second
        return first, second

    @property
    def second_weight(self) -> int:
        """Position of the second layer's weight among the parameters of a pair in tiles."""
        return 4 if self.is_quantized else 3

    def joined(self, second: Conv2DKernel) -> Conv2DKernel | None:
        """The pair of which this is the first kernel; None where a pair computes another one."""
        layers = *self.layers, *second.layers
        pair = replace(second, batch=self.batch, height=self.height, width=self.width)
        blocks = self.data_layout, second.data_layout
        pair = replace(pair, layers=layers, data_layout=blocks[0], mid_layout=blocks[1])
        is_pair = len(layers) == PAIR and None not in (self.height, self.width)
        return pair if is_pair and pair.apart() == (self, second) else None

    @property
    def is_matrix(self) -> bool:
        """Return whether words of several images of one pixel are multiplied: rows of a matrix."""
        single = self.height == self.width == 1 and self.layers[0].is_pointwise
        return self.has_words and single and (self.batch or 0) > 1

    @property
    def is_static(self) -> bool:
        """Return whether batch, height and width are all known."""
        return None not in (self.batch, self.height, self.width)

    @property
    def lanes(self) -> int:
        """Channels in a block of the packed output; 1 for NCHW."""
        return int(self.out_layout[len("NCHW") : -1] or 1)

    def flops(self) -> int:
        """Floating-point operations (two a multiply-add) of one run; unknown extents count as one.

        Those of Winograd's transforms are not counted, as they are not multiply-adds of weights.
        """
        size, total = (self.height or 1, self.width or 1), 0
        for layer in self.layers:
            total += layer.flops(*size)
            size = layer.output_size(*size)
        if self.winograd:
            tiles = math.prod(-(-extent // self.winograd) for extent in size)
            points = (self.winograd + self.layers[0].kernel[0] - 1) ** 2
            total = 2 * tiles * points * self.layers[0].in_channels * self.layers[0].out_channels
        return (self.batch or 1) * total


def describe(kernel: Conv2DKernel) -> str:
    """Return the layers and the size of the image in a few words."""
    layers = " + ".join(map(str, kernel.layers))
    by = f" by Winograd {kernel.winograd}x{kernel.winograd}" if kernel.winograd else ""
    of = " of bytes" if kernel.is_quantized else f" of {kernel.dtype}" if kernel.sums else ""
    by = f" by {kernel.weight_dtype}{by}" if kernel.weight_dtype else by
    return f"{layers}{of} on {kernel.height}x{kernel.width}{by}"


def to_json(kernel: Conv2DKernel) -> str:
    """Write ``kernel`` as one line of JSON, the same text for equal kernels."""
    fields = asdict(kernel)
    defaults = {"data_dtype": None, "out_dtype": None, "word": WORD_BYTES, "addition": None}
    defaults |= {"limited": False, "sums": None, "rounding": None, "residual_dtype": None}
    defaults |= {"weight_dtype": None, "shifted": False, "mid_layout": None}
    for name, default in defaults.items():
        if fields[name] == default:
            del fields[name]
    return json.dumps(fields, sort_keys=True)


def from_json(text: str) -> Conv2DKernel:
    """Read the JSON text that :func:`to_json` wrote."""
    try:
        fields = json.loads(text)
        layers = tuple(_layer_from_fields(layer) for layer in fields.pop("layers"))
        if "addition" in fields:
            fields["addition"] = ByteAddition(**fields["addition"])
        if "rounding" in fields:
            fields["rounding"] = ByteRounding(**fields["rounding"])
        return Conv2DKernel(layers=layers, **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OpError(
            f"the kernel description {text!r} cannot be read ({error}); "
            "expected the JSON text which to_json writes"
        ) from error


def _layer_from_fields(fields: dict[str, Any]) -> ConvLayer:
    activation = Activation(**fields.pop("activation"))
    pairs: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return ConvLayer(activation=activation, **pairs)
