# SPDX-License-Identifier: Apache-2.0
"""The GPU of a machine, played by a table of its attributes, and which code it runs."""

from __future__ import annotations

from typing import Any

import pytest

from tvm_fusion.errors import TargetError
from tvm_fusion.runtime import tvm_runtime
from tvm_fusion.runtime.tvm_runtime import DeviceNeeds, check_device, find_device, runs_on

A40 = {0: 1, 1: 1024, 3: 49152, 4: "8.6", 5: "NVIDIA A40", 7: 84}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """A GPU whose attributes a test may change."""
    attributes = dict(A40)
    monkeypatch.setattr(tvm_runtime, "load_device_library", lambda kind: None)
    monkeypatch.setattr(tvm_runtime, "_attribute", lambda kind, number: attributes[number])
    return attributes


def test_a_gpu_is_described(gpu: dict[int, Any]) -> None:
    found = find_device("cuda")
    assert (found.name, found.arch) == ("NVIDIA A40", "sm_86")
    assert (found.max_threads, found.shared_bytes, found.multiprocessors) == (1024, 49152, 84)
    gpu[4] = "10.0"
    assert find_device("cuda").arch == "sm_100"
    assert find_device("opencl").arch == ""


def test_a_machine_without_a_gpu_says_so(gpu: dict[int, Any]) -> None:
    gpu[0] = 0
    with pytest.raises(TargetError, match="no GPU for cuda was found on this machine"):
        find_device("cuda")
    with pytest.raises(TargetError, match="the code is for cuda sm_80, and no GPU for"):
        check_device(DeviceNeeds("cuda", "sm_80", 1024, 49152))


@pytest.mark.parametrize(
    ("code", "there", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_86", "sm_80", False),
        ("sm_75", "sm_80", False),
        ("sm_90", "sm_89", False),
        ("sm_90a", "sm_90", True),
        ("sm_100a", "sm_100", True),
        ("sm_100a", "sm_103", False),
        ("sm_100f", "sm_103", True),
        ("sm_100", "sm_103", True),
        ("sm_100", "sm_120", False),
        ("sm_10", "sm_100", False),
        ("", "sm_80", False),
    ],
)
def test_machine_code_runs_on_its_generation(code: str, there: str, runs: bool) -> None:
    assert runs_on(code, there) is runs


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (DeviceNeeds("cuda", "sm_90", 1024, 49152), "for sm_90, and .*A40.* is sm_86; compile it"),
        (DeviceNeeds("cuda", "sm_86", 2048, 49152), "needs 2048 threads a block, and .* has 1024"),
        (DeviceNeeds("cuda", "sm_80", 1024, 65536), "needs 65536 bytes of shared memory .* 49152"),
        (DeviceNeeds("opencl", "", 2048, 1), "needs 2048 threads a block"),
    ],
)
def test_what_does_not_fit_is_refused(
    gpu: dict[int, Any], needs: DeviceNeeds, message: str
) -> None:
    with pytest.raises(TargetError, match=message):
        check_device(needs)


def test_what_fits_is_taken(gpu: dict[int, Any]) -> None:
    check_device(DeviceNeeds("cuda", "sm_80", 1024, 49152))
    check_device(DeviceNeeds("opencl", "", 256, 16384))


@pytest.mark.parametrize(
    ("kind", "reason", "message"),
    [
        ("cuda", "libcuda.so.1: cannot open shared object file", "no NVIDIA driver"),
        ("cuda", "libcudart.so.99: cannot open", r"install the CUDA runtime with: pip install"),
        ("cuda", "Cannot find libtvm_runtime_cuda.so", "has no CUDA runtime; .* USE_CUDA"),
        ("opencl", "Cannot find libtvm_runtime_opencl.so", "has no OpenCL runtime; .* USE_OPENCL"),
    ],
)
def test_a_runtime_that_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, kind: str, reason: str, message: str
) -> None:
    monkeypatch.setattr(tvm_runtime, "_has_device", lambda kind: False)
    monkeypatch.setattr(tvm_runtime, "_try_to_load", lambda name: reason)
    with pytest.raises(TargetError, match=message):
        tvm_runtime.load_device_library(kind)


def test_the_cuda_runtime_is_looked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    loaded: list[str] = []
    reasons = iter(["libcudart.so.13: cannot open shared object file", ""])
    monkeypatch.setattr(tvm_runtime, "_has_device", lambda kind: bool(loaded))
    monkeypatch.setattr(tvm_runtime, "_try_to_load", lambda name: next(reasons))
    monkeypatch.setattr(tvm_runtime, "find_libraries", lambda name: asked.append(name) or ["lib"])
    monkeypatch.setattr(tvm_runtime.ctypes, "CDLL", loaded.append)
    tvm_runtime.load_device_library("cuda")
    assert (asked, loaded) == (["libcudart.so.13"], ["lib"])
