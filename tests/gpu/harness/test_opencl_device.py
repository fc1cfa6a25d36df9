# SPDX-License-Identifier: Apache-2.0
"""OpenCL device of the tests, and machines without any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import opencl_device
import pytest
from opencl import opencl_context
from opencl_device import choose_device, cl, find_platforms

from schedules.errors import EngineError

ROOT = Path(__file__).parents[3]
CANNOT_BUILD = cl.RuntimeError(
    cl._cl._ErrorRecord(msg="saved in /tmp/x.cl\nand more", code=-11, routine="clBuildProgram")
)


class Device:
    """Fake device that computes the given number, or fails with the given error."""

    def __init__(self, name: str, found: int | Exception) -> None:
        self.name = name
        self.found = found


class Platform:
    """One with these CPUs."""

    def __init__(self, name: str, *devices: Device) -> None:
        self.name = name
        self._devices = list(devices)

    def get_devices(self, kind: int) -> list[Device]:
        assert kind == cl.device_type.CPU
        return self._devices


@pytest.fixture
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: Device) -> int:
        if isinstance(device.found, Exception):
            raise device.found
        return device.found

    monkeypatch.setattr(opencl_device, "_run", run)


@pytest.mark.usefixtures("fake_runs")
def test_devices_that_fail_are_passed_over() -> None:
    broken, wrong = Device("new", CANNOT_BUILD), Device("odd", 7)
    good, other = Device("good", 1024), Device("other", 1024)
    platforms = [Platform("GPUs only"), Platform("old", broken, wrong), Platform("it", good, other)]
    assert choose_device(platforms) is good
    assert choose_device(platforms[::-1]) is good
    assert choose_device([Platform("both", broken, other)]) is other


@pytest.mark.usefixtures("fake_runs")
def test_no_usable_device() -> None:
    advice = "no OpenCL for this CPU: pip install intel-opencl-rt intel-cmplr-lib-rt; .*cl_khr_fp16"
    with pytest.raises(EngineError, match=f"^{advice}$"):
        choose_device([])
    platforms = [Platform("old", Device("new", CANNOT_BUILD)), Platform("odd", Device("one", 7))]
    failed = "; new of old: clBuildProgram: BUILD_PROGRAM_FAILURE; one of odd: computed 7 instead"
    with pytest.raises(EngineError, match=f"^{advice}{failed} of 1024$"):  # one line
        choose_device(platforms)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("total[0] = unknown;", "clBuildProgram: BUILD_PROGRAM_FAILURE"),
        ("atom_add(total, 1L);", "computed 1056 instead of 1024"),
    ],
)
def test_a_real_device_is_tried(line: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [device] = opencl_context().devices
    assert device.type & cl.device_type.CPU
    assert choose_device([device.platform]).name == device.name
    text = opencl_device._KERNEL.replace("}\n", f"{line}\n}}\n")
    monkeypatch.setattr(opencl_device, "_KERNEL", text)
    with pytest.raises(EngineError, match=f"{re.escape(device.name)} of .*: {reason}"):
        choose_device([device.platform])


def test_without_any_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[cl.Platform]:
        raise cl.LogicError(cl._cl._ErrorRecord(msg="", code=-1001, routine="clGetPlatformIDs"))

    monkeypatch.setattr(cl, "get_platforms", fail)
    assert find_platforms() == []


def test_the_loader_is_told_where_pip_put_intels_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class File:
        name = "libintelocl.so"

        def locate(self) -> str:
            return "/venv/lib/python3/site-packages/../../libintelocl.so"

    monkeypatch.setattr(cl, "get_platforms", lambda: [])
    monkeypatch.setattr(metadata, "files", lambda name: [File()])
    monkeypatch.setenv("OCL_ICD_VENDORS", "/of/the/user")
    find_platforms()
    assert os.environ["OCL_ICD_VENDORS"] == "/of/the/user"
    monkeypatch.delenv("OCL_ICD_VENDORS")
    find_platforms()
    assert os.environ["OCL_ICD_VENDORS"] == "/venv/lib/libintelocl.so"
    monkeypatch.delenv("OCL_ICD_VENDORS")
    monkeypatch.setattr(metadata, "files", lambda name: None)  # Such a package has no record.
    find_platforms()
    assert "OCL_ICD_VENDORS" not in os.environ


def test_the_loader_is_left_alone_without_intels_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cl, "get_platforms", lambda: [])
    monkeypatch.setattr(metadata, "files", missing)
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    find_platforms()
    assert "OCL_ICD_VENDORS" not in os.environ


@pytest.mark.slow
def test_one_line_tells_of_all_skipped_tests(tmp_path: Path) -> None:
    """Kernels, whole modules and queues are skipped; the other tests of their files run."""
    lines = ("import pyopencl, sys", "pyopencl.get_platforms = list", "sys.modules['torch'] = None")
    (tmp_path / "no_opencl.py").write_text("\n".join(lines))
    files = [f"tests/gpu/harness/test_{name}.py" for name in ("opencl_harness", "relax_on_opencl")]
    chosen = "test_dtypes or test_refusals or nobody_claims or every_place_has or constant"
    command = [sys.executable, "-m", "pytest", "-p", "no_opencl", "-p", "no:cacheprovider", "-n1"]
    result = subprocess.run(
        [*command, *files, "tests/gpu/core/test_workspace_slot.py", "-k", chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert result.returncode == 0 and len(skipped) == 1, result.stdout
    place = r"SKIPPED \[1\d\] tests/gpu/opencl.py:\d+: "
    assert re.fullmatch(place + "no OpenCL for this CPU: pip install .*", skipped[0])
    assert re.search(r"= \d passed, 1\d skipped", result.stdout)
