# SPDX-License-Identifier: Apache-2.0
"""CPUInfo from a target: vector units, registers, cores, caches."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tvm.target import Target, codegen
from tvm.target.codegen import llvm_get_system_cpu

from schedules.cost.machine import load_machine
from schedules.cpu.core import machine
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.machine_costs import known_family
from schedules.errors import TargetError

X86 = "x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("target", "bits", "registers", "fma"),
    [
        ({"mtriple": X86, "mcpu": "x86-64"}, 128, 16, False),
        ({"mtriple": X86, "mcpu": "x86-64-v3"}, 256, 16, True),
        ({"mtriple": X86, "mcpu": "x86-64-v4"}, 512, 32, True),
        ({"mtriple": X86, "mcpu": "znver3"}, 256, 16, True),
        ({"mtriple": X86, "mcpu": "znver4"}, 512, 32, True),
        ({"mtriple": X86, "mcpu": "znver4", "mattr": ["-avx512f"]}, 256, 16, True),
        ({"mtriple": X86, "mattr": ["+avx2"]}, 256, 16, False),
        ({"mtriple": X86, "mattr": ["+avx2", "+fma"]}, 256, 16, True),
        ({"mtriple": "aarch64-linux-gnu"}, 128, 32, True),
        ({"mtriple": "arm64-apple-macos"}, 128, 32, True),
        ({"mtriple": "riscv64-linux-gnu"}, 128, 16, False),
    ],
)
def test_vector_unit_comes_from_the_features(target, bits, registers, fma):
    cpu = CPUInfo.from_target(Target({"kind": "llvm", **target}))
    assert (cpu.vector_bits, cpu.num_vector_registers, cpu.has_fma) == (bits, registers, fma)


@pytest.mark.parametrize(
    ("dtype", "lanes"),
    [("float64", 4), ("float32", 8), ("float16", 16), ("int8", 32), ("bool", 32), ("int64", 4)],
)
def test_lanes_of_a_256_bit_unit(dtype, lanes):
    target = Target({"kind": "llvm", "mtriple": X86, "mcpu": "x86-64-v3"})
    assert CPUInfo.from_target(target).lanes(dtype) == lanes


def test_cores_come_from_the_target_else_from_the_process():
    named = Target({"kind": "llvm", "num-cores": 7})
    assert CPUInfo.from_target(named).num_cores == 7
    assert CPUInfo.from_target(Target("llvm")).num_cores >= 1


def test_equal_targets_give_the_same_object():
    make = lambda: CPUInfo.from_target(Target({"kind": "llvm", "mcpu": "x86-64-v3"}))  # noqa: E731
    assert make() is make()


@pytest.mark.parametrize(
    ("cpu", "features", "tiles"),
    [
        ("sapphirerapids", [], {"uint8", "bfloat16"}),
        ("graniterapids", ["-amx-bf16"], {"uint8"}),
        ("sapphirerapids", ["-amx-tile"], set()),
        ("sapphirerapids", ["-avx512f"], set()),
        ("znver5", [], set()),
        ("x86-64-v4", ["+amx-tile", "+amx-bf16", "+avx512bf16"], {"bfloat16"}),
        ("sapphirerapids", ["-avx512bf16"], {"uint8"}),
    ],
)
def test_tiles_come_from_the_features(cpu, features, tiles):
    target = Target({"kind": "llvm", "mtriple": X86, "mcpu": cpu, "mattr": features})
    assert set(CPUInfo.from_target(target).tiles) == tiles


@pytest.mark.parametrize(
    ("cpu", "features", "name"),
    [
        ("emeraldrapids", [], "emeraldrapids"),
        (
            "emeraldrapids",
            ["-amx-tile", "-amx-int8", "-amx-bf16", "-avx512bf16", "-avx512fp16"],
            "llvm -mcpu=emeraldrapids -mattr=-amx-bf16,-amx-int8,-amx-tile,-avx512bf16",
        ),
        ("znver4", ["-avx512bf16"], "llvm -mcpu=znver4 -mattr=-avx512bf16"),
        ("znver4", ["-avx512f"], "znver4"),  # the width of the vectors tells them apart
        ("znver4", ["-avx512ifma"], "znver4"),
        ("x86-64-v3", ["+avxvnni"], "llvm -mcpu=x86-64-v3 -mattr=+avxvnni"),
    ],
)
def test_a_cpu_without_instructions_of_its_family_has_another_name(cpu, features, name):
    options = {"kind": "llvm", "mtriple": X86, "mcpu": cpu, "num-cores": 2}
    found = CPUInfo.from_target(Target(options | {"mattr": features} if features else options))
    assert found.name == name and found.family == cpu
    assert CPUInfo(**json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("cpu", "dots", "word"),
    [
        ("generic", "", 0),
        ("neoverse-n1", "sdot", 4),
        ("apple-m1", "sdot", 4),
        ("neoverse-v1", "usdot", 4),
        ("neoverse-v2", "usdot", 4),
    ],
)
def test_products_of_bytes_on_aarch64_come_from_the_features(cpu, dots, word):
    info = CPUInfo.from_target(
        Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": cpu})
    )
    assert (info.byte_dots, info.word_channels, info.shifts_bytes) == (dots, word, dots == "sdot")


@pytest.mark.parametrize("cpu", ["cortex-a76", "cortex-a710"])
def test_arm_of_32_bits_has_no_products_of_words(cpu):
    info = CPUInfo.from_target(
        Target({"kind": "llvm", "mtriple": "armv8a-linux-gnueabihf", "mcpu": cpu})
    )
    assert (info.byte_dots, info.half_dots, info.word_channels) == ("", "", 0)


def caches(**options: object) -> tuple[int, int, int]:
    cpu = CPUInfo.from_target(Target({"kind": "llvm", **options}))
    return cpu.l1d_bytes, cpu.l2_bytes, cpu.l3_bytes


def test_caches_of_an_unknown_cpu_are_defaults():
    for options in ({"mtriple": "aarch64-linux-gnu"}, {"mtriple": X86, "mcpu": "skylake-avx512"}):
        assert caches(**options) == (32 << 10, 512 << 10, 8 << 20)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["emeraldrapids", "sapphirerapids", "graniterapids"], (48 << 10, 2 << 20, 260 << 20)),
        (["znver4"], (32 << 10, 1 << 20, 32 << 20)),
        (["znver5"], (48 << 10, 1 << 20, 32 << 20)),
    ],
)
def test_caches_of_measured_cpus_are_known_by_name(names, found, monkeypatch):
    monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: "another")
    machine._from_text.cache_clear()
    assert {caches(mtriple=X86, mcpu=name) for name in names} == {found}
    machine._from_text.cache_clear()


def write_cache(root: Path, index: int, level: str, kind: str, size: str) -> None:
    folder = root / f"index{index}"
    folder.mkdir()
    for name, text in (("level", level), ("type", kind), ("size", size)):
        (folder / name).write_text(text + "\n")


def test_caches_of_this_cpu_are_read_from_the_kernel(tmp_path, monkeypatch):
    write_cache(tmp_path, 0, "1", "Data", "48K")
    write_cache(tmp_path, 1, "1", "Instruction", "64K")
    write_cache(tmp_path, 2, "2", "Unified", "2M")
    write_cache(tmp_path, 3, "3", "Unified", "garbage")
    monkeypatch.setattr(machine, "_SYSFS_CACHE", tmp_path)
    machine._from_text.cache_clear()
    cpu = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": str(llvm_get_system_cpu())}))
    machine._from_text.cache_clear()
    assert (cpu.l1d_bytes, cpu.l2_bytes) == (48 * 1024, 2 * 1024**2)
    known = known_family(cpu.family)
    assert cpu.l3_bytes == (8 << 20 if known is None else load_machine(known)["capacity.L3"])


def test_other_kinds_of_target_are_an_error():
    with pytest.raises(TargetError, match="target kind is 'c'; the CPU schedules need 'llvm'"):
        CPUInfo.from_target(Target("c"))
