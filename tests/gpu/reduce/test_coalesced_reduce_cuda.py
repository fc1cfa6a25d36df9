# SPDX-License-Identifier: Apache-2.0
"""The CUDA text of reductions: resources, wide loads, structure; compiled, not run."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from cuda_text import count, cuda_source, main_loop, opcodes, ptxas, sass
from hypothesis import given, settings
from hypothesis import strategies as st
from reduce_cases import CUDA, Case, choose, numpy_dtype
from tvm import te, tirx
from tvm.target import Target

from schedules.errors import OpError, TargetError
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.machine_costs import COSTS
from schedules.gpu.reduce.plan.config import blocks_at_once, tiles
from schedules.workload.reduce import DTYPES, OPERATORS, CanonicalLoops, ReduceWorkload
from tests.selection import in_turns

FORMS: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "all": ((1 << 22,), [0]),
    "x": ((64, 1 << 20), [1]),
    "y": ((1 << 16, 64), [0]),
}
FINISHES = ("one_block", "atomic", "last_block")


QUICK = ("float16",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    [d if d in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in DTYPES],
)
def test_nothing_spills(dtype: str) -> None:
    """One text with a kernel of every operator; forms and finishes take turns."""
    functions = {}
    for number, operator in enumerate(OPERATORS, DTYPES.index(dtype)):
        shape, axes = FORMS[list(FORMS)[number % 3]]
        finish = FINISHES[number // 3 % 3]
        if finish == "atomic" and operator.startswith("arg"):
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


@pytest.mark.slow
@pytest.mark.parametrize(("dtype",), in_turns(["int8", "bfloat16", "float16"], every=3))
def test_clusters_do_not_spill_wide_states(dtype: str) -> None:
    """A thread has many narrow elements."""
    case = Case("prod", dtype, (100_000, 64), [0], "one_block", CUDA)
    assert case.config.finish == "cluster"
    [resources] = ptxas(cuda_source(case.func)).values()
    assert (resources.stack_frame, resources.spill_stores, resources.spill_loads) == (0, 0, 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("form", "finish"), in_turns(FORMS, FINISHES, every=3))
def test_main_loop_loads_16_bytes(form: str, finish: str) -> None:
    shape, axes = FORMS[form]
    case = Case("sum", "float32", shape, axes, finish, CUDA)
    main = main_loop(*sass(cuda_source(case.func)).values())
    assert count(main, "LDG.E.128") >= case.config.unroll
    assert count(main, "LDG.E") == count(main, "LDG.E.128")


@pytest.mark.parametrize("finish", FINISHES)
def test_tvm_adds_no_barriers(finish: str) -> None:
    """It does where it finds one missing."""
    func = Case("sum", "float32", *FORMS["x"], finish, CUDA).func
    assert cuda_source(func).count("__syncthreads();") == str(func).count("storage_sync") > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", [*FORMS, "far"])
def test_indices_are_narrow_beside_a_ticket(form: str) -> None:
    shape, axes = FORMS.get(form, ((128, 64, 147, 147), [0, 2, 3]))
    case = Case("sum", "float32", shape, axes, "last_block", CUDA)
    assert case.config.finish == "last_block"
    assert not re.search(r"int64_t\)\(*(int\)\(*)?(thread|block)Idx", cuda_source(case.func))


@pytest.mark.slow
def test_subscripts_of_far_axes_are_stepped() -> None:
    """A quotient and a remainder take as many instructions alone."""
    case = Case("sum", "float32", (128, 64, 147, 147), [0, 2, 3], "auto", CUDA)
    assert case.config.vector == 1
    main = main_loop(*sass(cuda_source(case.func)).values())
    assert len(main) <= 12 * count(main, "LDG.E")


@pytest.mark.slow
@pytest.mark.parametrize("last", in_turns([64, 5, 90], every=3))
def test_all_axes_are_one_row(last: int) -> None:
    """No subscripts are computed by division, whether the vector divides the last extent or not."""
    lengths = []
    for shape in ((32, 52, 52, 3, last), (32 * 52 * 52 * 3 * last,)):
        case = Case("sum", "float32", shape, list(range(len(shape))), "auto", CUDA)
        source = cuda_source(case.func)
        [used] = ptxas(source).values()
        assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
        lengths.append(len(main_loop(*sass(source).values())))
    assert lengths[0] == lengths[1]


@pytest.mark.slow
def test_neighbouring_axes_are_one_vector() -> None:
    """Rows of images are shorter than a vector, or no multiple of one; an image is one."""
    case = Case("sum", "float32", (64, 96, 14, 14), [0, 2, 3], "auto", CUDA)
    main = main_loop(*sass(cuda_source(case.func)).values())
    assert count(main, "LDG.E") == count(main, "LDG.E.128") > 0


def _is_finite(data: te.Tensor) -> te.Tensor:
    return te.compute(data.shape, lambda *i: tirx.isfinite(data(*i)), name="finite")


@pytest.mark.slow
def test_wide_data_of_narrow_values_is_loaded_by_vectors() -> None:
    case = Case("and", "float32", (1 << 22,), [0], target=CUDA, producer=_is_finite)
    main = main_loop(*sass(cuda_source(case.func)).values())
    assert count(main, "LDG.E") == count(main, "LDG.E.128") > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("outputs", [1, 3, 64, 1000, 4096, 1 << 18])
@pytest.mark.parametrize("form", ["x", "y"])
def test_two_blocks_for_each_multiprocessor(form: str, outputs: int, dtype: str) -> None:
    """Inputs of 1 MiB or more, whatever the shape."""
    for size in (5 << 18, 1 << 24, 1 << 27):
        reduced = -(-size // (outputs * np.dtype(numpy_dtype(dtype)).itemsize))
        shape = (outputs, reduced) if form == "x" else (reduced, outputs)
        workload = ReduceWorkload.create("max", [1 if form == "x" else 0], 2, dtype)
        loops = CanonicalLoops(shape, workload.axes)
        gpu = GPUInfo.from_target(CUDA)
        config = choose(workload, loops, gpu)
        assert tiles(config, loops) * config.splits >= 2 * gpu.multiprocessors, config


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    outputs=st.one_of(st.integers(1, 3000), st.integers(1, 1 << 18)),
    reduced=st.one_of(st.integers(1, 5000), st.integers(1, 1 << 20)),
    form=st.sampled_from(["x", "y"]),
    dtype=st.sampled_from(["float32", "float16", "int32", "int8"]),
    finish=st.sampled_from(["auto", "last_block", "atomic"]),
    arch=st.sampled_from(["sm_70", "sm_80", "sm_90"]),
)
def test_splits(outputs: int, reduced: int, form: str, dtype: str, finish: str, arch: str) -> None:
    """Few for an output, and no few blocks left when all others have ended."""
    gpu = GPUInfo.from_target(Target({"kind": "cuda", "arch": arch}))
    shape, axes = ((outputs, reduced), [1]) if form == "x" else ((reduced, outputs), [0])
    workload = ReduceWorkload.create("sum", axes, 2, dtype, finish=finish)
    loops = CanonicalLoops(shape, workload.axes)
    config = choose(workload, loops, gpu)
    if config.splits == 1:
        return
    if config.finish == "last_block" and config.tile_outputs > 1:
        assert config.splits * config.tile_outputs <= COSTS.most_partials
    if config.finish == "atomic" and outputs > 32:
        assert config.splits <= 16
    blocks = tiles(config, loops) * config.splits
    at_once = blocks_at_once(config, [workload], []) * gpu.multiprocessors
    assert blocks <= at_once or blocks >= 4 * at_once


@pytest.mark.parametrize(
    ("shape", "axes", "dtype"),
    [
        ((200_704, 256), [0], "float16"),
        ((16_000, 256), [0], "int32"),
        ((64, 128_256), [1], "float32"),
        ((600, 55_924), [1], "float32"),
        ((256, 131_072), [0], "float32"),
        ((9000, 256), [1], "float32"),
    ],
)
def test_waves_are_even(shape: tuple[int, ...], axes: list[int], dtype: str) -> None:
    workload = ReduceWorkload.create("sum", axes, 2, dtype)
    loops = CanonicalLoops(shape, workload.axes)
    gpu = GPUInfo.from_target(CUDA)
    config = choose(workload, loops, gpu)
    blocks = tiles(config, loops) * config.splits
    at_once = blocks_at_once(config, [workload], []) * gpu.multiprocessors
    assert at_once // 2 <= blocks <= at_once or blocks >= 4 * at_once, config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((8192, 8, 7168), "float32"), ((4, 7, 4096, 128), "bfloat16"), ((90, 31, 4096), "int8")],
)
def test_few_elements_are_left_to_one_thread(shape: tuple[int, ...], dtype: str) -> None:
    """There is no barrier; 16 bytes are loaded and stored at once."""
    case = Case("sum", dtype, shape, [1], "auto", CUDA)
    assert (case.config.rows, case.config.splits) == (1, 1)
    [code] = sass(cuda_source(case.func)).values()
    names = opcodes(code)
    assert count(names, "BAR") == 0
    for opcode in ("LDG.E", "STG.E"):
        assert count(names, opcode) == count(names, f"{opcode}.128") > 0


@pytest.mark.slow
@pytest.mark.parametrize(("arch",), in_turns(["sm_90", "sm_80", "sm_70"], every=3))
def test_integer_sums_are_atomic_on_request(arch: str) -> None:
    """Sums are one kernel by default, without another one that initialises the output."""
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "int32", (1 << 22,), [0], "atomic", target)
    assert case.config.finish == "atomic"
    assert "atomicAdd(p, v)" in cuda_source(case.func, arch)
    for operator, dtype in (("sum", "int32"), ("max", "int64"), ("or", "bool")):
        case = Case(operator, dtype, (1 << 24,), [0], "auto", target)
        assert case.config.splits > 1
        assert cuda_source(case.func, arch).count("__global__ void") == 2  # declared, defined


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "dtype"), in_turns(FORMS, ["float32", "float16", "int64"], every=5)
)
def test_positions_of_extremes_need_no_branch(form: str, dtype: str) -> None:
    """Four vectors are loaded at once; the loop has no branch but the one that closes it."""
    shape, axes = FORMS[form]
    shape = (1 << 24,) if form == "all" else shape
    case = Case("argmax", dtype, shape, axes, "auto", CUDA)
    main = main_loop(*sass(cuda_source(case.func)).values())
    assert count(main, "LDG.E.128") % case.config.unroll == 0 and case.config.unroll == 4
    assert count(main, "BRA") == 1 and count(main, "BSSY") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "instruction"), [("float32", "F32x4"), ("float16", "F16x2"), ("bfloat16", "BF16x2")]
)
def test_atomic_sums_of_columns_are_vectors(dtype: str, instruction: str) -> None:
    case = Case("mean", dtype, (1 << 16, 64), [0], "atomic", CUDA)
    names = [name for code in sass(cuda_source(case.func)).values() for name in opcodes(code)]
    updates = [name for name in names if name.startswith(("RED", "ATOM"))]
    assert updates
    assert all(name.startswith("REDG") and instruction in name for name in updates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "operator", "dtype"),
    [("y", "max", "int8")]
    + [
        pytest.param(form, operator, dtype, marks=pytest.mark.slow)
        for form, operator, dtype in (
            ("x", "prod", "uint8"),
            ("x", "max", "int8"),
            ("y", "sum", "uint8"),
            ("x", "sum", "int8"),
            ("x", "sum", "uint8"),
            ("x", "prod", "int8"),
            ("x", "max", "uint8"),
            ("y", "sum", "int8"),
            ("y", "prod", "int8"),
            ("y", "prod", "uint8"),
            ("y", "max", "uint8"),
        )
    ],
)
def test_bytes_are_swapped_with_their_neighbours(form: str, operator: str, dtype: str) -> None:
    """Columns of a word by one instruction: 64 columns in threads with 16 bytes each."""
    shape, axes = FORMS[form]
    case = Case(operator, dtype, shape, axes, "atomic", CUDA)
    assert case.config.finish == "atomic"
    source = cuda_source(case.func)
    for name, used in ptxas(source).items():
        assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0), name
    names = [name for code in sass(source).values() for name in opcodes(code)]
    updates = [name for name in names if name.startswith(("RED", "ATOM"))]
    assert count(names, "ATOMG.E.CAS") == len(updates) == (1 if form == "x" else 4)


def test_old_architectures_are_refused() -> None:
    with pytest.raises(TargetError, match="sm_61 is too old"):
        GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_61"}))
