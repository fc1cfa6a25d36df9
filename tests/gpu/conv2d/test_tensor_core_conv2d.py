# SPDX-License-Identifier: Apache-2.0
"""Convolutions of 16-bit floats on tensor cores: numbers by emulation, and machine code."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from gemm.matmul.test_tensor_cores import rounded_to_tf32
from graph_cases import CUDA, run
from opencl import compile_opencl
from tensor_core_emulation import emulate_tensor_cores
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.target import Target

from relay_passes.layout.packed.weight_packing import pack_array
from schedules import attributes
from schedules.compute.conv2d import activate, conv2d, padded
from schedules.gpu import AnyConv2D
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json
from tests.selection import in_turns

OPENCL = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")


def layer_of(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, **more) -> ConvLayer:
    square, padding = (kernel, kernel), (kernel // 2,) * 4
    return ConvLayer(inputs, outputs, square, strides=(stride, stride), padding=padding, **more)


BLOCK = 8  # channels of 16 bits in 16 bytes
BLOCKS = {"float16": BLOCK, "bfloat16": BLOCK, "float32": 4}


def scheduled(
    layer: ConvLayer,
    size: tuple[int, int, int],
    dtype: str,
    target: Target,
    wide: bool = False,
    is_packed: bool = False,
    constants: Sequence[int] = (),
) -> tirx.PrimFunc:
    """The rule's result for :func:`layer_function`."""
    func = layer_function(layer, size, dtype, wide, is_packed)
    func = func.with_attr(attributes.CONSTANTS, list(constants)) if constants else func
    return AnyConv2D().apply(func, target, False).mod["main"]


def layer_function(
    layer: ConvLayer, size: tuple[int, int, int], dtype: str, wide: bool, is_packed: bool
) -> tirx.PrimFunc:
    """A function of one layer, with TF32 allowed; with ``wide``, of :func:`wide_conv2d`.

    The tensors are in NCHW, or in blocks of channels, the data only if it has some.
    """
    batch, height, width = size
    shapes = [
        (batch, layer.in_channels, height, width),
        (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel),
        (layer.out_channels,),
    ]
    layouts = ["NCHW", "NCHW"]
    if is_packed:
        used, block = forms(layer, dtype), BLOCKS[dtype]
        layouts = ["NCHW" if used[0] is None else f"NCHW{block}c", f"NCHW{block}c"]
        shapes = [
            shape if form is None else pack_array(np.empty(shape, dtype), form, block).shape
            for shape, form in zip(shapes, used, strict=True)
        ]
    types = [dtype, dtype, "float32" if wide else dtype]
    tensors = [
        te.placeholder(shape, kind, name=name)
        for shape, kind, name in zip(shapes, types, ("data", "weight", "bias"), strict=True)
    ]
    output = wide_conv2d(*tensors, layer) if wide else conv2d(*tensors, None, layer, *layouts)
    func = te.create_prim_func([*tensors, output], "int64").with_attr(attributes.TF32, True)
    kernel = Conv2DKernel((layer,), batch, height, width, False, dtype, *layouts)
    return func.with_attr(attributes.WORKLOAD, to_json(kernel))


def wide_conv2d(data: te.Tensor, weight: te.Tensor, bias: te.Tensor, layer: ConvLayer) -> te.Tensor:
    """A convolution of float16 with a float32 output: OpenCL on a CPU does not add float16."""
    image = padded(data, layer, "1")
    if len(weight.shape) == 6:
        return wide_packed_conv2d(image, weight, bias, layer)
    taps = [te.reduce_axis((0, int(extent))) for extent in weight.shape[1:]]

    def value(n: tirx.Var, o: tirx.Var, h: tirx.Var, w: tirx.Var) -> tirx.Expr:
        c, kh, kw = taps
        window = image(n, c, h * layer.strides[0] + kh, w * layer.strides[1] + kw)
        product = window.astype("float32") * weight(o, c, kh, kw).astype("float32")
        return te.sum(product, axis=taps)

    size = layer.output_size(*(int(extent) for extent in data.shape[2:]))
    conv = te.compute((data.shape[0], layer.out_channels, *size), value, name="conv1")
    return te.compute(
        conv.shape,
        lambda *at: activate(conv(*at) + bias(at[1]), layer.activation, "float32"),
        name="layer1",
    )


