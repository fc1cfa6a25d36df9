# SPDX-License-Identifier: Apache-2.0
"""Templates of GPU kernels: settings drawn from each space compile for CUDA and agree in OpenCL."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from cluster_emulation import clusters, emulated
from conv2d.test_tensor_core_conv2d import layer_function, layer_of
from cpu.conv_cases import build
from cuda_text import cuda_source, ptxas
from gpu_conv_cases import CUDA, case_of, dense, depthwise
from opencl import compile_opencl
from tvm import te, tirx, topi
from tvm.target import Target
from warpgroup_emulation import emulate_warpgroups

from schedules import attributes, gpu
from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.errors import OpError
from schedules.gpu.conv2d.conv2d import conv2d_template
from schedules.gpu.conv2d.fused_tiles import FusedTile
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.conv_tiles import ConvTile
from schedules.gpu.gemm.matmul import warpgroup_conv2d, warpgroup_tile
from schedules.tuning.records import Record, Records, parse_record
from schedules.tuning.tunable_rule import tunable_rule_of
from schedules.workload.reduce import ReduceWorkload

# Blocks are as large as CUDA's: the settings are those of its spaces.
OPENCL = Target(
    {"kind": "opencl", "max_num_threads": 1024, "max_shared_memory_per_block": 49152},
    host="llvm",
)
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
MANY, PARTS = 200, 4


def matmul(m: Any, k: Any, n: Any, transposed: bool = False) -> tirx.PrimFunc:
    m, k, n = (tirx.const(extent, "int64") for extent in (m, k, n))  # Relax has such extents.
    left = te.placeholder((m, k), name="left")
    right = te.placeholder((n, k) if transposed else (k, n), name="right")
    return te.create_prim_func([left, right, topi.matmul(left, right, False, transposed)])


def product(m: int, k: int, n: int) -> tirx.PrimFunc:
    """A product of float16, summed in float32."""
    m, k, n = (tirx.const(extent, "int64") for extent in (m, k, n))
    left, right = (
        te.placeholder((m, k), "float16", "left"),
        te.placeholder((k, n), "float16", "right"),
    )
    inner = te.reduce_axis((tirx.const(0, "int64"), k), "inner")

    def term(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        factors = left[i, inner].astype("float32"), right[inner, j].astype("float32")
        return te.sum(factors[0] * factors[1], inner)

    return te.create_prim_func([left, right, te.compute((m, n), term, "output")])


def total(shape: tuple[int, ...], axes: list[int]) -> tirx.PrimFunc:
    data = te.placeholder(shape, name="data")
    workload = ReduceWorkload.create("sum", axes, len(shape), "float32")
    return te.create_prim_func([data, coalesced_reduce(data, workload)])


def softmax(shape: tuple[int, int]) -> tirx.PrimFunc:
    """Softmax by two coalesced reductions of a row."""

    def reduced(operator: str, source: te.Tensor) -> te.Tensor:
        workload = ReduceWorkload.create(operator, [1], 2, "float32", keepdims=True)
        return coalesced_reduce(source, workload)

    data = te.placeholder(shape, name="data")
    largest = reduced("max", data)
    terms = te.compute(shape, lambda i, j: te.exp(data[i, j] - largest[i, 0]), "terms")
    sums = reduced("sum", terms)
    output = te.compute(shape, lambda i, j: terms[i, j] / sums[i, 0], "softmax")
    return te.create_prim_func([data, output])


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
    "gpu.conv2d_warpgroups": [
        layer_function(layer_of(24, 40, 3, 2), (2, 9, 13), "float16", True, True),
        layer_function(layer_of(64, 136, 3), (4, 14, 14), "float16", True, True),
    ],
    "gpu.matmul_warpgroups": [product(200, 72, 136), product(1000, 264, 520)],
    "gpu.reduce": [total((3, 5, 4100), [1, 2]), total((4097, 36), [0])],
    "gpu.reduce_chain": [softmax((37, 1000)), softmax((3, 8200))],
}


@pytest.fixture(autouse=True)
def prefer_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let them take small products, too."""
    for module in (warpgroup_tile, warpgroup_conv2d):
        monkeypatch.setattr(module, "single_cycles", lambda *_: float("inf"))


def cuda_of(name: str) -> Target:
    """The target of a template's kernels."""
    return HOPPER if "warpgroup" in name else CUDA


