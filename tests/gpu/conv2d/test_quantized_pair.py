# SPDX-License-Identifier: Apache-2.0
"""Fused pairs of convolutions of bytes on tensor cores: numbers by emulation, machine code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from conv2d.test_tensor_core_conv2d import OPENCL, convolve
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from opencl import compile_opencl
from tensor_core_emulation import emulate_tensor_cores
from tvm import te, tirx
from tvm.target import Target

from relay_passes.layout.packed.weight_packing import pack_array
from schedules.compute.quantized_conv2d import fused_quantized_conv2d, quantized_conv2d
from schedules.gpu import AnyConv2D, FusedConv2D
from schedules.gpu.conv2d.tensor_core_pair import pair_workload
from schedules.gpu.conv2d.tensor_core_pair_tile import choose_pair_tile
from schedules.gpu.core.machine import GPUInfo
from schedules.workload.conv2d import Activation, ByteAddition, Conv2DKernel, ConvLayer, to_json
from tests.selection import in_turns, slow_where

BYTES = Activation("round_clip", 0, 255)
BLOCK = 16
MOST_INSTRUCTIONS = 9.5  # of a warp, for each product, where a tile is smallest


def layer_of(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, **more) -> ConvLayer:
    square, padding = (kernel, kernel), (kernel // 2,) * 4
    more = {"activation": BYTES, **more}
    return ConvLayer(inputs, outputs, square, strides=(stride, stride), padding=padding, **more)


def kernel_of(layers: tuple[ConvLayer, ...], size: tuple[int, int, int]) -> Conv2DKernel:
    is_bytes = layers[-1].activation.kind == "round_clip"
    return Conv2DKernel(layers, *size, dtype="uint8", out_dtype="uint8" if is_bytes else "float32")


def function(kernel: Conv2DKernel) -> tirx.PrimFunc:
    """The function of one or two layers as legalization makes it."""
    data = (kernel.batch, kernel.layers[0].in_channels, kernel.height, kernel.width)
    tensors = [te.placeholder(packed_shape(kernel, data, "data"), "uint8", name="data")]
    for number, layer in enumerate(kernel.layers, 1):
        weight = packed_shape(kernel, (layer.out_channels, layer.in_channels, *layer.kernel))
        tensors.append(te.placeholder(weight, "int8", name=f"weight{number}"))
        for name in ("bias", "scale"):
            shape = packed_shape(kernel, (layer.out_channels,), "bias")
            tensors.append(te.placeholder(shape, "float32", name=f"{name}{number}"))
    compute = quantized_conv2d if len(kernel.layers) == 1 else fused_quantized_conv2d
    added = ()
    if kernel.addition is not None:
        size = kernel.layers[0].output_size(kernel.height, kernel.width)
        shape = packed_shape(kernel, (kernel.batch, kernel.layers[-1].out_channels, *size), "data")
        tensors.append(te.placeholder(shape, "uint8", name="residual"))
        added = tensors.pop(), kernel.addition
    output = compute(*tensors, *kernel.layers, kernel.out_dtype, *added)
    tensors += added[:1]
    func = te.create_prim_func([*tensors, output], "int64")
    return func.with_attr("tvm_fusion.workload", to_json(kernel))


def packed_shape(kernel: Conv2DKernel, shape: Sequence[int], form: str = "chunks"):
    return packed(kernel, np.empty(shape, "int8"), form).shape


def packed(kernel: Conv2DKernel, array: np.ndarray, form: str) -> np.ndarray:
    """An array in NCHW in the kernel's layout."""
    return array if kernel.out_layout == "NCHW" else pack_array(array, form, BLOCK)


def in_blocks(kernel: Conv2DKernel) -> Conv2DKernel:
    """The kernel with channels in blocks of 16 bytes."""
    layout = f"NCHW{BLOCK}c"
    return replace(kernel, data_layout=layout, out_layout=layout, word=BLOCK)


