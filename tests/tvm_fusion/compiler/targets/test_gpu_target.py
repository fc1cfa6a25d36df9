# SPDX-License-Identifier: Apache-2.0
"""Targets of GPUs: every way to write one, what the device fills in, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tvm.target import Target

from schedules.cost.machine import load_machine
from schedules.errors import PredictionError
from schedules.gpu.core.machine import GPUInfo
from tvm_fusion.compiler import targets
from tvm_fusion.compiler.targets import (
    arch_of,
    device_needs,
    host_of,
    is_gpu,
    required_features,
    resolve,
)
from tvm_fusion.errors import TargetError
from tvm_fusion.machine import host
from tvm_fusion.runtime.tvm_runtime import DeviceInfo, DeviceNeeds

H100 = DeviceInfo("cuda", "H100 PCIe", "sm_90", 1024, 49152, 114)
"""A GPU that is not the largest of its architecture."""

EQUAL: list[Any] = [
    "cuda -arch=sm_80 -host=x86-64-v3",
    "cuda --host=x86-64-v3 -max_num_threads=1024 -arch=sm_80 -thread_warp_size=32",
    {"kind": "cuda", "arch": "sm_80", "host": "x86-64-v3"},
    '{"kind": "cuda", "arch": "sm_80", "host": {"kind": "llvm", "mcpu": "x86-64-v3"}}',
    Target({"kind": "cuda", "arch": "sm_80"}, host={"kind": "llvm", "mcpu": "x86-64-v3"}),
]


@pytest.mark.parametrize("spelling", EQUAL[1:])
def test_spellings_of_one_target_are_equal(spelling: Any) -> None:
    expected = str(resolve(EQUAL[0]))
    assert str(resolve(spelling)) == expected
    assert str(resolve(expected)) == str(resolve(Target(expected))) == expected


def test_everything_is_spelled_out_and_a_host_may_be_this_machine() -> None:
    resolved = resolve("cuda -arch=sm_86 -host=native", cores=3)
    told = {name: resolved.attrs[name] for name in ("arch", "thread_warp_size")}
    assert told == {"arch": "sm_86", "thread_warp_size": 32}
    assert device_needs(resolved) == DeviceNeeds("cuda", "sm_86", 1024, 49152)
    native = resolve("native", cores=3)
    assert str(host_of(resolved)) == str(native) and host_of(native) is native
    assert arch_of(resolved) == host.host_arch()
    assert required_features(resolved) == required_features(native)
    assert is_gpu(resolved) and not is_gpu(native) and device_needs(native) is None


@pytest.mark.parametrize(
    ("arch", "absent", "expected"),
    [
        ("x86_64", [], "x86-64-v3"),
        ("x86_64", ["fma"], "x86_64"),
        ("aarch64", [], "aarch64"),
    ],
)
def test_the_host_is_one_that_others_are_like(
    arch: str, absent: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No feature of this very machine, so that the file runs on others."""
    has = {name for name in required_features(resolve("x86-64-v3")) if name not in absent}
    monkeypatch.setattr(targets, "host_arch", lambda: arch)
    monkeypatch.setattr(targets, "host_features", lambda: has | {"avx512f"})
    resolved = resolve("cuda -arch=sm_90", cores=3)
    assert str(host_of(resolved)) == str(resolve(expected, cores=3))
    assert "avx512f" not in required_features(resolved)


def test_tags_keep_what_they_say() -> None:
    resolved = resolve("nvidia/nvidia-a100")
    assert (resolved.attrs["arch"], resolved.attrs["registers_per_block"]) == ("sm_80", 65536)
    for spelling in ({"tag": "nvidia/nvidia-a100"}, Target("nvidia/nvidia-a100")):
        assert str(resolve(spelling)) == str(resolved)


@pytest.mark.parametrize(
    ("spelling", "threads"),
    [
        ("opencl", 256),
        ("opencl -max_num_threads=128", 128),
        ("opencl -max_threads_per_block=64", 64),
    ],
)
def test_opencl_needs_no_architecture(spelling: str, threads: int) -> None:
    resolved = resolve(spelling)
    # dlight's rules read the one option, ours the other.
    assert int(resolved.attrs["max_threads_per_block"]) == threads
    assert device_needs(resolved) == DeviceNeeds("opencl", "", threads, 16384)
    assert host_of(resolved).kind.name == "llvm"


def test_plain_cuda_is_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_device", lambda kind: H100)
    resolved = resolve("cuda")
    assert device_needs(resolved) == DeviceNeeds("cuda", "sm_90", 1024, 49152)
    assert GPUInfo.from_target(resolved).multiprocessors == 114
    assert GPUInfo.from_target(resolve("cuda -arch=sm_90")).multiprocessors == 132


