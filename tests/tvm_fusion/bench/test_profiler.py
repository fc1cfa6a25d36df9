# SPDX-License-Identifier: Apache-2.0
"""The profile of a model: its kernels, what they cost, and their limits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper, numpy_helper
from small_onnx import dense_model, small_model
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import Conv2DKernel, ConvLayer
from tests.targets import compile_unchecked
from tvm_fusion.bench.machine_limits import (
    CacheLevel,
    MachineLimits,
    PeakProbe,
    _multiply_add,
    _word,
    measure_limits,
)
from tvm_fusion.bench.profiler import (
    Described,
    KernelCost,
    Profile,
    _against_limits,
    multiplied,
    profile,
    profile_table,
)
from tvm_fusion.cli.output import json_text
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidModelError, TargetError

CONTRIB = "com.microsoft"
LIMITS = MachineLimits(
    2,
    1e11,
    (
        CacheLevel("L2", 4096, 4e10),
        CacheLevel("L3", 1 << 20, 2e10),
        CacheLevel("memory", math.inf, 1e10),
    ),
)


@pytest.fixture(scope="module")
def small() -> Profile:
    return profile(small_model(), threads=2, runs=3, fuse="none", limits=LIMITS)


def test_every_convolution_is_there_with_its_cost(small: Profile) -> None:
    layers = [kernel for kernel in small.kernels if "conv" in kernel.operator]
    assert [kernel.operator for kernel in layers] == [
        "conv 3x3 3->8 relu on 12x12",
        "dw-conv 3x3 8->8 relu6 on 12x12",
        "conv 1x1 8->6 on 12x12",
    ]
    pixels = 144
    flops = [2 * pixels * 8 * 27, 2 * pixels * 8 * 9, 2 * pixels * 8 * 6]
    assert [kernel.cost.flops for kernel in layers] == flops
    depthwise = layers[1].cost
    lanes = CPUInfo.from_target(resolve("native")).lanes("float32")
    assert depthwise.activation_bytes == 2 * pixels * max(8, lanes) * 4  # whole blocks
    assert depthwise.weight_bytes >= (8 * 9 + 8) * 4


def test_limits_follow_from_costs(small: Profile) -> None:
    for kernel in small.kernels:
        cost = kernel.cost
        moved = cost.activation_bytes + cost.weight_bytes
        assert kernel.limit_seconds >= cost.flops / LIMITS.peak_flops
        assert moved / 4e10 <= kernel.limit_seconds or kernel.bound == "compute"
        assert kernel.seconds > 0 and kernel.lost_seconds >= 0
        assert kernel.fraction == pytest.approx(kernel.limit_seconds / kernel.seconds)
    assert {kernel.bound for kernel in small.kernels} <= {"compute", "L2", "L3", "memory"}
    assert small.seconds > 0


@pytest.mark.slow
def test_a_fused_pair_is_one_kernel() -> None:
    found = profile(small_model(), threads=1, runs=1, fuse="all", limits=LIMITS)
    assert any(
        kernel.operator == "dw-conv 3x3 8->8 relu6 + conv 1x1 8->6 on 12x12"
        for kernel in found.kernels
    )


@pytest.mark.slow
def test_winograd_counts_the_multiplications_that_it_does() -> None:
    found = profile(
        dense_model(size=10), threads=1, runs=1, fuse="none", winograd="always", limits=LIMITS
    )
    (kernel,) = (one for one in found.kernels if "Winograd" in one.operator)
    assert kernel.operator.startswith("conv 3x3 16->16 relu on 10x10 by Winograd ")
    tile = int(kernel.operator[-1])
    tiles = (-(-10 // tile)) ** 2
    assert kernel.cost.flops == 2 * tiles * (tile + 2) ** 2 * 16 * 16
    assert kernel.cost.weight_bytes >= (tile + 2) ** 2 * 16 * 16 * 4


def test_the_level_is_the_nearest_that_holds_the_bytes() -> None:
    assert [LIMITS.level_of(size).name for size in (1, 4096, 4097, 1 << 21)] == [
        "L2", "L2", "L3", "memory",
    ]  # fmt: skip


def test_json_and_table(small: Profile) -> None:
    text = json_text(small.to_json())
    record = json.loads(text)
    assert [kernel["position"] for kernel in record["kernels"]] == list(range(len(small.kernels)))
    assert record["limits"]["levels"][-1]["capacity"] is None
    table = profile_table(small, "small")
    assert table.row_count == len(small.kernels)
    lost = [float(text) for text in table.columns[8].cells]
    assert lost == sorted(lost, reverse=True)


def test_open_shapes_are_refused_and_bound() -> None:
    with pytest.raises(InvalidModelError, match="image.*has no size"):
        profile(small_model("n"), limits=LIMITS)
    with pytest.raises(InvalidModelError, match=r"image.*open shape \(n, 3, 12, 12\)"):
        profile(small_model("n"), shapes={"n": "n"}, limits=LIMITS)
    found = profile(small_model("n"), shapes={"n": 2}, runs=1, threads=1, limits=LIMITS)
    assert max(kernel.cost.flops for kernel in found.kernels) >= 2 * 2 * 144 * 8 * 27


def test_foreign_code_is_refused() -> None:
    with pytest.raises(TargetError, match="compiled for"):
        profile(small_model(), "cortex-a72", limits=LIMITS)


def test_the_mean_of_two_measurements() -> None:
    faster = MachineLimits(
        2,
        3e11,
        tuple(CacheLevel(lvl.name, lvl.capacity, 3 * lvl.bandwidth) for lvl in LIMITS.levels),
    )
    bytes_ = replace(LIMITS, peaks={"uint8": 1e11})
    mean = bytes_.mean(replace(faster, peaks={"uint8": 3e11}))
    assert mean.peak_flops == mean.peaks["uint8"] == 2e11
    assert [lvl.bandwidth for lvl in mean.levels] == [8e10, 4e10, 2e10]
    assert [lvl.name for lvl in mean.levels] == ["L2", "L3", "memory"]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_limits_of_this_machine(threads: int) -> None:
    limits = measure_limits(resolve("native", cores=threads), threads)
    assert limits.threads == threads
    assert [level.name for level in limits.levels] == ["L2", "L3", "memory"]
    rates = [limits.peak_flops, *(level.bandwidth for level in limits.levels)]
    cpu = CPUInfo.from_target(resolve("native"))
    assert ("uint8" in limits.peaks) == (cpu.word_channels > 0)
    assert ("bfloat16" in limits.peaks) == cpu.halves_pay
    rates += limits.peaks.values()
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    capacities = [level.capacity for level in limits.levels]
    assert capacities == sorted(capacities) and capacities[-1] == math.inf


@pytest.mark.parametrize(
    ("dtype", "form", "seconds"),
    [
        ("float32", {}, 4e-2),
        ("uint8", {}, 1e-2),
        ("bfloat16", {"sums": "float32", "word": 2}, 2e-2),
    ],
)
def test_each_type_of_numbers_has_its_peak(
    dtype: str, form: dict[str, Any], seconds: float
) -> None:
    layer = ConvLayer(64, 64, (3, 3))
    kernel = Conv2DKernel((layer,), 1, 8, 8, dtype=dtype, out_layout="NCHW8c", **form)
    described = Described("conv", KernelCost(4e9, 1, 1, numbers=multiplied(kernel)), kernel)
    limits = replace(LIMITS, peaks={"uint8": 4e11, "bfloat16": 2e11})
    cpu = CPUInfo.from_target(resolve("native"))
    found = _against_limits(0, "conv", described, 0.1, 1, limits, cpu)
    assert (found.limit_seconds, found.bound) == (pytest.approx(seconds), "compute")
    assert _against_limits(0, "conv", described, 0.1, 1, LIMITS, cpu).limit_seconds == 4e-2


def few_bits(level: int) -> onnx.ModelProto:
    """Five rows of 256 by a matrix of 4 bits in blocks of 32."""
    packed, scales = np.zeros((320, 8, 16), "uint8"), np.ones((320, 8), "float32")
    sizes = {"K": 256, "N": 320, "bits": 4, "block_size": 32, "accuracy_level": level}
    product = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain=CONTRIB, **sizes)
    ends = [
        helper.make_tensor_value_info(name, 1, [5, extent])
        for name, extent in (("x", 256), ("y", 320))
    ]
    arrays = [numpy_helper.from_array(*each) for each in ((packed, "w"), (scales, "s"))]
    graph = helper.make_graph([product], "few", ends[:1], ends[1:], arrays)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("level", [0, 4], ids=["floats", "rows of bytes"])
def test_products_with_few_bits_have_their_work(level: int) -> None:
    limits = replace(LIMITS, peaks={"uint8": 4e11})
    found = profile(few_bits(level), threads=1, runs=1, limits=limits)
    (product,) = (one for one in found.kernels if one.operator.startswith("matmul, "))
    kind = "bytes by int4" if level else "int4"
    assert product.operator == f"matmul, {kind} in blocks of 32, 5x256 by 256x320"
    cost = product.cost
    assert cost.flops == 2 * 5 * 256 * 320
    assert cost.weight_bytes == 256 * 320 // 2 + 256 // 32 * 320 * 4  # 4 bits, and scales
    rate = {"vpdpbusd": 4e11, "maddubs": 8e11}[CPUInfo.from_target(resolve("native")).byte_dots]
    moved = cost.activation_bytes / 2e10 + cost.weight_bytes / 2e10
    computing = cost.flops / (rate if level else 1e11)
    assert product.limit_seconds == pytest.approx(max(computing, moved))


def test_gpus_are_not_profiled() -> None:
    with pytest.raises(TargetError, match="profiled on CPUs only; got .* 'opencl'"):
        profile(small_model(), "opencl")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["uint8", "bfloat16"])
def test_the_peak_may_be_that_of_tile_registers(numbers: str) -> None:
    """Loops stand for the registers: a round adds 64 or 32 products of ones to each sum."""
    target = resolve("native", 2)
    tiles = {"tiles": (numbers,), "emulates_tiles": True}
    probe = PeakProbe(replace(CPUInfo.from_target(target), **tiles), target, 2, numbers)
    assert probe.flops(0.0, 1) > 0
    if numbers == "uint8":
        np.testing.assert_array_equal(probe._sums.numpy(), 0x01010101 + 64 * 2_000)
    else:
        np.testing.assert_allclose(probe._sums.numpy().view("float32"), 32 * 2_000, rtol=1e-4)


def test_the_peak_of_bfloat16_is_that_of_its_instruction() -> None:
    """The loop for Zen 4 multiplies pairs, and loads no sums."""
    target = resolve("znver4", 1)
    kernel = _multiply_add(16, 24, 1, "bfloat16", 2)
    text = tvm.compile(kernel, target).mod.inspect_source("asm")
    assert text.count("vdpbf16ps") in (24, 48)  # It stands in one place, or is inlined in a second.


def test_the_peak_of_bytes_is_that_of_two_rows_by_two_columns_on_aarch64() -> None:
    target = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v2"})
    cpu = CPUInfo.from_target(target)
    kernel = _multiply_add(4, 24, 1, "uint8", _word("uint8", cpu))
    text = compile_unchecked(kernel, target=target).mod.inspect_source("asm")
    assert text.count("usmmla") in (24, 48) and "usdot" not in text