def scheduled(kernel: Conv2DKernel, target: Target) -> tirx.PrimFunc:
    rule = AnyConv2D() if len(kernel.layers) == 1 else FusedConv2D()
    schedule = rule.apply(function(kernel), target, False)
    assert schedule is not None
    return schedule.mod["main"]


def finished(
    sums: np.ndarray,
    bias: np.ndarray,
    scale: np.ndarray,
    layer: ConvLayer,
    added: tuple[np.ndarray, ByteAddition] | None = None,
) -> np.ndarray:
    """The layer's output in NCHW; ``added`` are the bytes of a residual."""
    value = activated(sums.astype("float32") * scale[:, None, None] + bias[:, None, None], layer)
    activation = layer.activation
    if added is not None:
        numbers, how = added
        numbers = (numbers.astype("float32") + how.shift) * how.bytes_factor
        activation = how.activation
        layer = replace(layer, activation=activation)
        value = activated((value * how.factor + numbers) / how.divisor, layer)
    is_bytes = activation.kind == "round_clip"
    return (value - activation.low).astype("uint8") if is_bytes else value


def activated(value: np.ndarray, layer: ConvLayer) -> np.ndarray:
    activation = layer.activation
    if activation.kind == "round_clip":
        return np.clip(np.round(value), activation.low, activation.high)
    return np.maximum(value, 0) if activation.kind == "relu" else value


ADDITION = ByteAddition(0.0371828, 0.0214142, -7.0, 0.0531416, -9.0, 246.0)


def with_bytes(kernel: Conv2DKernel) -> Conv2DKernel:
    """The kernel with bytes that are added to its output."""
    return replace(kernel, residual=True, addition=ADDITION)


CASES = {
    "3x3": ((layer_of(13, 40, 3), layer_of(40, 24)), (2, 6, 8)),
    "3x3_added": ((layer_of(13, 40, 3), layer_of(40, 24)), (2, 6, 8)),
    "1x1": ((layer_of(16, 33), layer_of(33, 72, activation=Activation("relu"))), (1, 7, 9)),
    "strided": ((layer_of(3, 24, 3, 2), layer_of(24, 70, activation=Activation())), (1, 15, 13)),
    "halo": ((layer_of(16, 64), layer_of(64, 20, 3)), (2, 4, 8)),
    "halo_of_windows": (
        (layer_of(3, 64, 3), layer_of(64, 19, 3, activation=Activation("round_clip", -9, 246))),
        (1, 4, 13),
    ),
    "one": ((layer_of(40, 24, 3),), (2, 6, 8)),
    "one_in_blocks": ((layer_of(40, 24, 3),), (2, 6, 8)),
    "one_added_in_blocks": ((layer_of(40, 24, 3),), (2, 6, 8)),
    "image_in_blocks": ((layer_of(3, 72, 7, 2, activation=Activation("relu")),), (1, 15, 13)),
}


