# SPDX-License-Identifier: Apache-2.0
"""Trees as arrays: a tree made by hand, xgboost's own predictions, and damaged files."""

import io
import struct
import zipfile

import numpy as np
import pytest

from schedules.cost.trees import LEAF, read_arrays, trees_from_arrays
from schedules.errors import PredictionError


def hand_made():
    """x0 < 2: 10, else (x1 < 5: 20, else 30); and a tree of one leaf, 1; base 100."""
    return {
        "sizes": np.array([5, 1], np.int32),
        "split": np.array([0, LEAF, 1, LEAF, LEAF, LEAF], np.uint8),
        "bin": np.array([0, 1], np.uint8),
        "leaf": np.array([20, 40, 60, 2], np.int8),
        "scale": np.array([0.5, 0.5], np.float32),
        "cuts": np.array([2, 4, 5], np.float32),
        "cut_counts": np.array([1, 2], np.int32),
        "base": np.array([100.0]),
    }


def test_a_tree_by_hand():
    trees = trees_from_arrays(hand_made())
    rows = [[1, 9], [2, 4.5], [2, 5], [1.999, 0]]
    assert trees(np.array(rows)).tolist() == [111, 121, 131, 111]
    assert trees.depth == 2
    assert trees(np.zeros((0, 2))).shape == (0,)


@pytest.mark.parametrize("rows", [np.zeros(2), np.zeros((1, 3)), np.array([[np.nan, 0]])])
def test_rows_that_are_refused(rows):
    with pytest.raises(PredictionError, match="expected 2 finite features a row"):
        trees_from_arrays(hand_made())(rows)


@pytest.mark.parametrize("scale", [1, 30])
def test_predictions_are_those_of_xgboost(scale):
    xgboost = pytest.importorskip("xgboost")
    from examples.benchmarks.prediction.train import arrays_of

    random = np.random.default_rng(7)
    rows = random.normal(size=(800, 6)).astype(np.float16).astype(np.float32)
    target = scale * (np.sin(3 * rows[:, 0]) + rows[:, 1] * (rows[:, 2] > 0))
    parameters = {"max_depth": 6, "tree_method": "hist", "nthread": 1, "base_score": 0.25}
    booster = xgboost.train(parameters, xgboost.DMatrix(rows, target), 40)
    found = trees_from_arrays(arrays_of(booster))(rows)
    expected = booster.predict(xgboost.DMatrix(rows))
    # Leaves are stored in eight bits, and thresholds in half precision.
    np.testing.assert_allclose(found, expected, atol=0.02 * scale)
    assert np.abs(found - target).mean() < np.abs(target).mean() / 5


def changed(name, value):
    return {**hand_made(), name: np.asarray(value)}


REFUSED = {
    "missing": ({k: v for k, v in hand_made().items() if k != "leaf"}, "no vector 'leaf'"),
    "matrix": (changed("leaf", np.ones((2, 2))), "no vector 'leaf'"),
    "type": (changed("split", np.zeros(6, np.int32)), "no vector 'split'"),
    "nan": (changed("scale", np.array([np.nan, 0])), "'scale' holds what is no finite"),
    "scales": (changed("scale", np.ones(3)), "'scale' has not one number a tree"),
    "floats": (changed("leaf", np.ones(4)), "no vector 'leaf' of numpy kind 'i'"),
    "infinite": (changed("cuts", np.array([1, np.inf, 2])), "'cuts' holds what is no finite"),
    "negative": (changed("cut_counts", np.array([-1, 4])), "'cut_counts' does not add up"),
    "cuts": (changed("cut_counts", np.array([1, 1])), "'cut_counts' does not add up"),
    "sizes": (changed("sizes", np.array([5, 2])), "'sizes' does not add up"),
    "empty": (changed("sizes", np.array([6, 0])), "'sizes' does not add up"),
    "leaves": (changed("leaf", np.ones(5, np.int8)), "'leaf', 'bin' or 'base'"),
    "bins": (changed("bin", np.zeros(1, np.uint8)), "'leaf', 'bin' or 'base'"),
    "feature": (changed("split", np.array([9, 255, 1, 255, 255, 255], np.uint8)), "not there"),
    "threshold": (changed("bin", np.array([1, 1], np.uint8)), "not there"),
    "unbalanced": (changed("sizes", np.array([4, 2])), "too few or too many leaves"),
    "leaf first": (
        changed("split", np.array([255, 0, 1, 255, 255, 255], np.uint8)),
        "not breadth first",
    ),
}


