# SPDX-License-Identifier: Apache-2.0
"""Fused pairs from NCHW to NCHW that compute on planes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tvm
from cpu.conv_cases import ACTIVATION, Case, assembly, compile_function
from cpu.plain_cases import arrays_of, build, check, depthwise, kernel_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from schedules.cpu.conv2d.planar.planar_nest import PlanarKnobs, planar_template, takes_planar
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, ConvLayer

LANES = st.sampled_from([None, 4, 8, 16])


def planar(case: Case, knobs: PlanarKnobs):
    kernel = kernel_of(case, True, True)
    return planar_template(build(case, True, True), kernel, knobs).mod["main"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A depthwise layer of any padding and dilation and a pointwise one, with uneven numbers."""
    channels = draw(st.sampled_from([3, 8, 13, 16]))
    rows, columns = draw(st.sampled_from([1, 3, 5])), draw(st.integers(1, 5))
    first = ConvLayer(
        channels,
        channels,
        (rows, columns),
        (draw(st.integers(1, 3)), draw(st.integers(1, 2))),
        tuple(draw(st.integers(0, 3)) for _ in range(4)),
        (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        channels,
        draw(ACTIVATION),
    )
    outputs = draw(st.sampled_from([1, 5, 8, 13, 24]))
    second = ConvLayer(channels, outputs, (1, 1), activation=draw(ACTIVATION))
    size = {"height": draw(st.integers(2, 20)), "width": draw(st.integers(8, 40))}
    lanes = draw(st.sampled_from([8, 16]))
    return Case((first, second), batch=draw(st.integers(1, 2)), lanes=lanes, **size)


@given(cases(), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=6)
def test_numbers_of_any_layers_and_knobs(case, drawn, seed):
    assume(min(case.layers[0].output_size(case.height, case.width)) > 0)
    lanes1, lanes2 = drawn.draw(LANES), drawn.draw(LANES)
    assume(takes_planar(kernel_of(case, True, True), lanes1))
    h_t = drawn.draw(st.integers(1, min(3, case.out_shape[2])))
    h = drawn.draw(st.integers(1, case.out_shape[2] // h_t))
    assume(h * case.out_shape[3] >= (lanes2 or case.lanes))
    chosen = PlanarKnobs(
        h_t=h_t,
        h=h,
        rows=drawn.draw(st.integers(1, 4)),
        outputs=drawn.draw(st.integers(1, 5)),
        vectors=drawn.draw(st.integers(1, 3)),
        lanes1=lanes1,
        lanes2=lanes2,
    )
    check(case, True, True, [planar(case, chosen)], seed)


@pytest.mark.slow
def test_lines_of_the_output_are_asked_for_in_time():
    case = Case((depthwise(16, 3, 1), ConvLayer(16, 16, (1, 1))), height=8, width=56)
    function = planar(case, PlanarKnobs(h_t=1, h=4))
    znver3 = tvm.target.Target({"kind": "llvm", "mcpu": "znver3"})
    assert "prefetchw" in assembly(function, znver3)


SQUARE = Case((depthwise(13, 3, 1), ConvLayer(13, 13, (1, 1))), height=9, width=19, batch=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "stride"),
    [(48, 1)]
    + [
        pytest.param(width, stride, marks=pytest.mark.slow)
        for stride, widths in ((1, (16, 17, 33, 40)), (2, (16, 17, 33, 40, 48)))
        for width in widths
    ],
)
def test_numbers_of_rows_with_and_without_a_rest(width, stride):
    case = replace(SQUARE, layers=(depthwise(13, 3, stride), SQUARE.layers[1]), width=width)
    rows = case.out_shape[2]
    knobs = [PlanarKnobs(1, rows, 4), PlanarKnobs(2, 2, 2), PlanarKnobs(1, 3, 2)]
    check(case, True, True, [planar(case, chosen) for chosen in knobs], seed=width)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "lanes"),
    [(39, 4)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((39, 16), (64, 4), (64, 16))],
)
def test_numbers_of_vectors_of_other_lengths(width, lanes):
    layers = depthwise(13, 5, 2), SQUARE.layers[1]
    case = replace(SQUARE, lanes=lanes, layers=layers, width=width)
    check(case, True, True, [planar(case, PlanarKnobs(2, 2))], seed=lanes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "block", "stride"),
    [(33, 4, 2)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((9, 28), (16,), (1, 2))
    ]
    + [
        pytest.param(*case, marks=pytest.mark.slow) for case in ((33, 4, 1), (56, 8, 1), (56, 8, 2))
    ],
)
def test_numbers_of_vectors_that_differ_from_the_blocks(width, block, stride):
    layers = depthwise(19, 3, stride), ConvLayer(19, 21, (1, 1))
    case = replace(SQUARE, batch=1, lanes=block, layers=layers, height=8, width=width)
    pixels = 2 * case.out_shape[3]
    functions = [
        planar(case, PlanarKnobs(2, 2, 2, 6, 4, lanes1, lanes2))
        for lanes1, lanes2 in ((4, 4), (4, 8), (8, 16), (16, 16), (16, 8))
        if takes_planar(kernel_of(case, True, True), lanes1) and lanes2 <= pixels
    ]
    assert len(functions) >= 2
    check(case, True, True, functions, seed=width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [33, pytest.param(48, marks=pytest.mark.slow)])
