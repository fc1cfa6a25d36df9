# SPDX-License-Identifier: Apache-2.0
"""Activations inside convolutions are vector code, and right."""

from __future__ import annotations

import math

import pytest
import tvm_ffi
from cpu.conv_cases import Case, build, check, compile_function
from cpu.rule_cases import AVX2, HOST, assembly
from tvm import ir, tirx

from schedules.cpu.conv2d.conv2d import Conv2D
from schedules.cpu.conv2d.fused_conv2d import FusedConv2D
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, ConvLayer
from tests.selection import in_turns


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "fused"), in_turns(["sigmoid", "silu"], [False, True]))
def test_no_activation_calls_the_c_library(kind: str, fused: bool) -> None:
    activation = Activation(kind)
    layers = [ConvLayer(16, 16, (3, 3), padding=(1, 1, 1, 1), activation=activation)]
    if fused:
        layers.append(ConvLayer(16, 24, (1, 1), activation=activation))
    case = Case(tuple(layers), height=9, width=11)
    rule = FusedConv2D() if fused else Conv2D()
    made = {target: rule.apply(build(case), target, False) for target in (AVX2, HOST)}
    code = assembly(made[AVX2].mod["main"], AVX2)
    assert "vroundps" in code and "expf" not in code
    check(case, compile_function(made[HOST].mod["main"]), seed=3)


def test_one_pixel() -> None:
    # Here TVM puts the shared values and the sums of both layers into the same memory.
    layers = (ConvLayer(1, 1, (1, 1)), ConvLayer(1, 1, (1, 1), activation=Activation("silu")))
    case = Case(layers, height=1, width=1)
    func = FusedConv2D().apply(build(case), HOST, False).mod["main"]
    check(case, compile_function(func), seed=1)


SAME, POINT = ConvLayer(16, 16, (3, 3), padding=(1, 1, 1, 1)), ConvLayer(16, 16, (1, 1))
DEEP = ConvLayer(1024, 1024, (1, 1))


def offsets(func: tirx.PrimFunc, elements: int) -> set[str]:
    """Types of the offsets into tensors of at least so many elements."""
    found: set[str] = set()

    def look(access: ir.TensorLoad | tirx.BufferStore) -> None:
        tensor = access.buffer if isinstance(access, tirx.BufferStore) else access.source
        if math.prod(int(extent) for extent in tensor.shape) >= elements:
            index = access.indices[0]
            found.add(str((index.base if isinstance(index, tirx.Ramp) else index).ty.dtype))

    callbacks = ((ir.TensorLoad, look), (tirx.BufferStore, look))
    tvm_ffi.structural_walk(func.body, callbacks)
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("layers", "size"), [((SAME,), 4096), ((DEEP,), 512), ((SAME, POINT), 4096)]
)
def test_tensors_beyond_32_bits_have_offsets_of_64(
    layers: tuple[ConvLayer, ...], size: int
) -> None:
    rule = FusedConv2D() if len(layers) > 1 else Conv2D()
    for batch, expected in ((7, "int32"), (8, "int64")):
        case = Case(layers, batch=batch, height=size, width=size)
        func = rule.apply(build(case), AVX2, False).mod["main"]
        assert offsets(func, 7 * 2**28) == {expected}


def test_images_beyond_32_bits_are_refused() -> None:
    case = Case((POINT,), height=16384, width=8192)
    with pytest.raises(OpError, match="an image of 'data' of shape 1, 2, 16384, 8192, 8 has 2147"):
        Conv2D().apply(build(case), AVX2, False)
