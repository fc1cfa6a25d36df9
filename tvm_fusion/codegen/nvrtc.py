# SPDX-License-Identifier: Apache-2.0
"""Compilation of CUDA text by NVRTC, or by nvcc, with accurate functions of float32.

TVM's own way needs the package ``cuda-bindings`` and a toolkit folder with a fixed layout. Here any
NVRTC works: that of the wheels ``nvidia-cuda-nvrtc``, ``-runtime``, ``-crt`` and ``-cccl``, which
``pip install 'tvm-fusion[cuda]'`` installs, of PyTorch, or of a toolkit. No GPU and no host
compiler is needed. NVRTC contains ``ptxas``, which reports the resources of each kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from ..errors import CompilationError, TargetError
from ..machine import cuda_toolkit

CALLBACK = "tvm_callback_cuda_compile"
HEADERS = ("cuda_fp16.h", "cuda/std/type_traits")
REPORT_OPTIONS = (
    "--ptxas-options=-v",
    "--ptxas-options=--register-usage-level=10",
    "--ptxas-options=--warn-on-local-memory-usage",
)
# Parts of --use_fast_math whose errors CUDA's tables bound closely for every argument: division
# within 2 ulp, square roots within 1 ulp, subnormal numbers as zero (an error below 2^-126).
# Functions stay those of the library: tanhf within 2 ulp, where MUFU.TANH has 2^-11; expf and logf
# within 1; sinf and cosf within 2; powf within 4, where __powf gives NaN for negative bases.
MATH_OPTIONS = ("--ftz=true", "--prec-div=false", "--prec-sqrt=false")
FAST_MATH_OPTIONS = ("--use_fast_math",)
# TVM calls a function by this name to round numbers of 16 bits; in CUDA it has the other name.
_NAMES = ("-Dhnearbyint=hrint",)
# Part of every text of TVM: reading this header takes 1.1 s, a kernel of a network 0.1 to 0.3 s.
_TYPE_TRAITS = re.compile(
    r"#include <cuda/std/type_traits>\s+namespace std \{(?:\s*using cuda::std::\w+;)*\s*\}"
)
_NVRTC_OPTIONS = ("-default-device", "--device-int128")
_compiling = threading.RLock()
_ADVICE = "pip install 'tvm-fusion[cuda]', or install a CUDA toolkit"


@dataclass(frozen=True)
class MachineCode:
    """Output of a compiler for CUDA text."""

    cubin: bytes  # The machine code, an ELF object.
    log: str  # Messages of the compiler and ``ptxas``.


@dataclass(frozen=True)
class _Release:
    """A loadable NVRTC library."""

    path: Path
    library: ctypes.CDLL
    version: tuple[int, int]
    architectures: tuple[int, ...]

    def __str__(self) -> str:
        return "NVRTC {}.{}".format(*self.version)

    def knows(self, arch: str) -> bool:
        return int(re.sub(r"\D", "", arch) or 0) in self.architectures


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel as reported by ``ptxas``: registers a thread, and bytes."""

    registers: int  # Registers a thread.
    stack_frame: int
    spill_stores: int
    spill_loads: int
    """``stack_frame``, ``spill_stores`` and ``spill_loads``: bytes a thread in local memory, which
    is slow."""
    shared: int  # Bytes of static shared memory a block.


@contextlib.contextmanager
def tvm_compiler(arch: str, fast_math: bool = False) -> Iterator[None]:
    """Let TVM compile its CUDA text by this module while the block runs.

    Where TVM's CUDA runtime is loaded it does so as soon as it has generated a text. TVM has one
    compiler for the whole process, so other threads wait until the block ends.

    ``arch`` and ``fast_math``: as of :func:`compile_cuda`.
    """
    with _compiling:
        before = tvm_ffi.get_global_func(CALLBACK, allow_missing=True)
        tvm_ffi.register_global_func(
            CALLBACK, lambda text: compile_cuda(str(text), arch, fast_math).cubin, override=True
        )
        try:
            yield
        finally:
            if before is None:
                tvm_ffi.registry.remove_global_func(CALLBACK)
            else:
                tvm_ffi.register_global_func(CALLBACK, before, override=True)


@functools.lru_cache(maxsize=64)
def compile_cuda(text: str, arch: str, fast_math: bool = False) -> MachineCode:
    """Compile CUDA text; the same text only once.

    ``arch``: the architecture, such as ``sm_90``. ``fast_math``: whether functions of float32 may
    be replaced by approximations, as by ``--use_fast_math``. Raises TargetError if there is no
    compiler, its headers are missing, or it does not know the architecture. Raises CompilationError
    if it refuses the text; with its log.
    """
    release = _best_release(arch)
    if release is not None:
        return _by_nvrtc(release, text, arch, _options(fast_math))
    nvcc = find_nvcc()
    if nvcc is None:
        raise TargetError(f"neither NVRTC (libnvrtc.so) nor nvcc was found: {_ADVICE}")
    return _by_nvcc(nvcc, text, arch, _options(fast_math))


def resources(code: MachineCode) -> dict[str, Resources]:
    """Resources of each kernel of some machine code, by its name."""
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack_frame": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "shared": r"(\d+) bytes smem",
    }
    used = {}
    for part in code.log.split("Compiling entry function '")[1:]:
        found = {name: re.search(pattern, part) for name, pattern in patterns.items()}
        numbers = {name: int(match[1]) if match else 0 for name, match in found.items()}
        used[part.split("'")[0]] = Resources(**numbers)
    return used


