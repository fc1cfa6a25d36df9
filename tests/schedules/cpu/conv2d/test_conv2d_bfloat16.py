# SPDX-License-Identifier: Apache-2.0
"""Convolutions of bfloat16 with sums of float32: their numbers, rounding, and special values."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.conv2d.test_conv2d import KNOBS, SEED
from cpu.conv_cases import (
    TARGET,
    Array,
    Case,
    apply_activation,
    assembly,
    cases,
    compile_function,
    convolve,
    loop_bodies,
    pack,
    pack_weight,
    up,
)
from cpu.machine_cases import check_mmla
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, tirx
from tvm.target import Target

from examples.benchmarks.assembly import loops
from schedules.compute.conv2d import conv2d
from schedules.cpu.conv2d.conv2d import CONV2D, Conv2D, conv2d_template
from schedules.cpu.conv2d.winograd import winograd_nest
from schedules.cpu.core import micro_kernel
from schedules.cpu.core.machine import CPUInfo
from schedules.tir.float_bits import round_to_bits
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json, to_json
from tests.targets import compile_unchecked

TYPES = st.sampled_from(["bfloat16", "float32"])


def has_words(case: Case) -> bool:
    """Return whether weights are words: dense ones, and those of pairs in blocks of tiles."""
    layer = case.layers[0]
    return layer.groups == 1 or (case.lanes >= 16 and layer.input_step(case.lanes) % 2 == 0)


def kernel_of(case: Case, out_dtype: str, word: int = 2) -> Conv2DKernel:
    """The workload; ``case.nchw`` stands for an image in blocks of four channels."""
    word = word if has_words(case) else 1
    kernel = replace(case.kernel, dtype="bfloat16", sums="float32", word=word)
    layout = "NCHW4c" if case.nchw else kernel.out_layout
    return replace(kernel, out_dtype=out_dtype, data_layout=layout)


def operands(case: Case, seed: int, word: int = 2) -> tuple[list[Array], list[Array]]:
    """Packed arguments with garbage in the pad lanes of activations, and those in NCHW."""
    random, layer = np.random.default_rng(seed), case.layers[0]
    inputs = layer.in_channels // layer.groups
    shapes = {
        "data": (case.batch, layer.in_channels, case.height, case.width),
        "weight": (layer.out_channels, inputs, *layer.kernel),
        "bias": (layer.out_channels,),
        "residual": case.out_shape,
    }
    arrays = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    arrays["weight"] *= 2 * (inputs * layer.kernel[0] * layer.kernel[1]) ** -0.5
    if not case.residual:
        del arrays["residual"]
    types = {name: ml_dtypes.bfloat16 for name in arrays} | {"bias": np.float32}
    exact = [array.astype(types[name]).astype("float64") for name, array in arrays.items()]
    lanes = 4 if case.nchw else case.lanes
    packed = [pack(exact[0], lanes, fill=7), _pack_weight(exact[1], case, lanes, word)]
    packed += [
        pack(exact[2], case.lanes, axis=0),
        *(pack(r, case.lanes, fill=7) for r in exact[3:]),
    ]
    return packed, exact


def _pack_weight(weight: Array, case: Case, data_lanes: int, word: int) -> Array:
    if not has_words(case):
        return pack_weight(weight, case, 0)
    step = case.layers[0].input_step(data_lanes)
    words = pack(pack(weight, step, axis=1), case.lanes, axis=0)
    shape = *words.shape[:4], step // word, word, case.lanes
    return np.moveaxis(words.reshape(shape), 5, 6)


def build(
    case: Case, out_dtype: str, batch: tirx.Var | None = None, word: int = 2
) -> tirx.PrimFunc:
    """The function as legalization makes it."""
    packed, _ = operands(case, 0, word)
    dtypes = ["bfloat16", "bfloat16", "float32", "bfloat16"]
    shapes = [array.shape for array in packed]
    if batch is not None:
        shapes = [(batch, *shape[1:]) if at in (0, 3) else shape for at, shape in enumerate(shapes)]
    inputs = [te.placeholder(*each) for each in zip(shapes, dtypes, strict=False)]
    kernel = kernel_of(case, out_dtype, word)
    layouts = kernel.data_layout, kernel.out_layout
    residual = inputs[3] if case.residual else None
    output = conv2d(*inputs[:3], residual, case.layers[0], *layouts, out_dtype)
    func = te.create_prim_func([*inputs, output])
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def run(case: Case, func: tirx.PrimFunc, packed: list[Array], out_dtype: str) -> Array:
    """Run into a poisoned output; return its true channels in NCHW."""
    dtypes = ["bfloat16", "bfloat16", "float32", "bfloat16"]
    tensors = [
        tvm.runtime.tensor(array.astype(dtype))
        for array, dtype in zip(packed, dtypes, strict=False)
    ]
    batch, channels, *size = case.out_shape
    shape = batch, up(channels, case.lanes), *size, case.lanes
    output = tvm.runtime.tensor(np.full(shape, np.nan, out_dtype))
    compile_function(func)["main"](*tensors, output)
    blocks = output.numpy().astype("float64")
    return np.moveaxis(blocks, -1, 2).reshape(batch, -1, *size)[:, :channels]


def check(case: Case, func: tirx.PrimFunc, out_dtype: str, seed: int, word: int = 2) -> None:
    """Compare with NumPy: a result of bfloat16 is the exact one, rounded once."""
    packed, exact = operands(case, seed, word)
    residual = exact[3] if case.residual else None
    expected = convolve(*exact[:3], case.layers[0], residual)
    found = run(case, func, packed, out_dtype)
    scale = max(1.0, float(np.abs(expected).max()))
    half = 2**-8 if out_dtype == "bfloat16" else 0
    limit = 2e-5 * scale + half * np.abs(expected)
    assert (np.abs(found - expected) <= limit).all(), case


def schedule(case: Case, out_dtype: str) -> tirx.PrimFunc:
    found = Conv2D().apply(build(case, out_dtype), TARGET, False)
    assert found is not None
    return found.mod["main"]


@pytest.mark.slow
@given(cases(pair=False), TYPES, SEED)
@settings(max_examples=settings.default.max_examples // 2)
def test_numbers_with_default_knobs(case, out_dtype, seed):
    check(case, schedule(case, out_dtype), out_dtype, seed)


@given(cases(pair=False), TYPES, KNOBS, SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_with_any_knobs(case, out_dtype, knobs, seed):
    func = conv2d_template(build(case, out_dtype), kernel_of(case, out_dtype), knobs).mod["main"]
    check(case, func, out_dtype, seed)


@pytest.mark.slow
@given(cases(pair=False), TYPES, SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_the_definition(case, out_dtype, seed):
    func = build(case, out_dtype).without_attr("tvm_fusion.workload")
    check(case, func, out_dtype, seed)


def test_rows_of_a_matrix_are_pixels():
    case = Case((ConvLayer(40, 24, (1, 1)),), batch=19, height=1, width=1)
    assert kernel_of(case, "bfloat16").is_matrix
    check(case, schedule(case, "bfloat16"), "bfloat16", 0)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [16, 32])
def test_words_of_layers_with_groups(lanes):
    """They are meant for tile registers; vectors, and the definition, give the same."""
    layer = ConvLayer(96, 48, (3, 2), (2, 1), (1, 0, 1, 1), groups=3)
    case = Case((layer,), lanes=lanes, residual=True)
    check(case, build(case, "bfloat16").without_attr("tvm_fusion.workload"), "bfloat16", 2)
    if lanes == 16:
        check(case, schedule(case, "bfloat16"), "bfloat16", 3)


def test_an_open_batch():
    case = Case((ConvLayer(16, 8, (3, 3), padding=(1, 1, 1, 1)),), batch=3, residual=True)
    func = build(case, "bfloat16", batch=tirx.Var("n", "int64"))
    found = Conv2D().apply(func, TARGET, False)
    assert found is not None
    check(case, found.mod["main"], "bfloat16", 1)


def ends(value: np.ndarray, out_dtype: str = "bfloat16", activation: str = "none") -> np.ndarray:
    """Results of numbers of float32, given as biases of channels whose sums are zero."""
    case = Case((ConvLayer(8, len(value), (1, 1), activation=Activation(activation)),), 1, 1, 1)
    packed, _ = operands(case, 0)
    packed[0][:], packed[2] = 0, pack(value.astype("float32"), 8, axis=0)
    return run(case, schedule(case, out_dtype), packed, out_dtype).reshape(-1)


def test_results_are_rounded_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:8] = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 1, 0x80000001, 0x8000]
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype("float64")
    found = ends(values)
    np.testing.assert_array_equal(found, expected)


def test_nan_stays_nan_whatever_its_bits():
    bits = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F808000])
    values = bits.astype(np.uint32).view(np.float32)
    assert np.isnan(ends(values)).all()
    assert np.isnan(ends(values, activation="relu")).all()
    infinities = np.array([np.inf, -np.inf], "float32")
    np.testing.assert_array_equal(ends(infinities), infinities)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_the_workload_is_read_as_it_was_written(out_dtype):
    kernel = kernel_of(Case((ConvLayer(16, 8, (1, 1)),)), out_dtype)
    assert from_json(to_json(kernel)) == kernel
    assert kernel.in_words().layers[0].in_channels == 8


def test_infinite_data_spreads_like_float32():
    case = Case((ConvLayer(8, 8, (1, 1)),), 1, 1, 3)
    packed, exact = operands(case, 3)
    packed[0][..., 0, :, 0], exact[0][:, 0] = np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = apply_activation(convolve(*exact[:3], case.layers[0], None), Activation())
    found = run(case, schedule(case, "float32"), packed, "float32")
    np.testing.assert_array_equal(np.sign(found), np.sign(expected))
    assert np.isinf(found).all()


NEON = {"neoverse-n1": False, "neoverse-v1": True, "neoverse-v2": True, "apple-m1": False}
"""CPUs, and whether they multiply pairs."""


PORTABLE_MMLA = """
define linkonce_odr <4 x float> @tvm_fusion_mmla_bfloat16(
    <4 x float> %a, <4 x i32> %b, <4 x i32> %c) alwaysinline {
  %b0 = shufflevector <4 x i32> %b, <4 x i32> %b, <4 x i32> <i32 0, i32 0, i32 2, i32 2>
  %b1 = shufflevector <4 x i32> %b, <4 x i32> %b, <4 x i32> <i32 1, i32 1, i32 3, i32 3>
  %c0 = shufflevector <4 x i32> %c, <4 x i32> %c, <4 x i32> <i32 0, i32 2, i32 0, i32 2>
  %c1 = shufflevector <4 x i32> %c, <4 x i32> %c, <4 x i32> <i32 1, i32 3, i32 1, i32 3>
  %s0 = call <4 x float> @tvm_fusion_dot_bfloat16(
      <4 x float> %a, <4 x i32> %b0, <4 x i32> %c0)
  %s1 = call <4 x float> @tvm_fusion_dot_bfloat16(
      <4 x float> %s0, <4 x i32> %b1, <4 x i32> %c1)
  ret <4 x float> %s1
}
"""


def portable_dots(lanes: int, mmla: bool = False) -> str:
    """Replace the instructions for pairs, for CPUs without them.

    Those of AVX-512 add one product after the other, the later one first; that of AArch64 adds
    their sum. That for two rows and two columns is two of these.
    """
    if mmla:
        return portable_dots(lanes) + PORTABLE_MMLA
    sums, words = f"<{lanes} x float>", f"<{lanes} x i32>"

    def every(value: int) -> str:
        return f"<{', '.join([f'i32 {value}'] * lanes)}>"

    order = ("%a", "%p1", "%p0") if lanes == 16 else ("%p0", "%p1", "%a")
    return f"""
