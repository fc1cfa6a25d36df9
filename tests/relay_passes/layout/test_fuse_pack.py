# SPDX-License-Identifier: Apache-2.0
"""Pass ``FusePack``: what merges, what is left alone, and the same numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_strategies import Parameters
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic
from tvm.s_tir import dlight
from tvm.script.parser import relax as R
from tvm.target import Target

from relay_passes import FuseConv2D, FuseEpilogue, FusePack, PackLayout
from schedules import cpu
from schedules.cpu.core.machine import CPUInfo
from schedules.workload.conv2d import Activation, ConvLayer
from tvm_fusion.compiler.targets import resolve

TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
HOST = resolve("native", 2)


def depthwise(channels=16, kernel=3, stride=1):
    margin = (kernel // 2,) * 4
    return ConvLayer(
        channels,
        channels,
        (kernel, kernel),
        (stride, stride),
        margin,
        groups=channels,
        activation=Activation("relu6"),
    )


def dense(inputs=16, outputs=24, kernel=1, activation="none"):
    margin = (kernel // 2,) * 4
    return ConvLayer(
        inputs, outputs, (kernel, kernel), padding=margin, activation=Activation(activation)
    )


class Network:
    """One function whose calls follow each other as the test emits them."""

    def __init__(self, *shapes):
        self.builder = relax.BlockBuilder()
        self.inputs = [
            relax.Var(f"x{number}", relax.TensorType(shape, "float32"))
            for number, shape in enumerate(shapes)
        ]
        self.rng = np.random.default_rng(7)
        self.parameters = []

    def build(self, body):
        """The module of ``body``, which gets the inputs and gives the outputs."""
        with self.builder.function("main", self.inputs):
            with self.builder.dataflow():
                found = body(*self.inputs)
                outputs = found if isinstance(found, tuple) else (found,)
                outputs = [self.builder.emit_output(value) for value in outputs]
            single = len(outputs) == 1
            self.builder.emit_func_output(outputs[0] if single else relax.Tuple(outputs))
        return self.builder.get()

    def pair(self, value, first, second, residual=None):
        """A fused pair on NCHW."""
        one, two = Parameters.of(first, self.rng), Parameters.of(second, self.rng)
        self.parameters += [one, two]
        constants = [relax.const(array) for p in (one, two) for array in (p.weight, p.bias)]
        rest = [] if residual is None else [residual]
        attributes = {
            f"{name}{digit}": given
            for digit, layer in ((1, first), (2, second))
            for name, given in (
                ("strides", list(layer.strides)),
                ("padding", list(layer.padding)),
                ("groups", layer.groups),
                ("activation", layer.activation.kind),
            )
        }
        call = R.tvm_fusion.fused_conv2d(value, *constants, *rest, **attributes)
        return self.builder.emit(call)

    def emit(self, call):
        return self.builder.emit(call)


def single(first=None, second=None, shape=(1, 16, 9, 7)):
    """A module that is one pair."""
    network = Network(shape)
    return network.build(lambda x: network.pair(x, first or depthwise(), second or dense()))


def legalized(mod, target=TARGET, block=None):
    with target:
        mod = PackLayout(block=block)(mod) if block else PackLayout(target=target)(mod)
        return relax.transform.LegalizeOps()(mod)


def called(mod):
    """The marks of the functions that ``main`` calls, in order; ``None`` for others."""
    calls = [
        binding.value
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]
    assert all(call.op.name == "relax.call_tir" for call in calls)
    return [(mod[call.args[0]].attrs or {}).get("tvm_fusion.op") for call in calls]


def workloads(mod):
    return [
        json.loads(func.attrs["tvm_fusion.workload"])
        for func in mod.functions.values()
        if func.attrs and "tvm_fusion.workload" in func.attrs
    ]


def sides(mod):
    """(plain_data, plain_out) of the module's one pair."""
    (workload,) = workloads(mod)
    return workload["plain_data"], workload["plain_out"]


def fused(mod):
    """Merge, and check that the input stays as it was and that twice equals once."""
    before = mod.script(show_meta=True)
    once = FusePack()(mod)
    assert mod.script(show_meta=True) == before
    tvm.ir.assert_structural_equal(FusePack()(once), once, map_free_vars=True)
    return once