@pytest.mark.quick_cases("one_in_blocks")
@pytest.mark.parametrize("name", slow_where(["halo_of_windows"], CASES))
def test_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are those of two kernels, but for some that are rounded the other way."""
    emulate_tensor_cores(monkeypatch)
    plain = kernel = kernel_of(*CASES[name])
    is_pair = len(kernel.layers) == 2
    plain = with_bytes(plain) if "added" in name else plain
    kernel = in_blocks(plain) if is_pair or name.endswith("in_blocks") else plain
    rng = np.random.default_rng()
    shapes = [[int(extent) for extent in param.shape] for param in function(plain).params]
    mid = data = rng.integers(0, 256, shapes[0], "uint8")
    parameters: list[np.ndarray] = []
    more = []
    for number, layer in enumerate(kernel.layers):
        weight = rng.integers(-128, 128, shapes[1 + 3 * number], "int8")
        bias = rng.uniform(40, 90, layer.out_channels).astype("float32")
        scale = rng.uniform(0.5, 1, layer.out_channels) * 50 / 74 / 147
        scale = (scale / np.sqrt(np.prod(weight.shape[1:]))).astype("float32")
        sums = convolve(mid.astype("int64"), weight.astype("int64"), layer)
        added = None
        if kernel.residual and number == len(kernel.layers) - 1:
            residual = rng.integers(0, 256, sums.shape, "uint8")
            added, more = (residual, ADDITION), [packed(kernel, residual, "data")]
        mid = finished(sums, bias, scale, layer, added)
        forms = (weight, "chunks"), (bias, "bias"), (scale, "bias")
        parameters += [packed(kernel, array, form) for array, form in forms]
    assert len(np.unique(mid)) > 50
    is_channel = packed(kernel, np.ones(mid.shape, "bool"), "data")  # others are never used
    data, mid = (packed(kernel, each, "data") for each in (data, mid))
    found = np.full(mid.shape, 77, mid.dtype)
    compile_opencl(scheduled(kernel, OPENCL), OPENCL).run(data, *parameters, *more, found)
    errors = np.abs(found.astype("float64") - mid)[is_channel]
    assert errors.max() <= 1 and (errors > 0.01).mean() < 1e-2


PAIRS = {
    "resnet_2": ((layer_of(64, 64, 3), layer_of(64, 256)), (8, 56, 56)),
    "resnet_3": ((layer_of(128, 128, 3), layer_of(128, 512)), (8, 28, 28)),
    "strided": ((layer_of(128, 128, 3, 2), layer_of(128, 512)), (8, 56, 56)),
    "pointwise": ((layer_of(64, 96), layer_of(96, 64, activation=Activation())), (4, 28, 28)),
    "halo": ((layer_of(64, 64), layer_of(64, 64, 3)), (8, 56, 56)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), in_turns(PAIRS, ["sm_90", "sm_80"], every=3))
def test_machine_code(name: str, arch: str) -> None:
    """Both products are on tensor cores; as many blocks at once as asked for, without spills."""
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    kernel = in_blocks(kernel_of(*PAIRS[name]))
    tile = choose_pair_tile(pair_workload(kernel), GPUInfo.from_target(target))
    assert tile is not None and tile.first is not None
    source = cuda_source(scheduled(kernel, target), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= tile.registers
    assert tile.mid_bytes + tile.stages_bytes <= used.shared <= 48 * 1024
    names = opcodes(code)
    assert count(names, "IMMA.16832.U8.S8") >= (tile.first.sums + tile.second.sums) // 4 * 2
    assert count(names, "LDSM") and count(names, "LDGSTS.E.BYPASS.128")
    assert count(names, "STS") == count(names, "STS.128") + count(names, "STS.64")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arch"), in_turns(list(PAIRS)[:3], ["sm_90", "sm_80"], every=3))
def test_machine_code_of_blocks_of_channels(name: str, arch: str) -> None:
    """Windows and weights are copied as they lie: a seventh of the instructions of NCHW."""
    (layer, _), size = PAIRS[name]
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    source = cuda_source(scheduled(in_blocks(kernel_of((layer,), size)), target), arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names, [loop] = opcodes(code), loops(code)
    assert count(names, "LDGSTS.E.BYPASS.128") and not count(names, "STS")
    assert count(names, "STG.E") == count(names, "STG.E.64") > 0
    assert len(loop) <= MOST_INSTRUCTIONS * count(loop, "IMMA")


@pytest.mark.slow
def test_machine_code_of_one_layer() -> None:
    target = Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
    layers, size = PAIRS["resnet_2"]
    code = sass(cuda_source(scheduled(kernel_of(layers[:1], size), target), "sm_80"), "sm_80")
    names = opcodes(*code.values())
    assert count(names, "IMMA.16832.S8.U8") and count(names, "LDSM")


def test_steps_of_a_wider_layer_are_of_one_tap() -> None:
    gpu = GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_80"}))
    layers = layer_of(64, 96), layer_of(96, 64, 3)
    workload = pair_workload(kernel_of(layers, (1, 14, 14)))
    assert choose_pair_tile(workload, gpu) is None
    assert choose_pair_tile(replace(workload, dtype="float16"), gpu) is not None