def test_plain_cuda_without_a_gpu_asks_for_the_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(kind: str) -> DeviceInfo:
        raise TargetError(f"no {kind} here")

    monkeypatch.setattr(targets, "find_device", find)
    with pytest.raises(TargetError, match="no cuda here; to compile .*: 'cuda -arch=sm_90'"):
        resolve("cuda")
    assert resolve("cuda -arch=sm_90").attrs["arch"] == "sm_90"


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("cuda -arch=sm_52", "architecture sm_52 is too old; expected sm_70 or newer"),
        ("cuda -arch=sm_61", "architecture sm_61 is too old"),
        ("cuda -arch=sm_91", "unknown CUDA architecture 'sm_91'; did you mean sm_90"),
        ("cuda -arch=90", "unknown CUDA architecture '90'; expected for example 'sm_80'"),
        ({"kind": "cuda", "arch": 90}, "unknown CUDA architecture '90'"),
        ("cuda -arhc=sm_90", "unknown cuda option 'arhc'; did you mean arch"),
        ({"kind": "cuda", "arch": "sm_90", "colour": 3}, "unknown cuda option 'colour'"),
        ("cuda -arch=sm_90 -max_num_threads=many", "is 'many'; expected an integer"),
        ("cuda -arch=sm_90 -max_num_threads=0", "max_num_threads is 0; expected a positive"),
        ("cuda -arch=sm_90 -max_num_threads=2048", "2048; a CUDA block has at most 1024 threads"),
        (
            "cuda -arch=sm_90 -max_num_threads=64 -max_threads_per_block=1025",
            "max_threads_per_block is 1025; a CUDA block has at most 1024 threads",
        ),
        ({"kind": "opencl", "max_num_threads": "4"}, "is '4'; expected a positive integer"),
        ({"kind": "opencl", "max_num_threads": True}, "is True; expected a positive integer"),
        ("cuda -arch=sm_90 -model=large", "model is 'large'; expected .*'multiprocessors=132'"),
        ("cuda -arch=sm_90 -host=x86-64-v9", "unknown target 'x86-64-v9'"),
        ("cuda -arch=sm_90 -host=opencl", "the host of a GPU is a CPU; got 'opencl'"),
        ("nvidia/nvidia-geforce-gtx-980", "too old|unknown target"),
    ],
)
def test_what_is_no_gpu_is_refused(spelling: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        resolve(spelling)


def test_a_device_must_have_the_threads_of_all_rules() -> None:
    for options in ("-max_num_threads=64 -max_threads_per_block=512", "-max_num_threads=512"):
        needs = device_needs(resolve(f"opencl {options}"))
        assert needs is not None and needs.max_threads == 512


@pytest.mark.parametrize("spelling", ["cuda", "cuda -arch=sm_89", {"kind": "cuda"}])
def test_a_machine_says_what_the_target_does_not(spelling: Any) -> None:
    machine = load_machine("l4")
    resolved = resolve(spelling, machine=machine)
    assert resolved.attrs["arch"] == "sm_89"
    assert GPUInfo.from_target(resolved).multiprocessors == 58
    targets.check_machine(resolved, machine)


@pytest.mark.parametrize(
    ("spelling", "machine", "message"),
    [
        ("cuda", "znver3", "'znver3' is a CPU, and the target is of kind 'cuda'"),
        ("opencl", "h100", "'h100' is an NVIDIA GPU, and the target is of kind 'opencl'"),
        ("native", "h100", "'h100' is an NVIDIA GPU, and the target is of kind 'llvm'"),
        ("cuda -arch=sm_80", "h100", "'h100' has compute capability 9.0.* target is for sm_80"),
        ("cuda -model=multiprocessors=114", "h100", "'h100' has 132 multi.* the target 114"),
        ("cuda", "p4", "sm_61 is too old; expected sm_70"),
    ],
)
def test_a_machine_that_is_not_the_target_is_refused(
    spelling: str, machine: str, message: str
) -> None:
    found = load_machine(machine)
    with pytest.raises(TargetError, match=message):
        targets.check_machine(resolve(spelling, machine=found), found)


def test_a_machine_without_its_architecture_is_refused() -> None:
    machine = load_machine("h100")
    figures = {name: one for name, one in machine.figures.items() if name[:7] != "compute"}
    with pytest.raises(PredictionError, match="'h100' has no figure 'compute_capability'"):
        resolve("cuda", machine=replace(machine, figures=figures))