@pytest.mark.parametrize("batch", [1, 3, "n"])
def test_a_pair_between_nchw_becomes_one_call(batch):
    batch = tvm.tirx.Var("n", "int64") if batch == "n" else batch
    mod = legalized(single(shape=(batch, 16, 9, 7)))
    assert called(mod) == ["pack", "fused_conv2d", "unpack"]
    merged = fused(mod)
    assert called(merged) == ["fused_conv2d"]
    assert sides(merged) == (True, True)
    assert len(merged.get_global_vars()) == 2
    tvm.ir.assert_structural_equal(merged["main"].ret_ty, mod["main"].ret_ty, map_free_vars=True)


def test_a_pack_that_two_pairs_read_stays():
    network = Network((1, 16, 9, 7))

    def body(x):
        return tuple(network.pair(x, depthwise(), dense()) for _ in range(2))

    mod = legalized(network.build(body))
    assert sorted(called(mod)) == ["fused_conv2d"] * 2 + ["pack"] + ["unpack"] * 2
    merged = fused(mod)
    assert sorted(called(merged)) == ["fused_conv2d"] * 2 + ["pack"]
    assert {(w["plain_data"], w["plain_out"]) for w in workloads(merged)} == {(False, True)}


def test_a_result_that_others_read_packed_stays():
    network = Network((1, 16, 9, 7))

    def body(x):
        between = network.pair(x, depthwise(), dense())
        return between, network.pair(between, depthwise(24), dense(24))

    mod = legalized(network.build(body))
    assert sorted(called(mod)) == ["fused_conv2d"] * 2 + ["pack"] + ["unpack"] * 2
    merged = fused(mod)
    assert sorted(called(merged)) == ["fused_conv2d"] * 2 + ["unpack"]
    found = {w["layers"][0]["in_channels"]: (w["plain_data"], w["plain_out"])
             for w in workloads(merged)}  # fmt: skip
    assert found == {16: (True, False), 24: (False, True)}


def test_pairs_in_a_row_stay_packed_between():
    network = Network((1, 16, 9, 7))

    def body(x):
        return network.pair(network.pair(x, depthwise(), dense()), depthwise(24), dense(24))

    merged = fused(legalized(network.build(body)))
    assert called(merged) == ["fused_conv2d"] * 2
    found = [(w["layers"][0]["in_channels"], w["plain_data"], w["plain_out"])
             for w in workloads(merged)]  # fmt: skip
    assert sorted(found) == [(16, True, False), (24, False, True)]


def test_a_residual_keeps_its_pack():
    network = Network((1, 16, 9, 7), (1, 24, 9, 7))
    mod = network.build(lambda x, skip: network.pair(x, depthwise(), dense(), skip))
    mod = legalized(mod)
    assert sorted(called(mod)) == ["fused_conv2d", "pack", "pack", "unpack"]
    merged = fused(mod)
    assert called(merged) == ["pack", "fused_conv2d"]
    assert sides(merged) == (True, True)


def test_an_input_that_is_the_residual_too_stays_packed():
    network = Network((1, 16, 9, 7))
    mod = legalized(network.build(lambda x: network.pair(x, depthwise(), dense(16, 16), x)))
    assert called(mod) == ["pack", "fused_conv2d", "unpack"]
    merged = fused(mod)
    assert called(merged) == ["pack", "fused_conv2d"]
    assert sides(merged) == (False, True)


def test_a_packed_result_of_the_function_stays():
    network = Network((1, 16, 9, 7))

    def body(x):
        packed = network.emit(R.tvm_fusion.pack(x, block=8))
        return packed, network.pair(x, depthwise(), dense())

    mod = relax.transform.EliminateCommonSubexpr()(legalized(network.build(body)))
    mod = relax.transform.CanonicalizeBindings()(mod)
    assert sorted(called(mod)) == ["fused_conv2d", "pack", "unpack"]
    assert sides(fused(mod)) == (False, True)


def test_a_dense_first_layer_only_takes_the_unpack():
    merged = fused(legalized(single(dense(16, 24, 3), dense(24, 16))))
    assert called(merged) == ["pack", "fused_conv2d"]
    assert sides(merged) == (False, True)


def elementwise():
    network = Network((1, 16, 9, 7))

    def body(x):
        return network.emit(relax.op.exp(x))

    return network.build(body)


def packed_on_both_sides():
    network = Network((1, 16, 9, 7))

    def body(x):
        packed = network.emit(R.tvm_fusion.pack(x, block=8))
        return network.emit(R.tvm_fusion.unpack(packed, channels=16))

    return network.build(body)


