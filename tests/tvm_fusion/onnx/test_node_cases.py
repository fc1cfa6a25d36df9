# SPDX-License-Identifier: Apache-2.0
"""A sample of ONNX's own cases: what is imported has the outputs that ONNX expects, on the CPU."""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest
from node_suite import outcome, tensor_cases

from operator_cases import Case

PER_OPERATOR = int(os.environ.get("NODE_CASES", "2"))
"""Cases that are drawn of each operator; all of them take some minutes."""

LONG = ("test_gridsample_reflection_padding",)
"""Cases that take a minute to compile."""


def sample() -> list[Case]:
    """Some cases of each operator, the same ones each time."""
    by_operator: dict[str, list[Case]] = defaultdict(list)
    for case in tensor_cases():
        if case.operator and case.name not in LONG:
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
    found = [(case.name, outcome(case)) for case in chosen]
    wrong = [f"{name}: {result.reason}" for name, result in found if result.kind == "wrong"]
    assert "\n".join(wrong) == ""
