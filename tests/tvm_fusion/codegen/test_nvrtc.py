# SPDX-License-Identifier: Apache-2.0
"""CUDA text to machine code: both compilers, what they refuse, and where they are found."""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from tvm_fusion.codegen import nvrtc
from tvm_fusion.errors import CompilationError, TargetError
from tvm_fusion.machine import cuda_toolkit

KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void twice(half* x) { x[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }
"""


@pytest.mark.parametrize("nvcc", [False, True])
def test_cuda_text_becomes_machine_code(nvcc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compile_cuda.cache_clear()
    if nvcc:  # a toolkit is not needed for the tests: its driver is played by a function
        monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [])
        monkeypatch.setattr(nvrtc, "find_nvcc", lambda: Path("nvcc"))
        monkeypatch.setattr(nvrtc.subprocess, "run", fake_nvcc)
    assert nvrtc.compile_cuda(KERNEL, "sm_90").cubin.startswith(b"\x7fELF")
    with pytest.raises(
        CompilationError, match='refused the kernel[^~]*identifier "wrong" is undefined'
    ):
        nvrtc.compile_cuda(KERNEL.replace("half*", "wrong*"), "sm_90")
    nvrtc.compile_cuda.cache_clear()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code_is_that_of_the_architecture(arch: str) -> None:
    """The note that ptxas leaves in it names the architecture."""
    assert f"-arch {arch} ".encode() in nvrtc.compile_cuda(KERNEL, arch).cubin


def test_machine_code_for_volta_is_of_nvrtc_12() -> None:
    """NVRTC 13 does not know it; the architecture is in the flags of the ELF header."""
    assert nvrtc.compile_cuda(KERNEL, "sm_70").cubin[48] == 70


def fake_nvcc(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    source, target = Path(command[-1]), Path(command[command.index("-o") + 1])
    if "wrong" in source.read_text():
        return subprocess.CompletedProcess(command, 1, "", 'identifier "wrong" is undefined')
    target.write_bytes(b"\x7fELF")
    return subprocess.CompletedProcess(command, 0, "", "")


def test_an_nvrtc_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_text("no library")
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [broken])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: None)
    with pytest.raises(TargetError, match="libnvrtc.so.13 cannot be loaded"):
        nvrtc.compile_cuda("another text", "sm_90")


def test_an_nvrtc_that_does_not_load_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken, other, found = tmp_path / "libnvrtc.so.13", Path("libc.so.6"), nvrtc.nvrtc_libraries()
    broken.write_text("no library")
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [broken, other, *found])
    assert nvrtc.compile_cuda(KERNEL, "sm_90").cubin.startswith(b"\x7fELF")
    assert nvrtc.compiler().startswith("NVRTC ")


def test_nvcc_compiles_where_no_nvrtc_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_text("no library")
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [broken])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(nvrtc.subprocess, "run", fake_nvcc)
    nvrtc.compile_cuda.cache_clear()
    assert nvrtc.compile_cuda(KERNEL, "sm_90").cubin == b"\x7fELF"
    assert nvrtc.compiler() == "nvcc"
    nvrtc.compile_cuda.cache_clear()


def test_builtins_beside_nvrtc_are_loaded_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVRTC 13.0, which PyTorch has, does not look for them there; else the system is asked."""
    opened: list[str] = []
    load, real = ctypes.CDLL, nvrtc.nvrtc_libraries()[0]
    [builtins] = real.parent.glob("libnvrtc-builtins.so.*")

    def spy(name: str) -> ctypes.CDLL:
        opened.append(name)
        if str(tmp_path) in name or "/" not in name:
            raise OSError(f"{name}: cannot open shared object file")
        return load(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", spy)
    assert nvrtc._load.__wrapped__(real).path == real
    assert opened == [str(real), str(builtins.resolve())]
    (tmp_path / builtins.name).touch()
    for beside in (True, False):
        with pytest.raises(OSError, match=r"libnvrtc-builtins.so.* cannot open"):
            nvrtc._load_builtins(tmp_path / real.name, builtins.name)
        assert opened[-1] == (str(tmp_path / builtins.name) if beside else builtins.name)
        (tmp_path / builtins.name).unlink(missing_ok=True)
    monkeypatch.setattr(nvrtc, "_load_builtins", lambda path, name: spy(name))
    with pytest.raises(TargetError, match=r"libnvrtc.so.\d+ cannot be loaded: libnvrtc-builtins"):
        nvrtc._load.__wrapped__(real)


def test_the_extra_leaves_the_packages_that_pytorch_pins() -> None:
    """PyTorch for CUDA 13.0 pins 13.0; a higher bound would replace that, and PyTorch with it."""
    text = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    found = re.findall(r'"nvidia-cuda-(nvrtc|runtime|crt|cccl)>=([\d.]+),<14"', text)
    assert dict(found) == dict.fromkeys(("nvrtc", "runtime", "crt", "cccl"), "13.0")


RELEASES = {
    "libnvrtc.so.11": ((11, 8), (70, 80, 90)),
    "libnvrtc.so.12": ((12, 9), (70, 80, 90, 100)),
    "libnvrtc.so.13": ((13, 0), (80, 90, 100, 120)),
}


@pytest.mark.parametrize("order", [*itertools.permutations(RELEASES)])
@pytest.mark.parametrize(
    ("arch", "chosen"), [("sm_70", 12), ("sm_90a", 13), ("sm_120f", 13), ("sm_60", 13), ("", 13)]
)
def test_the_newest_nvrtc_that_knows_the_architecture(
    arch: str, chosen: int, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> nvrtc._Release:
        return nvrtc._Release(path, ctypes.CDLL(None), *RELEASES[path.name])

    monkeypatch.setattr(nvrtc, "_load", load)
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [*map(Path, order)])
    best = nvrtc._best_release(arch)
    assert best is not None and best.path.name == f"libnvrtc.so.{chosen}"
    assert str(best) == f"NVRTC {chosen}.{best.version[1]}"


def test_headers_lie_beside_the_chosen_nvrtc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = [tmp_path / "site/nvidia/cu12/include", tmp_path / "cuda-13/include"]
    for place in places:
        for header in nvrtc.HEADERS:
            (place / header).parent.mkdir(parents=True, exist_ok=True)
            (place / header).touch()
    monkeypatch.setattr(cuda_toolkit, "include_folders", lambda: places)
    for place in places:
        assert nvrtc.include_folders(place.parent / "lib/libnvrtc.so") == [place]


def test_nvrtc_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "nvrtc_libraries", lambda: [])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: None)
    with pytest.raises(TargetError, match="neither NVRTC .* nor nvcc was found"):
        nvrtc.compile_cuda("never compiled", "sm_90")
    assert nvrtc.compiler() == ""
    monkeypatch.setattr(cuda_toolkit, "wheel_folders", lambda kind: [])
    monkeypatch.setattr(cuda_toolkit, "toolkit_folders", lambda kind: [])
    monkeypatch.setattr(cuda_toolkit, "_cupy_folders", lambda: [])
    with pytest.raises(TargetError, match="header cuda_fp16.h was not found"):
        nvrtc.include_folders(Path("/cuda/lib/libnvrtc.so.13"))