def wide_packed_conv2d(
    image: te.Tensor, weight: te.Tensor, bias: te.Tensor, layer: ConvLayer
) -> te.Tensor:
    """The same with channels in blocks, but those of an image of few."""
    axes = [te.reduce_axis((0, int(extent))) for extent in weight.shape[1:5]]
    is_plain = len(image.shape) == 4

    def value(n: tirx.Var, ob: tirx.Var, h: tirx.Var, w: tirx.Var, oi: tirx.Var) -> tirx.Expr:
        icb, kh, kw, ici = axes
        pixel = (
            h * layer.strides[0] + kh * layer.dilation[0],
            w * layer.strides[1] + kw * layer.dilation[1],
        )
        window = image(n, icb, *pixel) if is_plain else image(n, icb, *pixel, ici)
        filters = weight(ob, icb, kh, kw, 0 if is_plain else ici, oi)
        return te.sum(
            window.astype("float32") * filters.astype("float32"), axis=axes[: 3 if is_plain else 4]
        )

    height, width = (
        (int(image.shape[2 + axis]) - spans(layer)[axis]) // layer.strides[axis] + 1
        for axis in range(2)
    )
    shape = (image.shape[0], weight.shape[0], height, width, BLOCK)
    conv = te.compute(shape, value, name="conv1")
    return te.compute(
        shape,
        lambda *at: activate(conv(*at) + bias(at[1], at[4]), layer.activation, "float32"),
        name="layer1",
    )


def forms(layer: ConvLayer, dtype: str = "float16") -> tuple[str | None, str, str]:
    """Packed forms of the data, if it has blocks, weights and bias."""
    if dtype == "float32":
        return "data", "chunks", "bias"
    is_image = layer.in_channels < BLOCK
    return None if is_image else "data", "first" if is_image else "dense", "bias"


def spans(layer: ConvLayer) -> list[int]:
    """Extents of a window."""
    return [(k - 1) * d + 1 for k, d in zip(layer.kernel, layer.dilation, strict=True)]


def convolve(data: np.ndarray, weight: np.ndarray, layer: ConvLayer) -> np.ndarray:
    top, left, bottom, right = layer.padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, tuple(spans(layer)), (2, 3))
    windows = windows[:, :, :: layer.strides[0], :: layer.strides[1]]
    windows = windows[..., :: layer.dilation[0], :: layer.dilation[1]]
    return np.einsum("nchwkl,ockl->nohw", windows, weight)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (layer_of(40, 24), (2, 6, 8)),
        (layer_of(16, 33, 3), (2, 7, 9)),
        (layer_of(3, 16, 3, 2, activation=Activation("relu")), (1, 15, 13)),
    ],
    ids=["1x1", "3x3", "image"],
)
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_numbers(
    layer: ConvLayer, size: tuple[int, int, int], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_tensor_cores(monkeypatch)
    func = scheduled(layer, size, "float16", OPENCL, wide=True, is_packed=is_packed)
    rng = np.random.default_rng()
    batch, height, width = size
    data = rng.standard_normal((batch, layer.in_channels, height, width)).astype("float16")
    weight = rng.standard_normal((layer.out_channels, layer.in_channels, *layer.kernel))
    weight, bias = weight.astype("float16"), rng.standard_normal(layer.out_channels)
    bias = bias.astype("float32")
    exact = convolve(data.astype("float64"), weight.astype("float64"), layer)
    exact += bias[:, None, None]
    if layer.activation.kind == "relu":
        exact = np.maximum(exact, 0)
    inputs = data, weight, bias
    if is_packed:
        exact = pack_array(exact, "data", BLOCK)
        inputs = tuple(
            array if form is None else pack_array(array, form, BLOCK)
            for array, form in zip(inputs, forms(layer), strict=True)
        )
    found = np.full(exact.shape, np.nan, "float32")
    compile_opencl(func, OPENCL).run(*inputs, found)
    terms = layer.in_channels * layer.kernel[0] * layer.kernel[1]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6 * terms + 1e-5)


@pytest.mark.quick_cases("packed")
@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
def test_numbers_of_tf32(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors are rounded to the nearest number of TF32; nothing else is."""
    emulate_tensor_cores(monkeypatch)
    layer = layer_of(10, 38, 3, 2, activation=Activation("relu"))
    func = scheduled(layer, (2, 9, 11), "float32", OPENCL, is_packed=is_packed)
    rng = np.random.default_rng()
    shapes = [(2, 10, 9, 11), (38, 10, 3, 3), (38,)]
    data, weight, bias = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    exact, rounded = (
        np.maximum(convolve(*factors, layer) + bias[:, None, None], 0)
        for factors in (
            (data.astype("float64"), weight.astype("float64")),
            (rounded_to_tf32(data), rounded_to_tf32(weight)),
        )
    )
    inputs = data, weight, bias
    if is_packed:
        used = forms(layer, "float32")
        inputs = [pack_array(each, form, 4) for each, form in zip(inputs, used, strict=True)]
        exact, rounded = (pack_array(each, "data", 4) for each in (exact, rounded))
    found = np.full(exact.shape, np.nan, "float32")
    compile_opencl(func, OPENCL).run(*inputs, found)
    np.testing.assert_allclose(found, rounded, rtol=0, atol=2e-4)
    assert np.abs(found - exact).max() > 1e-3, "nothing was rounded"


@pytest.mark.slow
def test_numbers_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution as TVM legalizes it, of several images, with an epilogue."""
    emulate_tensor_cores(monkeypatch)
    rng = np.random.default_rng()
    layer = layer_of(9, 20, 3)
    shapes = [(2, 9, 5, 8), (20, 9, 3, 3)]
    data, weight = (rng.standard_normal(shape).astype("float16") for shape in shapes)

    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.nn.conv2d(x, w, padding=1, out_dtype="float32"))

    [found] = run(build, [data, weight], target=OPENCL)
    exact = np.maximum(convolve(data.astype("float64"), weight.astype("float64"), layer), 0)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)