@pytest.mark.parametrize(
    "mod",
    [
        legalized(single(dense(16, 24, 3), dense(24, 16, 3))),
        legalized(single(shape=(1, 16, tvm.tirx.Var("h", "int64"), 7))),
        legalized(single(), block=6),
        legalized(elementwise()),
        legalized(packed_on_both_sides()),
        single(),
    ],
    ids=["3x3 layer two", "symbolic height", "six lanes", "no pair", "no pair between", "ops"],
)
def test_leaves_everything_else_alone(mod):
    tvm.ir.assert_structural_equal(fused(mod), mod, map_free_vars=True)


def test_leaves_calls_outside_a_dataflow_block_alone():
    mod = relax.transform.ToNonDataflow()(legalized(single()))
    tvm.ir.assert_structural_equal(fused(mod), mod, map_free_vars=True)


def run_scheduled(mod, *arrays):
    """Compile with this project's rules; the outputs of ``main``."""
    with HOST:
        mod = relax.transform.AnnotateTIROpPattern()(mod)
        mod = dlight.ApplyDefaultSchedule(*cpu.RULES)(mod)
    steps = [*cpu_generic.dataflow_lower_passes(HOST), *cpu_generic.finalize_passes(HOST)]
    executable = tvm.compile(mod, HOST, relax_pipeline=tvm.transform.Sequential(steps))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()


@pytest.mark.slow
@given(
    channels=st.sampled_from([13, 16, 19, 24, 40]),
    outputs=st.sampled_from([13, 16, 24, 40]),
    size=st.tuples(st.integers(5, 20), st.integers(8, 20)),  # two rows hold 16 lanes
    stride=st.integers(1, 2),
    kernel=st.sampled_from([3, 5]),
    first_is_dense=st.booleans(),
    residual=st.booleans(),
    batch=st.integers(1, 2),
    activation=st.sampled_from(["none", "relu", "hardswish"]),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_of_any_pair(
    reference,
    channels,
    outputs,
    size,
    stride,
    kernel,
    first_is_dense,
    residual,
    batch,
    activation,
):
    first = dense(channels, channels, kernel) if first_is_dense else None
    first = first or depthwise(channels, kernel, stride)
    second = dense(channels, outputs, activation=activation)
    out_shape = (batch, outputs, *first.output_size(*size))
    network = Network((batch, channels, *size), out_shape)
    mod = network.build(lambda x, skip: network.pair(x, first, second, skip if residual else None))
    merged = fused(legalized(mod, HOST))
    # A dense first layer reads fewer channels than a block has from NCHW; no kernel then unpacks.
    reads_plain = first_is_dense and channels < CPUInfo.from_target(HOST).lanes("float32")
    packs = ["pack"] * (first_is_dense - reads_plain + residual)
    assert called(merged) == packs + ["fused_conv2d"] + ["unpack"] * reads_plain
    arrays = [
        network.rng.standard_normal(shape).astype("float32")
        for shape in ((batch, channels, *size), out_shape)
    ]
    one, two = network.parameters
    middle = reference.layer(arrays[0], one.weight, one.bias, first)
    skip = arrays[1] if residual else None
    expected = reference.layer(middle, two.weight, two.bias, second, skip)
    found = run_scheduled(merged, *arrays)
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.slow
def test_numbers_of_relax_convolutions(run_module):
    network = Network((2, 13, 11, 9))
    first, second = depthwise(13, 5, 2), dense(13, 21)

    def body(x):
        one, two = (Parameters.of(layer, network.rng) for layer in (first, second))
        op, emit = relax.op, network.emit
        value = emit(op.nn.conv2d(x, relax.const(one.weight), 2, 2, groups=13))
        value = emit(op.add(value, relax.const(one.bias.reshape(1, -1, 1, 1))))
        value = emit(op.nn.relu6(value))
        value = emit(op.nn.conv2d(value, relax.const(two.weight)))
        return emit(op.add(value, relax.const(two.bias.reshape(1, -1, 1, 1))))

    mod = network.build(body)
    with HOST:
        lowered = FuseEpilogue()(FuseConv2D(fuse="all")(mod))
    merged = fused(legalized(lowered, HOST))
    assert called(merged) == ["fused_conv2d"]
    x = network.rng.standard_normal((2, 13, 11, 9)).astype("float32")
    np.testing.assert_allclose(run_scheduled(merged, x), run_module(mod, x), rtol=1e-4, atol=1e-4)
