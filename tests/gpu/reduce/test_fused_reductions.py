# SPDX-License-Identifier: Apache-2.0
"""Groups of ``FuseReductions`` become one kernel by the rule, with the same results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_chains import (
    CHAINS,
    half_norm,
    likelihood,
    log_softmax_of,
    normalized_of,
    random_graph,
    softmax,
    softmax_of,
)
from reduction_checks import random_data
from reduction_graphs import TABLE_2, data, f16, f32, op, several, total
from relax_on_opencl import OPENCL, RelaxOnOpenCL
from tvm import relax, tirx
from tvm.s_tir import dlight

from examples.coalesced_reduction import passes
from relay_passes.reduction import groups as reduction_groups
from relay_passes.reduction.tir_calls import is_reduction
from schedules import gpu
from schedules.gpu.reduce.plan import configure
from tests.selection import in_turns
from tvm_fusion.compiler.phases import gpu_phases


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the passes for reductions and the rules; no reduction may be left to TVM's rules."""
    with OPENCL:
        mod = tvm.transform.Sequential(passes(gpu.RULES))(mod)
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and is_reduction(func):
                assert "tirx.is_scheduled" in func.attrs, f"no rule took {var}:\n{func}"
        return dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(mod)


def build_and_run(build: Callable, params: list[relax.Var], inputs: list[np.ndarray]):
    """The results of a graph, and the launches that it took."""
    compiled = RelaxOnOpenCL(lower(several(build, *params)))
    for _ in range(2):  # the second call meets what the first left in the workspace
        results = compiled(*inputs)
    return results, [launch.kernel for launch in compiled.launches]


def assert_near(results, expected, rtol: float = 1e-4) -> None:
    for actual, wanted in zip(results, expected, strict=True):
        scale = np.abs(wanted).max(initial=0)
        actual = actual.astype("float64")
        np.testing.assert_allclose(actual, wanted, rtol=rtol, atol=rtol * scale)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", TABLE_2)
def test_a_sub_graph_of_table_2_is_one_launch(number, rng):
    types, build, by_numpy = TABLE_2[number]
    params = [data(*shape, dtype=dtype, name=f"x{i}") for i, (dtype, shape) in enumerate(types)]
    inputs = [random_data(rng, shape, dtype) for dtype, shape in types]
    results, launches = build_and_run(lambda emit, *params: build(*params), params, inputs)
    assert len(launches) == 1
    assert_near(results, by_numpy(*[x.astype("float64") for x in inputs]), rtol=1e-3)


@pytest.mark.slow
def test_calls_that_share_a_workspace(rng):
    def build(emit, x, y):
        return [emit(total(x, [1])), emit(total(op.exp(y), [1])), emit(total(y, [1]))]

    shape = (3, 40_001)
    inputs = [normal(rng, *shape), normal(rng, *shape)]
    results, launches = build_and_run(build, [data(*shape), data(*shape, name="y")], inputs)
    x, y = (values.astype("float64") for values in inputs)
    assert_near(results, [x.sum(1), np.exp(y).sum(1), y.sum(1)])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_one_launch(name, rng):
    build, by_numpy, shapes, _ = CHAINS[name]
    params = [data(*shape, name=f"x{i}") for i, shape in enumerate(shapes)]
    inputs = [normal(rng, *shape) for shape in shapes]
    results, launches = build_and_run(build, params, inputs)
    assert len(launches) == 1
    assert_near(results, by_numpy(*[x.astype("float64") for x in inputs]))


def test_likelihood_of_targets(rng):
    params = [data(33, 301), data(33, dtype="int64", name="t")]
    x, targets = normal(rng, 33, 301), rng.integers(0, 301, 33)
    (result,), launches = build_and_run(likelihood, params, [x, targets])
    assert len(launches) == 1
    assert_near([result], [-log_softmax_of(x.astype("float64"))[np.arange(33), targets]])


def test_half_precision(rng):
    x = normal(rng, 17, 259, dtype="float16")
    results, launches = build_and_run(half_norm, [data(17, 259, dtype="float16")], [x])
    assert len(launches) == 1
    assert_near(results, [normalized_of(x.astype("float64"))], rtol=5e-3)


@pytest.mark.slow
def test_softmax_of_long_rows(rng):
    x = normal(rng, 3, 40001)
    results, launches = build_and_run(lambda e, x: [softmax(e, x)], [data(3, 40001)], [x])
    assert len(launches) == 2
    assert_near(results, [softmax_of(x.astype("float64"))])


def pipeline(build: Callable, *params: relax.Var) -> RelaxOnOpenCL:
    """A graph by all passes of the compiler."""
    mod = several(build, *params)
    with OPENCL:
        for passes in gpu_phases(OPENCL).values():
            mod = tvm.transform.Sequential(passes)(mod)
    return RelaxOnOpenCL(mod)


