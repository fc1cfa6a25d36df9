# SPDX-License-Identifier: Apache-2.0
"""ONNX's own cases of single operators: which of them compile, and whether the numbers are right.

``PYTHONPATH=.:docs python tests/tvm_fusion/node_suite.py [PATTERN]`` runs the cases whose names
match the pattern, all of them by default, and prints the counts and what is wrong.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import onnx

import tvm_fusion
from operator_cases import Case, cases
from tvm_fusion.errors import TVMFusionError
from tvm_fusion.onnx.frontend import import_onnx

TOLERANCES = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""Tolerances by the size of an element; 16-bit numbers are rounded after other steps than
ONNX's."""

DISPUTED = {
    f"test_resize_downsample_scales_{mode}_align_corners": "ONNX's reference divides by the size "
    "that the scale gives, the specification and ONNX Runtime by that of the result"
    for mode in ("linear", "cubic")
}
"""Cases whose numbers ONNX Runtime does not have either, and why."""

RANDOM = ("Bernoulli", "RandomNormalLike", "RandomUniformLike")
"""Operators whose outputs nobody can expect."""


class Outcome(NamedTuple):
    """Verdict on a case.

    ``kind`` is "right", "constant" (right with all inputs but the first constant, or with the first
    output only), "folded" (right with all inputs constant), "refused", "wrong", or "disputed" for
    those of ``DISPUTED``.
    """

    kind: str
    reason: str = ""


@cache
def every_case() -> list[Case]:
    """All cases of ONNX, also those whose inputs are no tensors."""
    return sorted(cases(every=True), key=lambda case: case.name)


def tensor_cases(collected: Sequence[Case] | None = None) -> list[Case]:
    """Cases whose inputs and outputs are tensors, and the outputs determined by the inputs."""
    return [
        case
        for case in (every_case() if collected is None else collected)
        if not any(node.op_type in RANDOM for node in case.model.graph.node)
        and all(isinstance(value, np.ndarray) for value in (*case.inputs, *case.outputs))
    ]


def variants(case: Case) -> Iterator[tuple[onnx.ModelProto, dict[str, np.ndarray], str]]:
    """The model with no, all but the first, and all inputs constant; then with one output."""
    count = len(case.model.graph.output)
    feeds = dict(zip([value.name for value in case.model.graph.input], case.inputs, strict=True))
    names = list(feeds)
    for kept in dict.fromkeys((count, 1)):
        for constant in ([], names[1:], names):
            given = {name: feeds[name] for name in names if name not in constant}
            kind = "right" if not constant and kept == count else "constant" if given else "folded"
            yield case.variant(constant, kept), given, kind


def difference(found: np.ndarray, wanted: np.ndarray) -> str | None:
    """Describe what is wrong with an output, if anything."""
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
        found = _run(case, changed, feeds, kind)
        is_disputed = found.kind == "wrong" and case.name in DISPUTED
        return Outcome("disputed", DISPUTED[case.name]) if is_disputed else found
    return Outcome("refused", reason)


def _run(case: Case, model: onnx.ModelProto, feeds: dict[str, np.ndarray], kind: str) -> Outcome:
    try:
        compiled = tvm_fusion.compile(model, threads=1)
        found = compiled(feeds) if feeds else compiled()
    except Exception as error:  # whatever it is, it must not come after the import
        return Outcome("wrong", f"{type(error).__name__}: {error}")
    found = found if isinstance(found, tuple) else (found,)
    pairs = zip(found, case.outputs, strict=False)
    texts = [difference(np.asarray(one), other) for one, other in pairs]
    return Outcome("wrong", "; ".join(filter(None, texts))) if any(texts) else Outcome(kind)


def main(pattern: str = "") -> None:
    """Run the cases whose names match, and print the counts."""
    counts: Counter[str] = Counter()
    for case in tensor_cases():
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
