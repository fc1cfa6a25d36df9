# SPDX-License-Identifier: Apache-2.0
"""Reductions and chains that a cluster finishes: numbers in OpenCL, CUDA text, structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from chain_cases import CHAINS
from cluster_emulation import check_protocol, clusters, emulated, kernels
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from gpu_onnx import long_softmax, long_sums
from group_cases import Group
from opencl import compile_opencl
from reduce.test_reduce_chains import check as check_chain
from reduce.test_reduce_chains import inputs_of, make
from reduce_cases import CUDA, OPENCL, Case, check, choose, random_data, reference
from tvm import relax, tirx
from tvm.target import Target

import tvm_fusion
from relay_passes.op import coalesced_reduce
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.chain_config import chain_fits
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload
from tests.selection import in_turns
from tvm_fusion.codegen.host_code import AfterSplit
from tvm_fusion.codegen.library_bin import cuda_texts

op = relax.op

# Each form has shares that are equal, that are not, of which some are empty, and odd extents.
SHAPES: dict[str, list[tuple[tuple[int, ...], list[int]]]] = {
    "all": [((20_001,), [0]), ((2, 1, 20_000), [0, 1, 2])],
    "x": [((3, 9000), [1]), ((2, 3, 4099), [0, 2]), ((5, 8200), [1])],
    "y": [((301, 260), [0]), ((3, 515, 9), [1]), ((511, 3), [0])],
}
SINGLE = [
    ("sum", "float32"),
    ("argmax", "float32"),
    ("argmin", "float16"),
    ("max", "bfloat16"),
    ("prod", "float64"),
    ("mean", "float32"),
    ("sum", "int64"),
    ("min", "int8"),
    ("or", "bool"),
    ("sum_squares", "float16"),
]


def _emulate(case: Case | Group) -> None:
    """Let the kernel be run; it must be one for clusters."""
    plain, case.func = case.func, emulated(case.func)
    assert case.func is not plain


def _reduce(operator: str, dtype: str, shape: Sequence, axes: list[int], **options: str) -> Case:
    with clusters():
        case = Case(operator, dtype, shape, axes, **options)
    _emulate(case)
    return case


def _chain(name: str, dtype: str, shape: Sequence, axis: int) -> tuple[Group, int]:
    """A chain, and the blocks of its clusters."""
    with clusters():
        group = make(name, dtype, shape, axis)
        config = group.config
    _emulate(group)
    return group, config.cluster


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("operator", "dtype", "form", "number"),
    [
        pytest.param(
            *pair,
            form,
            (i // 3 + j) % len(SHAPES[form]),
            marks=() if i % 2 == 0 and j == i // 2 % 3 else pytest.mark.slow,
        )
        for i, pair in enumerate(SINGLE)
        for j, form in enumerate(SHAPES)
    ],
)
def test_numbers(
    operator: str, dtype: str, form: str, number: int, rng: np.random.Generator
) -> None:
    shape, axes = SHAPES[form][number]
    case = _reduce(operator, dtype, shape, axes, finish="one_block")
    assert (case.config.form, case.words) == (form, 0)
    data = random_data(rng, operator, dtype, shape)
    wanted = reference(operator, data, axes)
    arguments = case.arguments(data, wanted.shape)
    kernels = compile_opencl(case.func, OPENCL)
    assert len(kernels.launches(*arguments)) == 1
    kernels.run(*arguments)
    check(operator, arguments[-1], data, wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("operator", ["sum", "argmax"])
def test_several_rows_of_a_block(operator: str, rng: np.random.Generator) -> None:
    """The last block has one row less than the others."""
    shape = (7, 1000)
    case = _reduce(operator, "float32", shape, [1])
    assert case.config.rows == 2
    data = random_data(rng, operator, "float32", shape)
    wanted = reference(operator, data, [1])
    arguments = case.arguments(data, wanted.shape)
    compile_opencl(case.func, OPENCL).run(*arguments)
    check(operator, arguments[-1], data, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(tirx.Var("n", "int64"), 20_000), (3001, tirx.Var("n", "int64"))]
)
def test_unknown_outputs_of_chains(shape: tuple, rng: np.random.Generator) -> None:
    """There is no launch without outputs, and a cluster that has fewer is whole."""
    axis = 0 if shape[0] == 3001 else 1
    group, cluster = _chain("softmax", "float32", shape, axis)
    assert cluster > 1
    kernels = group.compile()
    for size in (0, 1, 5, 35):
        actual = [size if isinstance(extent, tirx.Var) else extent for extent in shape]
        inputs = inputs_of("softmax", "float32", actual, axis, rng)
        arguments = group.arguments(*inputs)
        assert len(kernels.launches(*arguments)) == min(size, 1)
        kernels.run(*arguments)
        if size:
            check_chain("softmax", axis, inputs, group.outputs(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("symbolic", in_turns(["all", "x", "y"], every=3))
def test_symbolic_rows(symbolic: str, rng: np.random.Generator) -> None:
    n = tirx.Var("n", "int64")
    shape, axis = {"all": ((n,), 0), "x": ((3, n), 1), "y": ((n, 70), 0)}[symbolic]
    case = _reduce("argmax", "float32", shape, [axis], finish="one_block")
    kernels = compile_opencl(case.func, OPENCL)
    for size in (1, 5, 300, 20_001):
        data = rng.integers(0, 500, [size if e is n else e for e in shape]).astype("float32")
        wanted = reference("argmax", data, [axis])
        arguments = case.arguments(data, wanted.shape)
        kernels.run(*arguments)
        np.testing.assert_array_equal(arguments[-1], wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("operator", ["max", "min", "sum", "argmax", "prod"])
def test_nan_and_infinity(operator: str, rng: np.random.Generator) -> None:
    shape = (5, 20_003)
    data = random_data(rng, operator, "float32", shape)
    data[0, rng.integers(shape[1])] = np.nan
    data[1, 12_000], data[1, 17_000] = np.inf, np.nan
    data[2] = -np.inf
    data[3, 7], data[3, 15_000] = np.inf, np.inf
    case = _reduce(operator, "float32", shape, [1], finish="one_block")
    arguments = case.arguments(data, (5,))
    compile_opencl(case.func, OPENCL).run(*arguments)
    check(operator, arguments[-1], data, reference(operator, data, [1]))


@pytest.mark.slow
@pytest.mark.parametrize("form", SHAPES)
def test_sisters_with_epilogues(form: str, rng: np.random.Generator) -> None:
    shape, axes = SHAPES[form][0]
    kept = [size for axis, size in enumerate(shape) if axis not in axes]

    def build(data: relax.Expr, scale: relax.Expr) -> list[relax.Expr]:
        norm = op.sqrt(coalesced_reduce(data, "sum_squares", axes, finish="one_block"))
        mean = coalesced_reduce(data, "mean", axes, finish="one_block")
        best = coalesced_reduce(data, "argmax", axes, finish="one_block")
        return [norm, best, op.multiply(mean, scale)]

    with clusters():
        group = Group(build, ("float32", shape), ("float32", kept))
    _emulate(group)
    data, scale = (random_data(rng, "sum", "float32", size) for size in (shape, kept))
    scale = np.asarray(scale, "float32")
    exact = data.astype("float64")
    norm, best, scaled = group.run(data, scale)
    np.testing.assert_allclose(norm, np.sqrt((exact**2).sum(tuple(axes))), rtol=1e-5)
    np.testing.assert_array_equal(best, reference("argmax", data, axes))
    np.testing.assert_allclose(scaled, exact.mean(tuple(axes)) * scale, rtol=1e-4, atol=1e-5)


# Rows of clusters of two, four and eight that are kept, with odd extents; then read again.
ROWS = [(3, 8200), (2, 20_004), (1, 60_000), (1, 12_345), (2, 90_004)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(
            name,
            shape,
            marks=() if place == number % len(ROWS) else pytest.mark.slow,
        )
        for number, name in enumerate(CHAINS)
        for place, shape in enumerate(ROWS)
        if name == "softmax" or (place - number) % len(ROWS) in (0, 3)
    ],
)
def test_rows_of_chains(name: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    group, _ = _chain(name, "float32", shape, 1)
    inputs = inputs_of(name, "float32", shape, 1, rng)
    check_chain(name, 1, inputs, group.run(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    in_turns(
        ["softmax", "residual_layer_norm", "three_stages"],
        [((2, 701, 12), 1), ((3001, 70), 0), ((9001, 3), 0)],
        every=3,
    ),
)
def test_columns_of_chains(
    name: str, case: tuple[tuple[int, ...], int], rng: np.random.Generator
) -> None:
    shape, axis = case
    group, _ = _chain(name, "float32", shape, axis)
    inputs = inputs_of(name, "float32", shape, axis, rng)
    check_chain(name, axis, inputs, group.run(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("softmax", "float16"), ("layer_norm", "bfloat16"), ("softmax", "float64")]
)
def test_types_of_chains(name: str, dtype: str, rng: np.random.Generator) -> None:
    shape = (2, 20_008)
    group, _ = _chain(name, dtype, shape, 1)
    inputs = inputs_of(name, dtype, shape, 1, rng)
    check_chain(name, 1, inputs, group.run(*inputs))


def test_every_size_of_cluster_is_met() -> None:
    found = set()
    for shape in ROWS[:3]:
        with clusters():
            config = make("softmax", "float32", shape, 1).config
        assert config.kept > 1
        found.add(config.cluster)
    assert found == {2, 4, 8}


@pytest.mark.slow
def test_nan_and_infinity_in_chains(rng: np.random.Generator) -> None:
    data = random_data(rng, "sum", "float32", (5, 20_000))
    data[0, 11_111] = np.nan
    data[1, -1] = np.inf
    data[2, 3:] = -np.inf
    data[3] = -np.inf
    group, _ = _chain("softmax", "float32", data.shape, 1)
    got = group.run(data)
    check_chain("softmax", 1, [data], got)
    assert np.isnan(got[0][[0, 1, 3]]).any(1).all()


@pytest.mark.slow
def test_ties_of_argmax_in_chains(rng: np.random.Generator) -> None:
    """The first of equal extremes, whichever block has it."""

    def build(data: relax.Expr) -> list[relax.Expr]:
        shifted = op.subtract(data, op.max(data, [1], keepdims=True))
        return [op.argmax(shifted, 1), op.sum(op.exp(shifted), [1])]

    data = rng.integers(-3, 4, (6, 20_000)).astype("float32")
    data[:, : 20_000 // 2] = np.minimum(data[:, : 20_000 // 2], 2)
    with clusters():
        group = Group(build, ("float32", data.shape))
    _emulate(group)
    best, total = group.run(data)
    np.testing.assert_array_equal(best, data.argmax(1))
    exact = data.astype("float64")
    np.testing.assert_allclose(total, np.exp(exact - 3).sum(1), rtol=1e-5)


CUDA_SINGLE = [
    ("sum", "float32", (1 << 16,), [0]),
    ("argmax", "float16", (3, 16_000), [1]),
    ("max", "float32", (512, 260), [0]),
    ("prod", "float64", (4, 8192), [1]),
    ("sum", "int32", (2, 40_000), [1]),
    ("or", "bool", (1 << 18,), [0]),
]
CUDA_CHAINS = [((1, 1 << 18), 1), ((40, 65_536), 1), ((4096, 128_256), 1), ((8192, 64), 0)]


def _cuda_functions() -> dict[str, tirx.PrimFunc]:
    """A kernel of every kind."""
    functions = {}
    for operator, dtype, shape, axes in CUDA_SINGLE:
        case = Case(operator, dtype, shape, axes, "auto", CUDA)
        assert (case.config.finish, case.words) == ("cluster", 0)
        functions[f"{operator}_{dtype}"] = case.func
    for number, name in enumerate(CHAINS):
        shape, axis = CUDA_CHAINS[number % len(CUDA_CHAINS)]
        dtype = "float16" if number % 3 == 2 else "float32"
        functions[f"{name}_{dtype}"] = make(name, dtype, shape, axis, CUDA).func
    return {name: func.with_attr("global_symbol", name) for name, func in functions.items()}


@pytest.fixture(scope="module")
def source() -> str:
    """The CUDA text of all of them."""
    return cuda_source(tvm.IRModule(_cuda_functions()))


@pytest.mark.slow
def test_nothing_spills(source: str) -> None:
    used = ptxas(source)
    assert len(used) == len(CUDA_SINGLE) + len(CHAINS)
    for name, resources in used.items():
        spilled = (resources.stack_frame, resources.spill_stores, resources.spill_loads)
        assert spilled == (0, 0, 0), name


@pytest.mark.slow
def test_large_states_of_many_stages_fit() -> None:
    """Memory kept for other blocks to the end is not taken from that of the stages."""

    def build(data: relax.Expr) -> list[relax.Expr]:
        found = []
        for _ in range(4):
            largest = op.max(data, [0], keepdims=True)
            found.append(op.argmax(data, 0))
            data = op.subtract(op.multiply(data, data), largest)
        return [*found, data]

    group = Group(build, ("float32", (8192, 17_024)), target=CUDA)
    config = group.config
    assert config.cluster == 8
    [used] = ptxas(cuda_source(group.func)).values()
    state = 4 + 4 + 8  # bytes of the maximum, of the value and its position
    leaders = config.lanes * config.vector
    assert used.shared == (config.rows + 4) * leaders * state


@pytest.mark.slow
def test_other_blocks_are_read_between_barriers(source: str) -> None:
    """One barrier a stage, then one before the end; nothing in memory but data and results."""
    for name, code in sass(source).items():
        names = opcodes(code)
        assert count(names, "UCGABAR_ARV") == count(names, "UCGABAR_WAIT") >= 2, name
        assert count(names, "LD.E") >= 2, name  # Loads from other blocks have generic addresses.
        assert count(names, "ATOM") == count(names, "ATOMG") == count(names, "RED") == 0, name
        assert count(names, "LDL") == count(names, "STL") == 0, name


@pytest.mark.slow
def test_protocol(source: str) -> None:
    """A barrier before each exchange, and one before the end."""
    exchanges = {"three_stages": 4, "residual_layer_norm": 1, "rms_norm": 1}
    for kernel, text in kernels(source).items():
        name = kernel.removesuffix("_kernel").rpartition("_")[0]
        wanted = exchanges.get(name, 2) if name in CHAINS else 1
        assert check_protocol(text) == wanted + 1, kernel


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("broken", "by"),
    [
        ("tvm_fusion_cluster_wait();\n  if", "if"),  # read before all have arrived
        ("tvm_fusion_cluster_wait();\n  tvm_fusion_keep", "tvm_fusion_keep"),  # end too early
        ("  tvm_fusion_cluster_arrive();\n", ""),
    ],
)
def test_protocol_is_told_from_a_broken_one(broken: str, by: str) -> None:
    func = Case("sum", "float32", (1 << 16,), [0], "auto", CUDA).func
    [text] = kernels(cuda_source(func)).values()
    assert broken in text
    with pytest.raises(AssertionError):
        check_protocol(text.replace(broken, by, 1))


def test_the_launch_has_clusters() -> None:
    """The grid counts blocks, and is a multiple of the cluster."""
    split = AfterSplit()
    func = make("softmax", "float32", (40, 65_536), 1, CUDA).func
    with tvm.transform.PassContext(instruments=[split]):
        tirx.build(tvm.IRModule({"main": func}), CUDA)
    [kernel] = [
        func
        for func in split.module.functions.values()
        if "tirx.kernel_launch_params" in func.attrs
    ]
    parameters = [str(name) for name in kernel.attrs["tirx.kernel_launch_params"]]
    assert parameters == ["blockIdx.x", "clusterCtaIdx.x", "threadIdx.x"]
    calls: list[tvm.ir.Call] = []
    tvm_ffi.structural_walk(split.module["main"].body, (tvm.ir.Call, calls.append))
    [launch] = [call for call in calls if call.op.name == "tirx.call_ffi_kernel"]
    assert [int(extent) for extent in launch.args[-3:]] == [80, 2, 1024]


@pytest.mark.parametrize(
    ("arch", "size"), [("sm_70", 1), ("sm_80", 1), ("sm_89", 1), ("sm_90", 8), ("sm_100", 8)]
)
def test_architectures(arch: str, size: int) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    assert GPUInfo.from_target(target).max_cluster == size
    finish = "cluster" if size > 1 else "last_block"
    assert Case("sum", "float32", (1 << 16,), [0], "auto", target).config.finish == finish
    assert GPUInfo.from_target(OPENCL).max_cluster == 1


@pytest.mark.parametrize(
    ("shape", "axes", "finish", "expected"),
    [
        ((4096,), [0], "auto", ("one_block", 1)),  # one round of loads
        ((8192,), [0], "auto", ("cluster", 2)),
        ((1 << 16,), [0], "auto", ("cluster", 8)),
        ((1 << 17,), [0], "auto", ("last_block", 128)),
        ((1 << 22,), [0], "one_block", ("cluster", 8)),
        ((1 << 16,), [0], "last_block", ("last_block", 64)),
        ((66, 1 << 20), [1], "auto", ("last_block", 8)),
        ((132, 1 << 20), [1], "one_block", ("cluster", 4)),
        ((200, 1 << 20), [1], "auto", ("last_block", 2)),  # clusters would have three waves
        ((600, 1 << 16), [1], "auto", ("cluster", 4)),  # many waves
        ((1000, 1 << 14), [1], "auto", ("one_block", 1)),
    ],
)
def test_thresholds(
    shape: tuple[int, ...], axes: list[int], finish: str, expected: tuple[str, int]
) -> None:
    workload = ReduceWorkload.create("sum", axes, len(shape), "float32", finish=finish)
    config = choose(workload, CanonicalLoops(shape, workload.axes), GPUInfo.from_target(CUDA))
    assert (config.finish, config.splits) == expected


@pytest.mark.parametrize(
    ("outputs", "reduced", "form", "fits"),
    [
        (1, 1 << 18, "all", True),
        (1, (1 << 18) + 1, "all", False),
        (8, 151_936, "x", True),
        (64, 8192, "y", True),
        (64, 8193, "y", False),
    ],
)
def test_chain_fits(outputs: int, reduced: int, form: str, fits: bool) -> None:
    gpu = GPUInfo.from_target(CUDA)
    assert chain_fits(outputs, reduced, 4, gpu, form) == fits
    older = GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_89"}))
    assert not chain_fits(outputs, reduced, 4, older, form)


@pytest.mark.slow
@pytest.mark.parametrize(("build", "exchanges"), [(long_softmax, 2), (long_sums, 1)])
def test_models(build: Callable[[], onnx.ModelProto], exchanges: int) -> None:
    """A whole model is one kernel with clusters."""
    compiled = tvm_fusion.compile(build(), "cuda -arch=sm_90")
    [text] = [
        kernel for text in cuda_texts(compiled._executable) for kernel in kernels(text).values()
    ]
    assert check_protocol(text) == exchanges + 1
