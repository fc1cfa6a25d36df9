# SPDX-License-Identifier: Apache-2.0
"""Pass ``KeepBytes``: which weights of packed convolutions stay bytes, and their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import GenericConst
from tvm.target import Target

from relay_passes import ChooseWinograd, KeepBytes
from relay_passes.layout.packed.weight_packing import pack_array, weight_form
from relay_passes.op import conv2d
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, ConvLayer

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
RNG = np.random.default_rng(11)
LATE = ConvLayer(128, 120, (1, 1))
THREE = ConvLayer(128, 128, (3, 3), padding=(1, 1, 1, 1))


def multiples(layer: ConvLayer, most: int = 127) -> np.ndarray:
    """Weights that are multiples of a scale for each output channel; one channel is zero."""
    shape = layer.out_channels, layer.in_channels // layer.groups, *layer.kernel
    integers = RNG.integers(-most - 1, most + 1, shape)
    integers[3] = 0
    return (integers * RNG.uniform(0.01, 0.1, (len(integers), 1, 1, 1))).astype("float32")


def packed(layer: ConvLayer, weight: np.ndarray, size: int = 4, batch: int = 1, nchw: bool = False):
    """A module of one packed layer with a residual."""
    channels = [-(-count // 8) for count in (layer.in_channels, layer.out_channels)]
    data = (layer.in_channels, size, size) if nchw else (channels[0], size, size, 8)
    x = relax.Var("x", relax.TensorType((batch, *data), "float32"))
    form = str(weight_form(layer, 8, nchw))
    call = conv2d(
        x,
        relax.const(pack_array(weight, form, 8)),
        relax.const(np.ones((channels[1], 8), "float32")),
        **layer.to_attrs(),
        data_layout="NCHW" if nchw else "NCHW8c",
        out_layout="NCHW8c",
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()


def stored(mod: tvm.IRModule, **choices: object) -> list[np.ndarray] | None:
    """Integers and scales after the pass; None where the weight stays."""
    before = mod.script(show_meta=True)
    found = KeepBytes(TARGET, **choices)(mod)
    assert mod.script(show_meta=True) == before
    tvm.ir.assert_structural_equal(KeepBytes(TARGET, **choices)(found), found)
    (binding,) = found["main"].body.blocks[0].bindings
    constants = [
        each.value.numpy() for each in binding.value.args if isinstance(each, GenericConst)
    ]
    if len(constants) == 2:
        tvm.ir.assert_structural_equal(found, mod)
        return None
    integers, _, scale = constants
    return [integers, scale]


def test_scales_of_another_shape_are_refused() -> None:
    x = relax.Var("x", relax.TensorType((1, 2, 4, 4, 8), "float32"))
    weight = relax.const(np.ones((2, 2, 1, 1, 8, 8), "int8"))
    bias, short = (relax.const(np.ones((blocks, 8), "float32")) for blocks in (2, 1))
    channels = {"in_channels": 16, "out_channels": 16}
    layout = {"data_layout": "NCHW8c", "out_layout": "NCHW8c"}
    with pytest.raises(OpError, match="expected a packed layer"):
        conv2d(x, weight, bias, scale=short, **layout, **channels)
    with pytest.raises(OpError, match="element types"):
        conv2d(x, weight, bias, **layout, **channels)


@pytest.mark.parametrize(
    "layer",
    [
        LATE,
        ConvLayer(120, 72, (3, 3), (2, 2), (1, 1, 1, 1), activation=Activation("relu")),
        ConvLayer(96, 96, (3, 3), (1, 1), (1, 1, 1, 1), groups=3),
    ],
    ids=str,
)
def test_integers_and_scales_are_the_weights(layer: ConvLayer) -> None:
    weight = multiples(layer)
    integers, scale = stored(packed(layer, weight))  # type: ignore[misc]
    assert integers.dtype == np.int8 and scale.dtype == np.float32
    form = str(weight_form(layer, 8, False))
    factors = np.moveaxis(scale[:, :, None, None, None, None], 1, 5)
    exact = pack_array(weight, form, 8)
    assert np.abs(integers * factors - exact).max() < 1e-5 * np.abs(exact).max()


def test_weights_that_are_few_or_no_multiples_stay() -> None:
    weight = multiples(LATE)
    assert stored(packed(LATE, weight, size=8)) is None  # less than data and output
    assert stored(packed(LATE, weight, size=8), rounds=True) is not None
    assert stored(packed(LATE, weight, batch=4)) is None
    assert stored(packed(LATE, RNG.standard_normal(weight.shape).astype("float32"))) is None
    assert stored(packed(LATE, multiples(LATE, most=200))) is None
    few = ConvLayer(16, 16, (1, 1))
    assert stored(packed(few, multiples(few)), rounds=True) is None
    depthwise = ConvLayer(512, 512, (3, 3), padding=(1, 1, 1, 1), groups=512)
    assert stored(packed(depthwise, multiples(depthwise)), rounds=True) is None
    first = ConvLayer(7, 128, (7, 7))
    assert stored(packed(first, multiples(first), 9, nchw=True), rounds=True) is None
    broken = weight.copy()
    broken[5, 6] = np.nan
    assert stored(packed(LATE, broken), rounds=True) is None


def test_layers_of_winograd_are_decided_before() -> None:
    mod = packed(THREE, multiples(THREE), 14)
    chosen = ChooseWinograd("auto", TARGET)(mod)
    assert "winograd_conv2d" in chosen.script()
    tvm.ir.assert_structural_equal(KeepBytes(TARGET, rounds=True)(chosen), chosen)
    kept = KeepBytes(TARGET, rounds=True)(mod)
    tvm.ir.assert_structural_equal(ChooseWinograd("always", TARGET)(kept), kept)


@pytest.mark.slow
def test_bytes_stay_by_default_where_no_time_is_lost() -> None:
    """Weights are read from memory for a single pixel, and arithmetic decides with many."""
    layer = ConvLayer(2048, 2048, (1, 1))
    weight = multiples(layer)
    assert stored(packed(layer, weight, size=1)) is not None
    assert stored(packed(layer, weight, size=14)) is None
    assert stored(packed(layer, weight, size=14), rounds=True) is not None


def test_other_weights_are_rounded_when_asked() -> None:
    weight = RNG.standard_normal((120, 128, 1, 1)).astype("float32")
    weight[7] = 0
    found = stored(packed(LATE, weight), rounds=True)
    assert found is not None
    integers, scale = found
    exact = pack_array(weight, "dense", 8)
    errors = np.abs(integers * scale[:, None, None, None, None] - exact).max(axis=(1, 2, 3, 4))
    largest = np.abs(exact).max(axis=(1, 2, 3, 4))
    assert (errors <= largest / 254 * (1 + 1e-5)).all()
    assert not integers[0, ..., 7].any()