def test_numbers_of_steps_of_two_with_any_number_of_columns(width):
    layers = [
        replace(depthwise(13, 3, 2), kernel=(3, columns), padding=(1, columns // 2, 1, 1))
        for columns in (2, 4, 5)
    ]
    for first in layers:
        case = replace(SQUARE, layers=(first, SQUARE.layers[1]), width=width)
        check(case, True, True, [planar(case, PlanarKnobs(1, 2, 3))], seed=width)


@cache
def seeing_infinity(width):
    first = replace(depthwise(8, 3, 2), activation=Activation())
    case = Case((first, ConvLayer(8, 8, (1, 1))), height=9, width=width)
    return case, compile_function(planar(case, PlanarKnobs(1, 3, 3)))


@pytest.mark.parametrize("width", [33, 48])
@pytest.mark.parametrize("column", [0, 15, 20, 21])
def test_infinity_reaches_only_the_outputs_that_see_it(width, column):
    case, library = seeing_infinity(width)
    arrays, expected = arrays_of(case, True, seed=column)
    arrays = [arrays[0], *map(np.abs, arrays[1:])]
    arrays[0][0, 3, 4, column] = np.inf
    output = tvm.runtime.tensor(np.full(expected.shape, np.nan, "float32"))
    library["main"](*(tvm.runtime.tensor(array.astype("float32")) for array in arrays), output)
    found = output.numpy()[0]
    sees = np.zeros(found.shape, bool)
    for place in range(found.shape[2]):
        sees[:, 2, place] = abs(2 * place - column) <= 1
    assert np.isposinf(found[sees]).all()
    assert np.isfinite(found[~sees]).all()


def test_what_it_takes():
    kernel = kernel_of(SQUARE, True, True)
    assert takes_planar(kernel)
    assert takes_planar(replace(kernel, batch=None))
    first, second = kernel.layers
    for other in (
        replace(kernel, plain_out=False),
        replace(kernel, plain_data=False),
        replace(kernel, residual=True),
        replace(kernel, height=None),
        replace(kernel, width=7),
        replace(kernel, layers=(first,)),
        replace(kernel, layers=(second, second)),
        replace(kernel, layers=(first, replace(second, kernel=(3, 3), padding=(1, 1, 1, 1)))),
        replace(kernel, layers=(replace(first, strides=(1, 3)), second)),
        replace(kernel, layers=(replace(first, strides=(1, 2), dilation=(1, 2)), second)),
        replace(kernel, layers=(replace(first, strides=(1, 2), kernel=(3, 1)), second)),
        replace(kernel, layers=(depthwise(13, 5, 1), second)),
        replace(kernel, data_layout="NCHW1c", out_layout="NCHW1c"),
    ):
        assert not takes_planar(other)
        with pytest.raises(OpError, match="cannot be computed on planes"):
            planar_template(build(SQUARE, True, True), other, PlanarKnobs(1, 1))


def test_what_shorter_vectors_take():
    kernel = replace(kernel_of(SQUARE, True, True), width=7)
    assert not takes_planar(kernel)
    assert takes_planar(kernel, 4)
    assert not takes_planar(kernel, 2)
    assert not takes_planar(kernel, 6)
    assert not takes_planar(replace(kernel, layers=(depthwise(13, 3, 2), kernel.layers[1])), 8)


@pytest.mark.parametrize("h", [0, 5])
def test_refuses_steps_larger_than_a_piece(h):
    with pytest.raises(OpError, match=f"h is {h}; expected 1 to 4, the rows of the smallest of 2"):
        planar(SQUARE, PlanarKnobs(2, h))


def test_refuses_vectors_longer_than_a_step():
    with pytest.raises(OpError, match="lanes2 is 32; expected at most the 19 pixels of a step"):
        planar(SQUARE, PlanarKnobs(2, 1, lanes2=32))
