# SPDX-License-Identifier: Apache-2.0
"""Reductions in one order on all GPUs: kernels, bits, and the order by itself in numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
import tvm_ffi
from cuda_text import count, cuda_source, main_loop, sass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from opencl import compile_opencl
from reduce_cases import OPENCL, Case
from small_onnx import small_model
from tvm import tirx
from tvm.target import Target

import tvm_fusion
from schedules.cost.decisions import recorded
from schedules.gpu.core.machine import GPUInfo, reproducible_target
from schedules.gpu.reduce.kernel.combine import TREE_ARITY
from schedules.gpu.reduce.plan.config import ReduceConfig
from tvm_fusion.compiler import pipeline
from tvm_fusion.errors import TargetError
from tvm_fusion.onnx.frontend import import_onnx

SAME = reproducible_target(OPENCL)


def cuda(arch: int, multiprocessors: int) -> Target:
    model = f"multiprocessors={multiprocessors}"
    return Target({"kind": "cuda", "arch": f"sm_{arch}", "model": model}, host="llvm")


GPUS = [cuda(75, 40), cuda(80, 108), cuda(87, 16), cuda(90, 132), cuda(90, 78), cuda(120, 170)]
SHAPES: list[tuple[str, tuple[int, ...], list[int]]] = [
    ("sum", (1 << 20,), [0]),
    ("sum_squares", (24, 1 << 17), [1]),
    ("sum", (1 << 14, 96), [0]),
    ("max", (9, 2, 40_000), [0, 2]),
]


def kernel(case: tuple[str, tuple[int, ...], list[int]], target: Target) -> tirx.PrimFunc:
    operator, shape, axes = case
    return Case(operator, "float32", shape, axes, target=target).func.without_attr("target")


@pytest.mark.slow
@pytest.mark.parametrize("case", SHAPES)
def test_one_kernel_for_all_gpus(case: tuple[str, tuple[int, ...], list[int]]) -> None:
    """Kernels that are equal but for the bound on registers add in the same order."""
    own = {hash_of(kernel(case, gpu)) for gpu in GPUS}
    same = {hash_of(kernel(case, reproducible_target(gpu))) for gpu in GPUS}
    assert len(own) > 1 and len(same) == 1


def hash_of(func: tirx.PrimFunc) -> int:
    return int(tvm_ffi.structural_hash(func))


def test_atomic_updates_of_floats_are_refused() -> None:
    for dtype, finish in (("float32", "last_block"), ("int32", "atomic")):
        case = Case("sum", dtype, (1 << 20,), [0], "atomic", reproducible_target(GPUS[3]))
        assert case.config.finish == finish


@pytest.mark.slow
def test_machine_code_adds_and_contracts_alike() -> None:
    """A product and a sum are one instruction, with one rounding, on all GPUs."""
    found: set[tuple[float, ...]] = set()
    for gpu in GPUS:
        arch = f"sm_{GPUInfo.from_target(gpu).arch}"
        func = kernel(SHAPES[1], reproducible_target(gpu))
        [code] = sass(cuda_source(func, arch), arch).values()
        body = main_loop(code)
        elements = 4 * count(body, "LDG.E.128")
        found.add(tuple(count(body, name) / elements for name in ("FFMA", "FADD", "FMUL")))
    assert found == {(1, 0, 0)}


def added(config: ReduceConfig, data: np.ndarray) -> np.float32:
    """The sum of a row in the order of a configuration, on a device without shuffles."""
    blocks = list(blocks_of(config, data))
    if len(blocks) == 1:
        return blocks[0]
    groups = 1 << (len(blocks) - 1).bit_length()
    assert groups <= config.threads, "no thread reads two partial results"
    return met([*blocks, *[np.float32(-0.0)] * (groups - len(blocks))])


def blocks_of(config: ReduceConfig, data: np.ndarray) -> Iterator[np.float32]:
    strides = -(-data.size // config.stride)
    least, longer = divmod(strides, config.splits)
    first = [(b * least + min(b, longer)) * config.stride for b in range(config.splits + 1)]
    for begin, end in zip(first, first[1:], strict=False):
        share = data[begin : min(end, data.size)]
        states = np.full((config.lanes, config.vector), -0.0, "float32")
        # Vectors while there is a whole turn of them, then elements where the row has a rest.
        step = config.stride if data.size % config.vector == 0 else config.stride * config.unroll
        whole = share.size // step * step
        for at in range(0, whole, config.stride):
            states += share[at : at + config.stride].reshape(states.shape)
        if data.size % config.vector == 0:
            rest = share[whole:].reshape(-1, config.vector)
            states[: len(rest)] += rest
        else:
            for at in range(whole, share.size, config.lanes):
                rest = share[at : at + config.lanes]
                states[: rest.size, 0] += rest
        while states.shape[1] > 1:
            half = states.shape[1] // 2
            states = states[:, :half] + states[:, half:]
        yield met(list(states[:, 0]))


def met(states: list[np.float32]) -> np.float32:
    """The tree by which the threads of a block combine their states."""
    while len(states) > 1:
        fewer = max(1, len(states) // TREE_ARITY)
        found = states[:fewer]
        for other in range(fewer, len(states), fewer):
            found = [a + b for a, b in zip(found, states[other : other + fewer], strict=True)]
        states = found
    return states[0]


@settings(
    max_examples=max(2, settings.default.max_examples // 10),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(size=st.integers(2, 260_000), seed=st.integers(0, 99))
def test_bits_are_those_of_the_order(size: int, seed: int) -> None:
    """Whatever the size of the modelled device, and at every call."""
    rng = np.random.default_rng(seed)
    data = (rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)).astype("float32")
    case = Case("sum", "float32", (size,), [0], target=SAME)
    kernels = compile_opencl(case.func, SAME)
    found = set()
    for _ in range(2):
        arguments = case.arguments(data, ())
        kernels.run(*arguments)
        found.add(arguments[-1].tobytes())
    assert found == {np.float32(added(case.config, data)).tobytes()}


@pytest.mark.slow
def test_a_model_for_all_gpus_and_its_cost() -> None:
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0),
            helper.make_node("Softmax", ["x"], ["z"]),
        ],
        "reductions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [40, 200_000])],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "yz"],
        [helper.make_tensor("axes", TensorProto.INT64, [1], [1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    imported = import_onnx(model).mod
    texts = {}
    for reproducible in (False, True):
        options = pipeline.Options(reproducible=reproducible)
        with recorded() as noted:
            mods = [pipeline.optimize(imported, gpu, options) for gpu in GPUS[1:5]]
        texts[reproducible] = len({frozenset(map(hash_of, kernels_of(mod))) for mod in mods})
        costs = [one for one in noted if one.decision == "order"]
        assert bool(costs) == reproducible
    assert texts[False] > 1 and texts[True] == 1
    assert all(0.2 < 1 + one.gain < 5 for one in costs), costs


def kernels_of(mod: tvm.IRModule) -> list[tirx.PrimFunc]:
    functions = (func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc))
    return [func.without_attr("target") for func in functions]


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(TargetError, match="reproducible=True has no effect on 'llvm'"):
        tvm_fusion.compile(small_model(), reproducible=True)
    with pytest.raises(TargetError, match="for all GPUs alike, and machine= and records="):
        tvm_fusion.compile(small_model(), "cuda", reproducible=True, machine="h100")
