# SPDX-License-Identifier: Apache-2.0
"""Convolutions whose images are regions of larger tensors: the bits of whole ones, and no more."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.conv2d.winograd.test_winograd_conv2d import function as winograd_function
from cpu.conv2d.winograd.test_winograd_conv2d import packed_arguments
from cpu.conv_cases import TARGET, Case, arguments, build, compile_function, pack
from tvm import tirx

from schedules.cpu.conv2d.conv2d import Conv2D
from schedules.cpu.conv2d.fused_conv2d import FusedConv2D
from schedules.cpu.conv2d.winograd.winograd_conv2d import WinogradConv2D
from schedules.errors import OpError
from schedules.tir.parameter_windows import Window, windows_of, with_window
from schedules.workload.conv2d import ConvLayer

SAME = (1, 1, 1, 1)
ROWS, BLOCKS = (2, 3), (3, 1)  # Parts of a larger tensor, before and after the window.


def around(func: tirx.PrimFunc, position: int) -> tuple[list[int], Window]:
    """A larger tensor of a parameter, and its window there."""
    shape = [int(extent) for extent in func.params[position].shape]
    window = [(0, extent) for extent in shape]
    for axis, (before, after) in ((1, BLOCKS), (2, ROWS)):
        window[axis] = before, before + shape[axis]
        shape[axis] += before + after
    return shape, tuple(window)


def run(func: tirx.PrimFunc, arrays: list[np.ndarray]) -> np.ndarray:
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    compile_function(func)["main"](*tensors)
    return tensors[-1].numpy()


ONE = Case((ConvLayer(16, 24, (3, 3), padding=SAME),), batch=2, residual=True)
FLAT = Case((ConvLayer(16, 24, (1, 1)),), residual=True)
PAIR = Case((ConvLayer(16, 24, (3, 3), (2, 2), SAME), ConvLayer(24, 16, (1, 1))), residual=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_scheduled", [True, False])
@pytest.mark.parametrize(
    ("rule", "case", "tile"),
    [(Conv2D, ONE, 0), (Conv2D, FLAT, 0), (WinogradConv2D, ONE, 4), (FusedConv2D, PAIR, 0)],
)
def test_images_in_larger_tensors(rule: type, case: Case, tile: int, is_scheduled: bool) -> None:
    func = winograd_function(case, tile) if tile else build(case)
    given, _ = packed_arguments(case, tile, 1) if tile else arguments(case, 1)
    arrays = [array.astype("float32") for array in given]
    arrays.append(np.full(pack(np.zeros(case.out_shape), case.lanes).shape, np.nan, "float32"))

    def made(func: tirx.PrimFunc) -> tirx.PrimFunc:
        return rule().apply(func, TARGET, False).mod["main"] if is_scheduled else func

    expected = run(made(func), arrays)
    larger, places = func, {}
    last = len(func.params) - 1
    for position in (0, last - 1, last):
        shape, window = around(func, position)
        larger = with_window(larger, position, shape, window)
        places[position] = tuple(slice(*each) for each in window)
        whole = np.full(shape, np.nan, "float32")
        whole[places[position]] = arrays[position]
        arrays[position] = whole
    assert windows_of(larger).keys() == places.keys() and windows_of(func) == {}
    found = run(made(larger), arrays)
    np.testing.assert_array_equal(found[places[last]], expected)
    found[places[last]] = np.nan
    assert np.isnan(found).all()


def test_a_rule_that_knows_no_windows_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    func = build(FLAT)
    larger = with_window(func, 1, *around(func, 1))  # A window of the weights.
    with pytest.raises(OpError, match="a part of a larger tensor"):
        Conv2D().apply(larger, TARGET, False)
