# SPDX-License-Identifier: Apache-2.0
"""Chains of reductions in one kernel: numbers in OpenCL, CUDA text, structure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from chain_cases import CHAINS, input_shape
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from group_cases import Group
from reduce_cases import CUDA, OPENCL, numpy_dtype, random_data
from tvm import relax, tirx
from tvm.target import Target

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.chain_config import chain_fits
from tests.selection import in_turns

op = relax.op
_RTOL = {"float32": 2e-5, "float64": 1e-9, "float16": 4e-3, "bfloat16": 4e-2}


def make(
    name: str, dtype: str, shape: Sequence[int | tirx.Var], axis: int, target: Target = OPENCL
) -> Group:
    """16-bit tensors are computed with in float32, as OpenCL only loads and stores them."""
    chain = CHAINS[name]
    types = [
        ("bool" if letter == "b" else dtype, input_shape(letter, shape, axis))
        for letter in chain.inputs
    ]

    def build(*tensors: relax.Expr) -> list[relax.Expr]:
        if not dtype.endswith("16") or target is CUDA:
            return chain.relax(*tensors, axis)
        emit = relax.BlockBuilder.current().emit
        wide = [t if t.ty.dtype == "bool" else emit(op.astype(t, "float32")) for t in tensors]
        return [op.astype(result, dtype) for result in chain.relax(*wide, axis)]

    return Group(build, *types, target=target)


def inputs_of(
    name: str, dtype: str, shape: Sequence[int], axis: int, rng: np.random.Generator
) -> list[np.ndarray]:
    return [
        random_data(
            rng, "sum", "bool" if letter == "b" else dtype, input_shape(letter, shape, axis)
        )
        for letter in CHAINS[name].inputs
    ]


def check(name: str, axis: int, inputs: list[np.ndarray], got: list[np.ndarray]) -> None:
    exact = [value if value.dtype == bool else value.astype("float64") for value in inputs]
    wanted = CHAINS[name].numpy(*exact, axis)
    for actual, number in zip(got, wanted, strict=True):
        if number is not None:
            tolerance = _RTOL[str(inputs[0].dtype)]
            np.testing.assert_allclose(
                actual.astype("float64"), number, rtol=tolerance, atol=tolerance
            )


def run(name: str, dtype: str, shape: Sequence[int], axis: int, rng: np.random.Generator) -> Group:
    group = make(name, dtype, shape, axis)
    inputs = inputs_of(name, dtype, shape, axis, rng)
    check(name, axis, inputs, group.run(*inputs))
    return group


# Rows of a few lanes, of a block, of several vectors a thread, and too long to be kept.
ROWS = [(517, 7), (35, 24), (9, 301), (3, 4096), (1, 1000), (2, 20_003), (2, 32_768)]


COLUMNS = [
    ((3, 21, 37), 1),
    ((300, 64), 0),
    ((2, 5, 8, 16), 1),
    ((1, 4001, 12), 1),
    ((2, 2048, 4), 1),
]


SLOW = pytest.mark.slow


def _in_turns(shapes: list, every: tuple[str, ...]) -> list:
    """Some chains with every shape, the others with two each; a shape of each is quick."""
    return [
        pytest.param(
            name,
            shape,
            marks=() if name == "softmax" or (place - number) % len(shapes) == 0 else SLOW,
        )
        for number, name in enumerate(CHAINS)
        for place, shape in enumerate(shapes)
        if name in every or (place - number) % len(shapes) in (0, 3)
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "shape"), _in_turns(ROWS, ("softmax", "residual_layer_norm")))
def test_rows(name: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    run(name, "float32", shape, 1, rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "case"), _in_turns(COLUMNS, ("softmax",)))
def test_columns(name: str, case: tuple[tuple[int, ...], int], rng: np.random.Generator) -> None:
    run(name, "float32", *case, rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "dtype", "shape", "axis"),
    [
        ("softmax", "float16", (5, 264), 1),
        pytest.param("softmax", "bfloat16", (3, 24, 40), 1, marks=SLOW),
        ("softmax", "float64", (3, 515), 1),
        pytest.param("masked_softmax", "float16", (3, 24, 40), 1, marks=SLOW),
        ("masked_softmax", "bfloat16", (3, 515), 1),
        pytest.param("masked_softmax", "float64", (5, 264), 1, marks=SLOW),
        ("layer_norm", "float16", (2, 9000), 1),
        pytest.param("layer_norm", "bfloat16", (5, 264), 1, marks=SLOW),
        pytest.param("residual_layer_norm", "bfloat16", (3, 1024), 1, marks=SLOW),
        pytest.param("rms_norm", "float16", (3, 24, 40), 1, marks=SLOW),
        ("rms_norm", "bfloat16", (2, 9000), 1),
    ],
)
def test_types(
    name: str, dtype: str, shape: tuple[int, ...], axis: int, rng: np.random.Generator
) -> None:
    run(name, dtype, shape, axis, rng)


@pytest.mark.slow
def test_thresholds_on_this_device() -> None:
    """Both kinds of rows and of columns are among the shapes above."""
    kept = [make("softmax", "float32", shape, 1).config.kept for shape in ROWS]
    assert min(kept) == 0 and max(kept) > 1
    columns = [((3, 21, 37), 1), ((1, 4001, 12), 1)]
    kept = [make("softmax", "float32", shape, axis).config.kept for shape, axis in columns]
    assert kept[0] > 0 == kept[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "symbolic", "axis"),
    in_turns(["softmax", "residual_layer_norm", "variance"], [0, 1], [1, 0]),
)
def test_symbolic_extents(name: str, symbolic: int, axis: int, rng: np.random.Generator) -> None:
    shape: list[int | tirx.Var] = [37, 70]
    shape[symbolic] = tirx.Var("n", "int64")
    group = make(name, "float32", shape, axis)
    kernels = group.compile()
    for size in (1, 5, 300, 1030):
        actual = (size, 70) if symbolic == 0 else (37, size)
        inputs = inputs_of(name, "float32", actual, axis, rng)
        arguments = group.arguments(*inputs)
        kernels.run(*arguments)
        check(name, axis, inputs, group.outputs(arguments))


def _batch_norm(data: relax.Expr, scale: relax.Expr) -> list[relax.Expr]:
    axes = [0, 2, 3]
    mean = op.mean(data, axes, keepdims=True)
    centred = op.subtract(data, mean)
    variance = op.mean(op.multiply(centred, centred), axes, keepdims=True)
    normal = op.divide(centred, op.sqrt(op.add(variance, relax.const(1e-5, "float32"))))
    scaled = op.multiply(normal, op.reshape(scale, (1, 6, 1, 1)))
    return [op.nn.relu(scaled), op.reshape(mean, (6,)), op.reshape(variance, (6,))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [(4, 6, 8, 8), (3, 6, 5, 7), (20, 6, 30, 30)])
def test_reduced_axes_around_parallel_ones(size: tuple[int, ...], rng: np.random.Generator) -> None:
    group = Group(_batch_norm, ("float32", size), ("float32", (6,)))
    data, scale = (random_data(rng, "sum", "float32", shape) for shape in (size, (6,)))
    exact = data.astype("float64")
    mean, variance = exact.mean((0, 2, 3), keepdims=True), exact.var((0, 2, 3), keepdims=True)
    normal = (exact - mean) / np.sqrt(variance + 1e-5) * scale.reshape(1, 6, 1, 1)
    got = group.run(data, scale)
    for actual, wanted in zip(got, (np.maximum(normal, 0), mean, variance), strict=True):
        np.testing.assert_allclose(actual, wanted.reshape(actual.shape), rtol=1e-4, atol=1e-4)


def _group_norm(data: relax.Expr, scale: relax.Expr) -> relax.Expr:
    groups = op.reshape(data, (2, 3, 4 * 35))
    mean, square = (
        op.mean(groups, [2], keepdims=True),
        op.mean(op.multiply(groups, groups), [2], keepdims=True),
    )
    deviation = op.sqrt(op.subtract(square, op.multiply(mean, mean)))
    normal = op.reshape(op.divide(op.subtract(groups, mean), deviation), (2, 12, 5, 7))
    return op.multiply(normal, op.reshape(scale, (12, 1, 1)))


def test_stored_elements_of_another_shape(rng: np.random.Generator) -> None:
    group = Group(_group_norm, ("float32", (2, 12, 5, 7)), ("float32", (12,)))
    data, scale = (random_data(rng, "sum", "float32", size) for size in ((2, 12, 5, 7), (12,)))
    rows = data.astype("float64").reshape(2, 3, -1)
    normal = (rows - rows.mean(2, keepdims=True)) / rows.std(2, keepdims=True)
    wanted = normal.reshape(2, 12, 5, 7) * scale.reshape(12, 1, 1)
    np.testing.assert_allclose(group.run(data, scale)[0], wanted, rtol=1e-4, atol=1e-4)


def _cross_entropy(logits: relax.Expr, labels: relax.Expr) -> list[relax.Expr]:
    largest = op.max(logits, [1])
    shifted = op.subtract(logits, op.expand_dims(largest, 1))
    logarithm = op.add(largest, op.log(op.sum(op.exp(shifted), [1])))
    chosen = op.squeeze(op.gather_elements(logits, op.expand_dims(labels, 1), 1), [1])
    return [op.subtract(logarithm, chosen), op.argmax(logits, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(17, 1000), (3, 30_001)])
def test_cross_entropy(shape: tuple[int, int], rng: np.random.Generator) -> None:
    group = Group(_cross_entropy, ("float32", shape), ("int64", shape[:1]))
    logits = random_data(rng, "sum", "float32", shape)
    labels = rng.integers(0, shape[1], shape[0])
    exact = logits.astype("float64")
    wanted = np.log(np.exp(exact).sum(1)) - exact[np.arange(shape[0]), labels]
    loss, best = group.run(logits, labels)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_array_equal(best, logits.argmax(1))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("columns", [300, 30_001])
def test_nan_and_infinity(columns: int, rng: np.random.Generator) -> None:
    data = random_data(rng, "sum", "float32", (5, columns))
    data[0, columns // 2] = np.nan
    data[1, -1] = np.inf
    data[2, 3:] = -np.inf
    data[3] = -np.inf
    got = make("softmax", "float32", data.shape, 1).run(data)
    check("softmax", 1, [data], got)
    assert np.isnan(got[0][[0, 1, 3]]).any(1).all()


@pytest.mark.slow
def test_the_same_bits_every_time(rng: np.random.Generator) -> None:
    group = make("layer_norm", "float32", (70, 1030), 1)
    inputs = inputs_of("layer_norm", "float32", (70, 1030), 1, rng)
    session = group.compile().session(*group.arguments(*inputs))
    session.launch()
    first = group.outputs(session.read())
    for _ in range(50):
        session.launch()
        np.testing.assert_array_equal(group.outputs(session.read())[0], first[0])


@pytest.mark.parametrize("name", CHAINS)
def test_kept_elements_are_read_once(name: str) -> None:
    group = make(name, "float32", (4096, 1024), 1, CUDA)
    config = group.config
    assert config.kept * config.stride == 1024
    found: list[tvm.ir.TensorLoad] = []
    tvm_ffi.structural_walk(group.func.body, (tvm.ir.TensorLoad, found.append))
    reads = [
        load
        for load in found
        if load.source.scope() == "global" and not isinstance(load.indices[0], tirx.IntImm)
    ]
    assert len(reads) == config.kept * len(CHAINS[name].inputs)  # each a vector


CUDA_SHAPES = [
    ((512, 256), 0),
    ((4096, 1024), 1),
    ((4096, 8192), 1),
    ((4096, 16_384), 1),
    ((4096, 32_768), 1),
    ((64, 21, 4096), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), in_turns(CHAINS, ["float32", "float16"], every=8))
def test_nothing_spills(name: str, dtype: str) -> None:
    functions = {
        f"kernel{number}": make(name, dtype, shape, axis, CUDA).func.with_attr(
            "global_symbol", f"kernel{number}"
        )
        for number, (shape, axis) in enumerate(CUDA_SHAPES)
    }
    used = ptxas(cuda_source(tvm.IRModule(functions)))
    assert len(used) == len(CUDA_SHAPES)
    for kernel, resources in used.items():
        spilled = (resources.stack_frame, resources.spill_stores, resources.spill_loads)
        assert spilled == (0, 0, 0), kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("softmax", "rms_norm") else SLOW) for name in CHAINS],
)
def test_rows_of_one_turn_and_a_part_do_not_spill(name: str) -> None:
    """Many rows: of 512 threads, a turn takes 16384 elements."""
    functions = {
        f"kernel{size}": make(name, "float16", (1000, size), 1, CUDA).func.with_attr(
            "global_symbol", f"kernel{size}"
        )
        for size in (18_432, 20_480, 24_576, 28_672)
    }
    for kernel, resources in ptxas(cuda_source(tvm.IRModule(functions))).items():
        spilled = (resources.stack_frame, resources.spill_stores, resources.spill_loads)
        assert spilled == (0, 0, 0), kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    in_turns(["softmax", "layer_norm", "residual_layer_norm"], CUDA_SHAPES, every=3),
)
def test_loads_and_stores_of_16_bytes(name: str, case: tuple[tuple[int, ...], int]) -> None:
    shape, axis = case
    group = make(name, "float32", shape, axis, CUDA)
    [code] = sass(cuda_source(group.func)).values()
    names = opcodes(code)
    assert count(names, "LDG.E.128") > 0
    assert count(names, "STG.E.128") > 0
    stored_by_row = 2 if name == "residual_layer_norm" else 0
    assert count(names, "STG.E") - count(names, "STG.E.128") <= 4 * stored_by_row
    assert count(names, "LDL") == count(names, "STL") == 0


def test_a_warp_has_a_short_row() -> None:
    """No shared memory, no barrier."""
    group = make("softmax", "float32", (1 << 16, 512), 1, CUDA)
    [code] = sass(cuda_source(group.func)).values()
    names = opcodes(code)
    assert group.config.lanes == 32
    assert count(names, "SHFL") == 10
    assert count(names, "BAR") == count(names, "LDS") == 0


@pytest.mark.parametrize(
    ("outputs", "reduced", "form", "fits"),
    [
        (1, 1000, "all", True),
        (8, 151_936, "x", False),
        (1, 1 << 22, "all", False),
        (4096, 128_256, "x", True),
        (None, 1 << 20, "x", True),
        (4096, None, "x", True),
        (8, None, "x", False),
        (64, 512, "y", True),
        (64, 16_384, "y", False),
        (4096, 16_384, "y", True),
    ],
)
def test_chain_fits(outputs: int | None, reduced: int | None, form: str, fits: bool) -> None:
    """Chains have no clusters, of which another file has tests."""
    gpu = GPUInfo.from_target(Target({"kind": "cuda", "arch": "sm_80"}))
    assert chain_fits(outputs, reduced, 4, gpu, form) == fits


@pytest.mark.parametrize("outputs", [1 << 16, 2048, 256])
def test_few_columns_are_spread_over_blocks(outputs: int) -> None:
    config = make("softmax", "float32", (512, outputs), 0, CUDA).config
    assert config.vector == 4
    assert config.tile_outputs >= 16
    assert config.tile_outputs == 16 or outputs // config.tile_outputs >= 132


def test_bfloat16_is_stored_as_such(rng: np.random.Generator) -> None:
    group = make("rms_norm", "bfloat16", (5, 64), 1)
    inputs = inputs_of("rms_norm", "bfloat16", (5, 64), 1, rng)
    assert group.run(*inputs)[0].dtype == numpy_dtype("bfloat16")
