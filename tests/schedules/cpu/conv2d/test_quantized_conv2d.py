# SPDX-License-Identifier: Apache-2.0
"""Convolutions of bytes: their numbers to the bit, their machine code, and other types."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
from cpu.conv2d.test_conv2d import KNOBS, SEED
from cpu.conv_cases import TARGET, assembly, compile_function, loop_bodies, pack
from cpu.machine_cases import check_mmla
from cpu.quantized_cases import (
    ADDITIONS,
    ROUNDINGS,
    WORD_FORMS,
    QuantizedCase,
    portable_products,
    product_of_blocks,
    quantized_cases,
    winograd_cases,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.target import Target, codegen

from relay_passes.op.quantized_conv2d import MOST_PRODUCTS, fits_pairs
from schedules.compute.conv2d import conv2d
from schedules.cpu.conv2d.conv2d import CONV2D, Conv2D, conv2d_template
from schedules.cpu.conv2d.winograd.winograd_conv2d import WinogradConv2D
from schedules.cpu.core import micro_kernel
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs, suits_mmla
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json, to_json
from schedules.workload.winograd_matrices import transform_words

HAS_VNNI = CPUInfo.from_target(TARGET).word_channels == 4
HAS_AVX2 = "avx2" in codegen.llvm_get_cpu_features(TARGET)
WORDS = [2] * HAS_AVX2 + [4] * HAS_VNNI
AVX2 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2})
runs_bytes = pytest.mark.skipif(not WORDS, reason="this CPU multiplies no bytes (AVX2, VNNI)")
OWN_FORMS = WORD_FORMS[:2] * HAS_AVX2 + WORD_FORMS[2:] * HAS_VNNI
own_cases = st.sampled_from(OWN_FORMS or WORD_FORMS).flatmap(quantized_cases)
ONE_TILE = Conv2DKnobs(7, 1, 1, 1, 7, blocks_inside=False)
ROUNDED = Activation("round_clip", -3, 252)


def schedule(case: QuantizedCase, target: Target | None = None, **build: object) -> tirx.PrimFunc:
    target = target or (AVX2 if case.word == 2 or case.limited else TARGET)
    found = Conv2D().apply(case.build(**build), target, False)
    assert found is not None
    return found.mod["main"]


@pytest.mark.slow
@runs_bytes
@given(own_cases, SEED)
@settings(max_examples=settings.default.max_examples // 2)
def test_numbers_with_default_knobs(case, seed):
    case.check(compile_function(schedule(case)), seed)


@runs_bytes
@given(own_cases, KNOBS, SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_with_any_knobs(case, knobs, seed):
    func = conv2d_template(case.build(), case.kernel, knobs).mod["main"]
    case.check(compile_function(func), seed)


@pytest.mark.skipif(not HAS_AVX2, reason="this CPU has no AVX2")
@given(winograd_cases(), SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_by_winograds_algorithm(case, seed):
    found = WinogradConv2D().apply(case.build(), AVX2, False)
    case.check(compile_function(found.mod["main"]), seed)


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not HAS_AVX2, reason="this CPU has no AVX2")
@pytest.mark.parametrize("weight", [-128, 127])
def test_the_largest_sums_by_winograds_algorithm(weight):
    channels = MOST_PRODUCTS // 4 // 9 // 8 * 8
    case = QuantizedCase(ConvLayer(channels, 8, (3, 3)), 1, 4, 4, 8, word=2, winograd=2)
    packed, _ = case.arguments(0)
    words = np.full((1, channels // 8, 3, 3, 4, 8, 2), weight, "int16")
    packed[:4] = np.full_like(packed[0], 255), transform_words(words, 2), 0 * packed[2], packed[3]
    packed[3][:] = 2.0**-12
    found = WinogradConv2D().apply(case.build(), AVX2, False)
    expected = np.float32(channels * 9 * 255 * weight) * np.float32(2.0**-12)
    np.testing.assert_array_equal(case.run(compile_function(found.mod["main"]), packed), expected)


@pytest.mark.parametrize("cpu", ["znver4", "x86-64"])
def test_cpus_that_multiply_other_words_leave_winograds_algorithm_of_bytes(cpu):
    case = QuantizedCase(ConvLayer(16, 16, (3, 3)), lanes=8, word=2, winograd=2)
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    assert WinogradConv2D().apply(case.build(), target, False) is None
    assert Conv2D().apply(case.build(), target, False) is None


@pytest.mark.slow
@given(st.one_of(quantized_cases(), winograd_cases()), SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_the_definition(case, seed):
    plain = case.build().without_attr("tvm_fusion.workload")
    case.check(compile_function(plain), seed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("weight", [-128, 127])
def test_the_largest_sums_do_not_saturate(word, weight):
    layer = ConvLayer(7296, 16, (3, 3))
    case = QuantizedCase(layer, height=3, width=3, lanes=4 * word, word=word)
    packed, _ = case.arguments(0)
    packed[0][:], packed[1][:], packed[2][:], packed[3][:] = 255, weight, 0, 2.0**-12
    found = case.run(compile_function(schedule(case)), packed)
    expected = np.float32(7296 * 9 * 255 * weight) * np.float32(2.0**-12)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(not HAS_AVX2, reason="this CPU has no AVX2")
def test_the_largest_limited_pairs_do_not_saturate():
    pairs = np.array([[64, 64], [127, 1], [-64, -64], [-128, 0], [1, 127], [0, -128], [0, 127]])
    assert fits_pairs(pairs.astype("int8"))
    assert not any(fits_pairs(np.array(pair, "int8")) for pair in ([127, 2], [-128, -1], [65, 64]))
    layer = ConvLayer(2, 7, (1, 1))
    case = QuantizedCase(layer, 1, 3, 5, 8, words=True, limited=True)
    packed, _ = case.arguments(0)
    packed[1][:] = 0
    packed[1][0, 0, 0, 0, 0, :7, :2] = pairs
    packed[0][:], packed[2][:], packed[3][:] = 255, 0, 1
    found = case.run(compile_function(schedule(case)), packed)
    expected = 255 * pairs.sum(axis=1)[None, :, None, None]
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@pytest.mark.quick_cases(2)
@pytest.mark.skipif(not HAS_AVX2, reason="this CPU has no AVX2")
@pytest.mark.parametrize(("low", "high"), [(0, 255), (-128, 127), (-100, 100), (2, 90)])
def test_bytes_of_extremes_and_halves(low, high):
    """Rows of seven pixels: four, two and one are packed together."""
    layer = ConvLayer(8, 8, (1, 1), activation=Activation("round_clip", low, high))
    case = QuantizedCase(layer, 1, 1, 7, 8, False, "uint8", 2)
    ends = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 2.0**31, -(2.0**31), 0.5])
    biases = np.stack([ends, np.arange(8) * 37.5 - 150, np.linspace(254, 256, 8)])
    executable = compile_function(conv2d_template(case.build(), case.kernel, ONE_TILE).mod["main"])
    for bias in biases:
        packed, _ = case.arguments(3)
        packed[1][:], packed[2][:] = 0, bias
        clipped = np.clip(np.rint(np.nan_to_num(bias, nan=low)), low, high) - low
        expected = np.broadcast_to(clipped[None, :, None, None], (1, 8, 1, 7))
        np.testing.assert_array_equal(case.run(executable, packed), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("batch", [1, 2, 17, 100])
def test_images_of_one_pixel_are_rows_of_a_matrix(batch, word):
    layer = ConvLayer(48, 80, (1, 1), activation=Activation("relu"))
    case = QuantizedCase(layer, batch, 1, 1, lanes=4 * word, word=word)
    assert case.kernel.is_matrix == (batch > 1)
    case.check(compile_function(schedule(case)), 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("addition", ADDITIONS, ids=["bytes last", "bytes first"])
def test_rows_of_a_matrix_and_added_bytes(word, addition):
    layer = ConvLayer(40, 24, (1, 1), activation=Activation("round_clip", -100, 155))
    case = QuantizedCase(layer, 9, 1, 1, 4 * word, False, "uint8", word, addition)
    case.check(compile_function(schedule(case)), 4)


FIRST = ConvLayer(3, 24, (3, 3), (2, 2), (2, 1, 0, 3), activation=ROUNDED)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("word", "limited"), OWN_FORMS)
@pytest.mark.parametrize("width", [3, 8, 21])
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=["asymmetric", "positive"])
def test_a_first_layer_rounds_its_image(word, limited, width, rounding):
    """With rows shorter than a vector, of one, and of some with an overlap."""
    lanes = 8 if word == 2 or limited else 16
    types = lanes, True, "uint8", word, None, limited, rounding
    case = QuantizedCase(FIRST, 2, 12, width, *types)
    case.check(compile_function(schedule(case)), 6)


def test_scales_of_bytes_do_not_count_in_records():
    rounds = ConvLayer(8, 8, (1, 1), activation=Activation("round_clip", -100, 155))
    added = [QuantizedCase(rounds, addition=each).kernel for each in ADDITIONS]
    images = [QuantizedCase(FIRST, words=True, rounding=each).kernel for each in ROUNDINGS]
    for first, second in (added, images):
        assert Conv2D().workload_json(first) == Conv2D().workload_json(second)
        assert from_json(to_json(first)) == first != second


@pytest.mark.parametrize("word", WORDS)
def test_a_batch_that_is_known_only_at_run_time(word):
    case = QuantizedCase(ConvLayer(20, 20, (3, 3)), batch=3, lanes=4 * word, word=word)
    func = schedule(case, batch=tirx.Var("n", "int64"))
    case.check(compile_function(func), 2)


def depthwise(layer: ConvLayer, kernel: Conv2DKernel) -> tirx.PrimFunc:
    lanes = kernel.lanes
    blocks = -(-layer.in_channels // lanes)
    size = int(kernel.height or 1), int(kernel.width or 1)
    data = te.placeholder((1, blocks, *size, lanes), "uint8", name="data")
    weight = te.placeholder((blocks, *layer.kernel, lanes), name="weight")
    bias, scale = (te.placeholder((blocks, lanes), name=name) for name in ("bias", "scale"))
    layouts = kernel.data_layout, kernel.out_layout
    output = conv2d(data, weight, bias, None, layer, *layouts, kernel.out_dtype, scale)
    func = te.create_prim_func([data, weight, bias, scale, output])
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
@pytest.mark.parametrize("out_dtype", [None, "uint8"])
@pytest.mark.parametrize("lanes", [16, 24, 64], ids=lambda lanes: f"NCHW{lanes}c")
def test_depthwise_layers_read_and_write_bytes(strides, out_dtype, lanes):
    """In blocks of several vectors, too."""
    layer = ConvLayer(40, 40, (3, 3), strides, (1, 1, 1, 1), groups=40, activation=ROUNDED)
    layouts = (f"NCHW{lanes}c",) * 2
    types = {"data_dtype": "uint8", "out_dtype": out_dtype}
    kernel = Conv2DKernel((layer,), 1, 13, 19, False, "float32", *layouts, **types)
    func = Conv2D().apply(depthwise(layer, kernel), TARGET, False).mod["main"]
    random = np.random.default_rng(5)
    data = random.integers(0, 256, (1, 40, 13, 19)).astype("uint8")
    weight = random.integers(-127, 128, (40, 1, 3, 3)).astype("float32")
    bias = random.integers(-5000, 5000, 40).astype("float32")
    scale = random.uniform(0.001, 0.003, 40).astype("float32")
    packed = pack(data, lanes), *(pack(each, lanes, axis=0) for each in (weight[:, 0], bias, scale))
    size = layer.output_size(13, 19)
    found = tvm.runtime.tensor(
        np.full((1, -(-40 // lanes), *size, lanes), 99, out_dtype or "float32")
    )
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in packed]
    compile_function(func)["main"](*tensors, found)
    image = np.pad(data.astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    sums = bias[:, None, None] + sum(
        image[:, :, kh:, kw:][:, :, :: strides[0], :: strides[1]][:, :, : size[0], : size[1]]
        * weight[:, 0, kh, kw][:, None, None]
        for kh, kw in np.ndindex(3, 3)
    )
    products = sums.astype("float32") * scale[:, None, None]
    wanted = np.clip(np.rint(products), -3, 252) + (3 if out_dtype else 0)
    channels = np.moveaxis(found.numpy(), -1, 2).reshape(1, -1, *size)[:, :40]
    np.testing.assert_array_equal(channels, wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cpu", "name", "register"),
    [
        ("znver4", "vpdpbusd", "zmm"),
        ("sapphirerapids", "vpdpbusd", "zmm"),
        ("alderlake", "vpdpbusd", "ymm"),
        ("znver3", "vpmaddwd", "ymm"),
        ("x86-64-v3", "vpmaddwd", "ymm"),
    ],
)
def test_the_instruction_of_the_cpu(cpu, name, register):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    cpu_info = CPUInfo.from_target(target)
    word = cpu_info.word_channels
    case = QuantizedCase(ConvLayer(64, 64, (1, 1)), lanes=cpu_info.lanes("float32"), word=word)
    text = assembly(schedule(case, target), target)
    assert any(name in line and register in line for line in text.splitlines())
    assert "vpmaddubsw" not in text
    limited = replace(case, word=4, limited=True)
    if word == 2:
        assert "vpmaddubsw" in assembly(schedule(limited, target), target)
    else:
        assert Conv2D().apply(limited.build(), target, False) is None


@pytest.mark.parametrize("cpu", ["skylake-avx512", "x86-64"])
def test_cpus_without_an_instruction(cpu):
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
    assert not CPUInfo.from_target(target).word_channels
    assert (
        Conv2D().apply(QuantizedCase(ConvLayer(8, 8, (1, 1)), lanes=4).build(), target, False)
        is None
    )


NEON = {
    name: Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": name, "num-cores": 2})
    for name in (
        *("neoverse-n1", "apple-m1", "neoverse-v1", "neoverse-v2", "neoverse-n2", "apple-m2"),
        "generic",
    )
}
SHIFTS = ("neoverse-n1", "apple-m1")
"""CPUs that multiply bytes of the same sign alone."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["neoverse-n1", "neoverse-v2", "apple-m1", "neoverse-v1"])
@pytest.mark.parametrize(
    "layer",
    [
        ConvLayer(64, 64, (3, 3), padding=(1, 1, 1, 1), activation=ROUNDED),
        ConvLayer(128, 64, (1, 1), activation=ROUNDED),
        ConvLayer(3, 32, (3, 3), (2, 2), activation=ROUNDED),
    ],
    ids=str,
)
def test_words_of_bytes_on_aarch64(layer, cpu):
    """Tiles stay in registers: no loop over them loads or stores a sum."""
    case = QuantizedCase(layer, 1, 28, 28, 4, out_dtype="uint8", shifted=cpu in SHIFTS)
    text = assembly(schedule(case, NEON[cpu]), NEON[cpu])
    name = re.compile("sdot" if case.shifted else "usdot")
    loops = [body for body in loop_bodies(text) if any(map(name.match, body))]
    assert max(sum(map(bool, map(name.match, body))) for body in loops) >= 12
    for body in loops:
        if not any(line.startswith("scvtf") for line in body):  # the end of a tile stores bytes
            assert not any(re.match(r"st[rp]\s", line) or "sp" in line for line in body), body
    other = replace(case, shifted=not case.shifted)
    assert Conv2D().apply(other.build(), NEON[cpu], False) is None
    assert Conv2D().apply(case.build(), NEON["generic"], False) is None


