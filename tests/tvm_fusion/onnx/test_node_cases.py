# SPDX-License-Identifier: Apache-2.0
"""A sample of ONNX's own cases: what is imported has the outputs that ONNX expects, on the CPU."""

from __future__ import annotations

import os
import random
from collections import defaultdict

import numpy as np
import pytest
import tvm
from node_suite import difference, outcome, tensor_cases, variants
from tvm import relax

from operator_cases import Case, cases
from tests.targets import compile_unchecked
from tvm_fusion.errors import TVMFusionError
from tvm_fusion.onnx.frontend import import_onnx

PER_OPERATOR = int(os.environ.get("NODE_CASES", "2"))
"""Cases that are drawn of each operator; all of them take some minutes."""

LONG = ("test_gridsample_reflection_padding",)
"""Cases that take a minute to compile."""


SLOW_FILES = ("averagepool", "lppool", "maxpool")
"""Files of ONNX whose cases it computes in many seconds."""


def sample(collected: list[Case], count: int) -> list[Case]:
    """Some cases of each operator, the same ones each time."""
    by_operator: dict[str, list[Case]] = defaultdict(list)
    for case in collected:
        if case.operator and case.name not in LONG:
            by_operator[case.operator].append(case)
    generator = random.Random(0)
    return [
        case
        for group in by_operator.values()
        for case in generator.sample(group, min(count, len(group)))
    ]


class Batch:
    """Cases as functions of one module, which TVM's own pipeline compiles at once."""

    def __init__(self) -> None:
        self.mod = tvm.IRModule()
        self.cases: dict[str, tuple[Case, dict[str, np.ndarray]]] = {}

    def add(self, case: Case) -> None:
        """Add the first variant of a case that is not refused, if there is one."""
        for model, feeds, _ in variants(case):
            try:
                functions = dict(import_onnx(model).mod.functions_items())
            except TVMFusionError:
                continue
            [main] = [name for name in functions if name.name_hint == "main"]
            func = functions.pop(main)
            taken = {name.name_hint for name in self.mod.get_global_vars()}
            if taken.isdisjoint(name.name_hint for name in functions):
                self.cases[case.name] = case, feeds
                self.mod.update(tvm.IRModule(functions))
                self.mod[case.name] = func.with_attr("global_symbol", case.name)
            return

    def wrong(self) -> list[str]:
        """Compile and run; what is not as ONNX expects."""
        machine = relax.VirtualMachine(compile_unchecked(self.mod), tvm.cpu())
        found = []
        for name, (case, feeds) in self.cases.items():
            arrays = [np.array(array, order="C") for array in feeds.values()]
            result = machine[name](*map(tvm.runtime.tensor, arrays))
            results = [result] if hasattr(result, "numpy") else result
            for output, wanted in zip(results, case.outputs, strict=False):
                if text := difference(output.numpy(), wanted):
                    found.append(f"{name}: {text}")
        return found


def test_one_case_of_each_operator() -> None:
    batch = Batch()
    found = sorted(cases(without=SLOW_FILES), key=lambda case: case.name)
    for case in sample(tensor_cases(found), 1):
        batch.add(case)
    assert len(batch.cases) > 150
    assert "\n".join(batch.wrong()) == ""


@pytest.mark.slow
def test_numbers_of_onnx_cases() -> None:
    chosen = sample(tensor_cases(), PER_OPERATOR)
    assert len(chosen) > 200
    found = [(case.name, outcome(case)) for case in chosen]
    wrong = [f"{name}: {result.reason}" for name, result in found if result.kind == "wrong"]
    assert "\n".join(wrong) == ""