@pytest.mark.parametrize("arrays, message", REFUSED.values(), ids=REFUSED)
def test_arrays_that_are_no_trees(arrays, message):
    with pytest.raises(PredictionError, match=message):
        trees_from_arrays(arrays)


def test_a_tree_that_is_too_deep():
    depth = 70
    split = np.array([0, LEAF] * depth + [LEAF], np.uint8)
    # Breadth first, each level: the left child goes on, the right one is a leaf.
    split[1:] = np.array([0, LEAF] * (depth - 1) + [LEAF, LEAF], np.uint8)
    arrays = {
        "sizes": np.array([2 * depth + 1]),
        "split": split,
        "bin": np.zeros(depth, np.uint8),
        "leaf": np.zeros(depth + 1, np.int8),
        "scale": np.ones(1, np.float32),
        "cuts": np.zeros(1, np.float32),
        "cut_counts": np.array([1]),
        "base": np.zeros(1),
    }
    with pytest.raises(PredictionError, match="deeper than 64"):
        trees_from_arrays(arrays)


def test_a_file_that_is_written_is_read(tmp_path):
    np.savez_compressed(tmp_path / "trees.npz", **hand_made())
    trees = trees_from_arrays(read_arrays(tmp_path / "trees.npz"))
    assert trees(np.array([[2, 4.5]])).tolist() == [121]


def test_pickles_are_not_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "bomb.npz", leaf=np.array([Bomb()], object))
    with pytest.raises(PredictionError, match=r"bomb.npz: array 'leaf' is of type object"):
        read_arrays(tmp_path / "bomb.npz")


def archive(path, payload):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("leaf.npy", payload)
    return path


def header(shape, data=b"", dtype="<f4"):
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    "payload, message",
    [
        (header("(1000000000000,)"), "'leaf': shape .* is larger than the file"),
        (header("(-1,)"), "'leaf': shape .* is larger than the file"),
        (header("(1,)", b"\0" * 8), "'leaf': 8 bytes; shape"),
        (header("(1,)", b"\0" * 2), "'leaf': 2 bytes; shape"),
        (header("(2,)", b"\0" * 16, "<c8"), "'leaf' is of type complex64"),
        (b"\x93NUMPY\x03\x00" + b"\0" * 20, "numpy format"),
        (b"nonsense", "no archive of arrays"),
        (b"", "no archive of arrays"),
        (header("(3,), ((("), "no archive of arrays"),
    ],
)
def test_members_that_are_refused(tmp_path, payload, message):
    with pytest.raises(PredictionError, match="x.npz: .*" + message):
        read_arrays(archive(tmp_path / "x.npz", payload))


def test_archives_that_are_refused(tmp_path):
    path = archive(tmp_path / "x.npz", b"\0" * (65 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(PredictionError, match="larger than any model's"):
        read_arrays(path)
    packed = io.BytesIO()
    np.savez_compressed(packed, leaf=np.arange(1000))
    whole = packed.getvalue()
    damaged = bytearray(whole)
    damaged[200:260] = b"\0" * 60
    for content in (b"", b"text", whole[: len(whole) // 2], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(PredictionError, match=r"x.npz: no archive of arrays"):
            read_arrays(path)
    with pytest.raises(PredictionError, match="none.npz: no archive"):
        read_arrays(tmp_path / "none.npz")
