# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of convolutions: resources and main loops; compiled, not run."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import tvm
from cpu.conv_cases import Case, build
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from gpu_conv_cases import CUDA, RULES, case_of, dense, depthwise, scheduled
from tvm import relax, te, tirx
from tvm.target import Target

from relay_passes import FuseConv2D, FuseEpilogue, PackLayout, SimplifyInference
from schedules.compute.conv2d import conv2d
from schedules.gpu import AnyConv2D, Conv2D, DepthwiseConv2D, FusedConv2D
from schedules.gpu.conv2d.conv2d import LEAST_REGISTERS, conv2d_template
from schedules.gpu.conv2d.depthwise_conv2d import choose_rows
from schedules.gpu.conv2d.fused_conv2d import fused_template
from schedules.gpu.conv2d.fused_tiles import FusedTile
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.gemm.conv_tiles import ConvTile, ProductExtents, all_tiles, choose_tile, fits
from schedules.gpu.gemm.implicit_gemm import ConvShape
from schedules.gpu.gemm.thread_block_tile import ThreadPlace
from schedules.workload.conv2d import Conv2DKernel, ConvLayer, to_json
from tvm_fusion.onnx.frontend import import_onnx

GPU = GPUInfo.from_target(CUDA)
SHARED_BYTES = 48 << 10
ARCHITECTURES = (pytest.param("sm_80", marks=pytest.mark.slow), "sm_90")

LARGE = case_of(dense(64, 64, 3, "relu"), batch=32, height=56, width=56, residual=True)
POINTWISE = case_of(dense(128, 512), batch=32, height=28, width=28)
SMALL = case_of(dense(512, 512, 3, "relu"), height=7, width=7)


def _resources(func: tirx.PrimFunc, arch: str = "sm_90") -> None:
    """Check that nothing of a function's kernels lies in local memory, and what they share."""
    for name, used in ptxas(cuda_source(func, arch), arch).items():
        spilled = (used.stack_frame, used.spill_stores, used.spill_loads)
        assert spilled == (0, 0, 0), name
        assert used.shared <= SHARED_BYTES, name


def _main_loop(func: tirx.PrimFunc, arch: str) -> list[str]:
    """The opcodes of the loop with the most multiply-adds."""
    code = sass(cuda_source(func, arch), arch)
    found = [loop for text in code.values() for loop in loops(text)]
    return max(found, key=lambda names: count(names, "FFMA"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(LARGE, id="3x3", marks=pytest.mark.slow),
        pytest.param(POINTWISE, id="1x1"),
    ],
)
def test_main_loop_of_large_products(case: Case, arch: str) -> None:
    """An 8 x 8 register tile: 16 multiply-adds for each read, and little else."""
    func = scheduled(case, Conv2D(), Target({"kind": "cuda", "arch": arch}, host="llvm"))
    _resources(func, arch)
    names = _main_loop(func, arch)
    products = count(names, "FFMA")
    assert products == 16 * count(names, "LDS.128")
    assert count(names, "LDS") == count(names, "LDS.128")
    assert count(names, "STS") == count(names, "STS.128") > 0
    assert count(names, "LDG.E") == count(names, "LDG.E.128") > 0
    assert count(names, "BAR.SYNC") == 2  # One barrier for each step.
    assert products > 0.75 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_small_images(arch: str) -> None:
    func = scheduled(SMALL, Conv2D(), Target({"kind": "cuda", "arch": arch}, host="llvm"))
    _resources(func, arch)
    names = _main_loop(func, arch)
    assert count(names, "LDG.E") == count(names, "LDG.E.128") > 0
    assert count(names, "FFMA") >= 3 * count(names, "LDS.128") > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_summed_in_float32(dtype: str) -> None:
    layer = ConvLayer(32, 8, (3, 3), groups=2)  # others run on tensor cores
    shapes = {"data": (1, 32, 9, 9), "weight": (8, 16, 3, 3), "bias": (8,)}
    tensors = [te.placeholder(shape, dtype, name=name) for name, shape in shapes.items()]
    func = te.create_prim_func([*tensors, conv2d(*tensors, None, layer)])
    kernel = Conv2DKernel((layer,), 1, 9, 9, dtype=dtype)
    schedule = AnyConv2D().apply(
        func.with_attr("tvm_fusion.workload", to_json(kernel)), CUDA, False
    )
    code = sass(cuda_source(schedule.mod["main"])).values()
    names = max((loop for text in code for loop in loops(text)), key=len)
    assert count(names, "FFMA") > 0 == count(names, "HFMA")