def compiler() -> str:
    """Name of the newest compiler for :func:`compile_cuda`, or an empty text."""
    return str(_best_release() or find_nvcc() or "")


@functools.cache
def nvrtc_libraries() -> list[Path]:
    """Every libnvrtc found, those of Python packages first."""
    found = cuda_toolkit.find_libraries("libnvrtc.so.*")
    return [path for path in found if "alt" not in path.name]


def find_nvcc() -> Path | None:
    """The compiler driver of a toolkit."""
    return cuda_toolkit.find_program("nvcc")


def include_folders(library: Path) -> list[Path]:
    """Folders with the headers of kernels, one for each header that is not in an earlier one.

    Those nearest to the library of NVRTC come first: headers of another release may not fit it.

    Raises TargetError if a header is missing.
    """
    places = sorted(
        cuda_toolkit.include_folders(),
        key=lambda place: len(Path(os.path.commonpath([place.absolute(), library])).parts),
        reverse=True,
    )
    folders: list[Path] = []
    for header in HEADERS:
        folder = next((place for place in places if (place / header).exists()), None)
        if folder is None:
            raise TargetError(f"CUDA header {header} was not found: {_ADVICE}")
        if folder not in folders:
            folders.append(folder)
    return folders


def _options(fast_math: bool) -> tuple[str, ...]:
    math = FAST_MATH_OPTIONS if fast_math else MATH_OPTIONS
    return ("-std=c++17", *math, *REPORT_OPTIONS, *_NAMES)


def _by_nvrtc(release: _Release, text: str, arch: str, common: tuple[str, ...]) -> MachineCode:
    if not release.knows(arch):
        known = ", ".join(f"sm_{number}" for number in release.architectures)
        raise TargetError(
            f"{release} does not compile for {arch}, only for {known}; install another release "
            "of nvidia-cuda-nvrtc, for sm_70 and sm_72 nvidia-cuda-nvrtc-cu12"
        )
    lib = release.library
    options = [f"--gpu-architecture={arch}", *_NVRTC_OPTIONS, *common]
    options += [f"-I{folder}" for folder in include_folders(release.path.absolute())]
    program = ctypes.c_void_p()
    # NVRTC compiles for the device alone and has no driver's header.
    source = _prelude() + _without_unused_traits(text).replace("#include <cuda.h>", "")
    status = lib.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(lib, status, "")
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = lib.nvrtcCompileProgram(program, len(options), array)
        log = _read(lib, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        _check(lib, status, log)
        return MachineCode(_read(lib, program, "CUBIN"), log)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _by_nvcc(nvcc: Path, text: str, arch: str, common: tuple[str, ...]) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        source.write_text(text)
        options = ("--cubin", "-arch", arch, *common)
        command = [str(nvcc), *options, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilationError(f"nvcc refused the kernel: {done.stderr.strip()}")
        return MachineCode(target.read_bytes(), done.stdout + done.stderr)


def _best_release(arch: str = "") -> _Release | None:
    """The newest NVRTC of those that support the architecture, if any does, else of all.

    Raises TargetError if some exist, but none can be loaded, and there is no nvcc.
    """
    releases, failures = [], []
    for path in nvrtc_libraries():
        try:
            releases.append(_load(path))
        except TargetError as error:
            failures.append(error)
    if failures and not releases and find_nvcc() is None:
        raise failures[0]
    return max(releases, key=lambda each: (each.knows(arch), each.version), default=None)


@functools.cache
def _load(path: Path) -> _Release:
    major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    try:
        lib = ctypes.CDLL(str(path))
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        _check(lib, lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "")
        _load_builtins(path, f"libnvrtc-builtins.so.{major.value}.{minor.value}")
        _check(lib, lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "")
        numbers = (ctypes.c_int * count.value)()
        _check(lib, lib.nvrtcGetSupportedArchs(numbers), "")
    except (OSError, AttributeError) as error:  # releases before 11.2 lack a function
        raise TargetError(f"{path} cannot be loaded: {error}") from None
    return _Release(path, lib, (major.value, minor.value), tuple(numbers))


def _load_builtins(path: Path, name: str) -> None:
    """Load what NVRTC itself opens by its name alone when it compiles.

    Some releases, such as 13.0, do not look beside themselves for it. What is loaded is found.
    """
    beside = path.resolve().with_name(name)
    ctypes.CDLL(str(beside) if beside.exists() else name)


def _read(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Read a result of NVRTC, asking for its size first."""
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "")
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer), "")
    return buffer.raw


def _check(lib: ctypes.CDLL, status: int, log: str) -> None:
    if status:
        text = lib.nvrtcGetErrorString(status).decode()
        raise CompilationError(f"NVRTC refused the kernel: {text}: {log.strip()}".rstrip(": "))


def _without_unused_traits(text: str) -> str:
    """Leave out TVM's type traits where no kernel names one."""
    lean = _TYPE_TRAITS.sub("", text)
    return text if re.search(r"(?<!using cuda::)\bstd::", lean) else lean


def _prelude() -> str:
    """Names of headers of the host and of the driver that kernels may use and NVRTC lacks."""
    names = [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    using = "".join(f"using cuda::std::{name};\n" for name in names)
    infinity = "#ifndef INFINITY\n#define INFINITY __int_as_float(0x7f800000)\n#endif\n"
    tensor_map = "struct alignas(64) CUtensorMap { unsigned long long words[16]; };\n"
    return f"#include <cuda/std/cstdint>\n{using}{infinity}{tensor_map}"
