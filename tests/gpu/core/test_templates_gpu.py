# SPDX-License-Identifier: Apache-2.0
"""Templates of GPU kernels: settings drawn from each space compile for CUDA and agree in OpenCL."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from cpu.conv_cases import build
from cuda_text import cuda_source, ptxas
from gpu_conv_cases import CUDA, case_of, dense, depthwise
from opencl import compile_opencl
from tvm import te, tirx, topi
from tvm.target import Target

from schedules import gpu
from schedules.errors import OpError
from schedules.tuning.records import RECORD, Record, Records, parse_record
from schedules.tuning.tunable_rule import tunable_rule_of

# As large blocks as CUDA's: the settings are those of its spaces.
OPENCL = Target(
    {"kind": "opencl", "max_num_threads": 1024, "max_shared_memory_per_block": 49152},
    host="llvm",
)
FEW, MANY = 2, 200


def matmul(m: Any, k: Any, n: Any, transposed: bool = False) -> tirx.PrimFunc:
    m, k, n = (tirx.const(extent, "int64") for extent in (m, k, n))  # as Relax has them
    left = te.placeholder((m, k), name="left")
    right = te.placeholder((n, k) if transposed else (k, n), name="right")
    return te.create_prim_func([left, right, topi.matmul(left, right, False, transposed)])


FUNCTIONS: dict[str, list[tirx.PrimFunc]] = {
    "gpu.conv2d": [
        build(case_of(dense(36, 44, 3), height=13, width=9)),
        build(case_of(dense(128, 24), height=7, width=5, batch=2)),
    ],
    "gpu.depthwise_conv2d": [
        build(case_of(depthwise(24), height=13, width=9)),
        build(case_of(depthwise(16, 5, strides=(2, 2)), height=11, width=12)),
    ],
    "gpu.fused_conv2d": [
        build(case_of(depthwise(24), dense(24, 40), height=13, width=9)),
        build(case_of(dense(12, 20, 3), dense(20, 28), height=9, width=11)),
    ],
    "gpu.matmul_tiles": [matmul(70, 132, 68), matmul(67, 131, 65, True)],
    "gpu.matmul_rows": [matmul(3, 132, 68), matmul(8, 131, 65, True)],
}


def drawn(name: str, count: int) -> list[tuple[tirx.PrimFunc, Any, list[Any]]]:
    """Functions of a template with their workloads: the default and settings that are drawn."""
    template, found = gpu.TEMPLATES[name], []
    for func in FUNCTIONS[name]:
        rule, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
        assert rule is not None and template in rule.templates(workload, rule.machine(CUDA))
        space = template.space(workload, rule.machine(CUDA))
        share = min(len(space) - 1, count // len(FUNCTIONS[name]))
        numbers = np.random.default_rng().choice(len(space) - 1, share, replace=False)
        found.append((func, workload, [space[0], *(space[number + 1] for number in numbers)]))
    return found


def check_resources(name: str, count: int) -> None:
    """No setting that is drawn spills registers in a kernel for sm_90."""
    template = gpu.TEMPLATES[name]
    for func, workload, settings in drawn(name, count):
        for knobs in settings[1:]:
            written = template.write(func, workload, knobs, CUDA).mod["main"]
            for kernel, used in ptxas(cuda_source(written)).items():
                spilled = used.stack_frame, used.spill_stores, used.spill_loads
                assert spilled == (0, 0, 0), (kernel, knobs)


def check_numbers(name: str, count: int) -> None:
    """Every setting computes what the default does."""
    template, generator = gpu.TEMPLATES[name], np.random.default_rng()
    for func, workload, settings in drawn(name, count):
        shapes = [tuple(map(int, param.shape)) for param in func.params]
        inputs = [generator.standard_normal(s).astype("float32") for s in shapes[:-1]]
        wanted = None
        for knobs in settings:
            written = template.write(func, workload, knobs, OPENCL).mod["main"]
            output = np.full(shapes[-1], np.nan, "float32")
            compile_opencl(written, OPENCL).run(*inputs, output)
            wanted = output if wanted is None else wanted
            assert np.isfinite(output).all(), knobs
            tolerance = 2e-5 * float(np.abs(wanted).max())
            np.testing.assert_allclose(output, wanted, rtol=0, atol=tolerance, err_msg=str(knobs))


@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_a_few_settings_spill_nothing(name: str) -> None:
    check_resources(name, FEW)


@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_a_few_settings_agree(name: str) -> None:
    check_numbers(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_many_settings_spill_nothing(name: str) -> None:
    check_resources(name, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_many_settings_agree(name: str) -> None:
    check_numbers(name, MANY)


@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_rules_follow_records(name: str) -> None:
    template, func = gpu.TEMPLATES[name], FUNCTIONS[name][0]
    rule, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
    assert rule is not None
    machine = rule.machine(CUDA)
    key, knobs = rule.key(workload, machine), template.space(workload, machine)[7]
    record = Record.of_key(key, template, knobs, (2e-5, 1e-5), trials=8)
    again = parse_record(record.to_line().encode())
    assert (again, again.kind, again.cpu) == (record, "cuda", "sm_90")
    rules = gpu.rules(Records([("mine.jsonl", again)]))
    written = next(found for one in rules if (found := one.apply(func, CUDA, False)))
    about = str(written.mod["main"].attrs[RECORD])
    assert json.loads(about)["gain"] == 2
    wanted = template.write(func.with_attr(RECORD, about), workload, knobs, CUDA)
    tvm.ir.assert_structural_equal(written.mod, wanted.mod)


def test_workloads_of_strangers_are_refused() -> None:
    func = FUNCTIONS["gpu.conv2d"][0]
    rule, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
    assert rule is not None
    values, machine = json.loads(rule.workload_json(workload)), rule.machine(CUDA)
    template = gpu.TEMPLATES["gpu.conv2d"]
    with pytest.raises(OpError, match="on 13xNone has symbolic extents; expected known ones"):
        template.read_workload(json.dumps(values | {"width": None}))
    with pytest.raises(OpError, match="no tile of conv 3x3 36->44 .* fits sm_90"):
        template.default(workload, replace(machine, shared_bytes=16))
    with pytest.raises(ValueError, match="describes no product"):
        gpu.TEMPLATES["gpu.matmul_tiles"].read_workload(
            '{"batches": 1, "m": 0, "n": 1, "k": 1, "dtype": "float32", "left_rows_first": false,'
            ' "right_rows_first": false, "vector": 1}'
        )


def test_functions_of_symbolic_extents_have_no_knobs() -> None:
    rows = tirx.Var("n", "int64")
    left, right = te.placeholder((rows, 64), name="left"), te.placeholder((64, 96), name="right")
    func = te.create_prim_func([left, right, topi.matmul(left, right)])
    assert tunable_rule_of(func, CUDA, gpu.RULES) is None
    assert gpu.Matmul().apply(func, CUDA, False) is not None
    assert gpu.Matmul().apply(func, CUDA, True) is None