@pytest.mark.slow
def test_depthwise_loads_each_row_once() -> None:
    case = case_of(depthwise(144), height=56, width=56, batch=4)
    func = scheduled(case, DepthwiseConv2D(), CUDA)
    _resources(func)
    [code] = sass(cuda_source(func)).values()
    names = opcodes(code)
    # Four outputs see six rows of three taps; nine weights and a bias.
    assert count(names, "LDG.E") == count(names, "LDG.E.128") == 6 * 3 + 9 + 1
    assert count(names, "FFMA") == 4 * 4 * 9
    assert count(names, "STG.E") == count(names, "STG.E.128") == 4


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "case",
    [
        case_of(depthwise(144), dense(144, 24), height=56, width=56),
        pytest.param(
            case_of(dense(64, 64, 3, "relu"), dense(64, 64, 3), height=56, width=56),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["depthwise", "dense"],
)
def test_fused_pair(case: Case, arch: str) -> None:
    func = scheduled(case, FusedConv2D(), Target({"kind": "cuda", "arch": arch}, host="llvm"))
    _resources(func, arch)
    names = _main_loop(func, arch)
    assert count(names, "LDG.E") == count(names, "LDG.E.128") > 0
    assert count(names, "LDS") == count(names, "LDS.128") > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "tile", [ConvTile(1, 16, 1, 1, 4, 4), ConvTile(2, 16, 1, 1, 8, 4)], ids=str
)
def test_small_tiles_leave_registers_for_addresses(tile: ConvTile) -> None:
    func = conv2d_template(build(SMALL), SMALL.kernel, tile, GPU)
    found = re.search(r"__launch_bounds__\((\d+), (\d+)\)", cuda_source(func))
    assert found and int(found[1]) == tile.threads
    assert COSTS.register_file // (tile.threads * int(found[2])) >= LEAST_REGISTERS


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "tile", [ConvTile(4, 32, 1, 4, 8, 4, splits=2), ConvTile(16, 128, 2, 8, 2)], ids=str
)
def test_tvm_adds_no_barriers_to_a_product(tile: ConvTile) -> None:
    """It does where it takes the halves of the shared memory for one."""
    case = case_of(dense(64, 64, 3), height=8, width=8)
    func = conv2d_template(build(case), case.kernel, tile, GPU)
    assert cuda_source(func).count("__syncthreads();") == str(func).count("storage_sync") > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", [depthwise(64), dense(64, 64, 3)], ids=str)
def test_tvm_adds_no_barriers_to_a_pair(first: ConvLayer) -> None:
    case = case_of(first, dense(64, 64, 3), height=16)
    tile = FusedTile(4, 8, 16, 1, 4, 4, 8)
    func = fused_template(build(case), case.kernel, tile)
    assert cuda_source(func).count("__syncthreads();") == str(func).count("storage_sync") > 0


