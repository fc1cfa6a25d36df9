# SPDX-License-Identifier: Apache-2.0
"""ONNX's own cases of one node: what is imported has the outputs that ONNX expects, on the CPU."""

from __future__ import annotations

import os
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import tvm_fusion
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

Case = tuple[str, onnx.ModelProto, list[np.ndarray], list[np.ndarray]]


@cache
def cases() -> list[Case]:
    """Cases of one operator of ONNX whose inputs and outputs are tensors."""
    from onnx.backend.test.case.node import collect_testcases

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = collect_testcases(None)
    for case in every:
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].domain or "_expanded" in case.name or case.name in LONG:
            continue
        inputs, results = case.data_sets[0]
        if nodes[0].op_type not in RANDOM and all(map(is_tensor, (*inputs, *results))):
            values, wanted = ([tensor(value) for value in part] for part in (inputs, results))
            found.append((case.name, case.model, values, wanted))
    return sorted(found, key=lambda case: case[0])


def is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | onnx.TensorProto)


def tensor(value: Any) -> np.ndarray:
    """A tensor as an array, which some cases have as a message."""
    is_message = isinstance(value, onnx.TensorProto)
    return numpy_helper.to_array(value) if is_message else np.asarray(value)


def variants(
    model: onnx.ModelProto, values: list[np.ndarray]
) -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """The model with no, all but the first, and all inputs constant; then with one output."""
    names = [value.name for value in model.graph.input]
    for kept in dict.fromkeys((len(model.graph.output), 1)):
        for constant in ([], names[1:], names):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            feeds = {}
            for value, array in zip(model.graph.input, values, strict=True):
                if value.name in constant:
                    changed.graph.input.remove(value)
                    weight = numpy_helper.from_array(array, value.name)
                    changed.graph.initializer.append(weight)
                else:
                    feeds[value.name] = array
            del changed.graph.output[kept:]
            del changed.graph.node[0].output[kept:]
            yield changed, feeds


def importable(
    model: onnx.ModelProto, values: list[np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]] | None:
    """The first variant that is not refused, with what it is fed."""
    for changed, feeds in variants(model, values):
        try:
            import_onnx(changed)
        except TVMFusionError:
            continue
        return changed, feeds
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
    name, model, values, wanted = case
    chosen = importable(model, values)
    if chosen is None:
        return None
    changed, feeds = chosen
    try:
        compiled = tvm_fusion.compile(changed, threads=1)
        found = compiled(feeds) if feeds else compiled()
    except Exception as error:  # whatever it is, it must not come after the import
        return f"{name}: {type(error).__name__}: {error}"
    found = found if isinstance(found, tuple) else (found,)
    texts = [difference(np.asarray(one), other) for one, other in zip(found, wanted, strict=False)]
    return f"{name}: {'; '.join(filter(None, texts))}" if any(texts) else None


def sample() -> list[Case]:
    """Some cases of each operator, the same ones each time."""
    by_operator: dict[str, list[Case]] = defaultdict(list)
    for case in cases():
        by_operator[case[1].graph.node[0].op_type].append(case)
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