def test_nvrtc_folders_of_wheels_and_toolkits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "toolkit/lib64"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libnvrtc.so.13").touch()
        (tmp_path / folder.replace("lib64", "lib").replace("lib", "bin")).mkdir(exist_ok=True)
    (tmp_path / "toolkit/bin/nvcc").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    nvrtc.nvrtc_libraries.cache_clear()
    try:
        found = [path for path in nvrtc.nvrtc_libraries() if tmp_path in path.parents]
    finally:
        nvrtc.nvrtc_libraries.cache_clear()
    assert [path.parents[1].name for path in found] == ["cu13", "cuda_nvrtc", "toolkit"]
    assert nvrtc.find_nvcc() == tmp_path / "toolkit/bin/nvcc"
    (tmp_path / "nvidia/cu13/bin/nvcc").touch()
    assert nvrtc.find_nvcc() == tmp_path / "nvidia/cu13/bin/nvcc"


def test_tvm_compiler_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:

    def compile_cuda(text: str, arch: str, fast_math: bool) -> nvrtc.MachineCode:
        return nvrtc.MachineCode(f"{arch}:{text}".encode(), "")

    monkeypatch.setattr(nvrtc, "compile_cuda", compile_cuda)
    before = tvm_ffi.get_global_func(nvrtc.CALLBACK)
    with nvrtc.tvm_compiler("sm_90"):
        assert bytes(tvm_ffi.get_global_func(nvrtc.CALLBACK)("text")) == b"sm_90:text"
    after = tvm_ffi.get_global_func(nvrtc.CALLBACK)
    assert before is not None and after.same_as(before)


