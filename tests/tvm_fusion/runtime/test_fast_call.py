# SPDX-License-Identifier: Apache-2.0
"""The short way of a call: what takes it, what does not, and that both give the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from relax_models import assert_dense, dense, many, symbolic

from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.fast_call import has_fast_call
from tvm_fusion.runtime.host_arrays import aligned_empty
from tvm_fusion.runtime.tensor_spec import TensorSpec

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


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    started = dense()
    started(aligned(4, 8))
    return started


def test_an_aligned_array_is_read_where_it_lies(model: CompiledModel) -> None:
    x = aligned(4, 8)
    y = model._fast_call((x,))
    assert y is not None
    assert_dense(y, x)
    y[...] = np.nan
    x[...] += 1
    assert_dense(model(x), x)


@pytest.mark.parametrize(
    "args",
    [
        (aligned(4, 8).view(Subclass),),
        (Exporter(aligned(4, 8)),),
        ({"x": aligned(4, 8)},),
        (aligned(8, 4).T,),
        (aligned(33)[1:].reshape(4, 8),),
        (np.broadcast_to(aligned(8), (4, 8)),),
        (read_only(),),
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


def test_only_one_new_output_of_a_plain_type_has_a_short_way() -> None:
    assert has_fast_call([X], [Y], [True])
    assert has_fast_call([], [Y], [True])
    assert not has_fast_call([X], [Y], [False])
    assert not has_fast_call([X], [Y, Y], [True, True])
    for shape in (("n", 8), (0, 8)):
        assert not has_fast_call([TensorSpec("x", shape, "float32")], [Y], [True])
    for dtype in ("bfloat16", "int4"):
        assert not has_fast_call([TensorSpec("x", (4, 8), dtype)], [Y], [True])
        assert not has_fast_call([X], [TensorSpec("y", (4, 6), dtype)], [True])


def test_others_have_none() -> None:
    for other in (many(), symbolic()):
        other._start()
        assert other._fast_call((aligned(4, 8),)) is None
