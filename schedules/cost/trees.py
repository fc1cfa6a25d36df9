# SPDX-License-Identifier: Apache-2.0
"""Gradient-boosted regression trees as arrays: read from untrusted files, evaluated by numpy.

The nodes of a tree lie breadth first, so that the children of its k-th split are its nodes 2k + 1
and 2k + 2: no file can hold a cycle, and no child need be stored.
"""

from __future__ import annotations

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from schedules.errors import PredictionError

LEAF = 255
"""Feature of a node that is a leaf."""

_MAX_FILE_BYTES = 64 << 20

_MAX_DEPTH = 64
_ROWS_AT_ONCE = 1 << 20

DAMAGED_ARRAY = (
    *(OSError, EOFError, ValueError, TypeError, OverflowError, MemoryError, RuntimeError),
    *(SyntaxError, tokenize.TokenError),  # numpy reads a header as Python's own source
    *(zipfile.BadZipFile, zlib.error),
)
"""Exceptions of numpy on damaged files of arrays."""


@dataclass(frozen=True)
class Trees:
    """Sum of regression trees."""

    column: np.ndarray  # (nodes,) int: feature that a split asks for, 0 in a leaf.
    threshold: np.ndarray  # (nodes,) float32: less goes left; infinite in a leaf.
    leaf: np.ndarray  # (nodes,) float32: value of a leaf, 0 in a split.
    left: np.ndarray  # (nodes,) int: left child, the right one is the next; a leaf's is itself.
    roots: np.ndarray  # (trees,) int.
    depth: int  # Splits on the longest path.
    features: int  # Features of a row.
    base: float  # Added to each sum.

    def __call__(
        self,
        rows: np.ndarray,  # (rows, features), finite.
    ) -> np.ndarray:
        """Sum over all trees.

        Returns (rows,) float64. Raises ``PredictionError`` if the shape is another, or a feature is
        no number.
        """
        rows = np.asarray(rows, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.features or not np.isfinite(rows).all():
            raise PredictionError(
                f"rows of shape {rows.shape}; expected {self.features} finite features a row"
            )
        step = max(1, _ROWS_AT_ONCE // max(1, len(self.roots)))
        parts = [self._sums(rows[at : at + step]) for at in range(0, len(rows), step)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _sums(self, rows: np.ndarray) -> np.ndarray:
        at = np.broadcast_to(self.roots, (len(rows), len(self.roots)))
        row = np.arange(len(rows))[:, None]
        for _ in range(self.depth):
            at = self.left[at] + (rows[row, self.column[at]] >= self.threshold[at])
        return self.base + self.leaf[at].sum(axis=1, dtype=np.float64)


def trees_from_arrays(
    # ``sizes`` (trees,) int32, nodes of each tree; ``split`` (nodes,) uint8, feature or ``LEAF``;
    # ``bin`` (splits,) uint8 or uint16, which of the feature's thresholds; ``leaf`` (leaves,) int8,
    # times ``scale`` (trees,) float32 of its tree; ``cuts`` float16 or float32, thresholds of all
    # features, and ``cut_counts`` (features,) int32, how many each has; ``base`` (1,) float64.
    arrays: Mapping[str, np.ndarray],
) -> Trees:
    """Check the arrays of a file and build its trees.

    Raises ``PredictionError`` if an array is missing, of another shape or type, not finite, or no
    trees come of it.
    """
    counts = _array(arrays, "cut_counts", "i")
    cuts = _array(arrays, "cuts", "f")
    sizes = _array(arrays, "sizes", "i")
    split = _array(arrays, "split", "u")
    chosen = _array(arrays, "bin", "u")
    leaf = _array(arrays, "leaf", "i")
    scale = _array(arrays, "scale", "f")
    base = _array(arrays, "base", "f")
    is_leaf = split == LEAF
    if (counts < 0).any() or counts.sum() != len(cuts) or not 0 < len(counts) < LEAF:
        raise PredictionError("'cut_counts' does not add up to the length of 'cuts'")
    if (sizes < 1).any() or sizes.sum() != len(split) or not len(sizes):
        raise PredictionError("'sizes' does not add up to the length of 'split'")
    if len(scale) != len(sizes):
        raise PredictionError("'scale' has not one number a tree")
    if is_leaf.sum() != len(leaf) or (~is_leaf).sum() != len(chosen) or base.shape != (1,):
        raise PredictionError("'leaf', 'bin' or 'base' has another length than 'split' asks for")
    features = split[~is_leaf].astype(np.int64)
    if (features >= len(counts)).any() or (chosen >= counts[features]).any():
        raise PredictionError("'split' or 'bin' names a feature or threshold that is not there")
    roots = np.cumsum(sizes) - sizes
    left = _left_children(~is_leaf, roots, sizes)
    column = np.zeros(len(split), np.intp)
    column[~is_leaf] = features
    threshold = np.full(len(split), np.inf, np.float32)
    threshold[~is_leaf] = cuts[(np.cumsum(counts) - counts)[features] + chosen]
    value = np.zeros(len(split), np.float32)
    value[is_leaf] = (leaf * np.repeat(scale.astype(np.float64), sizes)[is_leaf]).astype(np.float32)
    depth = _depth(left, roots)
    return Trees(column, threshold, value, left, roots, depth, len(counts), float(base[0]))


def _array(arrays: Mapping[str, np.ndarray], name: str, kind: str) -> np.ndarray:
    found = arrays.get(name)
    if found is None or found.ndim != 1 or found.dtype.kind != kind:
        raise PredictionError(f"no vector {name!r} of numpy kind {kind!r}")
    if kind == "f" and not np.isfinite(found).all():
        raise PredictionError(f"{name!r} holds what is no finite number")
    return found.astype(np.int64) if kind == "i" else found


def _left_children(splits: np.ndarray, roots: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Left child of each node: of the k-th split of a tree, the node 2k + 1 of that tree."""
    before = np.cumsum(splits) - splits
    per_tree = np.add.reduceat(splits.astype(np.int64), roots)
    if (sizes != 2 * per_tree + 1).any():
        raise PredictionError("a tree in 'split' has too few or too many leaves")
    first = np.repeat(before[roots], sizes)
    offset = np.repeat(roots, sizes)
    left = np.where(splits, offset + 2 * (before - first) + 1, np.arange(len(splits)))
    if (left[splits] <= np.flatnonzero(splits)).any():
        raise PredictionError("a tree in 'split' is not breadth first")
    return left


def _depth(left: np.ndarray, roots: np.ndarray) -> int:
    level = roots
    for depth in range(_MAX_DEPTH):
        level = level[left[level] != level]
        if not len(level):
            return depth
        level = np.concatenate([left[level], left[level] + 1])
    raise PredictionError(f"a tree is deeper than {_MAX_DEPTH} splits")


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file, which may be a stranger's.

    Nothing is unpickled, and no memory is taken before the sizes are known.

    Raises ``PredictionError`` if the file is no such archive, is too large, or holds anything but
    arrays of numbers; the message names file and array.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > _MAX_FILE_BYTES:
                raise PredictionError("the arrays are larger than any model's")
            return {_stem(m.filename): _member(archive, m) for m in members}
    except PredictionError as error:
        raise PredictionError(f"{path}: {error}") from None
    except DAMAGED_ARRAY as error:
        raise PredictionError(f"{path}: no archive of arrays: {error}") from None


def _stem(name: str) -> str:
    return name.removesuffix(".npy")


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    name = _stem(member.filename)
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise PredictionError(f"array {name!r}: numpy format {version}; expected (1, 0)")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.kind not in "iuf" or dtype.hasobject:
            raise PredictionError(f"array {name!r} is of type {dtype}; expected numbers")
        wanted = math.prod(shape) * dtype.itemsize
        if min(shape, default=1) < 0 or wanted > member.file_size:
            raise PredictionError(f"array {name!r}: shape {shape} is larger than the file")
        data = file.read()
    if len(data) != wanted:
        raise PredictionError(f"array {name!r}: {len(data)} bytes; shape {shape} needs {wanted}")
    return np.frombuffer(data, dtype).reshape(shape)
