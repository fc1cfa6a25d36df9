# SPDX-License-Identifier: Apache-2.0
"""Convolutions of warpgroups of sm_90a: numbers by emulation, machine code, and their choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tvm
from conv2d.test_quantized_pair import (
    ADDITION,
    BYTES,
    finished,
    function,
    in_blocks,
    kernel_of,
    packed,
    with_bytes,
)
from conv2d.test_tensor_core_conv2d import (
    BLOCK,
    convolve,
    forms,
    layer_function,
    scheduled,
    wide_packed_conv2d,
)
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from gemm.matmul.test_tensor_cores import rounded_to_tf32
from opencl import compile_opencl
from tvm import te, tirx
from tvm.target import Target
from warpgroup_emulation import check_protocol, emulate_warpgroups

from relay_passes.layout.packed.weight_packing import pack_array
from schedules import attributes
from schedules.gpu import AnyConv2D
from schedules.gpu.conv2d.any_conv2d import WARPGROUPS
from schedules.gpu.core import machine
from schedules.gpu.gemm.matmul import warpgroup_conv2d
from schedules.gpu.gemm.matmul.matmul import Matmul
from schedules.gpu.gemm.matmul.matmul_pattern import MatmulFunction, read_matmul
from schedules.gpu.gemm.matmul.warpgroup_conv2d import WindowSizes
from schedules.gpu.gemm.matmul.window_boxes import WindowProduct
from schedules.tuning.tunable_rule import tunable_rule_of
from schedules.workload.conv2d import Activation, ConvLayer
from tvm_fusion.codegen.nvrtc import compile_cuda

OPENCL = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
RULE = "Conv2D (warpgroups)"

Size = tuple[int, int, int]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    emulate_warpgroups(monkeypatch)
    monkeypatch.setattr(machine, "_OPENCL_MULTIPROCESSORS", 3)  # fewer blocks than tiles
    cached = warpgroup_conv2d.fastest_window_tile, warpgroup_conv2d.ranked_window_tiles
    for each in cached:
        each.cache_clear()
    yield monkeypatch
    for each in cached:
        each.cache_clear()


def layer_of(
    inputs: int, outputs: int, kernel: tuple[int, int] = (1, 1), padding: int = 0, **more
) -> ConvLayer:
    return ConvLayer(inputs, outputs, kernel, padding=(padding,) * 4, **more)


NUMBERS: dict[str, tuple[ConvLayer, Size, tuple[int, int, int]]] = {
    "1x1": (layer_of(72, 72), (3, 7, 9), (64, 1, 2)),
    "3x3": (layer_of(64, 40, (3, 3), 1, activation=Activation("relu")), (2, 9, 11), (64, 1, 1)),
    "strided": (layer_of(16, 128, (3, 3), 1, strides=(2, 2)), (2, 13, 15), (64, 2, 1)),
    "dilated": (layer_of(136, 16, (2, 3), 2, dilation=(3, 2)), (1, 12, 10), (64, 1, 1)),
    "wide": (layer_of(16, 264, (1, 5), 1), (1, 3, 40), (128, 2, 2)),
    "strided_1x1": (layer_of(24, 16, strides=(2, 3)), (9, 5, 7), (64, 1, 1)),
    "half_a_cluster": (layer_of(16, 16, (3, 3), 1), (2, 3, 32), (64, 2, 1)),
}
BOXES = {"half_a_cluster": (2, 1, 32)}  # three, whole, and of all images


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, emulated: pytest.MonkeyPatch) -> None:
    """Edges of tiles along all axes, padding, and channels that fill no step."""
    layer, (batch, height, width), shape = NUMBERS[name]
    emulated.setattr(warpgroup_conv2d, "SHAPES", (shape,))
    if name in BOXES:
        emulated.setattr(warpgroup_conv2d, "_boxes", lambda *_: [BOXES[name]])
    func = scheduled(layer, (batch, height, width), "float16", OPENCL, wide=True, is_packed=True)
    assert func.attrs[attributes.RULE] == RULE
    rng = np.random.default_rng()
    data, weight = (
        rng.standard_normal(each).astype("float16")
        for each in (
            (batch, layer.in_channels, height, width),
            (layer.out_channels, layer.in_channels, *layer.kernel),
        )
    )
    bias = rng.standard_normal(layer.out_channels).astype("float32")
    exact = convolve(data.astype("float64"), weight.astype("float64"), layer)
    exact += bias[:, None, None]
    if layer.activation.kind == "relu":
        exact = np.maximum(exact, 0)
    exact = pack_array(exact, "data", BLOCK)
    inputs = [
        pack_array(array, form, BLOCK)
        for array, form in zip((data, weight, bias), forms(layer), strict=True)
    ]
    found = np.full(exact.shape, np.nan, "float32")
    compile_opencl(func, OPENCL).run(*inputs, found)
    terms = layer.in_channels * layer.kernel[0] * layer.kernel[1]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * terms + 1e-5)


BYTES_AND_TF32: dict[str, tuple[ConvLayer, Size, tuple[int, int, int]]] = {
    "3x3": (layer_of(32, 48, (3, 3), 1), (2, 7, 9), (64, 2, 1)),
    "strided": (layer_of(100, 72, (3, 3), 1, strides=(2, 2)), (2, 13, 11), (64, 1, 2)),
    "1x1": (layer_of(160, 136), (3, 5, 7), (128, 2, 1)),
}


@pytest.mark.quick_cases("3x3")
@pytest.mark.parametrize("name", [*BYTES_AND_TF32, "3x3_added"])
def test_numbers_of_bytes(name: str, emulated: pytest.MonkeyPatch) -> None:
    """Sums are exact; they are scaled and rounded as those of single warps."""
    layer, size, shape = BYTES_AND_TF32[name.removesuffix("_added")]
    emulated.setattr(warpgroup_conv2d, "SHAPES", (shape,))
    kernel = in_blocks(kernel_of((replace(layer, activation=BYTES),), size))
    kernel = with_bytes(kernel) if name.endswith("_added") else kernel
    func = AnyConv2D().apply(function(kernel), OPENCL, False).mod["main"]
    assert func.attrs[attributes.RULE] == RULE
    rng = np.random.default_rng()
    batch, height, width = size
    data = rng.integers(0, 256, (batch, layer.in_channels, height, width), "uint8")
    weight = rng.integers(-128, 128, (layer.out_channels, layer.in_channels, *layer.kernel), "int8")
    scale = rng.uniform(1e-5, 1e-4, layer.out_channels).astype("float32")
    bias = rng.uniform(0, 255, layer.out_channels).astype("float32")
    sums = convolve(data.astype("int64"), weight.astype("int64"), layer)
    residual = rng.integers(0, 256, sums.shape, "uint8")
    added = (residual, ADDITION) if kernel.residual else None
    exact = packed(kernel, finished(sums, bias, scale, kernel.layers[0], added), "data")
    forms = [(data, "data"), (weight, "chunks"), (bias, "bias"), (scale, "bias")]
    forms += [(residual, "data")] * kernel.residual
    inputs = [packed(kernel, array, form) for array, form in forms]
    found = np.full(exact.shape, 77, "uint8")
    compile_opencl(func.with_attr("global_symbol", "main"), OPENCL).run(*inputs, found)
    off = np.abs(found.astype("int64") - exact)
    assert off.max() <= 1 and (off > 0).mean() < 1e-3  # multiply and add, rounded once or twice


@pytest.mark.quick_cases("3x3")
@pytest.mark.parametrize("name", BYTES_AND_TF32)
def test_numbers_of_tf32(name: str, emulated: pytest.MonkeyPatch) -> None:
    """Data are rounded by the kernel, which drops what constant weights have beyond TF32."""
    layer, size, shape = BYTES_AND_TF32[name]
    emulated.setattr(warpgroup_conv2d, "SHAPES", (shape,))
    func = scheduled(layer, size, "float32", OPENCL, is_packed=True, constants=(1,))
    assert func.attrs[attributes.RULE] == RULE and list(func.attrs[attributes.ROUNDED]) == [1]
    rng = np.random.default_rng()
    batch, height, width = size
    shapes = (
        (batch, layer.in_channels, height, width),
        (layer.out_channels, layer.in_channels, *layer.kernel),
        (layer.out_channels,),
    )
    data, weight, bias = (rng.standard_normal(each).astype("float32") for each in shapes)
    rounded = convolve(rounded_to_tf32(data), rounded_to_tf32(weight), layer)
    exact = pack_array(rounded + bias[:, None, None], "data", 4)
    used = forms(layer, "float32")
    arrays = data, rounded_to_tf32(weight).astype("float32"), bias
    inputs = [pack_array(each, form, 4) for each, form in zip(arrays, used, strict=True)]
    found = np.full(exact.shape, np.nan, "float32")
    compile_opencl(func, OPENCL).run(*inputs, found)
    np.testing.assert_allclose(found, exact, rtol=0, atol=5e-4)


def residual_function(batch: int | tirx.Var, guard: int = 1) -> tirx.PrimFunc:
    """A padded convolution of 3 x 3 and 16 channels whose output is added to, in float32.

    Above and left of ``guard``, counted in the padded image, there are zeros.
    """
    layer = layer_of(16, 24, (3, 3))
    data = te.placeholder((batch, 2, 5, 7, BLOCK), "float16", "data")
    weight = te.placeholder((3, 2, 3, 3, BLOCK, BLOCK), "float16", "weight")
    bias = te.placeholder((3, BLOCK), "float32", "bias")
    residual = te.placeholder((batch, 3, 5, 7, BLOCK), "float32", "residual")

    def pixel(n: tirx.Var, c: tirx.Var, h: tirx.Var, w: tirx.Var, i: tirx.Var) -> tirx.Expr:
        inside = tirx.all(h >= guard, h < 6, w >= guard, w < 8)
        return tirx.if_then_else(inside, data(n, c, h - 1, w - 1, i), tirx.const(0, "float16"))

    image = te.compute((batch, 2, 7, 9, BLOCK), pixel, name="pad1")
    conv = wide_packed_conv2d(image, weight, bias, layer)
    output = te.compute(residual.shape, lambda *at: conv(*at) + residual(*at), name="added")
    return te.create_prim_func([data, weight, bias, residual, output], "int64")


def test_numbers_of_a_residual_and_an_open_batch(emulated: pytest.MonkeyPatch) -> None:
    emulated.setattr(warpgroup_conv2d, "SHAPES", ((64, 2, 1),))
    func = Matmul().apply(residual_function(tirx.Var("n", "int64")), OPENCL, False).mod["main"]
    assert func.attrs[attributes.RULE] == RULE
    compiled = compile_opencl(func.with_attr("global_symbol", "main"), OPENCL)
    rng = np.random.default_rng()
    for batch in (1, 5):
        data, weight = (
            rng.standard_normal(shape).astype("float16")
            for shape in ((batch, 16, 5, 7), (24, 16, 3, 3))
        )
        bias = rng.standard_normal(24).astype("float32")
        residual = rng.standard_normal((batch, 24, 5, 7)).astype("float32")
        exact = convolve(
            *(x.astype("float64") for x in (data, weight)), layer_of(16, 24, (3, 3), 1)
        )
        exact += bias[:, None, None] + residual
        arrays = (data, "data"), (weight, "dense"), (bias, "bias"), (residual, "data")
        inputs = [pack_array(array, form, BLOCK) for array, form in arrays]
        found = np.full(inputs[-1].shape, np.nan, "float32")
        compiled.run(*inputs, found)
        np.testing.assert_allclose(found, pack_array(exact, "data", BLOCK), rtol=0, atol=2e-4)


def test_zeros_within_the_tensor_are_no_edges() -> None:
    found = []
    for guard in (1, 2):
        matmul = read_matmul(residual_function(2, guard), windows=True)
        found.append(WindowProduct.of(matmul.left, matmul.right) is not None)
    assert found == [True, False]


CASES = {
    "1x1": (layer_of(256, 512), (8, 28, 28)),
    "3x3": (layer_of(256, 256, (3, 3), 1), (64, 14, 14)),
    "3x3_stride": (layer_of(128, 128, (3, 3), 1, strides=(2, 2)), (8, 56, 56)),
    "1x1_stride": (layer_of(1024, 2048, strides=(2, 2)), (8, 14, 14)),
    "one_image": (layer_of(128, 256, (3, 3), 1), (1, 56, 56)),
}


@pytest.mark.quick_cases("3x3_stride")
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    """Four products of a warpgroup a step, which nothing but the next step's waits for."""
    func = scheduled(*CASES[name], "float16", HOPPER, is_packed=True)
    assert func.attrs[attributes.RULE] == RULE
    source = cuda_source(func, "sm_90a")
    check_protocol(source[source.rindex('extern "C"') :], cluster=2)
    [used], [code] = ptxas(source, "sm_90a").values(), sass(source, "sm_90a").values()
    assert "wgmma" not in compile_cuda(source, "sm_90a").log.lower(), "ptxas serializes products"
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 168  # of nine warps, three in a partition
    names = opcodes(code)
    main = min((each for each in loops(code) if count(each, "HGMMA")), key=len)
    assert count(names, "HGMMA") == count(main, "HGMMA") == 4
    assert len(main) <= 96 and count(main, "WARPGROUP.DEPBAR") == 1
    for slow in ("LDSM", "BAR", "MEMBAR", "STL", "LDL"):
        assert not count(main, slow)
    assert count(names, "UTMALDG") == 2 and not count(names, "HMMA")
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_90", "sm_80"])
@pytest.mark.parametrize("name", ["product", "added"])
def test_epilogues_of_bytes_spill_nothing(name: str, arch: str) -> None:
    """Scales and biases of 256 columns do not stay in registers from eight rows to the next."""
    layer, size = layer_of(768, 3072), (4096, 1, 1)  # a product with a matrix
    if name == "added":
        layer, size = layer_of(64, 256, activation=BYTES), (64, 56, 56)
    kernel = in_blocks(kernel_of((layer,), size))
    kernel = with_bytes(kernel) if name == "added" else kernel
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    func = AnyConv2D().apply(function(kernel), target, False).mod["main"]
    source = cuda_source(func.with_attr("global_symbol", "main"), arch)
    assert ("m64n128k32.s32.u8.s8" in source) == (arch == "sm_90a")
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "IGMMA" if arch == "sm_90a" else "IMMA")
    assert not count(names, "STL") and not count(names, "LDL")