def check_with(
    case: QuantizedCase, knobs: Conv2DKnobs, name: str, body: Callable[..., tirx.Expr], seed: int
) -> None:
    """Check numbers with an instruction's function of the micro-kernel replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_kernel, name, body)
        func = conv2d_template(case.build(), case.kernel, knobs).mod["main"]
    case.check(compile_function(func), seed)


@pytest.mark.slow
@given(
    quantized_cases((4, False)),
    st.sampled_from(ROUNDINGS),
    st.sampled_from(["neoverse-n1", "neoverse-v2"]),
    SEED,
)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_the_kernels_of_aarch64(case, rounding, cpu, seed):
    can_round = case.rounding is not None
    case = replace(case, lanes=4, rounding=rounding if can_round else None)
    case = replace(case, shifted=cpu in SHIFTS)
    knobs = CONV2D.default(case.kernel, CPUInfo.from_target(NEON[cpu]))
    check_with(case, knobs, "add_word_products", portable_products, seed)


@given(
    quantized_cases((4, False)).filter(lambda case: case.layer.groups == 1),
    st.sampled_from([None, 8, 16]),
    KNOBS,
    SEED,
)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_two_pixels_by_two_channels(case, inner, knobs, seed):
    """Pixels without another, and words without a second one, are multiplied with zeros."""
    inner = None if case.words else inner
    case = replace(case, lanes=4, inner=inner, word=8, rounding=None)
    check_with(case, knobs, "add_block_products", product_of_blocks, seed)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch", [2, 9])
def test_rows_of_a_matrix_in_pairs(batch):
    """Two words of a row lie together; the definition has the same numbers."""
    case = QuantizedCase(ConvLayer(40, 24, (1, 1)), batch, 1, 1, 4, word=8)
    knobs = CONV2D.default(case.kernel, CPUInfo.from_target(NEON["neoverse-v2"]))
    check_with(case, knobs, "add_block_products", product_of_blocks, 8)
    case.check(compile_function(case.build().without_attr("tvm_fusion.workload")), 8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["neoverse-v1", "neoverse-v2", "neoverse-n2", "apple-m2"])
@pytest.mark.parametrize(
    "layer",
    [
        ConvLayer(64, 64, (3, 3), padding=(1, 1, 1, 1), activation=ROUNDED),
        ConvLayer(60, 64, (1, 1), activation=ROUNDED),
        ConvLayer(64, 128, (1, 1), (2, 2), activation=ROUNDED),
    ],
    ids=str,
)
def test_two_pixels_by_two_channels_on_aarch64(layer, cpu):
    """No loop over the input stores a sum, or keeps one on the stack."""
    case = QuantizedCase(layer, 1, 28, 28, 4, out_dtype="uint8", word=8)
    check_mmla(assembly(schedule(case, NEON[cpu]), NEON[cpu]), "usmmla", least=12)
    for other in (*SHIFTS, "generic"):
        assert Conv2D().apply(case.build(), NEON[other], False) is None


@pytest.mark.slow
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_all_tiles_of_two_pixels_by_two_channels_stay_in_registers(size, strides):
    target = NEON["neoverse-n2"]
    layer = ConvLayer(64, 96, (size, size), strides, (size // 2,) * 4, activation=ROUNDED)
    for width in (27, 40):
        columns = width * strides[1]
        case = QuantizedCase(layer, 1, 14, columns, 4, out_dtype="uint8", word=8)
        cpu_info = CPUInfo.from_target(target)
        knobs = {(k.pixels, k.blocks): k for k in CONV2D.settings(case.kernel, cpu_info)}
        for (pixels, blocks), setting in knobs.items():
            func = conv2d_template(case.build(), case.kernel, setting).mod["main"]
            check_mmla(assembly(func, target), "usmmla", least=pixels * blocks)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_layers_that_are_multiplied_two_pixels_at_once(kernel):
    """Not single pixels, images whose channels fill no second word, groups, or other CPUs."""
    neon = CPUInfo.from_target(NEON["neoverse-v2"])
    padding = (kernel[0] // 2,) * 4
    workload = Conv2DKernel(
        (ConvLayer(8, 8, kernel, padding=padding),), 1, 7, 2, dtype="uint8", out_dtype="uint8"
    )
    halves = replace(workload, dtype="bfloat16", sums="float32", out_dtype="bfloat16", word=1)
    for each in (workload, halves):
        (layer,) = each.layers
        assert suits_mmla(each, neon)
        assert not suits_mmla(each, CPUInfo.from_target(NEON["neoverse-n1"]))
        assert not suits_mmla(each, CPUInfo.from_target(TARGET))
        assert not suits_mmla(replace(each, layers=(replace(layer, groups=2),)), neon)
        assert not suits_mmla(replace(each, layers=(replace(layer, in_channels=2),)), neon)
        assert not suits_mmla(replace(each, height=None), neon)
        single = replace(each, height=1, width=1)
        assert not suits_mmla(single, neon)
        assert suits_mmla(replace(single, batch=2), neon) == (kernel == (1, 1))


def test_blocks_that_are_larger_than_vectors_are_left_to_others():
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "alderlake"})
    case = QuantizedCase(ConvLayer(16, 16, (1, 1)), lanes=16)
    assert Conv2D().apply(case.build(), target, False) is None


@given(quantized_cases(), st.booleans())
def test_kernels_are_written_and_read_back(case, in_bytes):
    floats = {"dtype": "float32", "out_dtype": None, "addition": None, "limited": False}
    floats["rounding"] = None
    kernel = case.kernel if in_bytes else replace(case.kernel, **floats)
    assert from_json(to_json(kernel)) == kernel
    assert ("out_dtype" in to_json(kernel)) == in_bytes


def test_sums_are_not_cut_where_partial_ones_have_no_room():
    cpu = CPUInfo(512, 32, True, 2, 32 << 10, 512 << 10, 32 << 20, word_channels=4)
    kernel = QuantizedCase(ConvLayer(512, 512, (3, 3)), height=14, width=14).kernel
    settings_ = list(CONV2D.settings(kernel, cpu))
    assert settings_ and {knobs.ic_o for knobs in settings_} == {1}
    assert CONV2D.default(kernel, cpu) in settings_
    assert all(CONV2D.contains(kernel, knobs, cpu) for knobs in settings_)
