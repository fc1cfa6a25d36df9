# SPDX-License-Identifier: Apache-2.0
"""Damage of files: of bytes, whatever they mean, and of values in JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, -(2**31), 2**53, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "0", "-1", "nan", "\0", "../x", "a" * 300, "\ud800", "float32", "object"),
    *([], {}, [[]], [None], [1, 2, 3], {"x": 1}, {"value": 1, "origin": ""}),
)
"""Replacements of a value in JSON."""


def damaged_bytes(data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """A variant of a file: bits flipped, cut off, spliced with itself or another file."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 2)):
        rng.choice(BYTE_DAMAGES)(changed, rng, other or data)
    return bytes(changed)


def _near(changed: bytearray, rng: random.Random) -> int:
    """A place in a file; every second one is near an end, where headers are."""
    size = len(changed)
    if size == 0 or rng.random() < 0.5:
        return rng.randrange(size + 1)
    near = rng.randrange(min(size, 200))
    return near if rng.random() < 0.5 else size - near


def _flip(changed: bytearray, rng: random.Random, _: bytes) -> None:
    for _ in range(rng.randint(1, 8)):
        place = _near(changed, rng)
        if place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)


def _cut(changed: bytearray, rng: random.Random, _: bytes) -> None:
    del changed[_near(changed, rng) :]


def _remove(changed: bytearray, rng: random.Random, _: bytes) -> None:
    place = _near(changed, rng)
    del changed[place : place + rng.choice([1, 4, 64, 4096])]


def _overwrite(changed: bytearray, rng: random.Random, other: bytes) -> None:
    place, size = _near(changed, rng), rng.choice([1, 4, 8, 64, 4096])
    source = rng.randrange(len(other)) if other else 0
    block = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size), other[source:][:size]])
    changed[place : place + size] = block


def _insert(changed: bytearray, rng: random.Random, other: bytes) -> None:
    place, size = _near(changed, rng), rng.choice([1, 8, 64, 4096])
    source = rng.randrange(len(other)) if other else 0
    changed[place:place] = rng.choice([rng.randbytes(size), other[source:][:size]])


def _join(changed: bytearray, rng: random.Random, other: bytes) -> None:
    """The begin of one file, and the end of another."""
    changed[_near(changed, rng) :] = other[rng.randrange(len(other) + 1) :]


BYTE_DAMAGES = (_flip, _flip, _cut, _remove, _overwrite, _insert, _join)


def damaged_json(data: bytes, rng: random.Random) -> bytes:
    """A variant of a JSON file in which one or two values, names or items are others."""
    tree = json.loads(data)
    for _ in range(rng.randint(1, 2)):
        tree = changed_tree(tree, rng)
    return json.dumps(tree).encode()


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """Change one place of a tree of lists and dictionaries; return the tree."""
    places = list(_places(tree))
    if not places or rng.random() < 0.03:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["", "x", "name", key + "_"])] = holder.pop(key)
    elif kind == 1:
        holder.insert(key, holder[rng.randrange(len(holder))])
    elif kind == 2:  # a value from elsewhere
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other.get(name) if type(other) is dict else None))
    else:
        holder[key] = rng.choice(VALUES)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each list or dictionary of a tree with each of its indices or keys."""
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])