CUDA_ARCHS = ["sm_90", "sm_80"]
RESNET = {
    "stem": (layer_of(3, 64, 7, 2), (8, 224, 224)),
    "2_1x1": (layer_of(64, 256), (8, 56, 56)),
    "2_3x3": (layer_of(64, 64, 3), (8, 56, 56)),
    "3_3x3_stride": (layer_of(128, 128, 3, 2), (8, 56, 56)),
    "5_1x1": (layer_of(512, 2048), (8, 7, 7)),
}


@pytest.mark.quick_cases("5_1x1-sm_80")
@pytest.mark.parametrize(("name", "arch"), in_turns(RESNET, ["sm_90", "sm_80"], every=5))
def test_machine_code(name: str, arch: str) -> None:
    layer, size = RESNET[name]
    dtype = "bfloat16" if name == "2_3x3" else "float16"
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    source = cuda_source(scheduled(layer, size, dtype, target), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    threads, blocks = map(int, re.findall(r"__launch_bounds__\((\d+), (\d+)\)", source)[0])
    # 16 warps of a multiprocessor have 64x32 sums each or fewer; 8 warps, as there, 64x64.
    assert threads * blocks == (256 if name == "2_1x1" else 512)
    assert used.registers * threads * blocks <= 65536
    names = opcodes(code)
    assert count(names, "HMMA") and count(names, "LDSM")
    # The stem's weights have rows of 147 elements: no chunks of 16 bytes.
    assert bool(count(names, "LDGSTS.E.BYPASS.128")) is (name != "stem")
    assert count(names, "STS") == count(names, "STS.128")


# Bound for a warp and a product where a tile is smallest. Factors of TF32 are rounded on their way.
MOST_INSTRUCTIONS = {"float16": 9.5, "float32": 14.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"), in_turns([name for name in RESNET if name != "stem"], CUDA_ARCHS, every=4)
)
@pytest.mark.parametrize("dtype", MOST_INSTRUCTIONS)
def test_machine_code_of_blocks_of_channels(dtype: str, name: str, arch: str) -> None:
    """Windows and weights are copied as they lie, the place of a tap is computed once a step."""
    layer, size = RESNET[name]
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    source = cuda_source(scheduled(layer, size, dtype, target, is_packed=True), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names, [loop] = opcodes(code), loops(code)
    assert count(names, "LDGSTS.E.BYPASS.128") and not count(names, "STS")
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0
    assert len(loop) <= MOST_INSTRUCTIONS[dtype] * count(loop, "HMMA")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"), in_turns(["2_1x1", "2_3x3", "stem"], ["sm_90", "sm_80"], every=3)
)
def test_machine_code_of_tf32(name: str, arch: str) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    source = cuda_source(scheduled(*RESNET[name], "float32", target), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "HMMA.1688.F32.TF32") and count(names, "LDSM") and used.registers <= 128
    assert count(names, "STS") == count(names, "STS.128")  # others meet banks four times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "size"),
    [(layer_of(3, 64, 7, 2), (1, 224, 224)), (layer_of(256, 512, 1, 2), (8, 56, 56))],
    ids=["stem_of_one_image", "3_1x1_stride"],
)
def test_short_loops_are_not_unrolled(layer: ConvLayer, size: tuple[int, int, int]) -> None:
    """Unrolled, these five and eight steps load ahead, and spill."""
    target = Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    source = cuda_source(scheduled(layer, size, "float16", target), "sm_80")
    [used], [code] = ptxas(source, "sm_80").values(), sass(source, "sm_80").values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "BAR") == 1


@pytest.mark.slow
def test_groups_stay_on_the_ordinary_cores() -> None:
    func = scheduled(layer_of(32, 32, 3, groups=4), (1, 14, 14), "float16", CUDA)
    assert "mma.sync" not in cuda_source(func)
