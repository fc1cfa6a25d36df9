# SPDX-License-Identifier: Apache-2.0
"""The memory of a device, played by the CPU: TVM's tensors are on it, numpy's arrays are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from relax_models import assert_dense, dense, many, symbolic

import tvm_fusion
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidInputError, TargetError
from tvm_fusion.runtime import artifact, compiled_model
from tvm_fusion.runtime.compiled_model import CompiledModel, load
from tvm_fusion.runtime.host_arrays import TensorSpec
from tvm_fusion.runtime.memory import DeviceMemory, own_tensors
from tvm_fusion.runtime.tvm_runtime import DeviceNeeds

CPU = tvm_ffi.device("cpu", 0)
NEEDS = DeviceNeeds("opencl", "", 256, 16384)
SPECS = [TensorSpec("x", (2, "n"), "float32"), TensorSpec("i", (3,), "int64")]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng().standard_normal(shape, dtype=np.float32)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make models believe that they run on a GPU, which the CPU plays."""
    monkeypatch.setattr(compiled_model, "device_of", lambda kind: CPU)
    monkeypatch.setattr(artifact, "check_device", lambda needs: None)

    def move(model: CompiledModel) -> CompiledModel:
        about = replace(model._about, device=NEEDS, target=str(resolve("opencl")))
        return CompiledModel(model._executable, about, 1, model._weights)

    return move


def foreign(device: tuple[int, int]) -> Any:
    """A tensor of another library on some device."""

    class Tensor:
        def __dlpack_device__(self) -> tuple[int, int]:
            return device

        def __dlpack__(self, **_: Any) -> Any:
            return normal(2, 3).__dlpack__()

    return Tensor()


def test_arrays_are_copied_and_tensors_of_the_device_are_not() -> None:
    memory = DeviceMemory(SPECS, CPU)
    x, index = tvm.runtime.tensor(normal(2, 5)), np.array([4, 5, 6])
    (first, second), _ = memory.place(memory.check([x, index]))
    assert first.data_ptr() == x.data_ptr()
    np.testing.assert_array_equal(np.from_dlpack(second), index)
    assert second.data_ptr() != index.ctypes.data
    again, _ = memory.place(memory.check([normal(2, 7), index]))
    assert again[1].data_ptr() == second.data_ptr()  # the place is kept
    np.testing.assert_array_equal(np.from_dlpack(first), x.numpy())


@pytest.mark.parametrize("kind", ["transposed", "strided", "read-only", "empty"])
def test_arrays_of_any_layout_are_copied(kind: str) -> None:
    x = {
        "transposed": normal(4, 2).T,
        "strided": normal(2, 8)[:, ::2],
        "read-only": normal(2, 4),
        "empty": normal(2, 0),
    }[kind]
    x.flags.writeable = kind != "read-only"
    memory = DeviceMemory(SPECS[:1], CPU)
    (tensor,), _ = memory.place(memory.check([x]))
    np.testing.assert_array_equal(memory.arrays([tensor], [True], [])[0], x)


def test_a_misaligned_tensor_of_a_cuda_device_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_fusion.runtime.memory.kind_of", lambda tensor: 2)
    whole = tvm.runtime.tensor(normal(3 * 16))
    part = whole._create_view((2, 8), "float32", 4)
    memory = DeviceMemory(SPECS[:1], CPU)
    (tensor,), _ = memory.place(memory.check([part]))
    assert tensor.data_ptr() % 64 == 0 and part.data_ptr() % 64 == 4
    np.testing.assert_array_equal(np.from_dlpack(tensor), whole.numpy()[1:17].reshape(2, 8))


def test_types_that_numpy_lacks_come_back() -> None:
    values = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    memory = DeviceMemory([TensorSpec("b", (2, 3), "bfloat16")], CPU)
    (tensor,), _ = memory.place(memory.check([values]))
    (back,) = memory.arrays([tensor], [True], [])
    assert back.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(back.astype("float32"), values.astype("float32"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (foreign((2, 0)), "another device .DLPack type 2.; move it to the CPU or to cpu:0"),
        (foreign((1, 3)), "is on the device number 3; move it to cpu:0"),
        (tvm.runtime.tensor(np.zeros((2, 3))), "element type float64; expected float32"),
        (tvm.runtime.tensor(np.zeros((3, 2), "float32")), r"shape \(3, 2\); expected \(2, n\)"),
        (tvm_ffi.from_dlpack(np.zeros((2, 3), "complex64")), "a contiguous tensor of float32"),
        ([[1.0]], "input 'x' is a list"),
    ],
)
def test_wrong_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        DeviceMemory(SPECS[:1], CPU).check([value])


def test_a_tensor_that_is_not_contiguous_is_refused() -> None:
    class Transposed:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            return normal(3, 2).T.__dlpack__()

    with pytest.raises(InvalidInputError, match="cannot be read .* expected a contiguous tensor"):
        DeviceMemory(SPECS[:1], CPU).check([Transposed()])


def test_results_that_share_memory_are_copied() -> None:
    one, other = tvm.runtime.tensor(normal(4)), tvm.runtime.tensor(normal(4))
    view = one._create_view((2,), "float32", 4)
    owned = own_tensors([one, view, other, other], [True, True, True, False], [])
    assert owned[0].data_ptr() == one.data_ptr() and owned[2].data_ptr() == other.data_ptr()
    assert len({tensor.data_ptr() for tensor in owned}) == 4
    np.testing.assert_array_equal(owned[1].numpy(), view.numpy())
    np.testing.assert_array_equal(owned[3].numpy(), other.numpy())
    (copy,) = own_tensors([view], [True], [one])
    assert copy.data_ptr() != view.data_ptr()


