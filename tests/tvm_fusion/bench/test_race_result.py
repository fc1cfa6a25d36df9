# SPDX-License-Identifier: Apache-2.0
"""The relative error, the table and the JSON of a race."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rich.console import Console

from tvm_fusion.bench.race import EngineResult, Plan, RaceResult, race_table, title_of
from tvm_fusion.cli.output import json_text
from tvm_fusion.runtime.host_arrays import relative_error

FLOATS = arrays.arrays(
    np.float32,
    arrays.array_shapes(max_dims=3, max_side=5),
    elements=st.floats(-100, 100, width=32),
)


def result_of(**changes: object) -> RaceResult:
    values: dict = dict.fromkeys(("median_ms", "min_ms", "p90_ms", "p99_ms"), 2.0)
    values |= dict.fromkeys(("ratio", "ratio_p10", "ratio_p90"), 1.25)
    values |= {"engine": "openvino", "title": "OpenVINO", "version": "1", "options": {}}
    values |= {"relative_error": 1e-6, "compile_seconds": 0.5, "peak_mib": 100.0}
    values |= {"rounds": 3, "runs": 9, "details": {}}
    first = EngineResult(**(values | {"title": "tvm-fusion", "engine": "tvm-fusion"} | changes))
    machine = {"cpu": "some CPU", "physical_cores": 2}
    return RaceResult(
        "m.onnx",
        [("x", (1, 3), "float32")],
        2,
        "2020-01-01",
        machine,
        Plan(),
        "OpenVINO",
        [first, EngineResult(**values)],
    )


@given(FLOATS)
def test_equal_outputs_have_no_error(array: np.ndarray) -> None:
    assert relative_error([array, array], [array.copy(), array.copy()]) == 0


@given(FLOATS, st.floats(1e-3, 1))
def test_error_is_relative_to_the_largest_value(array: np.ndarray, off: float) -> None:
    largest = float(np.abs(array).max())
    scale = largest or 1.0
    want = np.concatenate([array.ravel(), [scale]]).astype(np.float64)
    got = want.copy()
    got[0] += off * scale
    assert relative_error([got], [want]) == pytest.approx(off, rel=1e-6)


def test_largest_error_of_all_outputs_counts() -> None:
    one = np.ones(3)
    assert relative_error([one, one * 1.5], [one, one]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([np.zeros(2)], [np.zeros(3)]),
        ([np.zeros(2)], [np.zeros(2), np.zeros(2)]),
        ([np.array([1.0, np.nan])], [np.array([1.0, 2.0])]),
        ([np.array([1.0, 2.0])], [np.array([1.0, np.nan])]),
        ([np.array([1.0, np.inf])], [np.array([1.0, -np.inf])]),
        ([np.array([0.0, 1.0])], [np.array([0.0, 0.0])]),
    ],
)
def test_disagreement_is_infinite(got: list, want: list) -> None:
    assert relative_error(got, want) == float("inf")


def test_same_nan_and_infinity_agree() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 3.0])
    assert relative_error([array], [array.copy()]) == 0


def test_nothing_to_compare_agrees() -> None:
    assert relative_error([], []) == 0
    assert relative_error([np.zeros((0, 2))], [np.zeros((0, 2))]) == 0


def shown(result: RaceResult) -> str:
    console = Console(width=120, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(race_table(result))
    return capture.get()


def test_table_shows_ratio_of_peers_and_error() -> None:
    text = shown(result_of())
    peer = next(line for line in text.splitlines() if "OpenVINO" in line and "│" in line)
    assert "1.25x" in peer and "reference" in peer
    ours = next(line for line in text.splitlines() if "│ tvm-fusion" in line)
    assert "1.25x" not in ours and "1.0e-06" in ours
    assert "\x1b[31m" not in text


def test_wrong_outputs_are_red() -> None:
    assert "\x1b[31m2.0e-01" in shown(result_of(relative_error=0.2))


def test_json_of_a_race_is_standard() -> None:
    text = json_text(result_of(relative_error=float("inf")).to_json())
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["engines"][0]["relative_error"] == "inf"
    assert data["engines"][1]["ratio"] == 1.25
    assert data["plan"]["rounds"] == Plan().rounds
    assert data["inputs"] == [["x", [1, 3], "float32"]]


def test_json_of_numbers_that_are_not_finite() -> None:
    assert json.loads(json_text([float("nan"), -float("inf"), (1, {"a": 2.5})])) == [
        "nan",
        "-inf",
        [1, {"a": 2.5}],
    ]


def test_a_type_that_an_engine_chose_is_in_its_row() -> None:
    chosen = {"options": {"precision": "default"}, "details": {"precision": "bf16"}}
    titles = [title_of(result_of(**change).engines[0]) for change in ({}, chosen)]
    assert titles == ["tvm-fusion", "tvm-fusion, bf16"]
