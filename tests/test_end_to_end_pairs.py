# SPDX-License-Identifier: Apache-2.0
"""Every pair of convolutions of the table, fused, gives the numbers of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_reference import assert_same, random_feed, relative_error, run_onnx

import tvm_fusion
from examples.layers import PAIRS, build_pair

NAMES = list(PAIRS)
CASES = [(name, 1) for name in NAMES] + [(name, 3) for name in NAMES[::3]]
# One of each network: neighbours in the table differ in their sizes only.
QUICK = [(name, 3) for name in {PAIRS[name].network: name for name in NAMES[::3]}.values()]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "batch"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_fused_pair(name: str, batch: int) -> None:
    model = build_pair(name, batch)
    compiled = tvm_fusion.compile(model, fuse="all")
    assert [record["fused"] for record in compiled.fused] == [True]
    for seed in range(2):
        feed = random_feed(model, seed)
        assert_same(compiled(**feed), run_onnx(model, feed))


def test_pairs_of_every_network_are_tried_with_three_images() -> None:
    networks = {pair.network for pair in PAIRS.values()}
    assert {PAIRS[name].network for name, batch in QUICK if batch == 3} == networks
    assert len(PAIRS) == 39
    assert len(CASES) == 39 + 13


@pytest.mark.slow
def test_images_of_a_batch_do_not_mix() -> None:
    name = "mv2_4_2"
    three = tvm_fusion.compile(build_pair(name, 3), fuse="all")
    one = tvm_fusion.compile(build_pair(name), fuse="all")
    images = random_feed(build_pair(name, 3), 5)["input"]
    apart = np.concatenate([one(images[i : i + 1]) for i in range(3)])
    assert relative_error(three(images), apart) <= 1e-5


def test_the_error_of_one_wrong_element_is_seen() -> None:
    model = build_pair("mv1_13")
    feed = random_feed(model, 0)
    expected = run_onnx(model, feed)
    wrong = expected[0].copy()
    wrong.flat[7] += 2e-4 * np.abs(wrong).max()
    assert_same(expected, expected)
    with pytest.raises(AssertionError):
        assert_same(wrong, expected)