def rule_of(
    layer: ConvLayer,
    size: Size = (8, 28, 28),
    target: Target = HOPPER,
    dtype: str = "float16",
    is_packed: bool = True,
) -> str:
    func = scheduled(layer, size, dtype, target, is_packed=is_packed)
    return str(func.attrs[attributes.RULE])


def test_only_sm_90a_has_them() -> None:
    layer = layer_of(256, 256, (3, 3), 1)
    assert rule_of(layer) == RULE
    for arch in ("sm_80", "sm_90", "sm_100a"):
        target = Target({"kind": "cuda", "arch": arch}, host="llvm")
        assert rule_of(layer, target=target) == "AnyConv2D"


@pytest.mark.slow
def test_others_stay_where_they_were() -> None:
    wide = layer_of(256, 256, (3, 3), 1)
    others = [
        rule_of(layer_of(3, 64, (7, 7), 3, strides=(2, 2)), (8, 224, 224)),
        rule_of(layer_of(64, 64), (1, 7, 7)),
        rule_of(layer_of(256, 8, (3, 3), 1)),
        rule_of(layer_of(8, 256, (3, 3), 1)),
        rule_of(layer_of(256, 256, strides=(9, 9)), (8, 112, 112)),
        rule_of(wide, is_packed=False),
        rule_of(wide, dtype="float32", is_packed=False),
    ]
    assert others == ["AnyConv2D"] * len(others)


