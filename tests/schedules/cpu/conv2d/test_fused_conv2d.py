# SPDX-License-Identifier: Apache-2.0
"""The rule for a fused pair: its numbers under all knobs, and what it leaves alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import tvm_ffi
from cpu.conv_cases import TARGET, Case, build, cases, check, compile_function, outer_loops, up
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir, tirx
from tvm.target import Target

from schedules.cpu.conv2d.fused_conv2d import (
    LOOPS,
    FusedConv2D,
    FusedConv2DKnobs,
    fused_conv2d_template,
    unsupported,
)
from schedules.errors import OpError
from schedules.workload.conv2d import ACTIVATIONS, Activation, ConvLayer, to_json
from tests.selection import in_turns

SEED = st.integers(0, 2**32 - 1)
SAME = (1, 1, 1, 1)
RELU6 = Activation("relu6")
ORDERS = list(itertools.permutations(LOOPS))


def knobs(blocks: int) -> st.SearchStrategy[FusedConv2DKnobs]:
    """Any knobs for a second layer that reads ``blocks`` blocks."""
    small = st.integers(1, 3)
    return st.builds(
        FusedConv2DKnobs,
        pixels1=st.integers(1, 4),
        blocks1=small,
        pixels2=st.integers(1, 4),
        blocks2=small,
        h_t=small,
        w_t=small,
        oc_t=small,
        h=st.integers(1, 4),
        w_o=small,
        ic_o=st.sampled_from([d for d in range(1, blocks + 1) if blocks % d == 0]),
        order=st.sampled_from(ORDERS),
        compute_at=st.integers(0, 4),
        prefetch=st.booleans(),
    )


def run(case: Case, chosen: FusedConv2DKnobs, seed: int) -> None:
    func = fused_conv2d_template(build(case), case.kernel, chosen).mod["main"]
    check(case, compile_function(func), seed)


def schedule(case: Case, target: Target = TARGET) -> tirx.PrimFunc:
    found = FusedConv2D().apply(build(case), target, False)
    assert found is not None
    return found.mod["main"]


@given(cases(pair=True), SEED)
@settings(max_examples=settings.default.max_examples // 7)
def test_numbers_with_default_knobs(case, seed):
    check(case, compile_function(schedule(case)), seed)


@given(cases(pair=True), st.data(), SEED)
@settings(max_examples=settings.default.max_examples // 3)
def test_numbers_with_any_knobs(case, data, seed):
    blocks = up(case.layers[1].in_channels, case.lanes)
    run(case, data.draw(knobs(blocks)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("order", in_turns(ORDERS, every=4))
def test_numbers_of_every_order(order):
    layers = (
        ConvLayer(4, 8, (2, 2), padding=SAME, activation=RELU6),
        ConvLayer(8, 8, (3, 2), (1, 2), padding=SAME),
    )
    case = Case(layers, height=5, width=6, lanes=4, residual=True)
    for compute_at in (ORDERS.index(order) % 5, (ORDERS.index(order) + 2) % 5):
        chosen = FusedConv2DKnobs(
            pixels1=3, blocks1=1, pixels2=2, blocks2=1, h_t=2, h=2, w_o=2, ic_o=2,
            order=order, compute_at=compute_at,
        )  # fmt: skip
        run(case, chosen, seed=compute_at)


NAMED = {
    "depthwise, pointwise": Case(
        (
            ConvLayer(40, 40, (3, 3), (2, 2), (0, 0, 1, 1), groups=40, activation=RELU6),
            ConvLayer(40, 24, (1, 1)),
        ),
        height=14,
        width=14,
        residual=True,
    ),
    "5x5 depthwise, pointwise, batch": Case(
        (
            ConvLayer(24, 24, (5, 5), (1, 1), (2,) * 4, groups=24, activation=RELU6),
            ConvLayer(24, 13, (1, 1), activation=RELU6),
        ),
        batch=3,
    ),
    "3x3, pointwise": Case(
        (ConvLayer(16, 24, (3, 3), padding=SAME, activation=RELU6), ConvLayer(24, 64, (1, 1))),
        residual=True,
    ),
    "wide lanes": Case(
        (
            ConvLayer(24, 24, (3, 3), padding=SAME, groups=24, activation=RELU6),
            ConvLayer(24, 40, (1, 1)),
        ),
        height=7,
        width=7,
        lanes=16,
    ),
    "3x3, 3x3": Case(
        (
            ConvLayer(13, 16, (3, 3), padding=SAME, activation=RELU6),
            ConvLayer(16, 13, (3, 3), padding=SAME),
        ),
        residual=True,
    ),
    "strides in both": Case(
        (
            ConvLayer(8, 16, (3, 3), (2, 1), SAME, activation=RELU6),
            ConvLayer(16, 8, (3, 3), (1, 2), SAME),
        ),
        batch=2,
        height=17,
        width=13,
    ),
    "dilation in both": Case(
        (
            ConvLayer(8, 8, (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), activation=RELU6),
            ConvLayer(8, 8, (3, 3), (1, 1), (3, 2, 1, 0), (3, 2)),
        ),
        height=13,
        width=11,
    ),
    "first layer of a network": Case(
        (
            ConvLayer(3, 16, (3, 3), (2, 2), SAME, activation=RELU6),
            ConvLayer(16, 16, (3, 3), padding=SAME),
        ),
        height=19,
        width=23,
        nchw=True,
    ),
    "second layer sees padding only at its borders": Case(
        (ConvLayer(8, 8, (1, 1), activation=RELU6), ConvLayer(8, 8, (2, 2), (3, 3), (4, 4, 4, 4))),
        height=3,
        width=2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())
def test_numbers_of_named_pairs(case):
    check(case, compile_function(schedule(case)), seed=3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_numbers_of_every_activation_between_the_layers(kind):
    first = ConvLayer(8, 8, (3, 3), groups=8, activation=Activation(kind, -0.4, 0.7))
    case = Case((first, ConvLayer(8, 8, (1, 1))), height=7, width=7)
    check(case, compile_function(schedule(case)), seed=4)


@pytest.mark.slow
def test_one_function_serves_every_batch():
    case = NAMED["depthwise, pointwise"]
    symbolic = to_json(replace(case.kernel, batch=None))
    func = build(case, tirx.Var("n", "int64")).with_attr("tvm_fusion.workload", symbolic)
    executable = compile_function(FusedConv2D().apply(func, TARGET, False).mod["main"])
    for batch in (1, 3):
        check(replace(case, batch=batch), executable, seed=batch)


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())
def test_one_parallel_loop_encloses_everything(case):
    (loop,) = outer_loops(schedule(case).body)
    assert loop.kind == tirx.ForKind.PARALLEL


def test_tiles_declare_what_they_read_of_the_rows_between_the_layers():
    """TVM takes minutes to join the regions of all reads of two unrolled 3x3 layers."""
    blocks: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(schedule(NAMED["3x3, 3x3"]).body, (s_tir.SBlock, blocks.append))
    tiles = [block for block in blocks if block.name_hint == "tile"]
    declared = [block for block in tiles if "explicit_read_region" in block.annotations]
    assert 0 < len(declared) < len(tiles), "layer two reads a local buffer, layer one does not"
    for block in declared:
        (region,) = block.reads
        assert [int(r.extent) for r in region.region] == [int(e) for e in region.source.shape]


def test_the_parallel_loop_runs_over_images_and_pieces():
    case = replace(NAMED["3x3, 3x3"], batch=3)
    chosen = FusedConv2DKnobs(4, 1, 4, 1, h_t=2, w_t=3, oc_t=2)
    func = fused_conv2d_template(build(case), case.kernel, chosen).mod["main"]
    (loop,) = outer_loops(func.body)
    assert int(loop.extent) == 3 * 2 * 3 * 2


GROUPED = ConvLayer(16, 16, (3, 3), padding=SAME, groups=2)
SINGLE = Case((ConvLayer(16, 16, (3, 3)),))
PAIR = NAMED["3x3, pointwise"]


def test_names_what_it_cannot_take():
    dense, depthwise = ConvLayer(16, 16, (1, 1)), ConvLayer(16, 16, (3, 3), groups=16)
    assert unsupported(dense) is None
    assert "second layer has groups" in str(unsupported(GROUPED))
    assert "second layer has groups" in str(unsupported(depthwise))


@pytest.mark.parametrize(
    ("func", "target"),
    [
        (build(PAIR, marked=False), TARGET),
        (build(SINGLE), TARGET),
        (build(PAIR), Target("c")),
        (build(Case((ConvLayer(16, 16, (1, 1)), GROUPED))), TARGET),
        (
            build(PAIR).with_attr(
                "tvm_fusion.workload",
                to_json(replace(PAIR.kernel, data_layout="NCHW", out_layout="NCHW")),
            ),
            TARGET,
        ),
    ],
    ids=["unmarked", "single layer", "other target", "groups in layer two", "NCHW"],
)
def test_leaves_other_functions_alone(func, target):
    assert FusedConv2D().apply(func, target, False) is None
    assert FusedConv2D().apply(build(PAIR), TARGET, False) is not None


@pytest.mark.parametrize(
    "order", [(), LOOPS[:3], ("oc2", "oc2", "h_o", "w_o"), (*LOOPS, "h_o"), ("n", *LOOPS[1:])]
)
def test_refuses_orders_that_are_no_permutation(order):
    with pytest.raises(OpError, match="order is .*expected a permutation of"):
        FusedConv2DKnobs(4, 2, 4, 2, h_t=1, order=order)


@pytest.mark.parametrize("compute_at", [-1, 5])
def test_refuses_places_outside_the_nest(compute_at):
    with pytest.raises(OpError, match=f"compute_at is {compute_at}; expected 0 to 4"):
        FusedConv2DKnobs(4, 2, 4, 2, h_t=1, compute_at=compute_at)
