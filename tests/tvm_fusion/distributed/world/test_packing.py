# SPDX-License-Identifier: Apache-2.0
"""Packing: the choice of a route, by constants and by measured times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_ranks import needs_mpi, run_ranks

from schedules.cost.machine import Figure, Machine
from tvm_fusion.distributed.calibrate import parcel_shapes, write_machine
from tvm_fusion.distributed.world.packing import (
    LONG_REGION,
    LONG_SEGMENT,
    ROUTES,
    SHORT_MESSAGE,
    SHORT_SEGMENT,
    ParcelShape,
    Route,
    always,
    by_constants,
    figure_name,
    packing_of,
)
from tvm_fusion.distributed.world.parcel import Parcel
from tvm_fusion.errors import InvalidInputError

PROGRAM = Path(__file__).with_name("packing_program.py")


def machine_of(times: dict[ParcelShape, dict[Route, float]]) -> Machine:
    figures = {
        figure_name(shape, route): Figure(seconds, "a test")
        for shape, routes in times.items()
        for route, seconds in routes.items()
    }
    return Machine("ranks-2", "cpu", "2 ranks", figures)


@pytest.mark.parametrize(
    ("shape", "routes"),
    [
        (ParcelShape(SHORT_MESSAGE, SHORT_MESSAGE), ["in place"]),
        (ParcelShape(SHORT_MESSAGE, SHORT_MESSAGE // 2, 2), ["in place"]),
        (ParcelShape(SHORT_MESSAGE, 16), ["slot", "packed"]),
        (ParcelShape(64, 8), ["in place"]),  # a corner
        (ParcelShape(72, 8), ["slot", "packed"]),
        (ParcelShape(SHORT_MESSAGE + 4, SHORT_MESSAGE + 4), ["slot", "in place"]),
        (ParcelShape(LONG_REGION, LONG_REGION), ["in place"]),
        (ParcelShape(8 * SHORT_SEGMENT, SHORT_SEGMENT), ["slot", "in place"]),
        (ParcelShape(8 * LONG_SEGMENT, LONG_SEGMENT), ["in place"]),
        (ParcelShape(8 * LONG_SEGMENT, 4 * LONG_SEGMENT, 2), ["slot", "packed"]),
    ],
)
def test_constants(shape: ParcelShape, routes: list[Route]) -> None:
    assert list(by_constants(shape)) == routes


def test_the_fastest_route_of_the_nearest_shape() -> None:
    packing = packing_of(
        machine_of(
            {
                ParcelShape(1024, 1024): {"in place": 1.0, "slot": 2.0},
                ParcelShape(1024, 64): {"packed": 1.0, "slot": 3.0, "in place": 2.0},
                ParcelShape(65536, 64): {"packed": 2.0, "slot": 1.0, "in place": 3.0},
                ParcelShape(65536, 64, 2): {"packed": 2.0, "in place": 1.0},
            }
        )
    )
    assert packing(ParcelShape(1 << 30, 1 << 30)) == ("in place", "slot")
    assert packing(ParcelShape(2048, 1024)) == ("packed", "in place", "slot")
    assert packing(ParcelShape(32000, 4)) == ("slot", "packed", "in place")
    assert packing(ParcelShape(8, 4, 3)) == ("in place", "packed")


def test_a_figure_changes_the_route() -> None:
    """The parcel stays the same; its regions have segments of 8 bytes."""
    view = np.zeros((4, 8), np.float32)[:, 2:4]
    for packed, in_place in ((1.0, 2.0), (2.0, 1.0)):
        times: dict[Route, float] = {"packed": packed, "in place": in_place}
        packing = packing_of(machine_of({ParcelShape(1024, 64): times}))
        assert (Parcel(1, [view], packing=packing).stage is not None) == (packed < in_place)


def test_what_is_measured() -> None:
    shapes = parcel_shapes()
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.nbytes % (shape.regions * shape.segment) == 0 and shape.segment % 4 == 0
    assert {shape.regions for shape in shapes if shape.is_whole} == {1, 2}
    times: dict[ParcelShape, dict[Route, float]]
    times = {shape: {route: 1.0 for route in ROUTES} for shape in shapes}
    packing = packing_of(machine_of(times))
    assert all(packing(shape) == ROUTES for shape in shapes)
    assert always("packed")(shapes[0]) == ("packed", "slot", "in place")


@pytest.mark.parametrize(
    "name",
    [
        "parcel_seconds.slot",
        "parcel_seconds.boat.8.4.1",
        "parcel_seconds.slot.8.x.1",
        "parcel_seconds.slot.8.16.1",
        "parcel_seconds.slot.8.0.1",
        "parcel_seconds.slot.8.4.0",
    ],
)
def test_a_figure_of_no_parcel(name: str) -> None:
    machine = Machine("n", "cpu", "N", {name: Figure(1.0, "a test")})
    with pytest.raises(InvalidInputError, match=f"figure '{name}' is of no parcel; expected parc"):
        packing_of(machine)


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_bytes_by_each_route(ranks: int) -> None:
    outcome = run_ranks(ranks, PROGRAM)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.count("all checked") == ranks


@pytest.mark.slow
@needs_mpi
def test_ranks_choose_as_the_file_of_the_first_one_tells(tmp_path: Path) -> None:
    times: dict[Any, Any] = {ParcelShape(1024, 64): {"packed": 1.0, "slot": 2.0, "in place": 3.0}}
    write_machine(machine_of(times), tmp_path / "network.json")
    outcome = run_ranks(2, PROGRAM, str(tmp_path / "network.json"))
    assert outcome.code == 0, outcome.stderr
    assert "".join(outcome.stdout.split()) == "packed" * 2  # lines may be joined


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "n", "kind": "cpu", "title": "N", "figures": {}}', r"'n' has no figures parcel"),
        ("{", "network.json"),
        ('{"name": "n"}', r"network.json is no file of a network: expected a str 'kind'; mpi"),
        (None, r"no file '.*network.json'; mpiexec -n 2 tvm-fusion calibrate --network writes one"),
    ],
)
def test_a_bad_file(text: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    if text is not None:
        file.write_text(text)
    outcome = run_ranks(2, PROGRAM, str(file))
    assert outcome.code != 0 and "Traceback" not in outcome.stderr
    [line] = outcome.lines
    assert line.startswith("tvm-fusion: rank 0 of 2 failed: ")
    assert re.search(reason, line), line
