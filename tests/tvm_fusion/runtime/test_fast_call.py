# SPDX-License-Identifier: Apache-2.0
"""The short way of a call: what takes it, what does not, and that both give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relax_models import assert_dense, dense, lifted_dense, many, symbolic

from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.fast_call import has_fast_call
from tvm_fusion.runtime.host_arrays import TensorSpec, aligned_empty

X = TensorSpec("x", (4, 8), "float32")
Y = TensorSpec("y", (4, 6), "float32")


class Subclass(np.ndarray):
    """Whatever an array may be made to do."""


class Exporter:
    """Nothing but DLPack, of another library's array, so to speak."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def aligned(*shape: int, dtype: str = "float32") -> np.ndarray:
    array = aligned_empty(shape, dtype)
    array[...] = np.random.default_rng().integers(-9, 9, shape)
    return array


def array_of(value: Any) -> np.ndarray:
    """The array in an argument."""
    value = value["x"] if isinstance(value, dict) else value
    return np.from_dlpack(value) if isinstance(value, Exporter) else np.asarray(value)


def read_only() -> np.ndarray:
    array = aligned(4, 8)
    array.flags.writeable = False
    return array


def shifted() -> np.ndarray:
    return aligned(33)[1:].reshape(4, 8)


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    started = lifted_dense()
    started(aligned(4, 8))
    return started


@pytest.mark.parametrize("make", [lambda: aligned(4, 8), shifted, read_only])
def test_an_array_is_read_where_it_lies(
    model: CompiledModel, make: Callable[[], np.ndarray]
) -> None:
    x = make()
    [y] = model._fast_call((x,))
    assert_dense(y, x)
    y[...] = np.nan
    assert_dense(model(x=x), x)


@pytest.mark.parametrize("name", ["position", "name", "mapping"])
def test_names_take_the_short_way(
    model: CompiledModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model._memory, "check", None)  # the long way
    x = shifted()
    calls = {"position": lambda: model(x), "name": lambda: model(x=x)}
    assert_dense(calls.get(name, lambda: model({"x": x}))(), x)


@pytest.mark.parametrize("pack", [lambda y: y, lambda y: (y,), lambda y: [y], lambda y: {"y": y}])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_results_are_written_where_they_are_wanted(
    model: CompiledModel, pack: Callable[[np.ndarray], Any], start: int
) -> None:
    memory = np.full(30, np.nan, np.float32)
    x, y = aligned(4, 8), memory[start : start + 24].reshape(4, 6)
    assert model(x, out=pack(y)) is y
    assert_dense(y, x)
    assert np.isnan(memory).sum() == 6


def test_results_in_the_memory_of_an_input_or_apart(model: CompiledModel) -> None:
    memory = aligned(32)
    x, y = memory.reshape(4, 8), memory[:24].reshape(4, 6)
    before = x.copy()
    assert model(x, out=y) is y
    assert_dense(y, before)
    wide = np.full((6, 4), np.nan, np.float32)
    assert model(before, out=wide.T).base is wide
    assert_dense(wide.T, before)


def test_out_that_does_not_fit_is_refused_and_untouched(model: CompiledModel) -> None:
    x = aligned(4, 8)
    frozen = np.zeros((4, 6), np.float32)
    frozen.flags.writeable = False
    for y in (frozen, np.zeros((6, 4), np.float32), np.zeros((4, 6)), [[0.0]]):
        before = np.array(y)
        with pytest.raises(InvalidInputError, match="out for output 'y'|expected 1"):
            model(x, out=y)
        np.testing.assert_array_equal(y, before)


@pytest.mark.parametrize(
    "args",
    [
        (aligned(4, 8).view(Subclass),),
        (Exporter(aligned(4, 8)),),
        ({"x": aligned(4, 8)},),
        (aligned(8, 4).T,),
        (np.broadcast_to(aligned(8), (4, 8)),),
    ],
)
def test_what_must_be_looked_at_or_copied_takes_the_long_way(
    model: CompiledModel, args: tuple[Any, ...]
) -> None:
    assert model._fast_call(args) is None
    assert_dense(model(*args), array_of(args[0]))


@pytest.mark.parametrize(
    "args",
    [
        (),
        (aligned(4, 8),) * 2,
        (aligned(4, 8, dtype="float64"),),
        (aligned(4, 8, dtype="int32"),),
        (aligned(4, 8, dtype="complex64"),),
        (aligned(4, 8).astype(">f4"),),
        (aligned(8, 4),),
        (aligned(4, 8, 1),),
        (aligned(32),),
        (aligned(0, 8),),
        (None,),
        ("x",),
    ],
)
def test_what_does_not_fit_is_refused_with_the_error_of_the_long_way(
    model: CompiledModel, args: tuple[Any, ...]
) -> None:
    assert model._fast_call(args) is None
    with pytest.raises(InvalidInputError, match="input"):
        model(*args)


def test_models_that_write_all_outputs_where_they_are_told_have_a_short_way() -> None:
    assert has_fast_call([X], [Y], [True])
    assert has_fast_call([], [Y], [True])
    assert has_fast_call([X], [Y, Y], [True, True])
    assert not has_fast_call([X], [Y], [])
    assert not has_fast_call([X], [Y, Y], [True, False])
    for shape in (("n", 8), (0, 8)):
        assert not has_fast_call([TensorSpec("x", shape, "float32")], [Y], [True])
    for dtype in ("bfloat16", "int4"):
        assert not has_fast_call([TensorSpec("x", (4, 8), dtype)], [Y], [True])
        assert not has_fast_call([X], [TensorSpec("y", (4, 6), dtype)], [True])


def test_others_have_none() -> None:
    for other in (many(), symbolic(), dense()):
        other._start()
        assert other._fast_call((aligned(4, 8),)) is None
