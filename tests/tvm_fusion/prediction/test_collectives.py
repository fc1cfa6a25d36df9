# SPDX-License-Identifier: Apache-2.0
"""Times of collectives: equations against numbers by hand, and the choice between models."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.cost.machine import load_machine
from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.collectives import (
    LINKS,
    Collectives,
    Curve,
    all_to_all_bytes,
    alpha_beta,
    bus_bandwidth,
    collectives_of,
    interpolation,
    link_bandwidth,
    load_collectives,
    node_collectives,
    three_sections,
)

SIZES = tuple(float(4 << n) for n in range(26))


def curve(seconds, sizes=SIZES, kind: str = "all_reduce", ranks: int = 4) -> Curve:
    return Curve(kind, ranks, tuple(sizes), tuple(map(float, map(seconds, sizes))))


def test_equation_5_1() -> None:
    sizes = np.array(SIZES)
    model = alpha_beta(sizes, 10e-6 + sizes / 1e10)
    assert model(1e6) == pytest.approx(110e-6)


def test_equation_5_2() -> None:
    """Constant up to 4 KB, then the sigmoid in log bandwidth, then constant bandwidth."""

    def sigmoid(x: float) -> float:
        return 2.5 / (1 + math.exp(-0.5 * (x - 15))) + 7.5

    def seconds(message: float) -> float:
        return max(12e-6, message / 10 ** sigmoid(math.log2(message)))

    sizes = np.array(SIZES)
    model = three_sections(sizes, np.array([seconds(size) for size in SIZES]))
    assert model(8) == pytest.approx(12e-6)
    for message in (300e3, 3e6):
        assert model(message) == pytest.approx(seconds(message), rel=0.05)
    assert model(1e9) == pytest.approx(12e-6 + 1e9 / 1e10, rel=0.02)


def test_interpolation() -> None:
    model = interpolation(np.array([1e3, 1e5]), np.array([1e-5, 1e-3]))
    assert model(1e4) == pytest.approx(1e-4)
    assert model(10) == pytest.approx(1e-5)


def test_bus_bandwidth() -> None:
    assert bus_bandwidth("all_reduce", 4, 8e9, 1.0) == pytest.approx(12e9)
    assert bus_bandwidth("all_to_all", 4, 8e9, 1.0) == pytest.approx(6e9)
    assert bus_bandwidth("send", 2, 8e9, 1.0) == pytest.approx(8e9)


def test_unequal_all_to_all() -> None:
    """Tables 1, 2, 4 and 7 on four ranks: the last sends to others as much as it gets."""
    sent = [[0 if a == b else tables for b in range(4)] for a, tables in enumerate((1, 2, 4, 7))]
    # Received by rank 0: 2 + 4 + 7; sent by rank 3: 3 times 7.
    assert all_to_all_bytes(sent) == 21
    assert all_to_all_bytes([[0, 5], [1, 0]]) == 5
    for wrong in ([], [[1, 2]], [[0, -1], [0, 0]], [[0, math.nan], [0, 0]]):
        with pytest.raises(PredictionError, match="all-to-all"):
            all_to_all_bytes(wrong)


def test_leave_one_out_chooses() -> None:
    line = curve(lambda size: 10e-6 + size / 1e10)
    assert line.predict(1e6).model == "equation 5.1"
    # A library that changes its protocol in jumps.
    jumps = curve(lambda size: (10e-6 + size / 1e10) * (1 if size < 1e5 else 1.6 + size % 7 / 100))
    assert jumps.predict(1e6).model == "interpolation"
    few = curve(lambda size: 10e-6 + size**0.9 / 1e10, SIZES[::6])
    assert few.predict(1e6).model != "interpolation"


@pytest.mark.slow
@given(
    st.lists(st.floats(0.7, 1.4), min_size=26, max_size=26),
    st.integers(0, 24),
    st.floats(1.01, 1.99),
)
def test_between_its_points(noise, index, share) -> None:
    """Whatever the noise, interpolation stays between the points beside a message."""
    found = curve(lambda size: (1e-5 + size / 1e10) * noise[SIZES.index(size)])
    time = found.predict(SIZES[index] * share)
    assert time.in_range and time.low <= time.seconds <= time.high
    if time.model == "interpolation":
        low, high = sorted(found.seconds[index : index + 2])
        assert low * (1 - 1e-9) <= time.seconds <= high * (1 + 1e-9)


def test_beyond_the_points() -> None:
    found = curve(lambda size: 10e-6 + size / 1e10)
    time = found.predict(SIZES[-1] * 4)
    assert not time.in_range
    assert time.seconds == pytest.approx(10e-6 + SIZES[-1] * 4 / 1e10, rel=0.01)


def test_other_numbers_of_ranks() -> None:
    curves = Collectives({("all_reduce", 4): curve(lambda size: size / 1e10)})
    time = curves.predict("all_reduce", 8, 1e6)
    assert time.seconds == pytest.approx(1e-4 * (14 / 8) / (6 / 4))
    assert not time.in_range and "from 4 ranks" in time.model
    with pytest.raises(PredictionError, match="no measured times of broadcast; .*all_reduce"):
        curves.predict("broadcast", 4, 1e6)


def test_saved_and_loaded(tmp_path) -> None:
    curves = Collectives({("all_reduce", 4): curve(lambda size: 1e-5 + size / 1e10)})
    curves.save(tmp_path / "c.json")
    assert load_collectives(tmp_path / "c.json") == curves


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": 3}, "expected kind, ranks"),
        ({"ranks": "4"}, "expected kind, ranks"),
        ({"bytes": [1, "2"]}, "expected kind, ranks"),
        ({"bytes": [1]}, "two or more points"),
        ({"bytes": [2, 1]}, "messages must ascend"),
        ({"seconds": [1, 0]}, "0 is no positive, finite number"),
        ({"seconds": [1, math.nan]}, "nan is no positive"),
        ({"ranks": 0}, "two or more points"),
    ],
)
def test_broken_curves(tmp_path, change: dict, reason: str) -> None:
    good = {"kind": "send", "ranks": 2, "bytes": [1, 2], "seconds": [1, 1]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"format": "tvm-fusion collectives 1", "curves": [good | change]}))
    with pytest.raises(PredictionError, match=f"c.json: .*{reason}"):
        load_collectives(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "not JSON"),
        ("{}", "expected a file of collectives"),
        ('{"format": "tvm-fusion collectives 1"}', "no curves"),
        ('{"format": "tvm-fusion collectives 1", "curves": true}', "'curves' is True; expected a"),
    ],
)
def test_other_files(tmp_path, text: str, reason: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match=reason):
        load_collectives(path)
    with pytest.raises(PredictionError, match="cannot read"):
        load_collectives(tmp_path / "absent")


def test_curves_in_the_file_of_a_machine(tmp_path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(load_machine("v100").to_json()))
    assert collectives_of(path) is None and collectives_of(tmp_path / "none.json") is None
    old, new = (curve(lambda size, s=s: s + size / 1e9) for s in (1e-5, 2e-5))
    other = curve(lambda size: 1e-5 + size / 1e9, kind="broadcast")
    Collectives({("all_reduce", 4): old}).save(path)
    Collectives({("all_reduce", 4): new, ("broadcast", 4): other}).save(path)
    found = Collectives({("all_reduce", 4): new, ("broadcast", 4): other})
    assert collectives_of(path) == load_collectives(path) == found
    assert load_machine(path) == load_machine("v100")
    plain = tmp_path / "collectives.json"
    found.save(plain)
    assert load_collectives(plain) == found and collectives_of(plain) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in LINKS.glob("*.json")))
def test_nodes_of_the_package(name: str) -> None:
    machine = load_machine(name)
    curves, note = node_collectives(machine)
    assert not note
    for ranks in (2, 4):
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            found = curves.predict(kind, ranks, 512e6)
            link = bus_bandwidth(kind, ranks, 512e6, found.seconds)
            # In-switch reductions pass a message once, not twice.
            assert 0.3 < link / link_bandwidth(machine) < 1.3
    small, large = (curves.predict("all_reduce", 2, size).seconds for size in (1e3, 1e6))
    assert 4e-6 < small < large < 60e-6


def test_a_node_that_was_not_measured_has_the_nearest_link() -> None:
    known, _ = node_collectives(load_machine("a100-sxm-80"))
    found, note = node_collectives(load_machine("l40s"))
    assert "those of a100-sxm-80, at 0.1" in note
    small = [each.predict("all_reduce", 2, 1e3).seconds for each in (known, found)]
    large = [each.predict("all_reduce", 2, 5e8).seconds for each in (known, found)]
    assert small[0] == pytest.approx(small[1], rel=0.2)
    assert large[1] / large[0] == pytest.approx(300 / 31.5, rel=0.05)
