# SPDX-License-Identifier: Apache-2.0
"""CUDA text to machine code by NVRTC, wherever a CUDA package of Python has left it, or by nvcc.

TVM's own way needs the package ``cuda-bindings`` and a toolkit folder with a fixed layout. PyTorch,
CuPy and the wheels ``nvidia-cuda-nvrtc``, ``nvidia-cuda-runtime`` and ``nvidia-cuda-cccl`` bring
all that is needed, in other places.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tvm_ffi

from tvm_fusion.errors import EngineError

CALLBACK = "tvm_callback_cuda_compile"
HEADERS = ("cuda_fp16.h", "cuda/std/type_traits")
# Those of TVM's own calls, so that kernels are what its users get.
OPTIONS = ("-std=c++17", "--use_fast_math", "--ptxas-options=--register-usage-level=10")
_WHEEL_FOLDERS = ("nvidia/cu*", "nvidia/cuda_*")
_ADVICE = (
    "install a CUDA toolkit, or the packages nvidia-cuda-nvrtc, nvidia-cuda-runtime and "
    "nvidia-cuda-cccl"
)


@contextlib.contextmanager
def tvm_compiler(arch: str) -> Iterator[None]:
    """Let TVM compile its CUDA text by this module while the block runs."""
    before = tvm_ffi.get_global_func(CALLBACK, allow_missing=True)
    tvm_ffi.register_global_func(
        CALLBACK, lambda text: compile_cuda(str(text), arch), override=True
    )
    try:
        yield
    finally:
        if before is None:
            tvm_ffi.registry.remove_global_func(CALLBACK)
        else:
            tvm_ffi.register_global_func(CALLBACK, before, override=True)


@functools.cache
def compile_cuda(text: str, arch: str) -> bytes:
    """Compile CUDA text to a cubin for ``arch``, such as ``sm_90``; the same text only once.

    Raises
    ------
    EngineError
        If there is no compiler, its headers are missing, or it refuses the text.
    """
    libraries = nvrtc_libraries()
    if libraries:
        return _by_nvrtc(libraries[0], text, arch)
    nvcc = find_nvcc()
    if nvcc is None:
        raise EngineError(f"neither NVRTC (libnvrtc.so) nor nvcc was found: {_ADVICE}")
    return _by_nvcc(nvcc, text, arch)


def compiler() -> str:
    """The compiler that :func:`compile_cuda` takes, or an empty text."""
    libraries = nvrtc_libraries()
    if libraries:
        major, minor = ctypes.c_int(), ctypes.c_int()
        _load(libraries[0]).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"
    return str(find_nvcc() or "")


@functools.cache
def nvrtc_libraries() -> list[Path]:
    """Every libnvrtc found, those of Python packages first."""
    places = [*_wheel_folders("lib"), *_toolkit_folders("lib64"), *_toolkit_folders("lib")]
    names = (path for place in places for path in sorted(place.glob("libnvrtc.so.*")))
    return [path for path in names if "alt" not in path.name]


def find_nvcc() -> Path | None:
    """The compiler driver of a toolkit."""
    found = [folder / "nvcc" for folder in _toolkit_folders("bin")]
    named = shutil.which("nvcc")
    return next((path for path in found if path.exists()), Path(named) if named else None)


def include_folders() -> list[Path]:
    """Where the headers of kernels are; one folder for each header that is not in an earlier one.

    Raises
    ------
    EngineError
        If a header is nowhere.
    """
    places = [*_wheel_folders("include"), *_toolkit_folders("include"), *_cupy_folders()]
    places = [inner for place in places for inner in (place, place / "cccl")]
    found: list[Path] = []
    for header in HEADERS:
        folder = next((place for place in places if (place / header).exists()), None)
        if folder is None:
            raise EngineError(f"CUDA header {header} was not found: {_ADVICE}")
        if folder not in found:
            found.append(folder)
    return found


def _by_nvrtc(library: Path, text: str, arch: str) -> bytes:
    lib = _load(library)
    options = [f"--gpu-architecture={arch}", "-default-device", *OPTIONS]
    options += [f"-I{folder}" for folder in include_folders()]
    program = ctypes.c_void_p()
    source = _prelude() + text
    status = lib.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(lib, status, "")
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = lib.nvrtcCompileProgram(program, len(options), array)
        log = _read(lib, program, "ProgramLog").decode(errors="replace") if status else ""
        _check(lib, status, log)
        return _read(lib, program, "CUBIN")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _by_nvcc(nvcc: Path, text: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        source.write_text(text)
        command = [str(nvcc), "--cubin", "-arch", arch, *OPTIONS, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineError(f"nvcc refused the kernel: {done.stderr.strip()}")
        return target.read_bytes()


def _load(library: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as error:
        raise EngineError(f"{library} cannot be loaded: {error}") from None
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    return lib


def _read(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """A result of NVRTC: its size is asked first."""
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "")
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer), "")
    return buffer.raw


def _check(lib: ctypes.CDLL, status: int, log: str) -> None:
    if status:
        text = lib.nvrtcGetErrorString(status).decode()
        raise EngineError(f"NVRTC refused the kernel: {text}: {log.strip()}".rstrip(": "))


def _prelude() -> str:
    """Names of host headers that kernels may use and NVRTC lacks."""
    names = [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    using = "".join(f"using cuda::std::{name};\n" for name in names)
    infinity = "#ifndef INFINITY\n#define INFINITY __int_as_float(0x7f800000)\n#endif\n"
    return f"#include <cuda/std/cstdint>\n{using}{infinity}"


def _wheel_folders(kind: str) -> list[Path]:
    """Folders of that kind in CUDA packages of Python."""
    roots = (Path(entry) for entry in sys.path if entry)
    return _existing(
        folder / kind
        for root in roots
        for pattern in _WHEEL_FOLDERS
        for folder in sorted(root.glob(pattern))
    )


def _toolkit_folders(kind: str) -> list[Path]:
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    usual: Sequence[Path] = sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    roots = [*map(Path, named), *usual]
    return _existing(
        folder for root in roots for folder in (root / kind, root / "targets/x86_64-linux" / kind)
    )


def _cupy_folders() -> list[Path]:
    """CuPy carries the headers that its own kernels need."""
    roots = (Path(entry, "cupy/_core/include/cupy") for entry in sys.path if entry)
    return _existing(
        folder
        for root in roots
        for pattern in ("_cuda/cuda-*", "_cccl/*", "_cccl/libcudacxx/include")
        for folder in sorted(root.glob(pattern))
    )


def _existing(folders: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))
