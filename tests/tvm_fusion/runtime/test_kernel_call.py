# SPDX-License-Identifier: Apache-2.0
"""Models of one kernel: how it is called, and that every result stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from relax_models import lifted
from tvm import relax

from tvm_fusion.errors import ArtifactError, InvalidInputError
from tvm_fusion.runtime.compiled_model import CompiledModel, load
from tvm_fusion.runtime.fast_call import OutputPool, SoleKernelCall
from tvm_fusion.runtime.host_arrays import TensorSpec, aligned_empty

op = relax.op
WEIGHT = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")


def one_kernel(build: Callable[..., relax.Expr], inputs: list[str]) -> CompiledModel:
    """A model of inputs of 3 x 4 and of the constant WEIGHT."""
    params = [relax.Var(name, relax.TensorType((3, 4), "float32")) for name in inputs]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(build(*params, relax.const(WEIGHT)))
        builder.emit_func_output(result)
    return lifted(builder.get(), inputs, ["y"])


@pytest.fixture(scope="module")
def model() -> CompiledModel:
    """WEIGHT @ x."""
    return one_kernel(lambda x, w: op.matmul(w, x), ["x"])


def random_input() -> np.ndarray:
    x = aligned_empty((3, 4))
    x[...] = np.random.default_rng().standard_normal((3, 4))
    return x


def assert_product(y: np.ndarray, x: np.ndarray) -> None:
    np.testing.assert_allclose(y, WEIGHT.astype("float64") @ x, rtol=1e-5, atol=1e-6)


def fast(model: CompiledModel, *args: Any) -> np.ndarray:
    """Output of the kernel when called by itself."""
    model(*args)
    outputs = model._fast_call(args)
    assert outputs is not None
    return outputs[0]


def test_arguments_are_in_the_order_of_the_kernel(model: CompiledModel) -> None:
    assert model._about.kernel == SoleKernelCall("matmul", (1, 0))
    x = random_input()
    assert_product(fast(model, x), x)


def test_several_inputs() -> None:
    model = one_kernel(lambda a, b, _: op.subtract(b, a), ["a", "b"])
    assert model._about.kernel == SoleKernelCall("subtract", (1, 0))
    a, b = random_input(), random_input()
    np.testing.assert_array_equal(fast(model, a, b), b - a)


def test_models_of_which_main_is_more_than_a_kernel() -> None:
    assert lifted(*dense_parts())._about.kernel is None
    twice = one_kernel(lambda x, _: op.multiply(x, x), ["x"])
    x = random_input()
    np.testing.assert_array_equal(fast(twice, x), x * x)
    unused = one_kernel(lambda a, b, _: op.nn.relu(b), ["a", "b"])
    other = random_input()
    np.testing.assert_array_equal(fast(unused, x, other), np.maximum(other, 0))
    for model in (twice, unused):
        assert model._about.kernel is None


def dense_parts() -> tuple[tvm.IRModule, list[str], list[str]]:
    """Two kernels."""
    x = relax.Var("x", relax.TensorType((3, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(op.nn.relu(op.sum(x, 0)))
        builder.emit_func_output(y)
    return builder.get(), ["x"], ["y"]


@pytest.mark.parametrize("shape", [(4, 3), (3, 4, 1), (12,), (0, 4), (3, 5)])
def test_what_does_not_fit_is_refused(model: CompiledModel, shape: tuple[int, ...]) -> None:
    model(random_input())
    x = aligned_empty(shape)
    assert model._fast_call((x,)) is None
    with pytest.raises(InvalidInputError, match="'x' has the shape"):
        model(x)


def test_the_machine_gives_the_same_numbers(model: CompiledModel) -> None:
    x = random_input()
    [slow] = model._crew.run(model._run, [x], (None,))
    np.testing.assert_array_equal(fast(model, x), slow)


def test_results_that_are_kept_do_not_change(model: CompiledModel) -> None:
    pairs = [(x, fast(model, x)) for x in (random_input() for _ in range(10))]
    pairs = [(x, y[1:]) if number % 2 else (x, y) for number, (x, y) in enumerate(pairs)]
    for _ in range(5):
        model(random_input())
    for number, (x, y) in enumerate(pairs):
        whole = WEIGHT.astype("float64") @ x
        np.testing.assert_allclose(y, whole[1:] if number % 2 else whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y,
        lambda y: y[2],
        lambda y: y.reshape(-1).T[::2],
        lambda y: y.view("int32"),
        memoryview,
        np.from_dlpack,
        lambda y: y.__dlpack__(),
        lambda y: iter(y),
        lambda y: y.flat,
    ],
)
def test_memory_that_somebody_has_is_not_used_again(hold: Callable[[np.ndarray], Any]) -> None:
    model = one_kernel(lambda x, w: op.matmul(w, x), ["x"])
    y = fast(model, random_input())
    place, held = y.ctypes.data, hold(y)
    del y
    assert all(fast(model, random_input()).ctypes.data != place for _ in range(5))
    del held


def test_memory_that_nobody_has_is_used_again() -> None:
    model = one_kernel(lambda x, w: op.matmul(w, x), ["x"])
    x = random_input()
    model(x)
    assert len({model(x).ctypes.data for _ in range(10)}) == 2


def test_what_a_caller_does_to_a_result_is_its_own_affair() -> None:
    model = one_kernel(lambda x, w: op.matmul(w, x), ["x"])
    for _ in range(6):
        x = random_input()
        y = model(x)
        assert y.flags.writeable and y.shape == (5, 4) and y.dtype == np.float32
        assert_product(y, x)
        y.shape = (20,)
        y.dtype = np.int32
        y[...] = -1
        y.flags.writeable = False


def test_threads_do_not_share_results(model: CompiledModel) -> None:
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            x = random_input()
            y = model(x)
            if not np.allclose(y, WEIGHT.astype("float64") @ x, rtol=1e-5, atol=1e-6):
                wrong.append(1)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_saved_model_calls_its_kernel_too(model: CompiledModel, tmp_path: Path) -> None:
    model.save(tmp_path / "model.so")
    again = load(tmp_path / "model.so", threads=1)
    assert again._about.kernel == model._about.kernel
    x = random_input()
    assert_product(fast(again, x), x)


def test_a_kernel_that_is_not_there(model: CompiledModel) -> None:
    about = replace(model._about, kernel=SoleKernelCall("missing", (1, 0)))
    other = CompiledModel(model._executable, about, 1, model._weights)
    with pytest.raises(ArtifactError, match="has no kernel 'missing', .*; compile it again"):
        other(random_input())


def test_a_pool_hands_out_what_it_has_got_back() -> None:
    pool = OutputPool(TensorSpec("y", (2, 3), "float64"))
    first, tensor = pool.take()
    assert first.shape == (2, 3) and first.dtype == np.float64
    assert first.ctypes.data == tensor.data_ptr() and first.ctypes.data % 64 == 0
    place = first.ctypes.data
    second, _ = pool.take()
    assert second.ctypes.data != place
    third, _ = pool.take()
    assert third.ctypes.data not in (place, second.ctypes.data)
    del first, second, third, tensor, _
    assert len({pool.take()[0].ctypes.data for _ in range(6)}) == 2


def test_a_pool_of_a_type_that_numpy_lacks() -> None:
    pool = OutputPool(TensorSpec("y", (2, 3), "bfloat16"))
    first, tensor = pool.take()
    assert first.dtype == ml_dtypes.bfloat16 and first.ctypes.data == tensor.data_ptr()
    places = {pool.take()[0].ctypes.data for _ in range(4)}
    assert first.ctypes.data not in places
