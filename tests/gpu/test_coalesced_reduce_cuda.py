# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of reductions: resources, wide loads, structure; compiled, not run."""

from __future__ import annotations

import pytest
import tvm
from cuda_text import count, cuda_source, loops, ptxas, sass
from reduce_cases import CUDA, Case
from tvm.target import Target

from schedules.errors import OpError, TargetError
from schedules.gpu.device import GPUInfo
from schedules.reduce_workload import DTYPES, OPERATORS

FORMS: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "all": ((1 << 22,), [0]),
    "x": ((64, 1 << 16), [1]),
    "y": ((1 << 16, 64), [0]),
}
FINISHES = ("one_block", "atomic", "last_block")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_spills(dtype: str) -> None:
    """One text with a kernel of every operator; forms and finishes take turns."""
    functions = {}
    for number, operator in enumerate(OPERATORS, DTYPES.index(dtype)):
        shape, axes = FORMS[list(FORMS)[number % 3]]
        finish = FINISHES[number // 3 % 3]
        if operator.startswith("arg") and finish == "atomic":
            finish = "last_block"
        try:
            case = Case(operator, dtype, shape, axes, finish, CUDA)
        except OpError:
            continue  # there is no such reduction
        functions[operator] = case.func.with_attr("global_symbol", operator)
    assert len(functions) >= 6
    used = ptxas(cuda_source(tvm.IRModule(functions)))
    assert len(used) >= len(functions)
    for name, resources in used.items():
        spilled = (resources.stack_frame, resources.spill_stores, resources.spill_loads)
        assert spilled == (0, 0, 0), name


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("form", FORMS)
def test_main_loop_loads_16_bytes(form: str, finish: str) -> None:
    shape, axes = FORMS[form]
    case = Case("sum", "float32", shape, axes, finish, CUDA)
    code = sass(cuda_source(case.func))
    main = max((loop for text in code.values() for loop in loops(text)), key=len)
    assert count(main, "LDG.E.128") >= case.config.unroll
    assert count(main, "LDG.E") == count(main, "LDG.E.128")


@pytest.mark.parametrize("form", FORMS)
def test_two_blocks_for_each_multiprocessor(form: str) -> None:
    shape, axes = FORMS[form]
    case = Case("sum", "float32", shape, axes, "auto", CUDA)
    outputs = 1 if form == "all" else 64
    blocks = -(-outputs // case.config.tile_outputs) * case.config.splits
    assert blocks >= 2 * GPUInfo.from_target(CUDA).multiprocessors


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90"])
def test_integer_sums_are_atomic(arch: str) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "int32", (1 << 22,), [0], "auto", target)
    assert case.config.finish == "atomic"
    assert "atomicAdd(p, v)" in cuda_source(case.func, arch)


def test_old_architectures_are_refused() -> None:
    with pytest.raises(TargetError, match="sm_61 is too old"):
        GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_61"}))
