# SPDX-License-Identifier: Apache-2.0
"""Packed convolutions for tests: how they are drawn, built, fed, run, and computed in NumPy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import tvm
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.conv2d import conv2d, fused_conv2d
from schedules.workload.conv2d import ACTIVATIONS, Activation, Conv2DKernel, ConvLayer, to_json
from tests.targets import compile_unchecked
from tvm_fusion.compiler.targets import resolve

Array = NDArray[np.float64]

TARGET = resolve("native", 2)
HOST = dict(TARGET.export())


@dataclass(frozen=True)
class Case:
    """One layer, or the two of a pair, on concrete shapes; ``nchw``: the data is not packed."""

    layers: tuple[ConvLayer, ...]
    batch: int = 1
    height: int = 9
    width: int = 11
    lanes: int = 8
    residual: bool = False
    nchw: bool = False

    @property
    def kernel(self) -> Conv2DKernel:
        packed = f"NCHW{self.lanes}c"
        return Conv2DKernel(
            layers=self.layers,
            batch=self.batch,
            height=self.height,
            width=self.width,
            residual=self.residual,
            data_layout="NCHW" if self.nchw else packed,
            out_layout=packed,
        )

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        size = (self.height, self.width)
        for layer in self.layers:
            size = layer.output_size(*size)
        return (self.batch, self.layers[-1].out_channels, *size)


def up(channels: int, lanes: int) -> int:
    """Number of blocks of ``lanes`` that hold the channels."""
    return -(-channels // lanes)


def build(case: Case, batch: int | tirx.Var | None = None, marked: bool = True) -> tirx.PrimFunc:
    """The function of a case as legalization makes it, with another ``batch`` if given."""
    images, lanes = case.batch if batch is None else batch, case.lanes

    def packed(channels: int, height: int, width: int, name: str) -> te.Tensor:
        return te.placeholder((images, up(channels, lanes), height, width, lanes), name=name)

    first = case.layers[0].in_channels
    if case.nchw:
        data = te.placeholder((images, first, case.height, case.width), name="data")
    else:
        data = packed(first, case.height, case.width, "data")
    inputs = [data]
    for number, layer in enumerate(case.layers):
        inputs.append(te.placeholder(_weight_shape(case, number), name=f"weight{number}"))
        inputs.append(te.placeholder((up(layer.out_channels, lanes), lanes), name=f"bias{number}"))
    residual = packed(*case.out_shape[1:], "residual") if case.residual else None
    layouts = (case.kernel.data_layout, case.kernel.out_layout)
    compute = conv2d if len(case.layers) == 1 else fused_conv2d
    output = compute(*inputs, residual, *case.layers, *layouts)
    func = te.create_prim_func([*inputs, *([] if residual is None else [residual]), output])
    return func.with_attr("tvm_fusion.workload", to_json(case.kernel)) if marked else func


def _weight_shape(case: Case, number: int) -> tuple[int, ...]:
    layer, lanes = case.layers[number], case.lanes
    out = up(layer.out_channels, lanes)
    if layer.is_depthwise:
        return (out, *layer.kernel, lanes)
    if case.nchw and number == 0:
        return (out, layer.in_channels, *layer.kernel, 1, lanes)
    width = layer.in_channels // layer.groups
    if layer.group_lanes(lanes):
        return (out, 1, *layer.kernel, width, lanes)
    step = lanes if layer.groups == 1 else math.gcd(width, lanes)
    return (out, up(width, step), *layer.kernel, step, lanes)


def pack(array: Array, lanes: int, axis: int = 1, fill: float = 0.0) -> Array:
    """Split ``axis`` into blocks of ``lanes``, which become the last axis."""
    missing = -array.shape[axis] % lanes
    widths = [(0, missing if at == axis else 0) for at in range(array.ndim)]
    array = np.pad(array, widths, constant_values=fill)
    shape = [*array.shape]
    shape[axis : axis + 1] = [shape[axis] // lanes, lanes]
    return np.moveaxis(array.reshape(shape), axis + 1, -1)


def pack_weight(weight: Array, case: Case, number: int) -> Array:
    """An OIHW weight in the layout of a layer."""
    layer, lanes = case.layers[number], case.lanes
    if layer.is_depthwise:
        return pack(weight[:, 0], lanes, axis=0)
    if case.nchw and number == 0:
        return pack(weight, lanes, axis=0)[..., None, :]
    if layer.groups == 1:
        return pack(pack(weight, lanes, axis=1), lanes, axis=0)
    packed = np.zeros(_weight_shape(case, number))
    width, step = weight.shape[1], packed.shape[4]
    for channel, inside in np.ndindex(*weight.shape[:2]):
        block, lane = divmod(channel, lanes)
        if layer.group_lanes(lanes):
            source = lane - lane % width + inside
            packed[block, 0, :, :, lane ^ source, source] = weight[channel, inside]
        else:
            packed[block, inside // step, :, :, inside % step, lane] = weight[channel, inside]
    return packed


ERF = np.vectorize(math.erf, otypes=["float64"])


def apply_activation(value: Array, activation: Activation) -> Array:
    """The activation in float64."""
    gate = 1 / (1 + np.exp(-value))
    return {
        "none": value,
        "relu": np.maximum(value, 0),
        "relu6": np.clip(value, 0, 6),
        "clip": np.clip(value, activation.low, activation.high),
        "round_clip": np.clip(np.rint(value), activation.low, activation.high),
        "sigmoid": gate,
        "hardswish": value * np.clip(value + 3, 0, 6) / 6,
        "silu": value * gate,
        "gelu": value * (1 + ERF(value * 0.5**0.5)) / 2,
    }[activation.kind]


def convolve(
    data: Array, weight: Array, bias: Array, layer: ConvLayer, residual: Array | None
) -> Array:
    """One layer on NCHW arrays, tap by tap, in float64."""
    top, left, bottom, right = layer.padding
    height, width = layer.output_size(*data.shape[2:])
    data = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    images, groups, (stride_h, stride_w) = len(data), layer.groups, layer.strides
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    total = np.zeros((images, groups, grouped.shape[1], height, width))
    for kh, kw in np.ndindex(*layer.kernel):
        row, column = kh * layer.dilation[0], kw * layer.dilation[1]
        seen = data[:, :, row:, column:][:, :, ::stride_h, ::stride_w][:, :, :height, :width]
        seen = seen.reshape(images, groups, -1, height, width)
        total += np.einsum("ngihw,goi->ngohw", seen, grouped[..., kh, kw])
    value = total.reshape(images, layer.out_channels, height, width) + bias[:, None, None]
    return apply_activation(value if residual is None else value + residual, layer.activation)


def arguments(case: Case, seed: int) -> tuple[list[Array], Array]:
    """Packed arguments with finite garbage in the pad lanes of activations, and the NCHW result."""
    random = np.random.default_rng(seed)
    data = random.standard_normal((case.batch, case.layers[0].in_channels, case.height, case.width))
    result, packed = data, [data if case.nchw else pack(data, case.lanes, fill=7)]
    for number, layer in enumerate(case.layers):
        inputs = layer.in_channels // layer.groups
        scale = (inputs * layer.kernel[0] * layer.kernel[1]) ** -0.5
        shape = (layer.out_channels, inputs, *layer.kernel)
        weight = random.standard_normal(shape) * scale * 2
        bias = random.standard_normal(layer.out_channels)
        packed += [pack_weight(weight, case, number), pack(bias, case.lanes, axis=0)]
        last = number == len(case.layers) - 1
        residual = random.standard_normal(case.out_shape) if case.residual and last else None
        if residual is not None:
            packed.append(pack(residual, case.lanes, fill=7))
        result = convolve(result, weight, bias, layer, residual)
    return packed, result


def compile_function(func: tirx.PrimFunc, target: Target = TARGET) -> tvm.runtime.Executable:
    """Compile one scheduled function under the name ``main``."""
    return compile_unchecked(tvm.IRModule({"main": func}), target=target)


def run(case: Case, executable: tvm.runtime.Executable, packed: list[Array]) -> Array:
    """Run into a poisoned output, which comes back as it is stored."""
    shape = pack(np.zeros(case.out_shape), case.lanes).shape
    tensors = [tvm.runtime.tensor(array.astype("float32")) for array in packed]
    output = tvm.runtime.tensor(np.full(shape, np.nan, dtype="float32"))
    executable["main"](*tensors, output)
    return output.numpy()


def check(case: Case, executable: tvm.runtime.Executable, seed: int) -> None:
    """Compare with NumPy."""
    packed, expected = arguments(case, seed)
    found = run(case, executable, packed)
    assert np.isfinite(found).all(), case
    channels = np.moveaxis(found, -1, 2).reshape(case.batch, -1, *found.shape[2:4])
    channels = channels[:, : expected.shape[1]]
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(channels, expected, rtol=0, atol=2e-5 * scale, err_msg=str(case))


def outer_loops(node: object) -> list[tirx.For]:
    """The loops below ``node`` that no other loop encloses."""
    if node is None or isinstance(node, tirx.For):
        return [node] if node is not None else []
    below = [getattr(node, name, None) for name in ("block", "body")]
    return [loop for part in [*below, *getattr(node, "seq", [])] for loop in outer_loops(part)]


def assembly(func: tirx.PrimFunc, target: Target) -> str:
    """The machine code of a scheduled function as text."""
    return str(compile_function(func, target).mod.inspect_source("asm"))


def loop_bodies(text: str) -> list[list[str]]:
    """The instructions of each innermost loop that is one basic block."""
    blocks = re.split(r"^(\.LBB\w+):.*$", text, flags=re.MULTILINE)
    return [
        [line.strip() for line in body.splitlines() if line.strip()]
        for label, body in zip(blocks[1::2], blocks[2::2], strict=True)
        if re.search(rf"^\t[jb]\S*\t{re.escape(label)}$", body, re.MULTILINE)
    ]


# Strategies.

CHANNELS = (1, 3, 5, 8, 13, 16, 24, 40)
KERNELS = ((1, 1), (1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (2, 2), (1, 3), (3, 1), (1, 7), (5, 2))
SIZES = (1, 2, 3, 5, 7, 11, 13, 17)
# Where a sum lies near a half, its last bit decides how it is rounded.
CONTINUOUS = tuple(kind for kind in ACTIVATIONS if kind != "round_clip")
ACTIVATION = st.sampled_from(CONTINUOUS).map(lambda kind: Activation(kind, -0.4, 0.7))


@st.composite
def layers(draw, in_channels: int, lanes: int, kinds: tuple[str, ...]) -> ConvLayer:
    """A layer of one of ``kinds``.

    Dense, plain (1x1, nothing else), depthwise, grouped in whole blocks; or with groups that share
    blocks (narrow) or cut them apart (cut).
    """
    kind = draw(st.sampled_from(kinds))
    out_channels, groups = draw(st.sampled_from(CHANNELS)), 1
    if kind == "plain":
        return ConvLayer(in_channels, out_channels, (1, 1), activation=draw(ACTIVATION))
    if kind == "depthwise":
        out_channels = groups = in_channels
    elif kind == "grouped":
        groups = draw(st.sampled_from([2, 3]))
        in_channels = groups * lanes * draw(st.integers(1, 2))
        out_channels = groups * lanes * draw(st.integers(1, 3))
    elif kind == "narrow":  # each block reads its own block only
        width = draw(st.sampled_from([each for each in (2, 4, 8) if each < lanes]))
        groups = draw(st.integers(2, 11))
        in_channels = out_channels = groups * width
    elif kind == "cut":
        groups = draw(st.integers(2, 7))
        in_channels = groups * draw(st.sampled_from([1, 3, 4, 6, 8, 12]))
        out_channels = groups * draw(st.sampled_from([1, 2, 3, 4, 6, 12, 16, 20, 24]))
    reach = st.tuples(st.sampled_from([1, 1, 2, 3]), st.sampled_from([1, 1, 2, 3]))
    return ConvLayer(
        in_channels,
        out_channels,
        kernel=draw(st.sampled_from(KERNELS)),
        strides=draw(reach),
        padding=draw(st.tuples(*[st.integers(0, 4)] * 4)),
        dilation=draw(reach),
        groups=groups,
        activation=draw(ACTIVATION),
    )


@st.composite
def cases(draw, pair: bool) -> Case:
    """A single layer or a pair, on an image that is large enough for it."""
    lanes, nchw = draw(st.sampled_from([4, 8, 16])), draw(st.booleans())
    kinds: tuple[str, ...] = ("dense", "plain")
    kinds += () if nchw else ("depthwise", "grouped", "narrow", "cut")
    first = draw(st.sampled_from((1, 3, 4) if nchw else CHANNELS))
    chain = [draw(layers(first, lanes, kinds))]
    if pair:
        chain.append(draw(layers(chain[0].out_channels, lanes, ("dense", "plain"))))
    needed = (1, 1)
    for layer in reversed(chain):
        needed = _needed(layer, needed)
    height, width = (max(least, draw(st.sampled_from(SIZES))) for least in needed)
    if pair:  # one whose second layer reads nothing but padding is none
        assume(_reads(chain[1], chain[0].output_size(height, width)))
    return Case(
        layers=tuple(chain),
        batch=draw(st.integers(1, 3)),
        height=height,
        width=width,
        lanes=lanes,
        residual=draw(st.booleans()),
        nchw=nchw,
    )


def _reads(layer: ConvLayer, size: tuple[int, int]) -> bool:
    """Whether some output of a layer reads an image, and not only what pads it."""
    return all(
        any(
            0
            <= place * layer.strides[axis] + tap * layer.dilation[axis] - layer.padding[axis]
            < size[axis]
            for place in range(layer.output_size(*size)[axis])
            for tap in range(layer.kernel[axis])
        )
        for axis in range(2)
    )


def _needed(layer: ConvLayer, out: tuple[int, int]) -> tuple[int, int]:
    """The smallest input for which the output has the extents ``out``."""
    return tuple(  # type: ignore[return-value]
        max(
            1,
            (out[i] - 1) * layer.strides[i]
            + (layer.kernel[i] - 1) * layer.dilation[i]
            + 1
            - layer.padding[i]
            - layer.padding[i + 2],
        )
        for i in range(2)
    )
