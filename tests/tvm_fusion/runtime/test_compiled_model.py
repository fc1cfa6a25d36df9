# SPDX-License-Identifier: Apache-2.0
"""Compiled models when they are called: numbers, memory, threads, timing."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import tvm
from relax_models import (
    RECORD,
    assert_dense,
    dense,
    dense_reference,
    dependent,
    many,
    symbolic,
)

from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime.compiled_model import CompiledModel, Latency
from tvm_fusion.runtime.host_arrays import TensorSpec, aligned_empty


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    return dense()


@pytest.fixture(scope="module")
def several() -> CompiledModel:
    return many()


def arguments() -> tuple[np.ndarray, np.ndarray, np.int64]:
    return normal(0, 3, 5), np.array([True, False, True]), np.int64(41)


def test_a_model_tells_what_it_is(model: CompiledModel) -> None:
    assert model.inputs == (TensorSpec("x", (4, 8), "float32"),)
    assert model.outputs == (TensorSpec("y", (4, 6), "float32"),)
    assert model.fused == [RECORD]
    assert model.threads == 1
    assert set(model.versions) == {"tvm_fusion", "tvm", "tvm_ffi"}
    cpu = str(model.target.attrs["mcpu"])
    assert repr(model) == (
        f"CompiledModel((x: float32[4, 8]) -> (y: float32[4, 6]), {cpu}, 1 threads)"
    )


def test_records_are_the_callers(model: CompiledModel) -> None:
    model.fused[0]["fused"] = True
    model.versions.clear()
    assert model.fused == [RECORD]
    assert model.versions


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: ((x,), {}),
        lambda x: ((), {"x": x}),
        lambda x: (({"x": x},), {}),
        lambda x: ((tvm.runtime.tensor(x),), {}),
        lambda x: ((np.asfortranarray(x),), {}),
        lambda x: ((np.repeat(x, 2, axis=0)[::2],), {}),
        lambda x: ((np.concatenate([x[:1], x])[1:],), {}),
    ],
)
def test_one_output_is_an_array_however_the_input_comes(model: CompiledModel, pack) -> None:
    x = normal(1, 4, 8)
    args, kwargs = pack(x)
    y = model(*args, **kwargs)
    assert isinstance(y, np.ndarray)
    assert_dense(y, x)


def test_misaligned_inputs_give_the_right_numbers(model: CompiledModel) -> None:
    memory = np.empty(32 + 16, np.float32)
    for shift in range(16):
        x = memory[shift : shift + 32].reshape(4, 8)
        x[...] = normal(shift, 4, 8)
        assert_dense(model(x), x)


def test_an_aligned_array_gives_what_any_other_layout_gives(several: CompiledModel) -> None:
    x, flag, s = arguments()
    lying = [aligned_empty(value.shape, value.dtype) for value in (x, flag, s)]
    for place, value in zip(lying, (x, flag, s), strict=True):
        place[...] = value
    for got, expected in zip(several(*lying), several(np.asfortranarray(x), flag, s), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert not any(np.shares_memory(got, place) for place in lying)


def test_several_outputs_are_a_tuple_of_their_types(several: CompiledModel) -> None:
    x, flag, s = arguments()
    outputs = several(x, flag, s)
    assert isinstance(outputs, tuple)
    for got, expected in zip(outputs, [2 * x, 2 * x, x, [1, 2], ~flag, s + 1], strict=True):
        np.testing.assert_array_equal(got, expected)
    assert [str(y.dtype) for y in outputs] == [spec.dtype for spec in several.outputs]
    assert [y.shape for y in outputs] == [spec.shape for spec in several.outputs]


def test_names_that_are_no_identifiers_come_in_a_mapping(several: CompiledModel) -> None:
    x, flag, s = arguments()
    outputs = several({"s.1": s, "x": x, "flag": flag})
    np.testing.assert_array_equal(outputs[0], 2 * x)
    np.testing.assert_array_equal(several(x, **{"s.1": s, "flag": flag})[5], 42)


def test_outputs_can_be_changed_and_nothing_else_changes(several: CompiledModel) -> None:
    x, flag, s = arguments()
    x = np.copyto(aligned := aligned_empty(x.shape), x) or aligned
    before = x.copy()
    first = several(x, flag, s)
    expected = [y.copy() for y in first]
    for index, y in enumerate(first):
        y[...] = ~y if y.dtype == bool else y + 100
        for other, value in zip(first[index + 1 :], expected[index + 1 :], strict=True):
            np.testing.assert_array_equal(other, value)
    np.testing.assert_array_equal(x, before)
    for got, value in zip(several(x, flag, s), expected, strict=True):
        np.testing.assert_array_equal(got, value)


def test_outputs_of_earlier_calls_stay(model: CompiledModel) -> None:
    inputs = [normal(seed, 4, 8) for seed in range(20)]
    outputs = [model(x) for x in inputs]
    for x, y in zip(inputs, outputs, strict=True):
        assert_dense(y, x)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("rows", [1, 5, 0, 3])
def test_open_dimensions_take_their_size_from_the_call(rows: int) -> None:
    a, b = normal(1, rows, 2), normal(2, rows, 2)
    np.testing.assert_array_equal(symbolic()(a, b), a + b)


def test_open_dimensions_must_agree() -> None:
    with pytest.raises(InvalidInputError, match="dimension 'n' is 4 in input 'b' and 3 in"):
        symbolic()(normal(1, 3, 2), normal(2, 4, 2))


def test_dimensions_that_depend_on_others_are_checked_too() -> None:
    model = dependent()
    np.testing.assert_array_equal(model(normal(0, 3), normal(0, 6)), 2 * normal(0, 3))
    with pytest.raises(InvalidInputError, match="the model cannot run on these inputs: .*b"):
        model(normal(0, 3), normal(0, 7))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing input 'x'"),
        ((normal(0, 4, 8),) * 2, {}, "got 2 inputs; expected 1"),
        ((), {"X": normal(0, 4, 8)}, "no input is called 'X'"),
        ((normal(0, 4, 8),), {"x": normal(0, 4, 8)}, "input 'x' is given twice"),
        ((normal(0, 4, 8),), {"X": normal(0, 4, 8)}, "no input is called 'X'|got 2 inputs"),
        ((normal(0, 4, 8).astype("float64"),), {}, "element type float64; expected float32"),
        ((normal(0, 8, 4),), {}, r"has the shape \(8, 4\); expected \(4, 8\)"),
        (([[1.0]],), {}, "input 'x' is a list"),
    ],
)
def test_wrong_inputs_are_refused_and_the_model_goes_on(
    model: CompiledModel, args, kwargs, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model(*args, **kwargs)
    x = normal(3, 4, 8)
    assert_dense(model(x), x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("threads", [1, min(2, os.cpu_count() or 1)])
def test_concurrent_calls_do_not_disturb_each_other(threads: int) -> None:
    model = dense(threads=threads)
    failures: list[str] = []

    def work(seed: int) -> None:
        for step in range(30):
            x = normal(1000 * seed + step, 4, 8)
            y = model(x)
            if not np.allclose(y, dense_reference(x), rtol=1e-5, atol=1e-6):
                failures.append(f"thread {seed}, call {step}")

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for worker in workers:
        worker.start()
    work(0)
    for worker in workers:
        worker.join()
    assert not failures


def test_benchmark_reports_ordered_latencies(model: CompiledModel) -> None:
    latency = model.benchmark(repeat=9, warmup=0)
    assert isinstance(latency, Latency)
    assert 0 < latency.min_ms <= latency.median_ms <= latency.p90_ms <= latency.p99_ms
    assert latency.min_ms <= latency.mean_ms
    assert (latency.repeat, latency.threads) == (9, 1)


def test_benchmark_calls_as_often_as_it_says(
    several: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(CompiledModel, "__call__", lambda self, *values: seen.append(values))
    several.benchmark(repeat=3, warmup=2)
    several.benchmark(repeat=1, warmup=0)
    assert len(seen) == 6
    x, flag, s = seen[0]
    assert (x.shape, flag.dtype, s.dtype) == ((3, 5), np.bool_, np.int64)
    assert not np.array_equal(x, seen[-1][0])


def test_benchmark_takes_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = symbolic()
    assert model.benchmark(3, 1, {"b": normal(0, 3, 2), "a": normal(1, 3, 2)}).repeat == 3
    with pytest.raises(InvalidInputError, match=r"'a' has the open shape \(n, .*\); pass inputs"):
        model.benchmark(3, 1)
    with pytest.raises(InvalidInputError, match="no input is called 'c'"):
        model.benchmark(3, 1, {"c": 1})
    with pytest.raises(InvalidInputError, match="inputs is a list; expected a mapping from names"):
        model.benchmark(3, 1, [normal(0, 3, 2)])


@pytest.mark.parametrize(
    ("repeat", "warmup"), [(0, 1), (-1, 1), (3, -1), (2.5, 1), ("3", 1), (3, None)]
)
def test_benchmark_needs_something_to_time(model: CompiledModel, repeat: int, warmup: int) -> None:
    with pytest.raises(InvalidInputError, match=f"repeat is {repeat!r} and warmup {warmup!r}"):
        model.benchmark(repeat, warmup)
