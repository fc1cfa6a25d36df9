# SPDX-License-Identifier: Apache-2.0
"""The rule for one packed convolution: its numbers, its machine code, and what it leaves alone."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cpu.conv_cases import (
    TARGET,
    Case,
    arguments,
    assembly,
    build,
    cases,
    check,
    compile_function,
    loop_bodies,
    outer_loops,
    run,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.target import Target

from schedules.cpu.conv2d.conv2d import Conv2D, Conv2DKnobs, conv2d_template
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.micro_kernel import UNROLLED_STEPS
from schedules.cpu.cost.cost_model import default_conv2d_knobs
from schedules.errors import OpError
from schedules.workload.conv2d import ACTIVATIONS, Activation, ConvLayer, to_json

SEED = st.integers(0, 2**32 - 1)
SAME = (1, 1, 1, 1)
KNOBS = st.builds(
    Conv2DKnobs,
    pixels=st.integers(1, 5),
    blocks=st.integers(1, 3),
    unit_chunks=st.integers(1, 4),
    block_chunks=st.integers(1, 4),
    unit_group=st.integers(1, 6),
    blocks_inside=st.booleans(),
    prefetch=st.booleans(),
)


def schedule(case: Case, target: Target = TARGET) -> tirx.PrimFunc:
    found = Conv2D().apply(build(case), target, False)
    assert found is not None
    return found.mod["main"]


@given(cases(pair=False), SEED)
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers_with_default_knobs(case, seed):
    check(case, compile_function(schedule(case)), seed)


def in_blocks(case: Case) -> int:
    """Input blocks, or pieces of a group, that one output channel reads."""
    layer = case.kernel.layers[0]
    if layer.group_lanes(case.lanes) or case.kernel.data_layout == "NCHW":
        return 1
    return -(-layer.in_channels // layer.groups // layer.input_step(case.lanes))


@given(cases(pair=False), KNOBS, st.integers(1, 4), SEED)
@settings(max_examples=settings.default.max_examples // 2)
def test_numbers_with_any_knobs(case, knobs, most_parts, seed):
    if not knobs.blocks_inside:
        parts = (n for n in range(most_parts, 0, -1) if in_blocks(case) % n == 0)
        knobs = replace(knobs, ic_o=next(parts))
    func = conv2d_template(build(case), case.kernel, knobs).mod["main"]
    check(case, compile_function(func), seed)


def test_a_reduction_in_parts():
    layer = ConvLayer(48, 24, (3, 3), padding=SAME, activation=Activation("relu"))
    case = Case((layer,), height=9, width=7, residual=True)
    knobs = Conv2DKnobs(4, 2, 1, 1, unit_group=2, blocks_inside=False, ic_o=3)
    check(case, compile_function(conv2d_template(build(case), case.kernel, knobs).mod["main"]), 3)


@pytest.mark.parametrize(("parts", "inside"), [(4, False), (2, True)])
def test_parts_that_do_not_fit_are_refused(parts, inside):
    case = Case((ConvLayer(48, 24, (3, 3), padding=SAME),))
    knobs = Conv2DKnobs(4, 2, 1, 1, unit_group=2, blocks_inside=inside, ic_o=parts)
    with pytest.raises(OpError, match=f"ic_o is {parts}; expected a divisor of the 6 input blocks"):
        conv2d_template(build(case), case.kernel, knobs)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4", "neoverse-n1"])
def test_weights_are_asked_for_ahead(cpu):
    triple, lanes, *_ = MACHINES[cpu]
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 2})
    case = Case((ConvLayer(256, 256, (1, 1)),), height=14, width=14, lanes=lanes)
    found = assembly(schedule(case, target), target)
    assert re.search(r"prefetcht1|prfm\tpldl2keep", found)


def test_weights_beyond_the_cache_are_read_in_parts():
    target = CPUInfo(256, 16, True, 2, 32 << 10, 512 << 10, 32 << 20)
    deep = Case((ConvLayer(512, 512, (3, 3), padding=SAME),), height=7, width=7).kernel
    knobs = default_conv2d_knobs(deep, target)
    whole = 9 * 512 * knobs.blocks * 8 * 4
    assert 2 * whole // knobs.ic_o <= target.l2_bytes < 2 * whole
    shallow = Case((ConvLayer(16, 64, (3, 3), padding=SAME),), height=56, width=56).kernel
    assert default_conv2d_knobs(shallow, target).ic_o == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_numbers_of_every_activation(kind):
    layer = ConvLayer(13, 24, (1, 1), activation=Activation(kind, -0.4, 0.7))
    case = Case((layer,), height=7, width=7, residual=True)
    check(case, compile_function(schedule(case)), seed=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "none"])
def test_nan_stays_nan(kind):
    layer = ConvLayer(8, 16, (1, 1), activation=Activation(kind, -0.4, 0.7))
    case = Case((layer,), height=5, width=3)
    packed, _ = arguments(case, seed=1)
    packed[0][0, 0, 2, 1, 3] = np.nan
    found = run(case, compile_function(schedule(case)), packed)
    assert np.isnan(found[0, :, 2, 1]).all() and np.isnan(found).sum() == 16


NAMED = {
    "first layer of a network": Case(
        (ConvLayer(3, 24, (3, 3), (2, 2), (0, 0, 1, 1)),), batch=2, height=18, width=22, nchw=True
    ),
    "depthwise with idle lanes": Case((ConvLayer(40, 40, (5, 5), (2, 2), (2,) * 4, groups=40),)),
    "grouped": Case((ConvLayer(32, 48, (3, 3), padding=SAME, groups=2),), batch=3, residual=True),
    "one pixel": Case((ConvLayer(24, 40, (1, 1)),), height=1, width=1),
    "kernel larger than the image": Case(
        (ConvLayer(5, 13, (7, 7), padding=(3, 3, 3, 3)),), height=2, width=3
    ),
    "rows and columns of padding only": Case(
        (ConvLayer(8, 8, (2, 2), (3, 3), (4, 4, 4, 4), (2, 2)),), height=3, width=2
    ),
    "dilated more than padded": Case(
        (ConvLayer(8, 16, (3, 3), (1, 1), (1, 2, 3, 0), (3, 2)),), height=7, width=7
    ),
    "narrow lanes": Case((ConvLayer(13, 7, (3, 3), padding=SAME),), lanes=4),
    "wide lanes": Case((ConvLayer(40, 24, (1, 1)),), lanes=16),
    "strided pointwise": Case((ConvLayer(16, 24, (1, 1), (2, 2)),), batch=2, height=7, width=7),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())
def test_numbers_of_named_layers(case):
    check(case, compile_function(schedule(case)), seed=2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
def test_one_function_serves_every_batch(kernel):
    case = Case((ConvLayer(13, 24, kernel),), residual=True)
    symbolic = to_json(replace(case.kernel, batch=None))
    func = build(case, tirx.Var("n", "int64")).with_attr("tvm_fusion.workload", symbolic)
    executable = compile_function(Conv2D().apply(func, TARGET, False).mod["main"])
    for batch in (1, 3):
        check(replace(case, batch=batch), executable, seed=batch)


@pytest.mark.parametrize("layer", [ConvLayer(16, 16, (1, 1)), ConvLayer(16, 16, (3, 3), groups=16)])
def test_one_parallel_loop_encloses_everything(layer):
    for batch in (1, 3):
        (loop,) = outer_loops(schedule(Case((layer,), batch=batch)).body)
        assert loop.kind == tirx.ForKind.PARALLEL


def test_large_layers_feed_all_cores():
    layer = ConvLayer(64, 64, (3, 3), padding=SAME)
    target = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 4})
    (loop,) = outer_loops(schedule(Case((layer,), height=56, width=56), target).body)
    assert int(loop.extent) == 4


# Triple, lanes, multiply-add, register, and how an access of the stack looks.
MACHINES = {
    "x86-64-v3": ("x86_64-linux-gnu", 8, r"vfmadd\d+ps\t", "%ymm", "(%rsp"),
    "x86-64-v4": ("x86_64-linux-gnu", 16, r"vfmadd\d+ps\t", "%zmm", "(%rsp"),
    "neoverse-n1": ("aarch64-linux-gnu", 4, r"fmla\t", ".4s", "[sp"),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", MACHINES)
def test_whole_tiles_are_multiply_adds_in_registers(cpu):
    triple, lanes, instruction, register, stack = MACHINES[cpu]
    target = Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 2})
    layer = ConvLayer(64, 64, (3, 3), padding=SAME, activation=Activation("relu"))
    case = Case((layer,), height=60, width=60, lanes=lanes)
    knobs = Conv2DKnobs(6, 2, 2, 1, unit_group=60, blocks_inside=False)
    func = conv2d_template(build(case), case.kernel, knobs).mod["main"]
    found = []
    for body in loop_bodies(assembly(func, target)):
        multiply_adds = [line for line in body if re.search(instruction, line)]
        steps = len(multiply_adds) / (knobs.pixels * knobs.blocks)
        if steps in (min(lanes, UNROLLED_STEPS), 3 * lanes):  # LLVM may unroll three columns
            found.append(body)
            assert all(register in line for line in multiply_adds)
            spilled = [line for line in body if stack in line and register[:2] in line]
            assert len(spilled) <= 1  # There are 96 multiply-adds and more.
    assert found


PACKED = Case((ConvLayer(16, 16, (3, 3)),))
PAIR = Case((ConvLayer(16, 16, (3, 3)), ConvLayer(16, 16, (1, 1))))


@pytest.mark.parametrize(
    ("func", "target"),
    [
        (build(PACKED, marked=False), TARGET),
        (build(PAIR), TARGET),
        (build(PACKED), Target("c")),
        (
            build(PACKED).with_attr(
                "tvm_fusion.workload",
                to_json(replace(PACKED.kernel, data_layout="NCHW", out_layout="NCHW")),
            ),
            TARGET,
        ),
        (
            build(PACKED).with_attr(
                "tvm_fusion.workload", to_json(replace(PACKED.kernel, width=None))
            ),
            TARGET,
        ),
    ],
    ids=["unmarked", "pair", "other target", "NCHW", "symbolic width"],
)
def test_leaves_other_functions_alone(func, target):
    assert Conv2D().apply(func, target, False) is None
    assert Conv2D().apply(build(PACKED), TARGET, False) is not None
