# SPDX-License-Identifier: Apache-2.0
"""Convolutions of bytes for tests: how they are drawn, built, fed, run, and computed in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm
from cpu.conv_cases import CHANNELS, SIZES, Array, convolve, layers, pack, up
from hypothesis import strategies as st
from tvm import te, tirx

from schedules.compute.quantized_conv2d import quantized_conv2d
from schedules.workload.conv2d import (
    Activation,
    ByteAddition,
    ByteRounding,
    Conv2DKernel,
    ConvLayer,
    to_json,
)
from schedules.workload.winograd_matrices import transform_words

WORD_FORMS = ((2, False), (4, True), (4, False))
"""Channels of a word, and whether weights are limited: two forms for AVX2, and that of VNNI."""
ADDITIONS = (
    ByteAddition(0.5, 0.25, -7.0, 0.125, -3.0, 252.0),
    ByteAddition(0.25, 2.0, 0.0, 4.0, 0.0, 255.0, bytes_first=True),
)
"""With scales by which float32 has no rounding error; some sums are halves."""
ROUNDINGS = (ByteRounding(0.25, -114.0, 141.0), ByteRounding(2.0, 0.0, 255.0))
ENDS = (Activation(), Activation("relu"), Activation("round_clip", -100, 155))


@dataclass(frozen=True)
class QuantizedCase:
    """A layer on concrete shapes; ``words``: the data is packed in words of four channels.

    Other data is in blocks of ``inner`` channels, if not as many as the output. Weights are words
    of ``word`` channels, also ``shifted`` ones. An image with a ``rounding`` is one of floats in
    NCHW, and is multiplied in words. A bias of ``bias_dtype`` int32 joins the sums.
    """

    layer: ConvLayer
    batch: int = 1
    height: int = 9
    width: int = 11
    lanes: int = 16
    words: bool = False
    out_dtype: str = "float32"
    word: int = 4
    addition: ByteAddition | None = None
    limited: bool = False
    rounding: ByteRounding | None = None
    inner: int | None = None
    winograd: int = 0
    shifted: bool = False
    bias_dtype: str = "float32"

    @property
    def data_lanes(self) -> int:
        return 4 if self.words else self.inner or self.lanes

    @property
    def own(self) -> int:
        """Input channels of a group."""
        return self.layer.in_channels // self.layer.groups

    @property
    def step(self) -> int:
        """Those of them that lie in one block."""
        return max(self.layer.input_step(self.data_lanes), self.word)

    @property
    def weight_dtype(self) -> str:
        return "int8" if self.word >= 4 else "int16"

    @property
    def kernel(self) -> Conv2DKernel:
        data = "NCHW" if self.rounding else f"NCHW{self.data_lanes}c"
        layouts = data, f"NCHW{self.lanes}c"
        sizes = self.batch, self.height, self.width
        adds = self.addition is not None
        types = {"out_dtype": self.out_dtype, "word": self.word, "addition": self.addition}
        types |= {"limited": self.limited, "rounding": self.rounding, "winograd": self.winograd}
        types["shifted"] = self.shifted
        return Conv2DKernel((self.layer,), *sizes, adds, "uint8", *layouts, **types)

    def build(self, batch: int | tirx.Var | None = None) -> tirx.PrimFunc:
        """The function as legalization makes it, with another ``batch`` if given."""
        lanes, data_lanes, layer = self.lanes, self.data_lanes, self.layer
        blocks, out_blocks = up(layer.in_channels, data_lanes), up(layer.out_channels, lanes)
        images = self.batch if batch is None else batch
        shapes = {
            "data": ((images, blocks, self.height, self.width, data_lanes), "uint8"),
            "weight": (
                (
                    *(out_blocks, up(self.own, self.step) + self.shifted, *layer.kernel),
                    *(self.step // self.word, lanes, self.word),
                ),
                self.weight_dtype,
            ),
            "bias": ((out_blocks, lanes), self.bias_dtype),
            "scale": ((out_blocks, lanes), "float32"),
        }
        if self.winograd:
            words = lanes // self.word, lanes, self.word
            shapes["weight"] = (16, out_blocks, blocks, *words), self.weight_dtype
        if self.rounding is not None:
            floats = images, layer.in_channels, self.height, self.width
            shapes["data"] = floats, "float32"
        if self.addition is not None:
            size = layer.output_size(self.height, self.width)
            shapes["residual"] = (images, out_blocks, *size, lanes), "uint8"
        inputs = [te.placeholder(*shape, name=name) for name, shape in shapes.items()]
        output = quantized_conv2d(
            *inputs[:4],
            layer,
            self.out_dtype,
            *inputs[4:],
            addition=self.addition,
            rounding=self.rounding,
            winograd=self.winograd,
        )
        func = te.create_prim_func([*inputs, output])
        return func.with_attr("tvm_fusion.workload", to_json(self.kernel))

    def arguments(self, seed: int) -> tuple[list[Array], Array]:
        """Packed arguments, with garbage in the pad lanes of the data, and the NCHW result.

        Scales and biases are such that float32 has no rounding error.
        """
        random, layer = np.random.default_rng(seed), self.layer
        size = layer.in_channels, self.height, self.width
        data = random.integers(0, 256, (self.batch, *size))
        span = (-64, 65) if self.limited else (-128, 128)
        weight = random.integers(*span, (layer.out_channels, self.own, *layer.kernel))
        scale = 2.0 ** random.integers(-12, -8, layer.out_channels)
        bias = random.integers(-64, 64, layer.out_channels) / 4
        if self.bias_dtype == "int32":
            bias = np.rint(bias / scale)
        packed = [pack(data, self.data_lanes, fill=77), self._pack_weight(weight)]
        zero = 0
        if self.rounding is not None:
            image = _image(random, data.shape, self.rounding)
            data, packed[0], zero = self.bytes_of(image), image, self.rounding.zero
        packed += [pack(each, self.lanes, axis=0, fill=3) for each in (bias, scale)]
        with np.errstate(over="ignore"):  # it computes all activations
            none = np.zeros(layer.out_channels)
            sums = convolve(data - zero, weight, none, _sums(layer), None)
        sums = sums + zero * weight.sum(axis=(1, 2, 3))[:, None, None]
        offset = bias * scale if self.bias_dtype == "int32" else bias
        exact = _end(sums * scale[:, None, None] + offset[:, None, None], layer.activation)
        if self.addition is None:
            return packed, exact
        added, how = random.integers(0, 256, exact.shape), self.addition
        packed.append(pack(added, self.lanes, fill=55))
        total = exact * how.factor + (added + how.shift) * how.bytes_factor
        return packed, _end(total / how.divisor, how.activation)

    def bytes_of(self, image: Array) -> Array:
        """The bytes that a float32 image is rounded to."""
        how = self.rounding
        assert how is not None
        with np.errstate(over="ignore"):
            quotients = np.float32(image) / np.float32(how.divisor)
        quotients = np.nan_to_num(quotients, nan=how.low)
        return np.clip(np.rint(quotients), how.low, how.high) - how.low

    def _pack_weight(self, weight: Array) -> Array:
        words = pack(pack(weight, self.step, axis=1), self.lanes, axis=0)
        shape = *words.shape[:4], self.step // self.word, self.word, self.lanes
        packed = np.moveaxis(words.reshape(shape), 5, 6)
        if self.shifted:
            sums = np.ascontiguousarray(128 * packed.sum(axis=(1, 4, 6)), "int32")
            block = np.zeros_like(packed[:, :1])
            block[:, 0, :, :, 0] = sums.view("int8").reshape(*sums.shape, 4)
            packed = np.concatenate([packed, block], axis=1)
        return transform_words(packed, self.word) if self.winograd else packed

    def run(self, executable: tvm.runtime.Executable, packed: list[Array]) -> Array:
        """Run into a poisoned output; return its true channels in NCHW."""
        data = "uint8" if self.rounding is None else "float32"
        dtypes = data, self.weight_dtype, self.bias_dtype, "float32", "uint8"
        tensors = [
            tvm.runtime.tensor(array.astype(dtype))
            for array, dtype in zip(packed, dtypes, strict=False)
        ]
        size = self.layer.output_size(self.height, self.width)
        shape = self.batch, up(self.layer.out_channels, self.lanes), *size, self.lanes
        poison = 99 if self.out_dtype == "uint8" else np.nan
        output = tvm.runtime.tensor(np.full(shape, poison, self.out_dtype))
        executable["main"](*tensors, output)
        channels = np.moveaxis(output.numpy(), -1, 2).reshape(self.batch, -1, *size)
        return channels[:, : self.layer.out_channels]

    def check(self, executable: tvm.runtime.Executable, seed: int) -> None:
        """Compare with NumPy, to the bit."""
        packed, expected = self.arguments(seed)
        if self.out_dtype == "uint8":
            last = self.layer.activation if self.addition is None else self.addition
            expected = expected - last.low
        np.testing.assert_array_equal(self.run(executable, packed), expected, err_msg=str(self))


def _image(random: np.random.Generator, shape: tuple[int, ...], how: ByteRounding) -> Array:
    """Floats whose quotients are halves, with some that are far away, and some that are none."""
    image = random.integers(-600, 600, shape) / 2 * how.divisor
    special = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, -0.0])
    return np.where(random.random(shape) < 0.05, random.choice(special, shape), image)


def _sums(layer: ConvLayer) -> ConvLayer:
    return replace(layer, activation=Activation())


def _end(value: Array, activation: Activation) -> Array:
    if activation.kind == "round_clip":
        return np.clip(np.rint(value), activation.low, activation.high)
    return np.maximum(value, 0) if activation.kind == "relu" else value


@st.composite
def winograd_cases(draw) -> QuantizedCase:
    """A 3x3 layer of bytes by tiles of 2x2, as AVX2 multiplies it."""
    padding, ends = draw(st.tuples(*[st.integers(0, 3)] * 4)), draw(st.sampled_from(ENDS))
    channels = draw(st.sampled_from(CHANNELS)), draw(st.sampled_from(CHANNELS))
    size = draw(st.tuples(*[st.integers(3, 14)] * 2))
    rounds = ends.kind == "round_clip"
    return QuantizedCase(
        ConvLayer(*channels, (3, 3), padding=padding, activation=ends),
        draw(st.integers(1, 2)),
        *size,
        lanes=8,
        out_dtype="uint8" if rounds and draw(st.booleans()) else "float32",
        word=2,
        addition=draw(st.sampled_from((None, *ADDITIONS))) if rounds else None,
        winograd=2,
        bias_dtype=draw(st.sampled_from(("float32", "int32"))),
    )


@st.composite
def quantized_cases(draw, form: tuple[int, bool] | None = None) -> QuantizedCase:
    """A layer on an image that is large enough for it, of any or a given form of words.

    It is dense, or has groups of a multiple of four channels.
    """
    word, limited = draw(st.sampled_from(WORD_FORMS)) if form is None else form
    words = draw(st.booleans())
    channels = draw(st.sampled_from((1, 3, 4, 7) if words else CHANNELS))
    lanes = 8 if limited else draw(st.sampled_from([8, 16] if word == 4 else [4, 8]))
    layer = replace(
        draw(layers(channels, lanes, ("dense", "plain"))), activation=draw(st.sampled_from(ENDS))
    )
    if not words and draw(st.booleans()):
        groups = draw(st.integers(2, 5))
        channels = groups * draw(st.sampled_from([4, 8, 12, 16, 40]))
        layer = replace(layer, in_channels=channels, out_channels=channels, groups=groups)
    height, width = (
        max(
            draw(st.sampled_from(SIZES)),
            (layer.kernel[i] - 1) * layer.dilation[i] + 1 - layer.padding[i] - layer.padding[i + 2],
        )
        for i in range(2)
    )
    rounds = layer.activation.kind == "round_clip"
    addition = draw(st.sampled_from((None, *ADDITIONS))) if rounds else None
    in_bytes = rounds and draw(st.booleans())
    out_dtype = "uint8" if in_bytes else "float32"
    batch = draw(st.integers(1, 3))
    types = lanes, words, out_dtype, word
    can_round = words and channels <= 4 and not layer.is_pointwise
    rounding = draw(st.sampled_from((None, *ROUNDINGS))) if can_round else None
    bias = {"bias_dtype": draw(st.sampled_from(("float32", "int32")))}
    return QuantizedCase(layer, batch, height, width, *types, addition, limited, rounding, **bias)


def portable_products(
    total: tirx.Expr,
    factor: tirx.Expr,
    vector: tirx.Expr,
    lanes: int,
    word: int,
    limited: bool = False,
    signed: bool = False,
) -> tirx.Expr:
    """What the instructions of AArch64 do, part by part."""

    def all_lanes(number: int) -> tirx.Expr:
        return tirx.Broadcast(tirx.const(number, "int32"), lanes)

    assert (word, limited) == (4, False)
    for part in range(0, 32, 8):
        byte = (factor >> all_lanes(part)) & all_lanes(255)
        if signed:
            byte = (factor << all_lanes(24 - part)) >> all_lanes(24)
        total = total + byte * ((vector << all_lanes(24 - part)) >> all_lanes(24))
    return total


def product_of_blocks(total: tirx.Expr, left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    """What ``usmmla`` does: two rows by two columns of eight bytes."""
    orders = ([0, 0, 2, 2], [0, 2, 0, 2]), ([1, 1, 3, 3], [1, 3, 1, 3])
    for by_rows, by_columns in orders:
        factors = tirx.Shuffle([left], by_rows), tirx.Shuffle([right], by_columns)
        total = portable_products(total, *factors, 4, 4)
    return total
