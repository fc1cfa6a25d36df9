# SPDX-License-Identifier: Apache-2.0
"""Number of cores from the system's description, and CPU features."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from without_torch import WITHOUT_TORCH, importing_from

from tvm_fusion.errors import TargetError
from tvm_fusion.machine import host


def system(root: Path, siblings: dict[int, str], files: dict[str, str] | None = None) -> Path:
    """A folder like / with processors, the limits of control groups, and the process's group."""
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for name, text in (files or {}).items():
        path = root / ("proc/self/cgroup" if name == "own" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch):
    def allow(*cpus: int) -> None:
        monkeypatch.setattr(host, "_affinity", lambda: sorted(cpus))

    return allow


def test_hyper_threads_of_a_core_count_once(tmp_path: Path, affinity) -> None:
    affinity(0, 1, 2, 3)
    paired = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    assert host.physical_cores(system(tmp_path, paired)) == 2


def test_only_processors_of_the_affinity_mask_count(tmp_path: Path, affinity) -> None:
    affinity(1, 3, 4)
    neighbours = {cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(6)}
    assert host.physical_cores(system(tmp_path, neighbours)) == 3


def test_processors_without_topology_count_each(tmp_path: Path, affinity) -> None:
    affinity(0, 1, 2)
    assert host.physical_cores(system(tmp_path, {0: "0-1", 1: "0-1"})) == 3
    assert host.physical_cores(tmp_path / "nothing") == 3


UNIFIED, OF_TIME = "0::/user.slice/job", "3:memory:/other\n2:cpu,cpuacct:/batch/job"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "900000 100000"}, 4),
        ({"cpu.max": "nonsense"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "0"}, 4),
        # The own group, the one that holds it, and the stricter one of both.
        ({"own": UNIFIED, "user.slice/job/cpu.max": "200000 100000"}, 2),
        ({"own": UNIFIED, "user.slice/cpu.max": "100000 100000"}, 1),
        ({"own": UNIFIED, "user.slice/cpu.max": "300000 100000",
          "user.slice/job/cpu.max": "max 100000"}, 3),
        ({"own": UNIFIED, "user.slice/cpu.max": "300000 100000",
          "user.slice/job/cpu.max": "120000 100000"}, 2),
        ({"own": UNIFIED, "unified/user.slice/job/cpu.max": "200000 100000"}, 2),
        # Groups of others, and a container that has its host's names but not its folders.
        ({"own": UNIFIED, "user.slice/other/cpu.max": "100000 100000"}, 4),
        ({"own": UNIFIED, "cpu.max": "200000 100000"}, 2),
        ({"own": "0::/../../outside", "cpu.max": "200000 100000",
          "outside/cpu.max": "100000 100000"}, 2),
        ({"own": OF_TIME, "cpu,cpuacct/batch/job/cpu.cfs_quota_us": "250000",
          "cpu,cpuacct/batch/job/cpu.cfs_period_us": "100000"}, 3),
        ({"own": OF_TIME, "cpu/batch/cpu.cfs_quota_us": "100000",
          "cpu/batch/cpu.cfs_period_us": "50000"}, 2),
        ({"own": OF_TIME, "cpu/other/cpu.cfs_quota_us": "50000",
          "cpu/other/cpu.cfs_period_us": "100000"}, 4),
    ],
)  # fmt: skip
def test_a_limit_of_processor_time_bounds_the_cores(
    tmp_path: Path, affinity, files: dict[str, str], cores: int
) -> None:
    affinity(0, 1, 2, 3)
    alone = {cpu: str(cpu) for cpu in range(4)}
    assert host.physical_cores(system(tmp_path, alone, files)) == cores


def test_a_wide_limit_gives_no_more_cores_than_the_affinity_mask(tmp_path: Path, affinity) -> None:
    affinity(2)
    limited = system(tmp_path, {2: "2-3"}, {"cpu.max": "300000 100000"})
    assert (host.time_limit(limited), host.physical_cores(limited)) == (3, 1)


def test_this_machine_has_cores_within_its_processors() -> None:
    assert 1 <= host.physical_cores() <= host.usable_processors() <= (os.cpu_count() or 1)


def test_every_machine_has_the_features_of_its_baseline() -> None:
    least = {"x86_64": {"sse2", "cmov"}, "aarch64": {"neon"}}
    assert least[host.host_arch()] <= host.host_features()


def test_features_that_are_probed_and_absent_are_not_host_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "probe_features", lambda: {"avx2": True, "avx512f": False})
    assert host.host_features() == {"avx2"}


@pytest.mark.parametrize(
    ("name", "arch"), [("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")]
)
def test_architectures_have_one_name_each(name: str, arch: str) -> None:
    assert host.canonical_arch(name) == arch


def test_flags_that_suffice_spare_the_question_to_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "flagged_features", lambda: frozenset({"sse2", "avx2"}))
    monkeypatch.setattr(host, "host_features", lambda: pytest.fail("LLVM was asked"))
    host.check_host(["sse2", "avx2"])


def test_features_that_are_no_flags_are_asked_of_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "flagged_features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(host, "host_features", lambda: frozenset({"avx10.1"}))
    host.check_host(["sse2", "avx10.1"])
    with pytest.raises(TargetError, match=r"has no avx512f, fma, which the model is compiled for"):
        host.check_host(["sse2", "fma", "avx10.1", "avx512f"])


@pytest.mark.parametrize("granted", [True, False])
def test_tile_registers_are_asked_for_once(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(*numbers: int) -> int:
        asked.append(numbers)
        return 0 if granted else -1

    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=answer))
    monkeypatch.setattr(host.platform, "system", lambda: "Linux")
    monkeypatch.setattr(host, "host_arch", lambda: "x86_64")
    monkeypatch.setattr(host, "flagged_features", lambda: frozenset({"amx-tile", "amx-int8"}))
    host.may_use_tiles.cache_clear()
    try:
        for _ in range(2):
            if granted:
                host.check_host(["amx-tile", "amx-int8"])
            else:
                with pytest.raises(TargetError, match=r"Linux does not .* target='x86-64-v4'"):
                    host.check_host(["amx-tile", "amx-int8"])
    finally:
        host.may_use_tiles.cache_clear()
    assert asked == [(158, 0x1023, 18)]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ({"sse2", "avx512f"}, r"no amx-int8, amx-tile, .*'native', or with target='x86-64-v4'"),
        ({"sse2"}, "no amx-int8, amx-tile, avx512f, .*'native'$"),
    ],
)
def test_cpus_without_tile_registers(
    flags: set[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flagged_features", "host_features"):
        monkeypatch.setattr(host, name, lambda: frozenset(flags))
    monkeypatch.setattr(host, "may_use_tiles", lambda: pytest.fail("Linux was asked"))
    with pytest.raises(TargetError, match=advice):
        host.check_host(["amx-tile", "amx-int8", "avx512f"])


def test_another_architecture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_arch", lambda: "x86_64")
    with pytest.raises(TargetError, match="compiled for aarch64 and this machine is x86_64"):
        host.check_host([], "aarch64")


@pytest.mark.slow
def test_processes_of_tests_have_the_name_that_is_asked_for() -> None:
    root = Path(__file__).parents[3]
    environment = importing_from(root / "tests" / "renamed_cpu", root)
    code = "from schedules.cpu.core.machine import CPUInfo\n"
    code += "from tvm_fusion.compiler.targets import resolve\n"
    code += "print(CPUInfo.from_target(resolve()).family)"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code],
        env=environment | {"TVM_FUSION_TEST_CPU": "diamondrapids"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "diamondrapids\n"