define linkonce_odr {sums} @tvm_fusion_dot_bfloat16(
    {sums} %a, {words} %b, {words} %c) alwaysinline {{
  %b0 = shl {words} %b, {every(16)}
  %c0 = shl {words} %c, {every(16)}
  %b1 = and {words} %b, {every(-65536)}
  %c1 = and {words} %c, {every(-65536)}
  %x0 = bitcast {words} %b0 to {sums}
  %y0 = bitcast {words} %c0 to {sums}
  %x1 = bitcast {words} %b1 to {sums}
  %y1 = bitcast {words} %c1 to {sums}
  %p0 = fmul {sums} %x0, %y0
  %p1 = fmul {sums} %x1, %y1
  %s1 = fadd {sums} {order[0]}, {order[1]}
  %s0 = fadd {sums} %s1, {order[2]}
  ret {sums} %s0
}}
"""


def emulate_dots(patch: pytest.MonkeyPatch) -> None:
    """Write other instructions in the place of those of AVX-512 and AArch64 for bfloat16."""
    patch.setattr(micro_kernel, "_dot_function", portable_dots)
    for module in (micro_kernel, winograd_nest):
        patch.setattr(module, "rounded_halves", round_to_bits)


@pytest.mark.slow
@given(
    cases(pair=False).filter(lambda case: case.layers[0].groups == 1),
    st.sampled_from([4, 16]),
    TYPES,
    KNOBS,
    SEED,
)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_products_in_pairs(case, lanes, out_dtype, knobs, seed):
    case = replace(case, lanes=lanes)
    with pytest.MonkeyPatch.context() as patch:
        emulate_dots(patch)
        func = build(case, out_dtype)
        written = conv2d_template(func, kernel_of(case, out_dtype), knobs, dots=True)
    check(case, written.mod["main"], out_dtype, seed)


@given(cases(pair=False).filter(lambda case: case.layers[0].groups == 1), TYPES, KNOBS, SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_two_pixels_by_two_channels(case, out_dtype, knobs, seed):
    """Pixels without another, in tiles and at borders, are multiplied with zeros."""
    case = replace(case, lanes=4)
    kernel = kernel_of(case, out_dtype, word=4)
    with pytest.MonkeyPatch.context() as patch:
        emulate_dots(patch)
        written = conv2d_template(build(case, out_dtype, word=4), kernel, knobs, dots=True)
    check(case, written.mod["main"], out_dtype, seed, word=4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["neoverse-v1", "neoverse-v2", "neoverse-n2", "apple-m2"])
@pytest.mark.parametrize(
    "layer",
    [
        ConvLayer(64, 64, (1, 1)),
        ConvLayer(128, 128, (3, 3), padding=(1, 1, 1, 1)),
        ConvLayer(64, 128, (1, 1), (2, 2)),
    ],
    ids=str,
)
def test_two_pixels_by_two_channels_on_aarch64(cpu, layer):
    """No loop over the input stores a sum, or keeps one on the stack."""
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    case = Case((layer,), height=28, width=28, lanes=4, residual=True)
    found = Conv2D().apply(build(case, "bfloat16", word=4), target, False)
    check_mmla(assembly(found.mod["main"], target), "bfmmla", least=8)
    for name in ("neoverse-n1", "apple-m1"):
        other = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": name})
        assert Conv2D().apply(build(case, "bfloat16", word=4), other, False) is None


def test_kernels_of_dots_and_of_two_pixels_in_one_module():
    """They import functions of different names."""
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"})
    case, functions = Case((ConvLayer(32, 32, (1, 1)),), lanes=4), {}
    for name, word in (("dots", 2), ("twos", 4)):
        found = Conv2D().apply(build(case, "bfloat16", word=word), target, False)
        functions[name] = found.mod["main"].with_attr("global_symbol", name)
    text = compile_unchecked(tvm.IRModule(functions), target=target).mod.inspect_source("asm")
    used = {
        (loop.function, each.name)
        for loop in loops(text)
        for each in loop.instructions
        if each.name in ("bfdot", "bfmmla")
    }
    assert used == {("dots", "bfdot"), ("twos", "bfmmla")}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_all_tiles_of_two_pixels_by_two_channels_stay_in_registers(size):
    cpu = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"}
    target = Target(cpu | {"num-cores": 2})
    layer = ConvLayer(64, 96, (size, size), padding=(size // 2,) * 4)
    for width in (27, 40):
        case = Case((layer,), height=14, width=width, lanes=4, residual=True)
        kernel = kernel_of(case, "bfloat16", word=4)
        settings_ = CONV2D.settings(kernel, CPUInfo.from_target(target))
        for (pixels, blocks), knobs in {(k.pixels, k.blocks): k for k in settings_}.items():
            func = build(case, "bfloat16", word=4)
            written = conv2d_template(func, kernel, knobs, dots=True).mod["main"]
            check_mmla(assembly(written, target), "bfmmla", least=pixels * blocks)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["znver4", "znver5", "sapphirerapids", "x86-64-v4", *NEON])
@pytest.mark.parametrize(
    "layer",
    [ConvLayer(64, 64, (1, 1)), ConvLayer(128, 128, (3, 3), padding=(1, 1, 1, 1))],
    ids=str,
)
def test_pairs_are_multiplied_by_an_instruction_where_that_is_faster(name, layer):
    triple = "aarch64-linux-gnu" if name in NEON else "x86_64-linux-gnu"
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": name, "num-cores": 2})
    lanes = CPUInfo.from_target(target).lanes("float32")
    case = Case((layer,), height=14, width=14, lanes=lanes, residual=True)
    found = Conv2D().apply(build(case, "bfloat16"), target, False)
    text = assembly(found.mod["main"], target)
    dot = re.compile("vdpbf16ps|bfdot")
    bodies = [body for body in loop_bodies(text) if any(map(dot.match, body))]
    assert bool(bodies) == (name.startswith("znver") or NEON.get(name, False))
    assert ("vcvtneps2bf16" in text) == name.startswith("znver")
    counts = [sum(map(bool, map(dot.match, body))) for body in bodies]
    assert max(counts, default=12) >= 12
    for body in bodies:
        assert not any(re.match("vfmadd|fmla|call|bl\\b", line) for line in body), body
        assert not any("zmm" in line and "(%rsp)" in line for line in body), body
        assert not any(re.match(r"st[rp]\s+q|ld[rp]\s+q.*\[sp", line) for line in body), body
