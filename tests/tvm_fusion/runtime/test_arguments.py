# SPDX-License-Identifier: Apache-2.0
"""Arguments of a call: names, types, shapes, layouts, memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tvm_fusion.errors import InvalidInputError
from tvm_fusion.runtime.arguments import InputBuffers, bind, check, numpy_dtype, results
from tvm_fusion.runtime.host_arrays import ALIGNMENT, aligned_empty
from tvm_fusion.runtime.tensor_spec import TensorSpec

A = TensorSpec("a", (2, 3), "float32")
B = TensorSpec("input.2", (2, 3), "float32")
ROWS = TensorSpec("rows", ("n", 3), "float32")
MORE = TensorSpec("more", (4, "n"), "float32")


class Exporter:
    """Nothing but DLPack, of another library's array, so to speak."""

    def __init__(self, array: Any, device: int = 1) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


class LazyView(Exporter):
    """As PyTorch's views whose memory holds the conjugate or negative numbers."""

    def __init__(self, array: Any, kind: str) -> None:
        super().__init__(array)
        self._kind = kind

    def is_conj(self) -> bool:
        return self._kind == "conj"

    def is_neg(self) -> bool:
        return self._kind == "neg"


class Meta(Exporter):
    """As PyTorch's tensors without data."""

    is_meta = True


class Wild(Exporter):
    """An exporter with an error of its own."""

    def __dlpack__(self, **options: Any) -> Any:
        raise KeyError("wild")


class Refusing(Exporter):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("call detach() first")


def ones(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((1, 2), {}),
        ((1,), {"input.2": 2}),
        ((), {"input.2": 2, "a": 1}),
        (({"input.2": 2, "a": 1},), {}),
    ],
)
def test_arguments_come_by_position_by_name_or_in_a_mapping(args, named) -> None:
    assert bind([A, B], args, named) == [1, 2]


@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ((), {}, r"missing input 'a', 'input\.2'; the inputs are 'a', 'input\.2'"),
        ((1,), {}, r"missing input 'input\.2'; the inputs"),
        ((1, 2, 3), {}, r"got 3 inputs; expected 2: 'a', 'input\.2'"),
        ((1,), {"input2": 2}, r"no input is called 'input2'; .* did you mean 'input\.2'\?"),
        ((1,), {"qqq": 2}, r"no input is called 'qqq'; the inputs are 'a', 'input\.2'$"),
        ((1, 2), {"a": 1}, "input 'a' is given twice, by position and by name"),
        (({"a": 1, 7: 2},), {}, "no input is called 7"),
    ],
)
def test_arguments_that_do_not_fit_the_names_are_refused(args, named, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        bind([A, B], args, named)


def test_a_model_without_inputs_takes_none() -> None:
    assert bind([], (), {}) == []
    with pytest.raises(InvalidInputError, match="got 1 inputs; expected 0: none"):
        bind([], (1,), {})
    with pytest.raises(InvalidInputError, match="no input is called 'x'; the inputs are none"):
        bind([], (), {"x": 1})


def test_arrays_scalars_and_dlpack_are_seen_without_copying() -> None:
    array = ones(2, 3)
    tensor = tvm.runtime.tensor(array)
    for value, memory in [
        (array, array),
        (Exporter(array), array),
        (tensor, np.from_dlpack(tensor)),
        (Exporter(tensor), np.from_dlpack(tensor)),
    ]:
        (seen,) = check([A], [value])
        assert np.shares_memory(seen, memory)
    scalar = TensorSpec("s", (), "int64")
    assert [check([scalar], [value])[0] for value in (np.int64(3), np.array(3))] == [3, 3]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0]], r"input 'a' is a list; expected a numpy array or an object with DLPack"),
        (1.0, "input 'a' is a float"),
        (None, "input 'a' is a NoneType"),
        (ones(2, 3, dtype="float64"), r"element type float64; expected float32: .*astype\('float"),
        (ones(2, 3, dtype="int32"), "element type int32; expected float32"),
        (ones(2, 3, dtype=">f4"), "element type >f4; expected float32"),
        (np.full((2, 3), "x", object), "element type object; expected float32"),
        (Exporter(ones(2, 3, dtype="float16")), "element type float16; expected float32"),
        (ones(2, 4), r"has the shape \(2, 4\); expected \(2, 3\)"),
        (ones(2), r"has the shape \(2,\); expected \(2, 3\)"),
        (ones(2, 3, 1), r"has the shape \(2, 3, 1\); expected \(2, 3\)"),
        (np.float32(1), r"has the shape \(\); expected \(2, 3\)"),
        (Exporter(ones(2, 3), device=2), r"is on another device \(DLPack type 2\); move it"),
        (LazyView(ones(2, 3), "conj"), r"is a conj view.*pass a.resolve_conj\(\)"),
        (LazyView(ones(2, 3), "neg"), r"is a neg view.*pass a.resolve_neg\(\)"),
        (Meta(ones(2, 3)), "input 'a' is a meta or fake tensor, which has no data"),
        (np.ndarray, "input 'a' is a type; expected a numpy array or an object with DLPack"),
        (Exporter(ones(2, 3), device="cpu"), r"\(Exporter\) cannot be read through DLPack"),
        (Wild(ones(2, 3)), r"\(Wild\) cannot be read through DLPack: 'wild'"),
        (Refusing(ones(2, 3)), r"\(Refusing\) cannot be read through DLPack: call detach\(\)"),
    ],
)
def test_values_that_do_not_fit_are_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check([A], [value])


