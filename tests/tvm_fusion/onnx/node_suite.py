# SPDX-License-Identifier: Apache-2.0
"""ONNX's own cases of single operators: which of them compile, and whether the numbers are right.

``python tests/tvm_fusion/onnx/node_suite.py [PATTERN]`` runs the cases whose names match the
pattern, all of them by default, and prints the counts and what is wrong.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

import tvm_fusion
from tvm_fusion.errors import TVMFusionError
from tvm_fusion.onnx.frontend import import_onnx

TOLERANCES = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""By the size of an element; 16-bit numbers are rounded after other steps than ONNX's."""

RANDOM = ("Bernoulli", "RandomNormalLike", "RandomUniformLike")
"""Operators whose outputs nobody can expect."""


class Case(NamedTuple):
    """One test case: a model, what it is fed, and what it must return."""

    name: str
    model: onnx.ModelProto
    values: list[np.ndarray]
    wanted: list[np.ndarray]

    @property
    def operator(self) -> str:
        """The operator of the case's only node; empty if it has other nodes."""
        nodes = self.model.graph.node
        is_one = len(nodes) == 1 and not nodes[0].domain and "_expanded" not in self.name
        return nodes[0].op_type if is_one else ""


class Outcome(NamedTuple):
    """What became of a case.

    ``kind`` is "right", "constant" (right with all inputs but the first constant, or with the first
    output only), "folded" (right with all inputs constant), "refused" or "wrong".
    """

    kind: str
    reason: str = ""


@cache
def every_case() -> list[Any]:
    """All cases of ONNX, also those whose inputs are no tensors."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(collect_testcases(None), key=lambda case: case.name)


@cache
def cases() -> list[Case]:
    """Cases whose inputs and outputs are tensors, and the outputs determined by the inputs."""
    found = []
    for case in every_case():
        inputs, results = case.data_sets[0]
        is_random = any(node.op_type in RANDOM for node in case.model.graph.node)
        if not is_random and all(map(is_tensor, (*inputs, *results))):
            values, wanted = ([tensor(value) for value in part] for part in (inputs, results))
            found.append(Case(case.name, case.model, values, wanted))
    return found


def is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | onnx.TensorProto)


def tensor(value: Any) -> np.ndarray:
    """A tensor as an array, which some cases have as a message."""
    is_message = isinstance(value, onnx.TensorProto)
    return numpy_helper.to_array(value) if is_message else np.asarray(value)


def variants(case: Case) -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray], str]]:
    """The model with no, all but the first, and all inputs constant; then with one output."""
    model = case.model
    names = [value.name for value in model.graph.input]
    for kept in dict.fromkeys((len(model.graph.output), 1)):
        for constant in ([], names[1:], names):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            feeds = {}
            for value, array in zip(model.graph.input, case.values, strict=True):
                if value.name in constant:
                    changed.graph.input.remove(value)
                    weight = numpy_helper.from_array(array, value.name)
                    changed.graph.initializer.append(weight)
                else:
                    feeds[value.name] = array
            if kept < len(model.graph.output) and case.operator:
                del changed.graph.output[kept:]
                del changed.graph.node[0].output[kept:]
            is_whole = not constant and kept == len(model.graph.output)
            yield changed, feeds, "right" if is_whole else "constant" if feeds else "folded"


def difference(found: np.ndarray, wanted: np.ndarray) -> str | None:
    """What is wrong with an output, if anything."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {found.shape}, expected {wanted.dtype} {wanted.shape}"
    limit = TOLERANCES.get(wanted.dtype.itemsize, 0)
    wide = [array.astype("float64") for array in (found, wanted)]
    if np.allclose(*wide, rtol=limit, atol=limit / 10, equal_nan=True):
        return None
    return f"{wide[0].ravel()[:8]}, expected {wide[1].ravel()[:8]}"


def outcome(case: Case) -> Outcome:
    """Compile the first variant that is not refused, and compare its outputs."""
    reason = ""
    for changed, feeds, kind in variants(case):
        try:
            import_onnx(changed)
        except TVMFusionError as error:
            reason = reason or str(error)
            continue
        except Exception as error:
            return Outcome("wrong", f"import: {type(error).__name__}: {error}")
        return _run(case, changed, feeds, kind)
    return Outcome("refused", reason)


def _run(
    case: Case, model: onnx.ModelProto, feeds: dict[str, np.ndarray], kind: str
) -> Outcome:
    try:
        compiled = tvm_fusion.compile(model, threads=1)
        found = compiled(feeds) if feeds else compiled()
    except Exception as error:  # whatever it is, it must not come after the import
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    found = found if isinstance(found, tuple) else (found,)
    pairs = zip(found, case.wanted, strict=False)
    texts = [difference(np.asarray(one), other) for one, other in pairs]
    return Outcome("wrong", "; ".join(filter(None, texts))) if any(texts) else Outcome(kind)


def main(pattern: str = "") -> None:
    """Run the cases whose names match, and print the counts."""
    counts: Counter[str] = Counter()
    for case in cases():
        if re.search(pattern, case.name):
            found = outcome(case)
            counts[found.kind] += 1
            if found.kind in ("refused", "wrong"):
                last = found.reason.strip().splitlines()[-1] if found.reason else ""
                print(f"{found.kind}: {case.name}: {last[:300]}", flush=True)
    total = sum(bool(re.search(pattern, case.name)) for case in every_case())
    print(f"{total} cases, of them {total - sum(counts.values())} without tensors or random:")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