def test_small_images_have_blocks_for_the_device() -> None:
    for channels, size in ((512, 7), (256, 14), (64, 56)):
        case = case_of(dense(channels, channels, 3), height=size, width=size)
        product = ProductExtents.of(ConvShape.of(case.kernel, 1))
        tile = choose_tile(product, GPU)
        down, across = -(-product.blocks // tile.blocks), -(-product.pixels // tile.pixels)
        assert fits(tile, GPU)
        assert tile.splits * down * across > 0.75 * GPU.multiprocessors


def test_large_images_have_large_tiles() -> None:
    for case in (LARGE, POINTWISE):
        tile = choose_tile(ProductExtents.of(ConvShape.of(case.kernel, case.batch)), GPU)
        assert (tile.thread_blocks, tile.thread_pixels) == (2, 8)
        assert (tile.parts, tile.splits) == (1, 1)


def test_a_symbolic_batch_is_not_split() -> None:
    shape = ConvShape(SMALL.layers[0], tirx.Var("n", "int64"), (7, 7))
    assert choose_tile(ProductExtents.of(shape), GPU).splits == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile",
    [
        ConvTile(4, 32, 1, 4, 8, 4),
        pytest.param(ConvTile(16, 64, 2, 8, 2), marks=pytest.mark.slow),
    ],
)
def test_shared_memory_is_as_predicted(tile: ConvTile) -> None:
    """The sums of several parts may reuse the memory of the operands."""
    case = case_of(dense(64, 64, 3), height=8, width=8)
    func = conv2d_template(build(case), case.kernel, tile, GPU)
    [used] = ptxas(cuda_source(func)).values()
    sums = 16 * tile.parts * tile.blocks * tile.pixels if tile.parts > 1 else 0
    assert tile.shared_bytes - sums - 64 <= used.shared <= tile.shared_bytes


def test_shared_memory_is_read_without_bank_conflicts() -> None:
    """No two of 8 lanes, which read 128 bytes at once, read other 16 bytes of the same banks."""
    for tile in all_tiles():
        places = [ThreadPlace.of(tile, thread) for thread in range(tile.threads)]
        share, stride = tile.quads // tile.parts, 4 * tile.quads + 1
        reads = {
            "data": [place.part * share * tile.pixels + place.pixel for place in places],
            "weights": [place.block * stride + place.part * share * 4 for place in places],
        }
        for name, vectors in reads.items():
            for first in range(0, tile.threads, 8):
                together = set(vectors[first : first + 8])
                assert len({vector % 8 for vector in together}) == len(together), (name, tile)


def test_a_thread_has_as_many_outputs_as_leave_work_for_the_device() -> None:
    def rows(channels: int, size: int, batch: int = 1) -> int:
        return choose_rows(ConvShape(depthwise(channels), batch, (size, size)), GPU)

    assert rows(32, 112, batch=8) == 4
    assert rows(960, 7) == rows(32, 14) == 1
    assert rows(960, 7, batch=64) == 4  # a quarter of the second strip is empty


@functools.cache
def _network(name: str) -> list[tirx.PrimFunc]:
    """The convolutions of a network of ``examples/models.py``, legalized for CUDA."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    try:
        models = __import__("models")
    finally:
        sys.path.pop(0)
    passes = [
        SimplifyInference(),
        FuseConv2D(target=CUDA),
        FuseEpilogue(),
        PackLayout(target=CUDA),
        relax.transform.LegalizeOps(),
    ]
    mod = tvm.transform.Sequential(passes)(import_onnx(getattr(models, name)()).mod)
    functions = [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    return [func for func in functions if "tvm_fusion.workload" in (func.attrs or {})]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mobilenet_v2", pytest.param("resnet_50", marks=pytest.mark.slow)]
)
def test_networks_have_tiled_kernels(name: str) -> None:
    """None is left to the rule of one thread an output."""
    taken: Counter[str] = Counter()
    for func in _network(name):
        rule = next(rule for rule in RULES if rule.apply(func, CUDA, False) is not None)
        taken[type(rule).__name__] += 1
    assert taken["Conv2D"] >= 10 and taken["AnyConv2D"] == 0
    if name == "mobilenet_v2":
        assert taken["FusedConv2D"] and taken["DepthwiseConv2D"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet_50"])
def test_networks_compile_without_spills(name: str) -> None:
    for func in _network(name):
        rules = (rule.apply(func, CUDA, False) for rule in RULES)
        schedule = next(found for found in rules if found is not None)
        _resources(schedule.mod["main"].with_attr("global_symbol", "main"))
