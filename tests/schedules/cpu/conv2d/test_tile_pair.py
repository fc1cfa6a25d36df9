# SPDX-License-Identifier: Apache-2.0
"""Pairs of convolutions in tile registers: their numbers by loops, to the bit, and machine code."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.conv2d.test_conv2d import SEED
from cpu.conv_cases import TARGET, Array, assembly, compile_function, convolve, pack
from cpu.quantized_cases import ADDITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.target import Target

from examples.benchmarks.assembly import loops
from relay_passes.op.conv2d import compute_pair
from schedules.cpu.conv2d.tile_pair import TILE_PAIR, TilePair
from schedules.cpu.core.machine import CPUInfo, described
from schedules.cpu.cost.tile_pair_knobs import TilePairKnobs, takes_pair
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json

TILES = {"tiles": ("bfloat16", "uint8"), "emulates_tiles": True, "word_channels": 4}
CPU = replace(CPUInfo.from_target(TARGET), **TILES)
BYTES = Activation("round_clip", -100, 155)
CLIP = Activation("clip", -100, 120)
TYPES = {"uint8": np.uint8, "bfloat16": ml_dtypes.bfloat16}


def pair(
    first: ConvLayer,
    columns: int,
    dtype: str,
    size: tuple[int, int, int] = (1, 9, 11),
    blocks: tuple[int, int, int] = (32, 32, 32),
    residual: bool = False,
) -> Conv2DKernel:
    """A layer and a 1x1 one behind it, whose ends leave numbers that the type holds exactly."""
    end = BYTES if dtype == "uint8" else CLIP
    first = replace(first, activation=end)
    second = ConvLayer(first.out_channels, columns, (1, 1), activation=end)
    layouts = [f"NCHW{lanes}c" for lanes in blocks]
    kernel = Conv2DKernel(
        (first, second), *size, residual, dtype, layouts[0], layouts[2], mid_layout=layouts[1]
    )
    if dtype == "uint8":
        return replace(kernel, out_dtype=dtype, addition=ADDITIONS[0] if residual else None)
    return replace(kernel, out_dtype=dtype, word=2, sums="float32")


class Operands(NamedTuple):
    """Arrays of a function, packed, with their types; and its result in NCHW."""

    arrays: list[tuple[Array, str]]
    expected: Array


def operands(kernel: Conv2DKernel, seed: int) -> Operands:
    """Small whole numbers, whose sums are exact, with garbage in the lanes that fill up blocks."""
    random, is_bytes = np.random.default_rng(seed), kernel.is_quantized
    first = kernel.layers[0]
    size = kernel.batch, first.in_channels, kernel.height, kernel.width
    result = random.integers(0, 256, size) if is_bytes else random.integers(-3, 4, size)
    arrays = [(pack(result, lanes_of(kernel.data_layout), fill=7), kernel.dtype)]
    for number, one in enumerate(kernel.apart()):
        [layer] = one.layers
        own = layer.in_channels // layer.groups
        weight = random.integers(-3, 4, (layer.out_channels, own, *layer.kernel)).astype(float)
        bias = random.integers(-9, 10, layer.out_channels).astype(float)
        scale = 2.0 ** random.integers(-4, 0, layer.out_channels)
        if one.is_quantized:
            arrays += [(packed_weight(weight, one), "int8")]
            arrays += [(pack(each, one.lanes, axis=0), "float32") for each in (bias, scale)]
        else:
            arrays += [(packed_weight(weight, one), one.dtype)]
            factors = (bias, scale) if one.has_scale else (bias,)
            arrays += [(pack(each, one.lanes, axis=0), "float32") for each in factors]
        plain = replace(layer, activation=Activation())
        with np.errstate(over="ignore"):  # it computes all activations
            sums = convolve(result, weight, np.zeros(layer.out_channels), plain, None)
        bias, scale = bias[:, None, None], scale[:, None, None]
        if one.is_quantized:
            value = sums * scale + bias
        else:
            value = (sums + bias) * scale if one.has_scale else sums + bias
        added = None
        if number == 1 and kernel.residual:
            added = random.integers(0, 256 if is_bytes else 9, value.shape)
            arrays += [(pack(added, one.lanes, fill=5), kernel.dtype)]
        result = ended(value, one, added)
    return Operands(arrays, result)


def ended(value: Array, kernel: Conv2DKernel, added: Array | None) -> Array:
    end, how = kernel.layers[0].activation, kernel.addition
    if end.kind == "clip":
        return np.clip(value if added is None else value + added, end.low, end.high)
    value = np.clip(np.rint(value), end.low, end.high)
    if how is None:
        return value - end.low
    assert added is not None
    value = (value * how.factor + (added + how.shift) * how.bytes_factor) / how.divisor
    return np.clip(np.rint(value), how.low, how.high) - how.low


def lanes_of(layout: str) -> int:
    return int(layout[len("NCHW") : -1])


def packed_weight(weight: Array, kernel: Conv2DKernel) -> Array:
    [layer], lanes = kernel.layers, kernel.lanes
    if layer.is_depthwise:
        return pack(weight[:, 0], lanes, axis=0)
    step = layer.input_step(lanes_of(kernel.data_layout))
    words = pack(pack(weight, step, axis=1), lanes, axis=0)
    shape = *words.shape[:4], step // kernel.word, kernel.word, lanes
    return np.moveaxis(words.reshape(shape), 5, 6)


def build(kernel: Conv2DKernel, batch: tirx.Var | None = None) -> tirx.PrimFunc:
    """The function as legalization makes it."""
    found = [(array.shape, dtype) for array, dtype in operands(kernel, 0).arrays]
    if batch is not None:
        found = [((batch, *s[1:]) if len(s) == 5 else s, dtype) for s, dtype in found]
    inputs = [te.placeholder(shape, dtype, name="x") for shape, dtype in found]
    parameters = inputs[:-1] if kernel.residual else inputs
    residual = inputs[-1] if kernel.residual else None
    func = te.create_prim_func([*inputs, compute_pair(kernel, parameters, residual)])
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def run(kernel: Conv2DKernel, func: tirx.PrimFunc, found: Operands) -> Array:
    """Run into a poisoned output; return its blocks."""
    types = {**TYPES, "int8": np.int8, "float32": np.float32}
    tensors = [tvm.runtime.tensor(array.astype(types[dtype])) for array, dtype in found.arrays]
    shape = pack(found.expected, kernel.lanes).shape
    tensors.append(tvm.runtime.tensor(np.full(shape, 99, TYPES[kernel.dtype])))
    compile_function(func)["main"](*tensors)
    return tensors[-1].numpy().astype(float)


def check(kernel: Conv2DKernel, func: tirx.PrimFunc, seed: int) -> None:
    """Compare with NumPy."""
    found = operands(kernel, seed)
    blocks = run(kernel, func, found)
    channels = np.moveaxis(blocks, -1, 2).reshape(*found.expected.shape[:1], -1, *blocks.shape[2:4])
    channels = channels[:, : found.expected.shape[1]]
    np.testing.assert_array_equal(channels, found.expected, err_msg=str(kernel))


def schedule(kernel: Conv2DKernel, knobs: TilePairKnobs | None = None) -> tirx.PrimFunc:
    with described(TARGET, CPU):
        if knobs is not None:
            return TILE_PAIR.write(build(kernel), kernel, knobs, TARGET).mod["main"]
        found = TilePair().apply(build(kernel), TARGET, False)
    assert found is not None
    return found.mod["main"]


def first_layer(kind: str, channels: tuple[int, int], **how: object) -> ConvLayer:
    """A first layer of a kind; those with groups have as many outputs as inputs."""
    if kind == "depthwise":
        return ConvLayer(channels[1], channels[1], (3, 3), groups=channels[1], **how)
    kernel = (1, 1) if kind == "pointwise" else (3, 3)
    return ConvLayer(*channels, kernel, **({} if kind == "pointwise" else how))


@st.composite
def pairs(draw) -> Conv2DKernel:
    kind = draw(st.sampled_from(["depthwise", "window", "pointwise"]))
    dtype = draw(st.sampled_from([*TYPES]))
    channels = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    padding = draw(st.tuples(*[st.integers(0, 2)] * 4))
    strides = draw(st.tuples(*[st.integers(1, 2)] * 2))
    widths = [16, 32] if dtype == "bfloat16" else [16, 32, 48, 64]
    data, mid, out = draw(st.tuples(*[st.sampled_from(widths)] * 3))
    blocks = (mid if kind == "depthwise" else data), mid, out
    size = draw(st.tuples(st.integers(1, 2), st.integers(4, 12), st.integers(3, 12)))
    first = first_layer(kind, channels, strides=strides, padding=padding)
    return pair(first, draw(st.integers(1, 70)), dtype, size, blocks, draw(st.booleans()))


@pytest.mark.slow
@given(pairs(), st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_with_any_knobs(kernel, data):
    space = list(TILE_PAIR.settings(kernel, CPU))
    check(kernel, schedule(kernel, data.draw(st.sampled_from(space))), data.draw(SEED))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["depthwise", "window", "pointwise"])
def test_rows_that_tasks_do_not_divide(kind, dtype):
    """Nine rows in pieces of two: the last one reaches back; so do tiles of pixels and channels."""
    first = first_layer(kind, (70, 40), padding=(1, 1, 1, 1))
    blocks = (16 if kind != "depthwise" else 32, 32, 16)
    kernel = pair(first, 80, dtype, (2, 9, 11), blocks, residual=True)
    tiles = (11, 1, 1) if kind == "depthwise" else (11, 2, 1)
    for interleaved in (True, False):
        knobs = TilePairKnobs(2, *tiles, 11, 1, 4, interleaved)
        check(kernel, schedule(kernel, knobs), 3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["depthwise", "window"])
def test_bits_are_the_same_for_any_number_of_threads(kind):
    """Sums of floats, whose bits tell in which order they were added."""
    first = first_layer(kind, (40, 40), padding=(1, 1, 1, 1))
    kernel = pair(first, 20, "bfloat16", (1, 6, 5), residual=True)
    found, random = operands(kernel, 0), np.random.default_rng()
    arrays = [(random.standard_normal(array.shape), dtype) for array, dtype in found.arrays]
    spaces = (TILE_PAIR.settings(kernel, replace(CPU, num_cores=cores)) for cores in (1, 2, 3))
    knobs = [next(k for k in s if k.height == 6 // n) for n, s in enumerate(spaces, 1)]
    one, *others = (run(kernel, schedule(kernel, k), found._replace(arrays=arrays)) for k in knobs)
    assert np.isfinite(one).all() and one.std() > 0.1
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_a_first_layer_with_groups():
    layer = ConvLayer(96, 96, (3, 3), (1, 2), (1, 0, 2, 1), groups=3)
    kernel = pair(layer, 20, "uint8", (1, 6, 19), (32, 32, 64))
    check(kernel, schedule(kernel), 4)


def test_a_batch_that_is_known_only_at_run_time():
    kernel = pair(first_layer("depthwise", (40, 40), padding=(1,) * 4), 20, "bfloat16", (3, 5, 6))
    with described(TARGET, CPU):
        func = TilePair().apply(build(kernel, tirx.Var("n", "int64")), TARGET, False)
    check(kernel, func.mod["main"], 2)


def test_what_is_no_pair_in_tiles():
    layer = first_layer("window", (40, 40), padding=(1,) * 4)
    good = pair(layer, 20, "uint8")
    assert takes_pair(good, CPU)
    assert not takes_pair(good, replace(CPU, tiles=("bfloat16",)))
    assert not takes_pair(replace(good, height=1, width=1), CPU)
    strided = replace(good.layers[1], strides=(2, 2))
    assert not takes_pair(replace(good, layers=(good.layers[0], strided)), CPU)
    first, second = good.apart()
    assert first.joined(second) == good
    for other in (
        replace(second, batch=2),
        replace(second, height=3),
        replace(second, data_layout="NCHW64c"),
        replace(second, dtype="bfloat16"),
    ):
        joined = first.joined(other)
        assert joined is None or joined.mid_layout == "NCHW64c"
    assert replace(first, residual=True).joined(second) is None
    assert replace(first, out_dtype="float32").joined(second) is None


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["depthwise", "window"])
def test_machine_code(kind, dtype):
    """Products take the loads that their groups promise; nothing is called or spilled there."""
    options = {"mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids", "num-cores": 2}
    target = Target({"kind": "llvm", **options})
    name, lanes = ("tdpbusd", 64) if dtype == "uint8" else ("tdpbf16ps", 32)
    layer = first_layer(kind, (128, 128), padding=(1,) * 4)
    kernel = pair(layer, 128, dtype, (1, 28, 28), (lanes,) * 3, residual=True)
    tiles = (14, 1, 1) if kind == "depthwise" else (14, 2, 2)
    knobs = TilePairKnobs(7, *tiles, 14, 2, 2)
    func = TILE_PAIR.write(build(kernel), kernel, knobs, target).mod["main"]
    text = assembly(func, target)
    found = 0
    for loop in loops(text):
        names = [instruction.name for instruction in loop.instructions]
        products, loads = (sum(each.startswith(n) for each in names) for n in (name, "tileload"))
        if products:
            assert products == loads and products % 4 == 0
            assert not any(each.startswith("call") for each in names)
            assert loop.stack_stores == loop.stack_loads == 0
            found += 1
    assert found >= 1 + (kind == "window")
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1 + (kind == "window")
