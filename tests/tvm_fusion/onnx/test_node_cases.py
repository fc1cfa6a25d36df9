# SPDX-License-Identifier: Apache-2.0
"""ONNX's own cases of one node: what is imported has the outputs that ONNX expects, on the CPU."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from functools import cache

import numpy as np
import onnx
import pytest

import tvm_fusion
from operator_cases import Case, cases
from tvm_fusion.errors import TVMFusionError
from tvm_fusion.onnx.frontend import import_onnx

PER_OPERATOR = int(os.environ.get("NODE_CASES", "2"))
"""Cases that are drawn of each operator; all of them take some minutes."""

TOLERANCES = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""By the size of an element; 16-bit numbers are rounded after other steps than ONNX's."""

RANDOM = ("Bernoulli", "RandomNormalLike", "RandomUniformLike")
"""Operators whose outputs nobody can expect."""

LONG = ("test_gridsample_reflection_padding",)
"""Cases that take a minute to compile."""


@cache
def tensor_cases() -> list[Case]:
    """Cases whose inputs and outputs are tensors, and whose outputs can be expected."""
    kept = (
        case
        for case in cases()
        if case.operator not in RANDOM
        and case.name not in LONG
        and all(isinstance(value, np.ndarray) for value in (*case.inputs, *case.outputs))
    )
    return sorted(kept, key=lambda case: case.name)


def importable(case: Case) -> tuple[onnx.ModelProto, dict[str, np.ndarray]] | None:
    """The first variant that is not refused, with what it is fed.

    Tried with no input constant, with all but the first, with all; then with one output only.
    """
    feeds = dict(zip([value.name for value in case.model.graph.input], case.inputs, strict=True))
    names = list(feeds)
    for kept in dict.fromkeys((len(case.model.graph.output), 1)):
        for constant in ([], names[1:], names):
            changed = case.variant(constant, kept)
            try:
                import_onnx(changed)
            except TVMFusionError:
                continue
            return changed, {name: feeds[name] for name in names if name not in constant}
    return None


def difference(found: np.ndarray, wanted: np.ndarray) -> str | None:
    """What is wrong with an output, if anything."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {found.shape}, expected {wanted.dtype} {wanted.shape}"
    limit = TOLERANCES.get(wanted.dtype.itemsize, 0)
    wide = [array.astype("float64") for array in (found, wanted)]
    if np.allclose(*wide, rtol=limit, atol=limit / 10, equal_nan=True):
        return None
    return f"{wide[0].ravel()[:8]}, expected {wide[1].ravel()[:8]}"


def defect(case: Case) -> str | None:
    """What an imported case shows of a defect, if anything."""
    chosen = importable(case)
    if chosen is None:
        return None
    changed, feeds = chosen
    try:
        compiled = tvm_fusion.compile(changed, threads=1)
        found = compiled(feeds) if feeds else compiled()
    except Exception as error:  # whatever it is, it must not come after the import
        return f"{case.name}: {type(error).__name__}: {error}"
    found = found if isinstance(found, tuple) else (found,)
    texts = [
        difference(np.asarray(one), other) for one, other in zip(found, case.outputs, strict=False)
    ]
    return f"{case.name}: {'; '.join(filter(None, texts))}" if any(texts) else None


def sample() -> list[Case]:
    """Some cases of each operator, the same ones each time."""
    by_operator: dict[str, list[Case]] = defaultdict(list)
    for case in tensor_cases():
        by_operator[case.operator].append(case)
    generator = random.Random(0)
    return [
        case
        for group in by_operator.values()
        for case in generator.sample(group, min(PER_OPERATOR, len(group)))
    ]


@pytest.mark.slow
def test_numbers_of_onnx_cases() -> None:
    chosen = sample()
    assert len(chosen) > 200
    assert "\n".join(text for text in map(defect, chosen) if text is not None) == ""
