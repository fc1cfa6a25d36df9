# SPDX-License-Identifier: Apache-2.0
"""Calls whose kernels gave up waiting, on a device that the CPU plays, and the start anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from gpu_onnx import long_sums
from relax_models import assert_dense, dense

import tvm_fusion
from schedules.workload.workspace_layout import FAILED, HEADER_WORDS, WATCHED, is_workspace
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.runtime import artifact, compiled_model, memory
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.memory import Workspaces
from tvm_fusion.runtime.tvm_runtime import DeviceNeeds

NEEDS = DeviceNeeds("opencl", "", 256, 16384)
X = np.random.default_rng(7).standard_normal((4, 8), dtype=np.float32)


@pytest.fixture
def workspace() -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.arange(1, 2 * HEADER_WORDS, dtype="int32"))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, workspace: tvm.runtime.Tensor) -> CompiledModel:
    """One that believes to be on a GPU and to have launched kernels long ago, which then failed."""
    monkeypatch.setattr(compiled_model, "device_of", lambda kind: tvm_ffi.device("cpu", 0))
    monkeypatch.setattr(artifact, "check_device", lambda needs: None)
    monkeypatch.setattr(memory, "_SECONDS", -1.0)
    compiled = dense()
    about = replace(compiled._about, device=NEEDS, target=str(resolve("opencl")))
    found = CompiledModel(compiled._executable, about, 1, compiled._weights)
    found(X)
    found._workspaces = Workspaces([workspace])
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model(X),
        lambda model: (model.tensors(X), model.synchronize()),
        lambda model: (model.tensors(X), model.tensors(X)),
    ],
    ids=["arrays", "synchronize", "next call"],
)
def test_a_failed_call_raises_and_the_next_begins_anew(
    model: CompiledModel,
    workspace: tvm.runtime.Tensor,
    call: Callable[[CompiledModel], object],
) -> None:
    with pytest.raises(TargetError, match=r"CompiledModel.reset\(\) was called"):
        call(model)
    assert np.flatnonzero(workspace.numpy()).tolist() == [WATCHED]
    call(model)
    assert_dense(model(X), X)


def test_a_reset_by_the_user(model: CompiledModel, workspace: tvm.runtime.Tensor) -> None:
    model.reset()
    assert np.flatnonzero(workspace.numpy()).tolist() == [WATCHED]
    assert_dense(model(X), X)


def test_quick_calls_have_not_failed(
    model: CompiledModel, workspace: tvm.runtime.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the device is not read after each of them."""
    monkeypatch.setattr(memory, "_SECONDS", 1e9)
    assert_dense(model(X), X)
    assert workspace.numpy()[FAILED]


@pytest.mark.slow
def test_a_model_for_a_gpu_knows_its_workspaces() -> None:
    """They are found among its weights, also small ones, and say that the host looks at them."""
    weights = tvm_fusion.compile(long_sums(), "cuda -arch=sm_80")._weights
    found = [weight for weight in weights if is_workspace(np.from_dlpack(weight))]
    places = [tvm.runtime.tensor(np.from_dlpack(weight)) for weight in weights]
    workspaces = Workspaces.among(weights, places)._tensors
    assert found and len(workspaces) == len(found)
    assert all(place.numpy()[WATCHED] == 1 for place in workspaces)