def test_an_architecture_that_the_compiler_does_not_know() -> None:
    with pytest.raises(
        TargetError, match=r"NVRTC \d+\.\d+ does not compile for sm_35, only for .*sm_9"
    ):
        nvrtc.compile_cuda(KERNEL, "sm_35")


def test_resources_are_those_of_each_kernel() -> None:
    text = """
extern "C" __global__ void large(float* x) {
  __shared__ float s[512];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[511 - threadIdx.x];
}
extern "C" __global__ void small(float* x) { x[threadIdx.x] = 0; }
"""
    used = nvrtc.resources(nvrtc.compile_cuda(text, "sm_90"))
    assert set(used) == {"large", "small"}
    assert (used["large"].shared, used["small"].shared) == (2048, 0)
    assert 0 < used["small"].registers < used["large"].registers


def test_threads_compile_for_their_own_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_cuda(text: str, arch: str, fast_math: bool) -> nvrtc.MachineCode:
        return nvrtc.MachineCode(f"{text} for {arch}".encode(), "")

    monkeypatch.setattr(nvrtc, "compile_cuda", compile_cuda)
    before = tvm_ffi.get_global_func(nvrtc.CALLBACK, allow_missing=True)
    inside, attempted = threading.Event(), threading.Event()
    compiled: list[bytes] = []

    def other() -> None:
        inside.wait()
        attempted.set()
        with nvrtc.tvm_compiler("sm_90"):
            compiled.append(bytes(tvm_ffi.get_global_func(nvrtc.CALLBACK)("text")))

    thread = threading.Thread(target=other)
    thread.start()
    with nvrtc.tvm_compiler("sm_80"):
        inside.set()
        attempted.wait()
        thread.join(0.2)  # it would be through by now if it did not wait
        compiled.append(bytes(tvm_ffi.get_global_func(nvrtc.CALLBACK)("text")))
    thread.join()
    assert compiled == [b"text for sm_80", b"text for sm_90"]
    assert (tvm_ffi.get_global_func(nvrtc.CALLBACK, allow_missing=True) is None) == (before is None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("header", "dtype"), [("fp16", "half"), ("bf16", "nv_bfloat16")])
def test_numbers_of_16_bits_are_rounded(header: str, dtype: str) -> None:
    body = "x[threadIdx.x] = hnearbyint(x[threadIdx.x]);"
    text = f'#include <cuda_{header}.h>\nextern "C" __global__ void r({dtype}* x) {{ {body} }}'
    assert [*nvrtc.resources(nvrtc.compile_cuda(text, "sm_90"))] == ["r"]


@pytest.mark.slow
def test_type_traits_are_read_only_where_a_kernel_names_one() -> None:
    """TVM's text has them always: without them a kernel is the same, and compiled sooner."""
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    text = str(tirx.build(doubled(), target=target).imports[0].inspect_source())
    naming = f"{text}\nstatic_assert(std::is_same_v<float, float>);"
    assert nvrtc._without_unused_traits(naming) == naming
    lean = nvrtc._without_unused_traits(text)
    assert "type_traits" in text and "cuda/std/type_traits" not in lean
    kernels = [nvrtc.compile_cuda(source, "sm_90").cubin for source in (naming, lean)]
    assert machine_code(kernels[0]) == machine_code(kernels[1]) != b""


def doubled() -> tirx.PrimFunc:
    data = te.placeholder((1024,), "float32", "data")
    func = te.create_prim_func([data, te.compute((1024,), lambda i: data[i] * 2, "twice")])
    schedule = tvm.s_tir.Schedule(func)
    [loop] = schedule.get_loops("twice")
    for part, axis in zip(
        schedule.split(loop, [None, 128]), ("blockIdx.x", "threadIdx.x"), strict=True
    ):
        schedule.bind(part, axis)
    return schedule.mod["main"]


def machine_code(cubin: bytes) -> bytes:
    """The section ``.text`` of the one kernel of an ELF object."""
    table, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<I20xQQ", cubin, table + size * at) for at in range(count)]
    [found] = (
        cubin[start : start + length]
        for name, start, length in headers
        if cubin[headers[names][1] + name :].startswith(b".text.")
    )
    return found