def test_boxes_fill_the_rows_of_a_tile() -> None:
    for most in (64, 128):
        boxes = list(warpgroup_conv2d._boxes([64, 14, 14], most))
        assert len(boxes) == len(set(boxes)) and max(map(np.prod, boxes)) == most
        for box in boxes:
            longer = np.prod(box[:-1]) * (box[-1] + 1)
            assert np.prod(box) <= most and (box[-1] == 14 or longer > most)


ONES = {
    "one_row": (ConvLayer(256, 256, (1, 3), padding=(0, 1, 0, 1)), (8, 1, 4096)),
    "one_column": (ConvLayer(256, 256, (3, 1), padding=(1, 0, 1, 0)), (8, 4096, 1)),
    "one_column_of_two": (layer_of(64, 256, strides=(1, 2)), (8, 4096, 2)),
    "one_row_padded": (layer_of(64, 256, (3, 3), 1), (1, 1, 4096)),
    "one_pixel": (layer_of(64, 256, (7, 7)), (4096, 7, 7)),
}


@pytest.mark.parametrize("name", ONES)
def test_axes_of_one_element_have_no_boxes(name: str) -> None:
    """The default setting's kernel is the one that is chosen without a template."""
    layer, (batch, height, width) = ONES[name]
    func = layer_function(layer, (batch, height, width), "float16", False, True)
    rule, workload = tunable_rule_of(func, HOPPER, (AnyConv2D(),)) or (None, None)
    assert rule is not None
    gpu = rule.machine(HOPPER)
    knobs = WARPGROUPS.default(workload, gpu)
    assert knobs in [*WARPGROUPS.settings(workload, gpu)]
    written = WARPGROUPS.write(func, workload, knobs, HOPPER).mod["main"]
    chosen = AnyConv2D().apply(func, HOPPER, False).mod["main"]
    assert chosen.attrs[attributes.RULE] == RULE
    tvm.ir.assert_structural_equal(written.body, chosen.body)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", CASES)
def test_sizes_of_a_layer_are_those_of_its_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those by which pairs are weighed, before anything is lowered."""
    found: list[WindowSizes] = []

    def note(windows: WindowProduct, matmul: MatmulFunction, *_: object) -> None:
        found.append(WindowSizes.of(windows, matmul.n))

    monkeypatch.setattr(warpgroup_conv2d, "choose_window_tile", note)
    layer, (batch, height, width) = CASES[name]
    scheduled(layer, (batch, height, width), "float16", HOPPER, is_packed=True)
    assert found == [WindowSizes.of_layer(layer, batch, (height, width))]