def drawn(name: str, count: int, first: int) -> list[tuple[tirx.PrimFunc, Any, list[Any]]]:
    """Functions of a template with their workloads: the default and settings that are drawn.

    ``count`` settings: of all functions if they are several, else of the one at ``first``.
    """
    template, found = gpu.TEMPLATES[name], []
    functions = FUNCTIONS[name] if count > 1 else FUNCTIONS[name][first : first + 1]
    for func in functions:
        target = cuda_of(name)
        rule, workload = tunable_rule_of(func, target, gpu.RULES) or (None, None)
        assert rule is not None and template in rule.templates(workload, rule.machine(target))
        space = template.space(workload, rule.machine(target))
        share = min(len(space) - 1, count // len(functions))
        numbers = np.random.default_rng().choice(len(space) - 1, share, replace=False)
        found.append((func, workload, [space[0], *(space[number + 1] for number in numbers)]))
    return found


def check_resources(name: str, count: int) -> None:
    """No setting that is drawn spills registers in a kernel for sm_90."""
    template = gpu.TEMPLATES[name]
    for func, workload, settings in drawn(name, count, 1):
        for knobs in settings[1:]:
            target = cuda_of(name)
            written = template.write(func, workload, knobs, target).mod["main"]
            check_spills(written, knobs, str(target.attrs["arch"]))


def check_spills(written: tirx.PrimFunc, knobs: Any = None, arch: str = "sm_90") -> None:
    """No kernel of a function for sm_90 spills registers."""
    for kernel, used in ptxas(cuda_source(written, arch), arch).items():
        spilled = used.stack_frame, used.spill_stores, used.spill_loads
        assert spilled == (0, 0, 0), (kernel, knobs)


@contextlib.contextmanager
def warpgroups(name: str) -> Iterator[None]:
    """Emulate the products of warpgroups of a template that has some."""
    with pytest.MonkeyPatch.context() as patch:
        if "warpgroup" in name:
            emulate_warpgroups(patch)
        yield


def check_numbers(name: str, count: int) -> None:
    """Every setting computes what the default does."""
    template, generator = gpu.TEMPLATES[name], np.random.default_rng()
    for func, workload, settings in drawn(name, count, 0):
        shapes = [tuple(map(int, param.shape)) for param in func.params]
        types = [str(param.dtype) for param in func.params[:-1]]
        inputs = [
            generator.standard_normal(shape).astype(dtype)
            for shape, dtype in zip(shapes[:-1], types, strict=True)
        ]
        wanted = None
        for knobs in settings:
            with clusters(), warpgroups(name):
                written = emulated(template.write(func, workload, knobs, OPENCL).mod["main"])
            output = np.full(shapes[-1], np.nan, "float32")
            added = written.params[: len(written.params) - len(func.params)]
            workspace = [np.zeros([int(e) for e in one.shape], "int32") for one in added]
            compile_opencl(written, OPENCL).run(*workspace, *inputs, output)
            wanted = output if wanted is None else wanted
            assert np.isfinite(output).all(), knobs
            tolerance = 2e-5 * float(np.abs(wanted).max())
            np.testing.assert_allclose(output, wanted, rtol=0, atol=tolerance, err_msg=str(knobs))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_a_setting_spills_nothing(name: str) -> None:
    check_resources(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile",
    [
        ConvTile(blocks=1, pixels=128, thread_blocks=1, thread_pixels=1, quads=4, parts=1),
        ConvTile(blocks=1, pixels=128, thread_blocks=1, thread_pixels=2, quads=2, parts=1),
    ],
    ids=str,
)
def test_small_tiles_get_the_registers_that_addresses_take(tile: ConvTile) -> None:
    """These spill in 80 and in 96 registers."""
    func, machine = FUNCTIONS["gpu.conv2d"][1], GPUInfo.from_target(CUDA)
    _, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
    check_spills(conv2d_template(func, workload, tile, machine))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tile",
    [
        ConvTile(blocks=1, pixels=128, thread_blocks=1, thread_pixels=2, quads=2, parts=2),
        ConvTile(blocks=4, pixels=32, thread_blocks=2, thread_pixels=4, quads=8, parts=4, splits=2),
        ConvTile(blocks=8, pixels=16, thread_blocks=1, thread_pixels=1, quads=16),
        ConvTile(blocks=32, pixels=64, thread_blocks=1, thread_pixels=8, quads=4),
    ],
    ids=str,
)
def test_settings_get_the_registers_that_128_are_not(tile: ConvTile) -> None:
    """These spill in the 128 registers of four warps a partition."""
    func, template = FUNCTIONS["gpu.conv2d"][0], gpu.TEMPLATES["gpu.conv2d"]
    rule, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
    assert rule is not None and template.contains(workload, tile, rule.machine(CUDA))
    check_spills(template.write(func, workload, tile, CUDA).mod["main"])


def test_dense_pairs_that_spill_are_no_settings() -> None:
    func, template = FUNCTIONS["gpu.fused_conv2d"][1], gpu.TEMPLATES["gpu.fused_conv2d"]
    rule, workload = tunable_rule_of(func, CUDA, gpu.RULES) or (None, None)
    assert rule is not None
    spills = FusedTile(4, 16, 4, 1, 4, quads=2, chunk=8, first_quads=4, rows=1)
    assert not template.contains(workload, spills, rule.machine(CUDA))
    assert template.contains(workload, replace(spills, first_quads=2), rule.machine(CUDA))


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_a_setting_agrees_with_the_default(name: str) -> None:
    check_numbers(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_many_settings_spill_nothing(name: str, part: int) -> None:
    check_resources(name, MANY // PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_many_settings_agree(name: str, part: int) -> None:
    check_numbers(name, MANY // PARTS)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", gpu.TEMPLATES)
def test_rules_follow_records(name: str) -> None:
    template, func, target = gpu.TEMPLATES[name], FUNCTIONS[name][0], cuda_of(name)
    rule, workload = tunable_rule_of(func, target, gpu.RULES) or (None, None)
    assert rule is not None
    machine = rule.machine(target)
    settings = template.space(workload, machine)
    # One that needs no workspace: a rule alone adds no parameter.
    knobs = next(one for one in settings[7:] if getattr(one, "splits", 1) == 1)
    key = rule.key(workload, machine)
    record = Record.of_key(key, template, knobs, (2e-5, 1e-5), trials=8)
    again = parse_record(record.to_line().encode())
    assert (again, again.kind, again.cpu) == (record, "cuda", machine.name)
    rules = gpu.rules(Records([("mine.jsonl", again)]))
    written = next(found for one in rules if (found := one.apply(func, target, False)))
    about = str(written.mod["main"].attrs[attributes.RECORD])
    assert json.loads(about)["gain"] == 2
    wanted = template.write(func.with_attr(attributes.RECORD, about), workload, knobs, target)
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
