# SPDX-License-Identifier: Apache-2.0
"""Fused pairs that pack their data or unpack their output themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cpu.conv_cases import ACTIVATION, TARGET, Case
from cpu.plain_cases import build, check, depthwise, kernel_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.cpu.conv2d.fused_conv2d import (
    LOOPS,
    FusedConv2D,
    FusedConv2DKnobs,
    fused_conv2d_template,
    takes_plain,
)
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, ConvLayer
from tests.selection import in_turns

SEED = st.integers(0, 2**32 - 1)
SAME = (1, 1, 1, 1)
RELU6 = Activation("relu6")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A depthwise and a pointwise layer, of which the first may read NCHW data."""
    channels = draw(st.sampled_from([8, 13, 16, 24, 40]))
    kernel, stride = draw(st.sampled_from([3, 5])), draw(st.integers(1, 2))
    first = depthwise(channels, kernel, stride, draw(ACTIVATION))
    outputs = draw(st.sampled_from([5, 13, 16, 24, 40]))
    second = ConvLayer(channels, outputs, (1, 1), activation=draw(ACTIVATION))
    return Case(
        (first, second),
        batch=draw(st.integers(1, 2)),
        height=draw(st.integers(1, 20)),
        width=draw(st.integers(5, 20)),
        lanes=draw(st.sampled_from([4, 8])),
        residual=draw(st.booleans()),
    )


