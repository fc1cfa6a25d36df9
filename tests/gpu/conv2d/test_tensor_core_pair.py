# SPDX-License-Identifier: Apache-2.0
"""Fused pairs on tensor cores: numbers by emulation, banks, machine code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import opencl
import pytest
from conv2d.test_tensor_core_conv2d import OPENCL, convolve
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from gemm.matmul.test_tensor_cores import rounded_to_tf32
from gpu_conv_cases import dense, depthwise
from graph_cases import numpy_dtype
from opencl import compile_opencl
from tensor_core_emulation import emulate_tensor_cores
from tvm import te, tirx
from tvm.target import Target

from relay_passes.layout.packed.weight_packing import pack_array
from schedules import attributes
from schedules.compute.conv2d import fused_conv2d
from schedules.gpu import FusedConv2D
from schedules.gpu.conv2d import tensor_core_pair_tile
from schedules.gpu.conv2d.tensor_core_pair import pair_workload
from schedules.gpu.conv2d.tensor_core_pair_tile import (
    NARROW,
    PairTile,
    PanelTile,
    candidates,
    choose_pair_tile,
)
from schedules.gpu.core.bfloat16_bits import convert_by_bits
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.tensor_core import CHUNK
from schedules.gpu.gemm.matmul.tensor_core_tile import TILES, TensorTile
from schedules.workload.conv2d import (
    ITEM_BYTES,
    Conv2DKernel,
    ConvLayer,
    FusedConv2DWorkload,
    to_json,
)
from tests.selection import in_turns, slow_where

Size = tuple[int, int, int]
UNITS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-11}
"""Differences of numbers from one on; of float32, those that results of TF32 may have."""


def kernel_of(
    layers: tuple[ConvLayer, ConvLayer], size: Size, residual: bool = False, dtype: str = "float16"
) -> Conv2DKernel:
    layout = f"NCHW{block_of(dtype)}c"
    return Conv2DKernel(layers, *size, residual, dtype, layout, layout)


def block_of(dtype: str) -> int:
    """Channels in 16 bytes."""
    return CHUNK // ITEM_BYTES[dtype]


def shapes_of(kernel: Conv2DKernel) -> list[tuple[int, ...]]:
    """Shapes of a pair's inputs in NCHW."""
    first, second = kernel.layers
    shapes = [
        (kernel.batch, first.in_channels, kernel.height, kernel.width),
        (first.out_channels, first.in_channels // first.groups, *first.kernel),
        (first.out_channels,),
        (second.out_channels, second.in_channels, *second.kernel),
        (second.out_channels,),
    ]
    size = second.output_size(*first.output_size(kernel.height, kernel.width))
    return [*shapes, *[(kernel.batch, second.out_channels, *size)] * kernel.residual]


def packed(kernel: Conv2DKernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The inputs in blocks of channels."""
    dense = "chunks" if kernel.dtype == "float32" else "dense"
    first = "depthwise" if kernel.layers[0].is_depthwise else dense
    forms = ("data", first, "bias", dense, "bias", "data")
    return [
        pack_array(array, form, block_of(kernel.dtype))
        for array, form in zip(arrays, forms, strict=False)
    ]


def function(kernel: Conv2DKernel, batch: tirx.Var | None = None) -> tirx.PrimFunc:
    """The function of a pair as legalization makes it."""
    shapes = [array.shape for array in packed(kernel, list(map(np.empty, shapes_of(kernel))))]
    names = ("data", "weight1", "bias1", "weight2", "bias2", "residual")
    tensors = []
    for shape, name in zip(shapes, names, strict=False):
        if batch is not None and name in ("data", "residual"):
            shape = (batch, *shape[1:])
        tensors.append(te.placeholder(shape, kernel.dtype, name=name))
    residual = tensors[5] if kernel.residual else None
    layouts = kernel.data_layout, kernel.out_layout
    output = fused_conv2d(*tensors[:5], residual, *kernel.layers, *layouts)
    func = te.create_prim_func([*tensors, output], "int64")
    marked = kernel if batch is None else replace(kernel, batch=None)
    return func.with_attrs({"tvm_fusion.workload": to_json(marked), attributes.TF32: True})


def scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    schedule = FusedConv2D().apply(func, target, False)
    assert schedule is not None
    return schedule.mod["main"]


def activated(values: np.ndarray, layer: ConvLayer) -> np.ndarray:
    kinds = {"none": (-np.inf, np.inf), "relu": (0, np.inf), "relu6": (0, 6)}
    return np.clip(values, *kinds[layer.activation.kind])


def reference(kernel: Conv2DKernel, arrays: list[np.ndarray]) -> np.ndarray:
    """The pair in float64, with the intermediate rounded as two kernels would round it."""

    def factor(values: np.ndarray) -> np.ndarray:
        """The values as factors of a product."""
        values = values.astype(numpy_dtype(kernel.dtype))
        return (rounded_to_tf32(values) if is_tf32 else values).astype("float64")

    is_tf32 = kernel.dtype == "float32"
    _, _, bias1, _, bias2, *residual = (a.astype("float64") for a in arrays)
    weight2 = factor(arrays[3])
    first, second = kernel.layers
    if first.is_depthwise:  # The ordinary cores compute it.
        data, weight1 = (array.astype("float64") for array in arrays[:2])
        each = [
            convolve(data[:, c : c + 1], weight1[c : c + 1], first)
            for c in range(first.in_channels)
        ]
        mid = np.concatenate(each, 1)
    else:
        mid = convolve(factor(arrays[0]), factor(arrays[1]), first)
    mid = factor(activated(mid + bias1[:, None, None], first))
    out = convolve(mid, weight2, second) + bias2[:, None, None]
    return activated(out + residual[0] if residual else out, second)


def check(kernel: Conv2DKernel, func: tirx.PrimFunc) -> None:
    """Run a scheduled function in OpenCL into a poisoned output."""
    rng, dtype = np.random.default_rng(), numpy_dtype(kernel.dtype)
    shapes = shapes_of(kernel)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    for place in (1, 3):
        arrays[place] /= np.sqrt(np.prod(shapes[place][1:]))
    arrays = [array.astype(dtype) for array in arrays]
    expected = pack_array(reference(kernel, arrays), "data", block_of(kernel.dtype))
    found = np.full(expected.shape, np.nan, dtype)
    compile_opencl(convert_by_bits(func), OPENCL).run(*packed(kernel, arrays), found)
    errors, unit = np.abs(found.astype("float64") - expected), UNITS[kernel.dtype]
    assert errors.max() < 20 * unit and errors.mean() < unit


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(opencl, "refuse_half_arithmetic", lambda kernel: None)
    monkeypatch.setattr(GPUInfo, "has_bfloat16", True)
    return monkeypatch


CASES = {
    "3x3": ((dense(13, 40, 3, "relu"), dense(40, 24, activation="relu")), (2, 6, 8), True),
    "1x1": ((dense(16, 33), dense(33, 72, activation="relu6")), (1, 7, 9), False),
    "strided": ((dense(3, 16, 3, "relu6", strides=(2, 2)), dense(16, 70)), (1, 15, 13), False),
    "halo": ((dense(16, 32, 1, "relu6"), dense(32, 20, 3, "relu")), (2, 4, 8), True),
    "halo_of_windows": ((dense(3, 64, 3, "relu"), dense(64, 9, 3)), (1, 4, 13), False),
    "halo_one_sided": (
        (dense(8, 32, 1, "relu"), dense(32, 40, 3, dilation=(2, 1), padding=(1, 2, 3, 0))),
        (2, 12, 8),
        False,
    ),
    "depthwise": ((depthwise(40, 3, "relu6"), dense(40, 24)), (2, 6, 8), True),
    "depthwise_strided": (
        (depthwise(24, 5, "relu", strides=(2, 1)), dense(24, 65, 1, "relu")),
        (1, 9, 7),
        False,
    ),
}


@pytest.mark.quick_cases("depthwise-float16")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_where(["halo_of_windows", "halo_one_sided"], in_turns(CASES, UNITS)),
)
def test_numbers(name: str, dtype: str) -> None:
    layers, size, residual = CASES[name]
    kernel = kernel_of(layers, size, residual, dtype)
    check(kernel, scheduled(function(kernel), OPENCL))


def touches_all_banks(places: list[int], width: int = 16) -> bool:
    """Return whether each phase, lanes that move 128 bytes, touches each bank once."""
    lanes = 128 // width
    phases = (places[first : first + lanes] for first in range(0, len(places), lanes))
    return all(len({place // width % lanes for place in phase}) == lanes for phase in phases)


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_no_bank_conflicts(columns: int) -> None:
    """Lines of pixels: loads, stores of results, and elements of a depthwise layer."""
    shared = PanelTile(columns, 32, True, True)
    loads = [
        [shared.fragment(lane, row, depth) for lane in range(32)]
        for row, depth in itertools.product(range(0, columns, 16), (0, 16))
    ]
    stores = [
        [shared.stored(lane, line, first) for lane in range(32)]
        for line, first in itertools.product(range(0, 32, 8), range(0, columns, 32))
    ]
    copied = [shared.copied(number)[2] for number in range(shared.lines * shared.chunks)]
    assert all(map(touches_all_banks, [*loads, *stores, copied]))
    assert sorted(copied) == sorted(sum(stores, [])) == list(range(0, shared.nbytes, 16))


@pytest.mark.parametrize("chunk", [4, 8, 16])
@pytest.mark.parametrize("columns", [32, 104])
def test_no_bank_conflicts_of_lines_of_channels(chunk: int, columns: int) -> None:
    """Loads of windows that begin at any pixel, and stores of elements of 4, 2 and 1 bytes."""
    lines = PanelTile(columns, 128, False, True, chunk, True)
    loads = [
        [lines.fragment(lane, row, depth) for lane in range(32)]
        for row, depth in itertools.product(range(columns - 15), range(0, 128, 2 * chunk))
    ]
    turns, width = -(-8 // chunk), min(16, 128 // chunk)
    stores = [
        [lines.stored(lane, line, first, turn) for lane in range(32)]
        for line, first in itertools.product(range(0, columns, 8), range(0, 128, 32))
        for turn in range(turns)
    ]
    copied = [lines.copied(number)[2] for number in range(lines.lines * lines.chunks)]
    assert all(map(touches_all_banks, [*loads, copied]))
    assert all(touches_all_banks(places, width) for places in stores)
    assert sorted(copied) == list(range(0, lines.nbytes, 16))
    assert sorted(sum(stores, [])) == list(range(0, lines.nbytes, width))


LARGE, WIDE, SQUARE, SMALL = TILES


@pytest.mark.slow
@pytest.mark.parametrize(
    "tiles",
    [(WIDE, WIDE), (SMALL, SQUARE), (NARROW, NARROW), (None, LARGE)],
    ids=["wide", "small_square", "narrow", "depthwise_large"],
)
def test_numbers_of_each_tile(
    tiles: tuple[TensorTile | None, TensorTile], emulated: pytest.MonkeyPatch
) -> None:
    """Several tiles of channels of either layer, where they fit, and of pixels.

    The large one does not fit behind a dense layer: 128 channels of 128 pixels are 32 KB.
    """
    first, second = tiles
    candidates = tensor_core_pair_tile.candidates

    def sizes(*tiles: TensorTile | None) -> list[tuple[int, int] | None]:
        return [tile and (tile.rows, tile.columns) for tile in tiles]

    def only(pair: FusedConv2DWorkload) -> list[PairTile]:
        return [
            tile for tile in candidates(pair) if sizes(tile.first, tile.second) == sizes(*tiles)
        ]

    emulated.setattr(tensor_core_pair_tile, "candidates", only)
    choose_pair_tile.cache_clear()
    if first is None:
        mid = 72
        layer1 = depthwise(mid, activation="relu")
    else:
        mid = first.columns + (8 if first.columns < 128 else -8)
        layer1 = dense(8, mid, activation="relu")
    layers = layer1, dense(mid, second.columns + 3)
    kernel = kernel_of(layers, (1, 3, second.rows // 2), residual=True)
    check(kernel, scheduled(function(kernel), OPENCL))
    choose_pair_tile.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_symbolic_batch() -> None:
    layers = dense(8, 32, 3, "relu"), dense(32, 16)
    func = function(kernel_of(layers, (3, 4, 8)), tirx.Var("n", "int64"))
    check(kernel_of(layers, (3, 4, 8)), scheduled(func, OPENCL))


PAIRS = {
    "resnet_2": ((dense(64, 64, 3, "relu"), dense(64, 256, activation="relu")), (8, 56, 56), True),
    "resnet_3": ((dense(128, 128, 3, "relu"), dense(128, 512, 1, "relu")), (8, 28, 28), True),
    "resnet_4": ((dense(256, 256, 3, "relu"), dense(256, 1024, 1, "relu")), (1, 14, 14), True),
    "strided": (
        (dense(128, 128, 3, "relu", strides=(2, 2)), dense(128, 512, 1, "relu")),
        (8, 56, 56),
        True,
    ),
    "pointwise": ((dense(64, 96, activation="relu"), dense(96, 64)), (4, 28, 28), False),
    "halo": ((dense(64, 64, 1, "relu"), dense(64, 64, 3, "relu")), (8, 28, 28), False),
    "halo_of_windows": ((dense(32, 32, 3, "relu"), dense(32, 96, 3)), (8, 28, 28), True),
    "mobilenet_2": ((depthwise(96), dense(96, 24)), (8, 56, 56), False),
    "mobilenet_4": ((depthwise(384), dense(384, 64)), (8, 14, 14), False),
}


def test_a_depthwise_layer_is_summed_in_float32() -> None:
    layers, size, _ = PAIRS["mobilenet_4"]
    target = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    text = scheduled(function(kernel_of(layers, size)), target).script()
    adds = r"(\w+) = T.alloc_local\(\(8,\)(.*)\)\n\s*\1\[0\] = \w+\[0\] \+ "
    assert {dtype for _, dtype in re.findall(adds, text)} == {""}  # Sums of float32 have no suffix.


PRODUCTS = {"float16": "HMMA.16816.F32", "bfloat16": "HMMA.16816.F32.BF16"}
PRODUCTS["float32"] = "HMMA.1688.F32.TF32"
TOO_LARGE = "mobilenet_4", "float32"
"""Its intermediate, 384 channels of each pixel of a tile, does not fit in shared memory."""


def test_an_intermediate_that_does_not_fit_is_not_fused() -> None:
    name, dtype = TOO_LARGE
    layers, size, _ = PAIRS[name]
    gpu = GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_80"}, host="llvm"))
    pairs = [pair_workload(kernel_of(layers, size, dtype=each)) for each in (dtype, "float16")]
    assert [choose_pair_tile(pair, gpu, tf32=True) is None for pair in pairs] == [True, False]
    least = min(tile.mid_bytes for tile in candidates(pairs[0]))
    assert least > 48 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    slow_where(  # compiling one takes a minute
        [name for name in PAIRS if name.startswith("halo")],
        [
            case
            for case in in_turns(PAIRS, PRODUCTS, ["sm_90", "sm_80"], every=6)
            if case.values[:2] != TOO_LARGE
        ],
    ),
)
def test_machine_code(name: str, dtype: str, arch: str) -> None:
    """Both products are on tensor cores; as many blocks at once as asked for, without spills."""
    layers, size, residual = PAIRS[name]
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    kernel = kernel_of(layers, size, residual, dtype)
    tile = choose_pair_tile(pair_workload(kernel), GPUInfo.from_target(target), tf32=True)
    assert tile is not None
    source = cuda_source(scheduled(function(kernel), target), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    blocks = 65536 // (tile.registers * tile.threads)
    assert f"__launch_bounds__({tile.threads}, {blocks})" in source
    assert used.registers <= tile.registers
    assert tile.mid_bytes + tile.stages_bytes <= used.shared <= 48 * 1024
    names, products = opcodes(code), [tile.second, *([tile.first] if tile.first else [])]
    each = sum(part.sums // 4 * part.depth // part.type.step for part in products)
    assert count(names, PRODUCTS[dtype]) >= each  # short loops are unrolled
    assert count(names, "LDSM")
    assert count(names, "LDGSTS.E.BYPASS.128")
    assert count(names, "STS") == count(names, "STS.128") > 0
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0
    assert (count(names, "FFMA") > 0) is (tile.first is None)
    # sm_80 adds bfloat16, a bias, by an HFMA2; no sum is one.
    assert dtype == "bfloat16" or not count(names, "HFMA2")


def test_refuses_what_tensor_cores_do_not_take() -> None:
    fine = kernel_of((dense(64, 64, 3), dense(64, 64)), (1, 14, 14))
    sm_80, sm_75 = (
        Target({"kind": "cuda", "arch": arch}, host="llvm") for arch in ("sm_80", "sm_75")
    )
    assert choose_pair_tile(pair_workload(fine), GPUInfo.from_target(sm_80))
    assert choose_pair_tile(pair_workload(fine), GPUInfo.from_target(sm_75)) is None
    single = replace(pair_workload(fine), dtype="float32")
    assert choose_pair_tile(single, GPUInfo.from_target(sm_80)) is None
    assert choose_pair_tile(single, GPUInfo.from_target(sm_80), tf32=True)
    assert FusedConv2D().apply(function(fine), sm_75, False) is None
    wide = kernel_of((dense(64, 1024, 3), dense(1024, 64)), (1, 14, 14))
    assert choose_pair_tile(pair_workload(wide), GPUInfo.from_target(sm_80)) is None
    for layers, reason in (
        ((dense(8, 64), dense(64, 64, 3, strides=(2, 2))), "changes the size"),
        ((dense(8, 40), dense(40, 64, 3)), "multiple of 32"),
        ((depthwise(64), dense(64, 64, 3)), "has to be pointwise"),
        ((ConvLayer(16, 16, (1, 1), groups=2), dense(16, 16)), "has groups"),
        ((dense(8, 8), dense(8, 16)), "at most 8 output channels"),
    ):
        assert reason in str(tensor_core_pair_tile.unsupported(*layers))
