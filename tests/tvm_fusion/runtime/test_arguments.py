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
from tvm_fusion.runtime.arguments import (
    InputBuffers,
    bind,
    check,
    check_outputs,
    numpy_dtype,
    results,
)
from tvm_fusion.runtime.host_arrays import ALIGNMENT, TensorSpec, aligned_empty

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
    """View like PyTorch's whose memory holds the conjugate or negative numbers."""

    def __init__(self, array: Any, kind: str) -> None:
        super().__init__(array)
        self._kind = kind

    def is_conj(self) -> bool:
        return self._kind == "conj"

    def is_neg(self) -> bool:
        return self._kind == "neg"


class Meta(Exporter):
    """Tensor like PyTorch's without data."""

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


@given(array=ARRAYS, alignment=st.sampled_from([1, ALIGNMENT]), data=st.data())
def test_any_layout_arrives_equal_and_as_aligned_as_kernels_expect(
    array: np.ndarray, alignment: int, data: st.DataObject
) -> None:
    layout = data.draw(
        st.sampled_from(["as is", "reversed", "transposed", "shifted", "between", "frozen"])
    )
    if layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "transposed":
        array = array.T
    elif layout == "shifted":
        memory = np.empty(array.size + 1, array.dtype)
        memory[1:] = array.ravel()
        array = memory[1:].reshape(array.shape)
    elif layout == "between":
        memory = np.empty(array.nbytes + 1, np.uint8)
        memory[1:] = np.frombuffer(array.tobytes(), np.uint8)
        array = memory[1:].view(array.dtype).reshape(array.shape)
    elif layout == "frozen":
        array.flags.writeable = False
    stage = InputBuffers([TensorSpec("x", array.shape, str(array.dtype))], alignment)
    for _ in range(2):
        (tensor,), (memory,) = stage.tensors([array])
        np.testing.assert_array_equal(tensor.numpy(), array)
        is_in_place = memory is array
        assert array.size == 0 or memory.ctypes.data % max(alignment, array.itemsize) == 0
        flags, place = array.flags, array.ctypes.data
        usable = flags.c_contiguous and place % max(alignment, array.itemsize) == 0 and array.size
        assert is_in_place == bool(usable)


def test_arrays_of_types_that_numpy_lacks_are_used_where_they_lie() -> None:
    array = np.arange(7).astype(ml_dtypes.bfloat16)[1:].reshape(2, 3)
    array.flags.writeable = False
    spec = TensorSpec("x", (2, 3), "bfloat16")
    (tensor,), (memory,) = InputBuffers([spec]).tensors([array])
    assert memory is array and tensor.data_ptr() == array.ctypes.data
    assert str(tensor.dtype) == "bfloat16"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_inputs_are_copied_by_threads(threads: int) -> None:
    array = np.random.default_rng(0).random((700, 2, 601), dtype=np.float32).transpose(1, 2, 0)
    assert array.nbytes > 1 << 20
    stage = InputBuffers([TensorSpec("x", array.shape, "float32")], threads=threads)
    (tensor,), (memory,) = stage.tensors([array])
    assert not np.shares_memory(memory, array)
    np.testing.assert_array_equal(tensor.numpy(), array)


Y, Z = TensorSpec("y", (2, 3), "float32"), TensorSpec("z", ("n",), "int64")


def test_arrays_that_are_given_for_outputs() -> None:
    y, z = ones(2, 3), np.ones(5, np.int64)
    assert check_outputs([Y], y) == (y,)
    for out in ((y, z), [y, z], {"z": z, "y": y}):
        found = check_outputs([Y, Z], out)
        assert found[0] is y and found[1] is z
    for out in ((None, z), {"z": z}):
        found = check_outputs([Y, Z], out)
        assert found[0] is None and found[1] is z


FROZEN = ones(2, 3)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (ones(2, 3), r"out has 1 arrays; expected 2, for 'y', 'z'"),
        ((), "out has 0 arrays"),
        ({"w": ones(2, 3)}, "no output is called 'w'; the outputs are 'y', 'z'"),
        ((ones(3, 2), None), r"output 'y' has the shape \(3, 2\); expected \(2, 3\)"),
        ((None, ones(3)), "output 'z' has the element type float32; expected int64"),
        (([[1.0]], None), "output 'y' is a list; expected a numpy array"),
        ((FROZEN, None), "output 'y' is read-only"),
    ],
)
def test_arrays_that_fit_no_output_are_refused(out: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_outputs([Y, Z], out)


def test_outputs_that_share_memory_are_refused() -> None:
    memory = np.empty(10, np.float32)
    both = memory[:6].reshape(2, 3), memory[4:].reshape(2, 3)
    with pytest.raises(InvalidInputError, match="'y2' shares memory with that of another output"):
        check_outputs([Y, TensorSpec("y2", (2, 3), "float32")], both)


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