@st.composite
def knobs(draw: st.DrawFn, case: Case, data: bool, out: bool) -> FusedConv2DKnobs:
    """Any knobs that the template takes for this pair."""
    small = st.integers(1, 3)
    channels = case.layers[1].in_channels
    blocks = -(-channels // case.lanes)
    split = not out and not (data and channels % case.lanes)
    return FusedConv2DKnobs(
        pixels1=draw(st.integers(1, 4)),
        blocks1=draw(small),
        pixels2=draw(st.integers(1, 4)),
        blocks2=draw(small),
        h_t=draw(st.integers(1, min(3, case.out_shape[2]) if data else 3)),
        w_t=1 if out else draw(small),
        oc_t=draw(small),
        h=draw(st.integers(1, 4)),
        w_o=1 if out else draw(small),
        ic_o=draw(st.sampled_from([n for n in range(1, blocks + 1) if blocks % n == 0]))
        if split
        else 1,
        order=draw(st.permutations(LOOPS).map(tuple)),
        compute_at=draw(st.integers(0, 4)),
        prefetch=draw(st.booleans()),
    )


SIDES = [(True, True), (True, False), (False, True)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("data", "out"), SIDES, ids=["both", "data", "out"])
@given(cases(), st.data(), SEED)
@settings(max_examples=settings.default.max_examples // 10)
def test_numbers_with_any_knobs(data, out, case, drawn, seed):
    kernel = kernel_of(case, data, out)
    assume(takes_plain(kernel, data, out))
    func = build(case, data, out)
    chosen = [drawn.draw(knobs(case, data, out)) for _ in range(2)]
    scheduled = [fused_conv2d_template(func, kernel, choice).mod["main"] for choice in chosen]
    default = FusedConv2D().apply(func, TARGET, False)
    assert default is not None
    check(case, data, out, [*scheduled, default.mod["main"]], seed)


BLOCK = Case(
    (depthwise(8, 3, 2), ConvLayer(8, 13, (1, 1))), height=9, width=7, lanes=4, residual=True
)
ORDERS = list(itertools.permutations(LOOPS))


@pytest.mark.slow
@pytest.mark.parametrize("compute_at", in_turns(range(5), every=3))
def test_numbers_of_every_order(compute_at):
    functions = []
    for number, order in enumerate(ORDERS):
        if number % 5 == compute_at:
            chosen = FusedConv2DKnobs(
                pixels1=3, blocks1=1, pixels2=3, blocks2=2, h_t=2, h=2,
                order=order, compute_at=compute_at,
            )  # fmt: skip
            kernel = kernel_of(BLOCK, True, True)
            functions.append(fused_conv2d_template(build(BLOCK, True, True), kernel, chosen))
    check(BLOCK, True, True, [schedule.mod["main"] for schedule in functions], seed=compute_at)


@pytest.mark.slow
def test_numbers_where_only_the_data_is_plain_and_everything_is_split():
    kernel, func = kernel_of(BLOCK, True, False), build(BLOCK, True, False)
    functions = [
        fused_conv2d_template(
            func,
            kernel,
            FusedConv2DKnobs(
                pixels1=2, blocks1=1, pixels2=2, blocks2=2, h_t=2, w_t=2, h=2, w_o=2, ic_o=2,
                order=("h_o", "ic_o", "w_o", "oc2"), compute_at=compute_at,
            ),
        ).mod["main"]
        for compute_at in range(5)
    ]  # fmt: skip
    check(BLOCK, True, False, functions, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["dense", "strided"])
def test_only_the_output_of_other_first_layers_is_plain(layer):
    first = {
        "dense": ConvLayer(13, 16, (3, 3), padding=SAME, activation=RELU6),
        "strided": ConvLayer(13, 16, (1, 1), (2, 2), activation=RELU6),
    }[layer]
    case = Case((first, ConvLayer(16, 13, (1, 1))), batch=2, height=7, width=9)
    assert not takes_plain(case.kernel, data=True, out=False)
    assert takes_plain(case.kernel, data=False, out=True)
    schedule = FusedConv2D().apply(build(case, False, True), TARGET, False)
    assert schedule is not None
    check(case, False, True, [schedule.mod["main"]], seed=2)


@pytest.mark.slow
def test_rows_inside_of_channel_tiles():
    case = Case((depthwise(8, 3, 1), ConvLayer(8, 24, (1, 1))), height=2, width=5, lanes=8)
    order = ("oc2", "ic_o", "h_o", "w_o")
    chosen = FusedConv2DKnobs(1, 1, 1, 2, h_t=1, order=order, compute_at=3)
    func = fused_conv2d_template(build(case, True, True), kernel_of(case, True, True), chosen)
    check(case, True, True, [func.mod["main"]], seed=5)


def test_more_pieces_than_rows():
    case = replace(BLOCK, height=3)
    chosen = FusedConv2DKnobs(2, 1, 2, 1, h_t=3)
    kernel = kernel_of(case, False, True)
    func = fused_conv2d_template(build(case, False, True), kernel, chosen).mod["main"]
    check(case, False, True, [func], seed=3)


@pytest.mark.parametrize(("width", "prefetches"), [(14, 4), (80, 0)])
def test_packing_asks_for_the_next_channels_where_rows_are_short(width, prefetches):
    case = replace(BLOCK, layers=(depthwise(16, 3, 1), ConvLayer(16, 8, (1, 1))), width=width)
    kernel = kernel_of(case, True, True)
    knobs = FusedConv2DKnobs(4, 1, 4, 1, h_t=1, h=2)
    text = fused_conv2d_template(build(case, True, True), kernel, knobs).mod.script()
    assert text.count("llvm.prefetch") == prefetches


def test_names_what_cannot_be_plain():
    assert takes_plain(BLOCK.kernel, data=True, out=True)
    second = ConvLayer(8, 13, (3, 3), padding=SAME)
    for kernel in (
        replace(BLOCK.kernel, layers=(BLOCK.layers[0], second)),
        replace(BLOCK.kernel, layers=BLOCK.layers[:1]),
        replace(BLOCK.kernel, height=None),
        replace(BLOCK.kernel, data_layout="NCHW"),
        replace(BLOCK.kernel, data_layout="NCHW6c", out_layout="NCHW6c"),
    ):
        assert not takes_plain(kernel, data=True, out=False)
        assert not takes_plain(kernel, data=False, out=True)
    narrow = replace(BLOCK.kernel, width=1)
    assert not takes_plain(narrow, data=True, out=False)
    assert takes_plain(narrow, data=False, out=True)
    assert takes_plain(replace(BLOCK.kernel, batch=None), data=True, out=True)


@pytest.mark.parametrize(
    ("data", "out", "changed", "message"),
    [
        (False, True, {"w_t": 2}, "w_t is 2; expected 1, because the kernel unpacks whole rows"),
        (False, True, {"w_o": 3}, "w_o is 3; expected 1, because the kernel unpacks whole rows"),
        (True, True, {"ic_o": 2}, "ic_o is 2; expected 1, because the kernel unpacks whole rows"),
        (True, False, {"h_t": 6}, "h_t is 6; expected at most the 5 rows of the output"),
    ],
    ids=["w_t", "w_o", "ic_o", "h_t"],
)
def test_refuses_knobs(data, out, changed, message):
    chosen = replace(FusedConv2DKnobs(3, 1, 3, 2, h_t=1), **changed)
    with pytest.raises(OpError, match=message):
        fused_conv2d_template(build(BLOCK, data, out), kernel_of(BLOCK, data, out), chosen)


def test_refuses_to_split_channels_that_do_not_fill_blocks():
    case = replace(BLOCK, layers=(depthwise(13, 3, 1), ConvLayer(13, 8, (1, 1))), residual=False)
    chosen = FusedConv2DKnobs(3, 1, 3, 2, h_t=1, ic_o=2)
    with pytest.raises(OpError, match="ic_o is 2; .* because 13 channels do not fill blocks of 4"):
        fused_conv2d_template(build(case, True, False), kernel_of(case, True, False), chosen)


def test_refuses_pairs_that_cannot_be_plain():
    case = replace(BLOCK, width=1)
    with pytest.raises(OpError, match="plain_data=True and plain_out=False; expected"):
        chosen = FusedConv2DKnobs(1, 1, 1, 1, h_t=1)
        fused_conv2d_template(build(case, True, False), kernel_of(case, True, False), chosen)