def test_a_model_gives_the_same_on_a_device(on_device: Any) -> None:
    model = on_device(dense())
    for given in (normal(4, 8), tvm.runtime.tensor(normal(4, 8))):
        assert_dense(model(given), given if isinstance(given, np.ndarray) else given.numpy())
    assert str(model).endswith("opencl, 1 threads)")
    assert (model.device, model.needs) == (CPU, NEEDS)


def test_results_can_stay_on_the_device(on_device: Any) -> None:
    x, flag, s = normal(3, 5), np.array([True, False, True]), np.int64(41)
    for model in (many(), on_device(many())):
        first = model.tensors(x, flag, s)
        again = model.tensors(x, flag, s)
        model.synchronize()
        assert all(isinstance(tensor, tvm_ffi.Tensor) for tensor in first)
        assert len({tensor.data_ptr() for tensor in (*first, *again)}) == 2 * len(first)
        for got, want in zip(first, model(x, flag, s), strict=True):
            np.testing.assert_array_equal(np.from_dlpack(got), want)


def test_weights_go_to_the_device_once(on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []
    real = DeviceMemory.upload

    def upload(self: DeviceMemory, weights: Any) -> list[Any]:
        uploads.append(real(self, weights))
        return uploads[-1]

    monkeypatch.setattr(DeviceMemory, "upload", upload)
    model = on_device(dense())
    model(normal(4, 8))
    model(normal(4, 8))
    assert len(uploads) == 1


def test_a_loaded_model_has_its_weights_on_the_device(on_device: Any, tmp_path: Any) -> None:
    on_device(dense()).save(tmp_path / "model.so")
    model, x = load(tmp_path / "model.so", threads=1), normal(4, 8)
    assert model.needs == NEEDS and model._placed is not None
    assert_dense(model(x), x)


def test_benchmark_waits_for_the_device(on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(DeviceMemory, "synchronize", lambda self: waits.append(self))
    latency = on_device(dense()).benchmark(repeat=3, warmup=2)
    assert len(waits) == 1 + 3 + 2 and 0 < latency.min_ms <= latency.median_ms
    assert on_device(symbolic()).benchmark(1, 0, {"a": normal(3, 2), "b": normal(3, 2)}).repeat == 1


def test_without_the_device_the_model_does_not_start(on_device: Any, monkeypatch) -> None:
    model = on_device(dense())

    def refuse(needs: DeviceNeeds) -> None:
        raise TargetError(f"no {needs}")

    monkeypatch.setattr(artifact, "check_device", refuse)
    with pytest.raises(TargetError, match="no opencl"):
        model(normal(4, 8))


def test_what_the_gpu_says_is_no_fault_of_the_inputs(on_device: Any) -> None:
    for model, text, kind in (
        (on_device(dense()), "CUDALaunch Error: out of resources", TargetError),
        (on_device(dense()), "Device API opencl: CL_OUT_OF_RESOURCES", TargetError),
        (on_device(dense()), "the shape is wrong", InvalidInputError),
        (dense(), "CUDA is mentioned", InvalidInputError),
    ):

        def fail(*_: Any, text: str = text) -> None:
            raise RuntimeError(text)

        model(normal(4, 8))
        model._main = fail
        with pytest.raises(kind, match=text):
            model(x=normal(4, 8))  # A call by name: the fast one would keep the program itself.


@pytest.mark.parametrize(
    "function",
    [
        "runtime.TVMTensorAllocWithScope",  # Allocates inputs.
        "runtime.TVMTensorCopyFromBytes",
        "runtime.TVMTensorCopyToBytes",
        "runtime.Device_StreamSync",
    ],
)
def test_a_device_that_fails_is_an_error_of_ours(on_device: Any, monkeypatch, function) -> None:
    model = on_device(dense())
    model(normal(4, 8))
    model._memory._places[:] = [None]

    def fail(*_: Any) -> None:
        raise RuntimeError("Traceback\nCUDA: out of memory")

    for module in ("arguments", "memory"):
        real = getattr(tvm_fusion.runtime, module).get_function
        monkeypatch.setattr(
            f"tvm_fusion.runtime.{module}.get_function",
            lambda name, real=real: fail if name == function else real(name),
        )
    with pytest.raises(TargetError, match="^cpu:0 failed: CUDA: out of memory$"):
        model(normal(4, 8))
        model.synchronize()


def test_without_the_device_there_is_nothing_to_time_or_wait_for(on_device: Any, monkeypatch):
    def refuse(needs: DeviceNeeds) -> None:
        raise TargetError(f"no {needs}")

    monkeypatch.setattr(artifact, "check_device", refuse)
    monkeypatch.setattr(DeviceMemory, "place", lambda *_: pytest.fail("no device is driven"))
    monkeypatch.setattr(DeviceMemory, "synchronize", lambda _: pytest.fail("no device is driven"))
    model = on_device(dense())
    model.synchronize()
    with pytest.raises(TargetError, match="no opencl"):
        model.benchmark(repeat=1)


def test_weights_that_do_not_fit_are_an_error(on_device: Any, monkeypatch) -> None:
    def upload(self: DeviceMemory, weights: Any) -> None:
        raise RuntimeError("stack\nout of memory")

    monkeypatch.setattr(DeviceMemory, "upload", upload)
    with pytest.raises(
        TargetError, match="MiB of weights cannot be placed on cpu:0: out of memory"
    ):
        on_device(dense())(normal(4, 8))