def logits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Large ones, some of them masked, and whole blocks of some rows."""
    x = (1e4 + 20 * rng.standard_normal(shape)).astype("float32")
    x[rng.random(shape) < 0.1] = -np.inf
    x[::2, : shape[1] // 2] = -np.inf
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name"), in_turns([(1, 1 << 18), (4, 70_001)], ["softmax", "log_softmax"])
)
def test_large_logits_of_long_rows(name, shape, rng):
    compiled = pipeline(lambda e, x: [getattr(op.nn, name)(x, -1)], data(*shape))
    x = logits(rng, *shape)
    for _ in range(2):
        (result,) = compiled(x)
    assert len(compiled.launches) == 2
    by_numpy = softmax_of if name == "softmax" else log_softmax_of
    with np.errstate(divide="ignore"):
        wanted = by_numpy(x.astype("float64"))
    atol = 1e-30 if name == "softmax" else 4e-6
    np.testing.assert_allclose(result.astype("float64"), wanted, rtol=4e-6, atol=atol)


@pytest.mark.slow
def test_rows_without_a_finite_maximum(rng):
    x = normal(rng, 4, 70_001)
    x[0], x[1, 5], x[2, 69_999] = -np.inf, np.inf, np.nan
    (result,) = pipeline(lambda e, x: [op.nn.softmax(x, -1)], data(*x.shape))(x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(result, softmax_of(x.astype("float64")), rtol=1e-5)


@pytest.mark.slow
def test_losses_of_long_rows(rng):
    shape = (4, 70_001)
    x, y = logits(rng, *shape), np.abs(normal(rng, *shape))
    finite = np.where(np.isfinite(x), x, np.float32(9000))
    targets = rng.integers(shape[1] // 2, shape[1], 4)
    exact = log_softmax_of(finite.astype("float64"))
    entropy = pipeline(
        lambda e, x, y: [op.nn.cross_entropy_with_logits(e(op.nn.log_softmax(x, -1)), y)],
        *[data(*shape, name=name) for name in "xy"],
    )
    assert_near(entropy(finite, y), [-(exact * y).sum() / 4])
    assert len(entropy.launches) == 2
    likelihoods = pipeline(
        lambda e, x, t: [op.nn.nll_loss(e(op.nn.log_softmax(x, -1)), t)],
        data(*shape),
        data(4, dtype="int64", name="t"),
    )
    assert_near(likelihoods(finite, targets), [-exact[np.arange(4), targets].mean()])
    assert len(likelihoods.launches) == 2


@pytest.mark.slow
def test_a_masked_softmax_of_long_rows_in_half_precision(rng):
    def build(emit, x, mask):
        scaled = emit(op.multiply(emit(f32(x)), relax.const(0.5)))
        return [f16(emit(op.nn.softmax(emit(op.add(scaled, emit(f32(mask)))))))]

    x = (100 * normal(rng, 3, 70_001)).astype("float16")
    mask = np.where(rng.random((1, 70_001)) < 0.5, -np.inf, 0).astype("float16")
    params = [data(*x.shape, dtype="float16"), data(*mask.shape, dtype="float16", name="mask")]
    compiled = pipeline(build, *params)
    (result,) = compiled(x, mask)
    assert len(compiled.launches) == 2
    wanted = softmax_of(x.astype("float64") / 2 + mask)
    np.testing.assert_allclose(result.astype("float64"), wanted, rtol=2e-3, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("width", [37, tirx.Var("k", "int64")])
def test_symbolic_extents(width, rng):
    n = tirx.Var("n", "int64")
    compiled = RelaxOnOpenCL(
        lower(several(lambda e, x: [softmax(e, x), total(x, [1], "min")], data(n, width)))
    )
    for rows in (1, 5, 64):
        x = normal(rng, rows, width if isinstance(width, int) else 3 * rows)
        assert_near(compiled(x), [softmax_of(x.astype("float64")), x.min(1)])
        assert len(compiled.launches) == 1


@pytest.mark.slow
def test_statistics_with_their_epilogue(rng):
    def build(emit, x):
        mean = emit(op.mean(x, [0, 2, 3]))
        squares = emit(op.mean(op.multiply(x, x), [0, 2, 3]))
        variance = emit(op.subtract(squares, op.multiply(mean, mean)))
        return [mean, op.rsqrt(op.add(variance, relax.const(1e-5)))]

    x = normal(rng, 5, 7, 9, 11)
    results, launches = build_and_run(build, [data(5, 7, 9, 11)], [x])
    assert len(launches) == 1
    exact, axes = x.astype("float64"), (0, 2, 3)
    assert_near(results, [exact.mean(axes), 1 / np.sqrt(exact.var(axes) + 1e-5)])


@pytest.mark.slow
@settings(max_examples=10)
@given(st.data(), st.booleans())
def test_every_group_of_random_graphs_is_a_kernel(draw, fits):
    graph, inputs, check = random_graph(draw.draw, 4, 12)
    with pytest.MonkeyPatch.context() as patch:
        for module in (reduction_groups, configure):
            patch.setattr(module, "chain_fits", lambda *_: fits)
        check(RelaxOnOpenCL(lower(graph))(*inputs))