def test_an_open_dimension_has_one_size_in_all_inputs() -> None:
    for rows in (0, 1, 7):
        assert len(check([ROWS, MORE], [ones(rows, 3), ones(4, rows)])) == 2
    with pytest.raises(
        InvalidInputError,
        match=r"dimension 'n' is 5 in input 'more' and 2 in input 'rows'; expected one size",
    ):
        check([ROWS, MORE], [ones(2, 3), ones(4, 5)])
    with pytest.raises(InvalidInputError, match=r"has the shape \(2, 4\); expected \(n, 3\)"):
        check([ROWS], [ones(2, 4)])
    with pytest.raises(InvalidInputError, match=r"expected \(n,\)"):
        check([TensorSpec("v", ("n",), "float32")], [ones(2, 4)])


def test_types_that_numpy_lacks_come_from_ml_dtypes() -> None:
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert numpy_dtype("float8_e4m3fn") == ml_dtypes.float8_e4m3fn
    assert numpy_dtype("bool") == np.bool_
    for name in ("handle", "float8_of_some_kind", "int4", "f4", "object", "finfo"):
        with pytest.raises(InvalidInputError, match=f"the element type '{name}' has no match"):
            numpy_dtype(name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_types_that_dlpack_of_numpy_lacks_are_taken_and_returned(dtype: str) -> None:
    spec = TensorSpec("x", (2, 3), dtype)
    array = np.arange(6).reshape(2, 3).astype(numpy_dtype(dtype))
    (tensor,), _ = InputBuffers([spec]).tensors(check([spec], [array]))
    assert str(tensor.dtype) == dtype
    (seen,) = check([spec], [tensor])
    (given_back,) = results([tensor], [True], [])
    for found in (seen, given_back):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


ARRAYS = hnp.arrays(
    st.sampled_from(["float32", "float64", "float16", "int8", "uint8", "int64", "bool"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@given(array=ARRAYS, data=st.data())
def test_any_layout_arrives_aligned_and_equal(array: np.ndarray, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(["as is", "reversed", "transposed", "shifted", "frozen"]))
    if layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "transposed":
        array = array.T
    elif layout == "shifted":
        memory = np.empty(array.size + 1, array.dtype)
        memory[1:] = array.ravel()
        array = memory[1:].reshape(array.shape)
    elif layout == "frozen":
        array.flags.writeable = False
    stage = InputBuffers([TensorSpec("x", array.shape, str(array.dtype))])
    for _ in range(2):
        (tensor,), (memory,) = stage.tensors([array])
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert array.size == 0 or memory.ctypes.data % ALIGNMENT == 0


def test_an_aligned_array_is_used_where_it_lies_and_any_other_one_is_not() -> None:
    array = aligned_empty((2, 3))
    array[...] = 1
    frozen = aligned_empty((2, 3))
    frozen.flags.writeable = False
    apart = np.empty(32, np.float32)
    start = -apart.ctypes.data % ALIGNMENT // 4 + 1
    shifted = apart[start : start + 6].reshape(2, 3)
    for value, shared in [(array, True), (frozen, False), (array.T.copy().T, False)]:
        _, (memory,) = InputBuffers([A]).tensors([value])
        assert np.shares_memory(memory, value) == shared
    _, (memory,) = InputBuffers([A]).tensors([shifted])
    assert not np.shares_memory(memory, shifted)


def test_memory_of_our_own_is_used_again_until_the_shape_changes() -> None:
    stage = InputBuffers([ROWS])
    places = [stage.tensors([ones(rows, 3)[::-1]])[1][0] for rows in (4, 4, 5)]
    assert np.shares_memory(places[0], places[1])
    assert not np.shares_memory(places[0], places[2])


def test_results_are_copied_only_where_someone_else_could_change_them() -> None:
    tensors = [tvm.runtime.tensor(ones(2, 3)) for _ in range(3)]
    memory = [np.from_dlpack(tensor) for tensor in tensors]
    new, constant, twice, passed = results(
        [tensors[0], tensors[1], tensors[0], tensors[2]], [True, False, True, True], [memory[2]]
    )
    assert np.shares_memory(new, memory[0])
    for copied in (constant, twice, passed):
        assert not any(np.shares_memory(copied, place) for place in memory)
        assert copied.flags.writeable
    assert new.flags.writeable


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool"])
def test_aligned_arrays(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned_empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
    assert array.flags.c_contiguous
    assert array.flags.writeable
