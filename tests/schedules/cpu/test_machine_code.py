# SPDX-License-Identifier: Apache-2.0
"""The machine code of every form of micro-kernel, for CPUs that are not at hand.

Sums stay in registers over the whole reduction, nothing is spilled, and the loads a multiply-add
are those that the register tile promises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pytest
from cpu import plain_cases
from cpu.conv2d import test_pack
from cpu.conv2d.test_pack import Image
from cpu.conv2d.winograd import test_winograd_conv2d
from cpu.conv_cases import Case, build
from cpu.loops.matmul.test_dense import dense
from cpu.machine_cases import (
    CPUS,
    Form,
    check_bytes,
    check_dense,
    check_matrix,
    check_reduction,
    check_rows,
    check_tiles,
    check_transforms,
    check_transposes,
    defects,
    dense_tiles_of,
    info_of,
    kernel_case,
    lanes_of,
    loops_of,
    machine_of,
    target_of,
)
from cpu.quantized_cases import QuantizedCase
from cpu.reduce.test_coalesced_reduce import reduction
from cpu.reduce.test_plain_reductions import reduced
from tvm import topi

from examples.benchmarks.mca import ModelError, find_mca, predict
from examples.benchmarks.network_layers import conv_kernels
from examples.layers import PAIRS
from examples.models import MODELS
from schedules.cpu.conv2d.conv2d import conv2d_template
from schedules.cpu.conv2d.fused_conv2d import fused_conv2d_template
from schedules.cpu.conv2d.pack import Pack
from schedules.cpu.conv2d.planar.planar_knobs import default_planar_knobs
from schedules.cpu.conv2d.planar.planar_nest import planar_template
from schedules.cpu.conv2d.planar.planar_tile import column_groups
from schedules.cpu.conv2d.winograd.winograd_conv2d import default_knobs
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.cpu.cost.cost_model import default_conv2d_knobs, default_fused_knobs
from schedules.cpu.cost.register_tile import dense_tiles
from schedules.cpu.loops.matmul.dense import Dense
from schedules.cpu.reduce.coalesced_reduce import CoalescedReduce
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer
from tests.selection import in_turns

RELU = Activation("relu")
Forms = dict[str, Form]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> ConvLayer:
    margin = (kernel // 2,) * 4
    square, strides = (kernel, kernel), (stride, stride)
    return ConvLayer(inputs, outputs, square, strides, margin, groups=groups, activation=RELU)


def single(kernel: Conv2DKernel, knobs: Conv2DKnobs) -> Form:
    """One convolution."""
    func = conv2d_template(build(kernel_case(kernel)), kernel, knobs).mod["main"]
    if kernel.layers[0].is_depthwise:
        return Form(func, (check_rows(),))
    layer = kernel.layers[0]
    depth = layer.in_channels // layer.groups * prod(layer.kernel)
    whole, seen = dense_tiles_of(kernel, knobs.pixels, knobs.blocks)
    return Form(func, (check_dense(whole, seen, depth),))


def default(cpu: str, case: Case) -> Form:
    return single(case.kernel, default_conv2d_knobs(case.kernel, info_of(cpu)))


def square(cpu: str, layer: ConvLayer, size: int, nchw: bool = False) -> Form:
    return default(cpu, Case((layer,), 1, size, size, lanes_of(cpu), nchw=nchw))


def tiles(cpu: str, kernel: int, row: int, every: int = 1) -> Forms:
    """Rows of three tiles, so that borders differ, of the sizes that are worth a try for a row."""
    lanes, found = lanes_of(cpu), {}
    blocks = 512 // lanes if kernel == 1 else 64 // lanes
    sizes = dense_tiles(row, blocks, info_of(cpu))
    for pixels, vectors in sizes[::every]:
        layer = conv(64 * lanes, 2 * vectors * lanes, kernel)  # too deep to be unrolled whole
        case = Case((layer,), height=1 if kernel == 1 else 16, width=3 * pixels, lanes=lanes)
        parts = 2 if kernel == 1 else 1
        knobs = Conv2DKnobs(pixels, vectors, 2, 1, 8, False, ic_o=parts, prefetch=True)
        found[f"{pixels}x{vectors}"] = single(case.kernel, knobs)
    return found


def networks(cpu: str, depthwise: bool) -> Forms:
    """The deepest layer of the five networks for each register tile that is a default."""
    found: Forms = {}
    kernels = conv_kernels(built(), lanes_of(cpu))
    for kernel in sorted(kernels, key=lambda kernel: -kernel.layers[0].in_channels):
        knobs, layer = default_conv2d_knobs(kernel, info_of(cpu)), kernel.layers[0]
        name = f"{layer.kernel[0]}x{layer.kernel[1]}_s{layer.strides[0]}"
        name = f"conv_{name}_tile_{knobs.pixels}x{knobs.blocks}"
        if layer.is_depthwise == depthwise and name not in found:
            found[name] = single(kernel, knobs)
    return found


@cache
def built() -> list:
    return [build_model() for build_model in MODELS.values()]


def stems(cpu: str) -> Forms:
    return {
        "stem3": square(cpu, conv(3, 32, 3, 2), 224, nchw=True),
        "stem7": square(cpu, conv(3, 64, 7, 2), 224, nchw=True),
    }


def products_of_bytes(cpu: str) -> Forms:
    """Convolutions and a matrix product of bytes, and an image in words."""
    info, lanes, found = info_of(cpu), lanes_of(cpu), {}
    if not info.word_channels:
        return {}
    sizes = [
        ("flat", conv(16 * lanes, 16 * lanes, 1), 14, False),
        ("window", conv(8 * lanes, 8 * lanes, 3), 28, False),
        ("stem", replace(conv(3, 64, 7, 2), padding=(0, 0, 0, 0)), 230, True),
        ("matrix", conv(32 * lanes, 16 * lanes, 1), 1, False),
    ]
    words = [(info.word_channels, False), *([(4, True)] if info.word_channels == 2 else [])]
    for (name, layer, size, is_words), (word, limited) in product(sizes, words):
        rows, name = 64 if size == 1 else 1, f"{name}_limited" if limited else name
        how = {"word": word, "limited": limited, "shifted": info.shifts_bytes}
        case = QuantizedCase(layer, rows, size, size, lanes, is_words, **how)
        kernel = case.kernel.in_words()
        knobs = default_conv2d_knobs(kernel, info)
        func = conv2d_template(case.build(), case.kernel, knobs).mod["main"]
        whole, seen = dense_tiles_of(kernel, knobs.pixels, knobs.blocks)
        depth = kernel.layers[0].in_channels * prod(layer.kernel)
        found[name] = Form(func, (check_bytes(whole, seen, depth),))
    return found


def grouped(cpu: str) -> Forms:
    width = 32 * lanes_of(cpu)
    return {
        "group1": square(cpu, conv(width, width, 1, groups=4), 14),
        "group3": square(cpu, conv(width, width, 3, groups=4), 14),
    }


def depthwise(cpu: str) -> Forms:
    channels = 4 * lanes_of(cpu)
    return {
        f"depthwise{kernel}_s{stride}": square(
            cpu, conv(channels, channels, kernel, stride, channels), 28 * stride
        )
        for kernel in (3, 5)
        for stride in (1, 2)
    }


def planar(cpu: str) -> Forms:
    """Both layers of pairs on planes; of 5x5 kernels more weights than there are registers."""
    lanes, info, found = lanes_of(cpu), info_of(cpu), {}
    for kernel, stride in ((3, 1), (3, 2), (5, 2))[: 3 if info.num_vector_registers < 32 else 2]:
        layers = plain_cases.depthwise(4 * lanes, kernel, stride), conv(4 * lanes, 2 * lanes, 1)
        case = Case(layers, height=56 * stride, width=7 * stride * lanes, lanes=lanes)
        workload = plain_cases.kernel_of(case, True, True)
        knobs = default_planar_knobs(workload, info)
        func = planar_template(plain_cases.build(case, True, True), workload, knobs).mod["main"]
        weights = kernel * len(column_groups(layers[0])) + 1
        needed = weights + knobs.rows * stride + 1
        constants = weights if needed > info.num_vector_registers else 0
        tile = knobs.outputs, knobs.vectors
        checks = check_rows(kernel, constants), check_tiles({tile: {tile[0] * tile[1]}})
        found[f"planar{kernel}_s{stride}"] = Form(func, checks)
    return found


def pairs(cpu: str) -> Forms:
    """Fused pairs with a first layer of each kind."""
    found = {}
    for name in ("mv1_3", "mv2_2_1", "mv1_7-11", "res_4x_b2"):
        pair = PAIRS[name].workload
        case = Case((pair.layer1, pair.layer2), 1, pair.height, pair.width, lanes_of(cpu))
        knobs = default_fused_knobs(case.kernel, info_of(cpu))
        func = fused_conv2d_template(build(case), case.kernel, knobs).mod["main"]
        second = replace(case.kernel, layers=(pair.layer2,), height=knobs.h, width=pair.out_size[1])
        whole, _ = dense_tiles_of(second, knobs.pixels2, knobs.blocks2)
        found[name.replace("-", "_")] = Form(func, (check_rows(), check_tiles(whole)))
    return found


def winograd(cpu: str) -> Forms:
    lanes, found = lanes_of(cpu), {}
    for size in (2, 4):
        layer = conv(16 * lanes, 16 * lanes, 3)
        case = Case((layer,), height=28, width=28, lanes=lanes)
        knobs = default_knobs(test_winograd_conv2d.workload(case, size), info_of(cpu))
        row = ConvLayer(layer.in_channels, layer.out_channels // knobs.block_chunks, (1, 1))
        product = Case((row,), height=1, width=knobs.group, lanes=lanes).kernel
        whole, _ = dense_tiles_of(product, knobs.pixels, knobs.blocks)
        func = test_winograd_conv2d.schedule(case, size, target_of(cpu))
        found[f"winograd{size}"] = Form(func, (check_tiles(whole), check_transforms()))
    return found


def transposes(cpu: str) -> Forms:
    """Changes of the layout between NCHW and blocks."""
    lanes, found = lanes_of(cpu), {}
    for kind in ("pack", "unpack"):
        image = Image(1, 4 * lanes, 28, 28, lanes)
        schedule = Pack().apply(test_pack.build(kind, image), target_of(cpu), False)
        assert schedule is not None
        found[kind] = Form(schedule.mod["main"], (check_transposes(lanes),))
    return found


def matrices(cpu: str) -> Forms:
    """Products by tiles of a panel, of rows, of columns of a vector; dot products; streams."""
    sizes = {
        "panel": (48, 512, 256, False),
        "rows": (12, 512, 256, False),
        "vector": (1, 512, 256, False),
        "dots": (6, 512, 512, True),
        "stream": (1, 1024, 1280, False),
    }
    found = {}
    for name, size in sizes.items():
        schedule = Dense().apply(dense(*size), target_of(cpu), False)
        assert schedule is not None
        found[name] = Form(schedule.mod["main"], (check_matrix(streams=name == "stream"),))
    return found


def reductions(cpu: str) -> Forms:
    shapes: dict[str, tuple[tuple[int, ...], list[int], str]] = {
        "rows": ((64, 4096), [1], "sum"),
        "columns": ((4096, 96), [0], "sum"),
        "few": ((4099, 9), [0], "sum"),
        "short": ((49, 512), [0], "sum"),
        "squares": ((64, 4096), [1], "sum_squares"),
        "middle": ((8, 64, 256), [1], "max"),
        "outer": ((16, 8, 1024), [0, 2], "sum"),
    }
    found, target = {}, target_of(cpu)
    for name, (shape, axes, operator) in shapes.items():
        coalesced = CoalescedReduce().apply(
            reduction(shape, "float32", operator, axes), target, False
        )
        op = topi.max if operator == "max" else topi.sum
        plain = CoalescedReduce().apply(reduced(op, shape, axes), target, False)
        assert coalesced is not None and plain is not None
        found[f"coalesced_{name}"] = Form(coalesced.mod["main"], (check_reduction(),))
        found[f"plain_{name}"] = Form(plain.mod["main"], (check_reduction(),))
    return found


FORMS: dict[str, Callable[[str], Forms]] = {
    "some tiles of 1x1": lambda cpu: tiles(cpu, 1, 196, every=4),
    "some tiles of 3x3": lambda cpu: tiles(cpu, 3, 56, every=5),
    "stems": stems,
    "products of bytes": products_of_bytes,
    "grouped": grouped,
    "depthwise": depthwise,
    "planar": planar,
    "pairs": pairs,
    "winograd": winograd,
    "transposes": transposes,
    "matrices": matrices,
    "reductions": reductions,
}
NETWORKS: dict[str, Callable[[str], Forms]] = {
    "dense layers": lambda cpu: networks(cpu, depthwise=False),
    "depthwise layers": lambda cpu: networks(cpu, depthwise=True),
}
SWEEPS: dict[str, Callable[[str], Forms]] = {
    "tiles of 1x1": lambda cpu: tiles(cpu, 1, 196),
    "tiles of 3x3": lambda cpu: tiles(cpu, 3, 56),
}
# One of each vector length; the others differ in the order of instructions only.
QUICK = ("x86-64-v3", "znver5", "neoverse-v2")
OTHERS = [(forms, cpu) for forms in FORMS for cpu in CPUS if cpu not in QUICK]
SLOW = [cpu if cpu in QUICK else pytest.param(cpu, marks=pytest.mark.slow) for cpu in CPUS]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("forms", "cpu"),
    in_turns(FORMS, QUICK, every=3)
    + [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS],
)
def test_sums_stay_in_registers_and_loads_are_few(cpu, forms):
    found = defects(FORMS[forms](cpu), cpu)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_vectors_of_256_bits_multiply_bytes():
    assert products_of_bytes("alderlake")
    found = defects(products_of_bytes("alderlake"), "alderlake")
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("forms", NETWORKS)
def test_default_tiles_of_the_networks_stay_in_registers(cpu, forms):
    found = defects(NETWORKS[forms](cpu), cpu)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("forms", SWEEPS)
def test_every_tile_worth_a_try_stays_in_registers(cpu, forms):
    found = defects(SWEEPS[forms](cpu), cpu)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", SLOW)
def test_the_units_of_multiply_adds_are_the_bound(cpu):
    """LLVM's models of the CPUs tell so, where its tools are installed and know them."""
    try:
        program = find_mca()
    except ModelError as error:
        pytest.skip(str(error))
    forms = {"flat": square(cpu, conv(512, 512, 1), 14)}
    forms["window"] = square(cpu, conv(128, 128, 3), 28)
    for name, found in loops_of({name: forms[name].func for name in forms}, cpu).items():
        loop = max((loop for loop in found if loop.innermost), key=lambda loop: loop.fmas)
        try:
            prediction = predict(program, loop, cpu, machine_of(cpu))
        except ModelError as error:
            if "recognized processor" not in str(error):
                raise
            pytest.skip(f"{program} does not know {cpu}")
        assert prediction.share >= 0.95, f"{name}: {prediction} of {loop}"
