# SPDX-License-Identifier: Apache-2.0
"""JSON that is read piece by piece: the same values, whatever the chunks, and clear refusals."""

from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest

from tvm_fusion.errors import PredictionError
from tvm_fusion.prediction.traces import kineto
from tvm_fusion.prediction.traces.kineto import json_items

DATA = {
    "a": 12345,
    "deep": {"x": [1, {"y": 'z, ] } \\ " ü'}]},
    "events": [{"n": i, "text": "e" * i} for i in range(40)] + [17, "s", None, []],
    "none": [],
    "last": -1.5e-3,
}


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_any_chunk(tmp_path, monkeypatch, chunk: int, indent: int | None) -> None:
    monkeypatch.setattr(kineto, "_CHUNK", chunk)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(DATA, indent=indent, ensure_ascii=False), encoding="utf-8")
    expected = [
        item
        for name, value in DATA.items()
        for item in ([(name, one) for one in value] if name == "events" else [(name, value)])
    ]
    assert list(json_items(path, "events")) == expected


def test_gzip(tmp_path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps(DATA).encode()))
    assert dict(json_items(path, "none"))["events"] == DATA["events"]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("packed", [False, True])
def test_cut_off(tmp_path, share: float, packed: bool) -> None:
    text = json.dumps(DATA).encode()
    data = gzip.compress(text) if packed else text
    path = tmp_path / "x.json"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(PredictionError, match=r"x\.json: cannot be read after \d+ elements"):
        list(json_items(path, "events"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("[1]", r"found '\['; expected '\{'"),
        ('{"a": 1 "b"}', "found '\"'; expected ','"),
        ('{"a": nonsense}', "Expecting value"),
        ('{"events": [{"a": 1}, {"b": ', "after 1 elements of events: it is cut off"),
    ],
)
def test_names_what_is_wrong(tmp_path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(PredictionError, match=reason):
        list(json_items(path, "events"))


def test_absent_file(tmp_path) -> None:
    with pytest.raises(PredictionError, match="absent.json: cannot be read"):
        list(json_items(tmp_path / "absent.json", "events"))


def test_values_that_do_not_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kineto, "_MAX_VALUE", 1000)
    monkeypatch.setattr(kineto, "_CHUNK", 100)
    path = tmp_path / "x.json"
    path.write_text('{"events": ["' + "x" * 5000)
    with pytest.raises(PredictionError, match="a value of more than"):
        list(json_items(path, "events"))


def test_memory_is_bounded(tmp_path) -> None:
    path = tmp_path / "x.json"
    event = json.dumps({"name": "x" * 1000})
    path.write_text('{"events": [' + ",".join([event] * 20_000) + "]}")
    tracemalloc.start()
    count = sum(1 for _ in json_items(path, "events"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < path.stat().st_size / 2
