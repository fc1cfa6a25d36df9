# SPDX-License-Identifier: Apache-2.0
"""What TVM's CUDA text becomes, without a GPU: registers, spills and machine code.

The text is compiled as TVM does it at run time: by NVRTC, with the same options. NVRTC contains
``ptxas`` and needs neither ``nvcc`` nor a host compiler; ``nvdisasm`` lists the machine code.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import tirx

from schedules.errors import CompilationError, EngineError

# As in tvm.support.nvcc, which gives no log of what it compiles.
_PREAMBLE = """#include <cuda/std/cstdint>
#include <cuda/std/limits>
using cuda::std::uint8_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::int8_t;
using cuda::std::int16_t;
using cuda::std::int32_t;
using cuda::std::int64_t;
#ifndef INFINITY
#define INFINITY (::cuda::std::numeric_limits<float>::infinity())
#endif
"""
_OPTIONS = (
    "-default-device",
    "--device-int128",
    "--use_fast_math",
    "--ptxas-options=-v",
    "--ptxas-options=--register-usage-level=10",
    "--ptxas-options=--warn-on-local-memory-usage",
)


@dataclass(frozen=True)
class Resources:
    """What ``ptxas`` reports of a kernel: registers a thread, and bytes."""

    registers: int
    stack_frame: int
    spill_stores: int
    spill_loads: int
    shared: int


def cuda_source(mod: tvm.IRModule | tirx.PrimFunc, arch: str = "sm_90") -> str:
    """Return the CUDA text that TVM's own lowering makes of GPU functions.

    Parameters
    ----------
    mod : tvm.IRModule or tirx.PrimFunc
        The functions, bound to ``blockIdx`` and ``threadIdx``.
    arch : str
        The architecture, for example ``"sm_90"``.

    Returns
    -------
    source : str
        The text of all kernels. TVM compiles it when a kernel is first run, not here.
    """
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    return tirx.build(mod, target=target).imports[0].inspect_source()


def ptxas(source: str, arch: str = "sm_90") -> dict[str, Resources]:
    """Compile CUDA text; return what each kernel uses.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
    """
    _, log = _compile(source, arch)
    used = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = {
            name: re.search(pattern, part)
            for name, pattern in {
                "registers": r"Used (\d+) registers",
                "stack_frame": r"(\d+) bytes stack frame",
                "spill_stores": r"(\d+) bytes spill stores",
                "spill_loads": r"(\d+) bytes spill loads",
                "shared": r"(\d+) bytes smem",
            }.items()
        }
        used[part.split("'")[0]] = Resources(
            **{name: int(found[1]) if found else 0 for name, found in numbers.items()}
        )
    return used


def sass(source: str, arch: str = "sm_90") -> dict[str, str]:
    """Compile CUDA text; return the machine code of each kernel, as ``nvdisasm`` lists it.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
    """
    cubin, _ = _compile(source, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassembler = _toolkit() / "bin" / "nvdisasm"
        listing = subprocess.run(
            [disassembler, "--print-code", file.name], capture_output=True, text=True, check=True
        ).stdout
    parts = re.split(r"^//-+ \.text\.(\w+)", listing, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def opcodes(code: str) -> list[str]:
    """Return the instructions' names of one kernel in their order, without operands."""
    return re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code)


def loops(code: str) -> list[list[str]]:
    """Return the opcodes of each loop of one kernel: from a backward branch's target to it."""
    names: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        names += opcodes(line)
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        # The last branch of every kernel jumps to itself.
        if jump and labels.get(jump[1], len(names)) < len(names) - 1:
            found.append(names[labels[jump[1]] :])
    return found


def count(names: list[str], opcode: str) -> int:
    """Count an opcode with any further modifiers: ``LDG.E.128`` also in its cached form."""
    return sum(name == opcode or name.startswith(opcode + ".") for name in names)


@functools.cache
def _toolkit() -> Path:
    """Return the folder of NVIDIA's packages for CUDA 13."""
    spec = importlib.util.find_spec("nvidia.cu13")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError("the CUDA compiler is not installed: pip install 'tvm-fusion[test]'")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(_toolkit() / "lib" / "libnvrtc.so.13"))


@functools.lru_cache(maxsize=16)
def _compile(source: str, arch: str) -> tuple[bytes, str]:
    """Compile to a cubin; return it and the log of NVRTC and ptxas."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    include = _toolkit() / "include"
    options = [f"--gpu-architecture={arch}", f"-I{include}", f"-I{include / 'cccl'}", *_OPTIONS]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    text = (_PREAMBLE + source.replace("#include <cuda.h>", "")).encode()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode()
        if failed:
            raise CompilationError(f"NVRTC refuses the CUDA text:\n{log}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(get_size, get, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw.rstrip(b"\0") if get.__name__ == "nvrtcGetProgramLog" else buffer.raw
