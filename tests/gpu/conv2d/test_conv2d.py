# SPDX-License-Identifier: Apache-2.0
"""Single convolutions of the GPU rules, executed in OpenCL against NumPy in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cpu.conv_cases import ACTIVATION, Case, arguments, build, convolve, pack
from gpu_conv_cases import (
    CUDA,
    OPENCL,
    RULES,
    case_of,
    check,
    dense,
    depthwise,
    rule_of,
    scheduled,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opencl import compile_opencl
from traffic import Traffic
from tvm import te, tirx
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules.compute.conv2d import conv2d
from schedules.errors import OpError
from schedules.gpu import AnyConv2D, Conv2D, DepthwiseConv2D, FusedConv2D
from schedules.gpu.conv2d.conv2d import conv2d_template, packed_kernel
from schedules.gpu.conv2d.costs import layer_cycles
from schedules.gpu.conv2d.depthwise_conv2d import DepthwiseKnobs, depthwise_template
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.conv_tiles import ConvTile, ProductExtents, choose_tile
from schedules.gpu.gemm.implicit_gemm import ConvShape
from schedules.workload.conv2d import ACTIVATIONS, Activation, Conv2DKernel, ConvLayer, to_json
from tests.selection import in_turns

GPU = GPUInfo.from_target(OPENCL)
ODD = ConvLayer(13, 22, (3, 2), (2, 1), (1, 2, 0, 1), (1, 2))
GROUPED = ConvLayer(16, 24, (3, 3), (2, 1), (1, 2, 1, 0), (2, 2), groups=2)

# Extents that fit no tile; one step, two, three, four; one part and several.
TILES = [
    ConvTile(4, 16, 1, 2, 8, 4),
    ConvTile(4, 32, 2, 2, 4, 2),
    ConvTile(8, 32, 2, 4, 4),
    ConvTile(1, 64, 1, 1, 2),
    ConvTile(2, 16, 1, 1, 16, 4),
    ConvTile(4, 16, 1, 1, 2, splits=3),
    ConvTile(2, 16, 1, 1, 4, 2, splits=2),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("tile", "residual"), in_turns(TILES, [False, True]))
def test_dense_in_any_tile(tile: ConvTile, residual: bool, rng: np.random.Generator) -> None:
    case = case_of(ODD, batch=2, height=9, width=11, residual=residual)
    check(case, conv2d_template(build(case), case.kernel, tile, GPU), rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "case",
    [
        case_of(dense(24, 40, activation="silu"), height=7, width=7),
        case_of(dense(20, 12, 3, "relu"), height=7, width=7, residual=True),
        case_of(dense(9, 5, 5, strides=(3, 2)), batch=2),
        case_of(dense(6, 10, strides=(2, 2)), batch=3),
        case_of(GROUPED, height=11, width=10, residual=True),
        case_of(replace(GROUPED, groups=4, out_channels=32, kernel=(1, 1)), batch=2),
        case_of(dense(3, 14, 3, "relu6", strides=(2, 2)), batch=2, height=15, width=13, nchw=True),
        case_of(dense(1, 5, 7), height=12, nchw=True),
    ],
    ids=str,
)
def test_dense(case: Case, rng: np.random.Generator) -> None:
    assert rule_of(build(case)) == "Conv2D"
    check(case, scheduled(case, Conv2D()), rng)


@pytest.mark.parametrize("nchw", [False, True])
@pytest.mark.parametrize("tile", [ConvTile(16, 16, 1, 1, 2), ConvTile(8, 16, 1, 2, 8, 4)])
def test_no_thread_reads_behind_the_data(tile: ConvTile, nchw: bool) -> None:
    """Some threads have nothing to load; in the last step what they might load does not exist."""
    assert tile.pixels * tile.quads < tile.threads
    case = case_of(dense(64, 64), height=4, width=4, nchw=nchw)
    func = conv2d_template(build(case), case.kernel, tile, GPU)
    shapes = [[int(extent) for extent in param.shape] for param in func.params]
    traffic = Traffic(func, OPENCL, [np.empty(shape, "float32") for shape in shapes])
    assert traffic.reads[0].all() and set(traffic.writes[-1]) == {1}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str, rng: np.random.Generator) -> None:
    case = case_of(dense(5, 6, activation=kind), height=3, width=5, residual=True)
    check(case, scheduled(case, Conv2D()), rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("case", "rows"),
    in_turns(
        [
            case_of(depthwise(13), batch=2, height=9, width=7, residual=True),
            case_of(depthwise(8, 5, strides=(2, 2), padding=(2, 0, 1, 1)), height=11, width=13),
            case_of(depthwise(6, 7, dilation=(1, 2), activation="hardswish"), height=10, width=19),
            case_of(depthwise(5, 1, "none", strides=(2, 3)), height=5),
        ],
        [1, 2, 4],
    ),
)
def test_depthwise(case: Case, rows: int, rng: np.random.Generator) -> None:
    check(case, depthwise_template(build(case), case.kernel, DepthwiseKnobs(rows, 128)), rng)


def test_depthwise_by_the_rule(rng: np.random.Generator) -> None:
    case = case_of(depthwise(13), batch=2)
    assert rule_of(build(case)) == "DepthwiseConv2D"
    check(case, scheduled(case, DepthwiseConv2D()), rng)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    inputs, outputs = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    layer = ConvLayer(
        inputs,
        outputs,
        kernel,
        strides=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        padding=draw(st.tuples(*[st.integers(0, 2)] * 4)),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        activation=draw(ACTIVATION),
    )
    if draw(st.booleans()):
        layer = replace(layer, out_channels=inputs, groups=inputs)
    size = draw(st.integers(5, 9)), draw(st.integers(5, 9))
    nchw = not layer.is_depthwise and layer.groups == 1 and draw(st.booleans())
    extents = {"batch": draw(st.integers(1, 2)), "height": size[0], "width": size[1]}
    return case_of(layer, residual=draw(st.booleans()), nchw=nchw, **extents)


def _name(rule: ScheduleRule) -> str:
    return type(rule).__name__


@given(case=_cases(), number=st.integers(0, len(TILES) - 1))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layer(case: Case, number: int, rng: np.random.Generator) -> None:
    func = build(case)
    if case.layers[0].is_depthwise:
        check(case, depthwise_template(func, case.kernel, DepthwiseKnobs(number % 4 + 1, 128)), rng)
    else:
        check(case, conv2d_template(func, case.kernel, TILES[number], GPU), rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rule", [Conv2D(), DepthwiseConv2D(), AnyConv2D()], ids=_name)
def test_symbolic_batch(rule: ScheduleRule, rng: np.random.Generator) -> None:
    layer = depthwise(6) if isinstance(rule, DepthwiseConv2D) else dense(6, 10, 3, "relu")
    case = case_of(layer, batch=3, height=5, width=7, residual=True)
    func = build(case, tirx.Var("n", "int64"))
    kernel = replace(case.kernel, batch=None)
    func = func.with_attr("tvm_fusion.workload", to_json(kernel))
    check(case, rule.apply(func, OPENCL, False).mod["main"], rng)


SMALL_BLOCKS = Target({"kind": "opencl", "max_num_threads": 32}, host="llvm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "threads"),
    in_turns(
        [
            case_of(dense(6, 10, 3, "relu"), batch=2, residual=True),
            case_of(depthwise(6), batch=2),
            case_of(dense(512, 16), height=2, width=2),  # splits
            case_of(dense(5, 6, 3), depthwise(6), height=6, width=5),
        ],
        [32, 48, 100],
    ),
)
def test_devices_with_small_blocks(case: Case, threads: int, rng: np.random.Generator) -> None:
    target = Target({"kind": "opencl", "max_num_threads": threads}, host="llvm")
    func = build(case)
    schedules = [rule.apply(func, target, False) for rule in RULES]
    found = [schedule.mod["main"] for schedule in schedules if schedule is not None]
    assert found or len(case.layers) == 2, "a layer of its own is never left alone"
    packed, _ = arguments(case, 1)
    inputs = [np.ascontiguousarray(array, "float32") for array in packed]
    output = np.zeros(pack(np.zeros(case.out_shape), case.lanes).shape, "float32")
    for scheduled_func in found:
        for launch in compile_opencl(scheduled_func, target).launches(*inputs, output):
            assert math.prod(launch.block) <= threads
        check(case, scheduled_func, rng)


def test_no_tile_has_the_threads() -> None:
    shape = ConvShape.of(case_of(dense(8, 8)).kernel, 1)
    gpu = GPUInfo.from_target(SMALL_BLOCKS)
    assert choose_tile(ProductExtents.of(shape), gpu) is None
    assert layer_cycles(shape, gpu) == math.inf
    assert Conv2D().apply(build(case_of(dense(8, 8))), SMALL_BLOCKS, False) is None


@pytest.mark.parametrize("rule", [Conv2D(), DepthwiseConv2D(), FusedConv2D()], ids=_name)
def test_groups_that_cut_packed_blocks_are_refused(rule: ScheduleRule) -> None:
    layer = ConvLayer(8, 12, (1, 1), groups=2)
    fits = case_of(dense(8, 8), *[dense(8, 12)] * isinstance(rule, FusedConv2D))
    cut = replace(fits.kernel, layers=(layer, *fits.kernel.layers[1:]))
    func = build(fits).with_attr("tvm_fusion.workload", to_json(cut))
    with pytest.raises(OpError, match="groups of 4 input and 6 output channels cross blocks"):
        rule.apply(func, OPENCL, False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "case",
    [
        case_of(dense(5, 6, 3, "silu"), batch=2, residual=True),
        case_of(depthwise(6, 9), height=12),  # more taps than are unrolled
        case_of(dense(3, 6, 3, strides=(2, 2)), nchw=True),
    ],
    ids=str,
)
def test_one_thread_an_output(case: Case, rng: np.random.Generator) -> None:
    check(case, scheduled(case, AnyConv2D()), rng)


def test_bytes_in_fours_have_one_thread_an_output(rng: np.random.Generator) -> None:
    """Templates read and write floats."""
    case = case_of(depthwise(6), height=5, width=7)
    (_, *parameters), _ = arguments(case, int(rng.integers(1 << 30)))
    data = rng.integers(0, 256, [int(extent) for extent in build(case).params[0].shape], "uint8")
    arrays = [data, *(np.ascontiguousarray(array, "float32") for array in parameters)]
    inputs = [te.placeholder(array.shape, str(array.dtype)) for array in arrays]
    kernel = replace(case.kernel, data_dtype="uint8")
    layouts = kernel.data_layout, kernel.out_layout
    func = te.create_prim_func([*inputs, conv2d(*inputs, None, *kernel.layers, *layouts)])
    func = func.with_attr("tvm_fusion.workload", to_json(kernel))
    assert rule_of(func) == "AnyConv2D"
    outputs = []
    for function, first in (func, data), (build(case), data.astype("float32")):
        outputs.append(np.full(data.shape, np.nan, "float32"))
        rule = AnyConv2D() if function is func else DepthwiseConv2D()
        scheduled_func = rule.apply(function, OPENCL, False).mod["main"]
        compile_opencl(scheduled_func, OPENCL).run(first, *arrays[1:], outputs[-1])
    np.testing.assert_allclose(*outputs, rtol=1e-5)
    rounding = Activation("round_clip", 0, 255)
    layers = (replace(case.layers[0], activation=rounding),)
    rounded = replace(case.kernel, layers=layers, out_dtype="uint8")
    assert packed_kernel(build(case).with_attr("tvm_fusion.workload", to_json(rounded)), 1) is None


@pytest.mark.slow
def test_symbolic_sizes_and_groups_that_cut_blocks(rng: np.random.Generator) -> None:
    layer = ConvLayer(8, 6, (3, 3), (2, 1), (1, 1, 1, 1), groups=2, activation=Activation("relu"))
    batch, height, width = (tirx.Var(name, "int64") for name in "nhw")
    shapes = [(batch, 8, height, width), (6, 4, 3, 3), (6,)]
    inputs = [te.placeholder(shape, name=name) for shape, name in zip(shapes, "xwb", strict=True)]
    func = te.create_prim_func([*inputs, conv2d(*inputs, None, layer)])
    kernel = Conv2DKernel((layer,), None, None, None)
    func = func.with_attr("tvm_fusion.workload", to_json(kernel))
    assert rule_of(func) == "AnyConv2D"
    extents = [(2, 8, 7, 9), (6, 4, 3, 3), (6,)]
    arrays = [rng.standard_normal(extent).astype("float32") for extent in extents]
    wanted = convolve(*(array.astype("float64") for array in arrays), layer, None)
    output = np.full(wanted.shape, np.nan, "float32")
    compile_opencl(AnyConv2D().apply(func, OPENCL, False).mod["main"], OPENCL).run(*arrays, output)
    np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-4)


def test_what_fits_no_tile_has_one_thread_an_output() -> None:
    half = replace(case_of(dense(8, 8)).kernel, dtype="float16")
    func = build(case_of(dense(8, 8))).with_attr("tvm_fusion.workload", to_json(half))
    assert rule_of(func) == "AnyConv2D"
    unpacked = replace(half, dtype="float32", out_layout="NCHW", data_layout="NCHW")
    assert rule_of(func.with_attr("tvm_fusion.workload", to_json(unpacked))) == "AnyConv2D"
    assert rule_of(build(case_of(depthwise(6, 9), height=12))) == "AnyConv2D"


def test_leaves_other_functions_and_targets_alone() -> None:
    data = te.placeholder((4, 4), name="data")
    other = te.create_prim_func([data, te.compute((4, 4), lambda *i: data(*i) + 1.0)])
    marked = build(case_of(dense(8, 8)))
    pair = build(case_of(dense(8, 8), dense(8, 8)))
    for rule in (Conv2D(), DepthwiseConv2D(), AnyConv2D()):
        assert rule.apply(other, CUDA, False) is None
        assert rule.apply(marked, Target("llvm"), False) is None
        assert rule.apply(pair, CUDA, False) is None
    assert DepthwiseConv2D().apply(marked, CUDA, False) is None
    assert Conv2D().apply(build(case_of(depthwise(8))), CUDA, False) is None
