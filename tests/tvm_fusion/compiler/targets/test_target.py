# SPDX-License-Identifier: Apache-2.0
"""Targets: every way to write one, what is filled in, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.target import Target

from tvm_fusion.compiler import targets
from tvm_fusion.compiler.targets import arch_of, required_features, resolve
from tvm_fusion.errors import TargetError
from tvm_fusion.machine import host
from tvm_fusion.machine.host import check_host

AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def attrs(resolved: Target) -> dict[str, Any]:
    return {str(key): value for key, value in resolved.attrs.items()}


def test_native_needs_what_this_machine_has_and_no_more() -> None:
    native = resolve("native")
    assert str(native.attrs["mcpu"]) == host.host_cpu()
    assert arch_of(native) == host.host_arch()
    check_host(required_features(native), arch_of(native))


def test_native_leaves_out_what_a_virtual_machine_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host_arch", lambda: "x86_64")
    monkeypatch.setattr(targets, "host_cpu", lambda: "znver4")
    probe = {"avx2": True, "fma": False, "avx512f": False, "avxvnni": True, "rdpru": False}
    monkeypatch.setattr(targets, "probe_features", lambda: probe)
    native = resolve("native")
    assert list(native.attrs["mattr"]) == ["+avxvnni", "-avx512f", "-fma"]
    features = set(required_features(native))
    assert {"avx2", "avxvnni"} <= features
    assert not features & (AVX512 | {"fma"})


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("x86-64", {"sse2"}, {"sse3", "avx"}),
        ("x86-64-v2", {"sse4.2", "popcnt"}, {"avx"}),
        ("x86-64-v3", {"avx2", "fma", "bmi2"}, AVX512),
        ("x86-64-v4", AVX512, {"avx512vnni"}),
        ("skylake-avx512", AVX512, {"avx512vnni"}),
        ("znver4", AVX512 | {"avx512bf16"}, {"avx512fp16"}),
        ("x86_64", {"sse2"}, {"sse3"}),
        ("amd64", {"sse2"}, {"sse3"}),
    ],
)
def test_x86_cpus_need_their_features(name: str, present: set[str], absent: set[str]) -> None:
    resolved = resolve(name)
    features = set(required_features(resolved))
    assert arch_of(resolved) == "x86_64"
    assert present <= features
    assert not features & absent


@pytest.mark.parametrize("name", ["aarch64", "arm64", "cortex-a72", "neoverse-n1"])
def test_aarch64_can_be_compiled_for_anywhere(name: str) -> None:
    resolved = resolve(name)
    assert arch_of(resolved) == "aarch64"
    assert {"neon", "fp-armv8"} <= set(required_features(resolved))


def test_aarch64_products_of_words_are_required() -> None:
    dots = {
        name: set(required_features(resolve(name))) & {"dotprod", "i8mm", "bf16"}
        for name in ("cortex-a72", "neoverse-n1", "neoverse-v1")
    }
    assert list(dots.values()) == [set(), {"dotprod"}, {"dotprod", "i8mm", "bf16"}]


EQUAL = [
    "llvm -mcpu=znver4 -mattr=-avx512f,+avxvnni -num-cores=4",
    "llvm --num-cores=4 --mattr=-avx512f,+avxvnni --mcpu=znver4",
    '{"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512f", "+avxvnni"], "num-cores": 4}',
    {"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512f", "+avxvnni"], "num-cores": 4},
]


@pytest.mark.parametrize("spelling", EQUAL[1:])
def test_spellings_of_one_target_are_equal(spelling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "host_arch", lambda: "x86_64")
    assert str(resolve(spelling)) == str(resolve(EQUAL[0]))
    assert not set(required_features(resolve(spelling))) & AVX512


def test_target_objects_tags_and_resolved_targets_are_taken() -> None:
    tag = "raspberry-pi/4b-aarch64"
    expected = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72 -mattr=+neon -num-cores=4")
    for spelling in (tag, Target(tag), {"tag": tag}, expected, Target(str(expected))):
        assert attrs(resolve(spelling)) == attrs(expected)


def test_everything_is_spelled_out() -> None:
    least = resolve("llvm")
    assert {"mcpu", "mtriple", "num-cores"} <= set(attrs(least))
    assert str(least.attrs["mcpu"]) in ("x86-64", "generic")


def test_cores_come_from_the_target_else_the_caller_else_the_machine() -> None:
    assert resolve("native").attrs["num-cores"] == host.physical_cores()
    assert resolve("native", cores=7).attrs["num-cores"] == 7
    assert resolve("llvm -num-cores=3", cores=7).attrs["num-cores"] == 3


@pytest.mark.parametrize("option", ["-fast-math", "-fast-math=true", "-fast-math=1"])
def test_switches_are_read(option: str) -> None:
    assert resolve(f"llvm {option}").attrs["fast-math"]


OTHER_KIND = "is not supported: this version compiles for CPUs, CUDA and OpenCL"


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("vulkan", f"target kind 'vulkan' {OTHER_KIND}"),
        ({"kind": "metal"}, OTHER_KIND),
        ({"mcpu": "znver3"}, OTHER_KIND),
        ("x86-64-v5", r"unknown target 'x86-64-v5'; did you mean .*x86-64-v4"),
        ("cortex-a27", r"unknown target 'cortex-a27'; did you mean cortex-a7"),
        ("natve", "unknown target 'natve'; did you mean native"),
        ("qqq", r"unknown target 'qqq'; expected for example 'native'"),
        ("", "unknown target ''"),
        ("sm_90", "target 'sm_90' is not a CPU; did you mean 'cuda -arch=sm_90'"),
        ("lvm -mcpu=znver3", "unknown target kind 'lvm'; did you mean llvm"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=znvr3", "unknown x86_64 mcpu .*did you mean znver3"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=pentium", "unknown x86_64 mcpu 'pentium'"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=znver3", "unknown aarch64 mcpu 'znver3'"),
        ("llvm -mtriple=x86_64-linux-gnu -mattr=+avx3", "unknown x86_64 mattr .*did you mean avx"),
        ("llvm -mattr=avx2", r"feature 'avx2' in mattr must begin with '\+' or '-'"),
        ("llvm -mtriple=riscv64-linux-gnu", "is for 'riscv64'; this version compiles for x86_64"),
        ("llvm -mtriple=nonsense", "mtriple 'nonsense' is for 'nonsense'"),
        ("llvm -mcqu=znver3", "unknown llvm option 'mcqu'; did you mean mcpu"),
        ("llvm mcpu=znver3", "target option 'mcpu=znver3' is not of the form -name=value"),
        ("llvm -mcpu", "target option -mcpu needs a value"),
        ("llvm -num-cores=many", "-num-cores is 'many'; expected an integer"),
        ("llvm -num-cores=0", "num-cores is 0; expected at least 1"),
        ('{"kind": "llvm"', "is not valid JSON"),
        pytest.param('{"a":' * 100_000, "is not valid JSON", id="deep JSON"),
        ({"kind": "llvm", "mcpu": 3}, "mcpu is a string and its mattr a list"),
        ({"kind": "llvm", "mattr": "+avx2"}, "mcpu is a string and its mattr a list"),
        ({"kind": "llvm", "mattr": [3]}, "feature 3 in mattr must begin with"),
        ({"kind": "llvm", "colour": 3}, "is not valid: Unknown config option 'colour'"),
        ({"kind": "llvm", "num-cores": "4"}, "is not valid: Option 'num-cores'"),
        ({"tag": "no/such/tag"}, "is not valid: .*Unknown target tag"),
        (None, "a target is a str, a mapping or a tvm.target.Target; got NoneType"),
        ("x86-64-v3,x86-64-v4", "expected one target, got 'x86-64-v3,x86-64-v4'.*explain take"),
        ("native,cuda -arch=sm_90", "expected one target, got 'native,cuda -arch=sm_90'"),
        (["x86-64-v3"], r"expected one target, got \['x86-64-v3'\]"),
        (3, "got int"),
    ],
)
def test_what_is_no_known_target_is_refused(spelling: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        resolve(spelling)


def test_native_is_a_cpu_of_this_architecture() -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[host.host_arch()]
    with pytest.raises(TargetError, match=f"mcpu 'native' is a .* CPU, and the target is {other}"):
        resolve(f"llvm -mtriple={other}-linux-gnu -mcpu=native")
