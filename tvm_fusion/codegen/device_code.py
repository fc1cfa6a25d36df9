# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of a compiled model: from TVM's text to machine code, and their resources.

TVM generates CUDA text, and where it finds no GPU it leaves the text in the library that it saves:
the machine that loads it would have to compile it. Here the text of a model becomes machine code
when the model is compiled, and that is what is saved. OpenCL text stays text, since there the
driver of each device has the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import ArtifactError
from ..machine.host import physical_cores
from .library_bin import Rewrite, packed
from .nvrtc import Resources, compile_cuda, resources

_TEXT, _MACHINE_CODE = packed(b"cuda"), packed(b"cubin")
"""Prefix of the content of a CUDA module; its code is at the end."""


def cuda_texts(executable: Any) -> list[str]:
    """The CUDA text of every kernel module of an executable."""
    found = (module.inspect_source("cuda") for module in _modules(executable.mod))
    return [str(text) for text in found if text]


def compile_kernels(executable: Any, arch: str, fast_math: bool = False) -> dict[str, Resources]:
    """Compile every CUDA kernel of an executable for ``arch``; no GPU is needed.

    ``fast_math`` is that of :func:`tvm_fusion.codegen.nvrtc.compile_cuda`.

    Returns
    -------
    dict[str, Resources]
        Resources of each kernel, by its name.

    Raises
    ------
    TargetError
        If no compiler for CUDA text is installed.
    CompilationError
        If it refuses a kernel.
    """
    used: dict[str, Resources] = {}
    # The compiler works without Python's lock.
    with ThreadPoolExecutor(physical_cores(), "tvm_fusion.compile_cuda") as pool:
        compiled = pool.map(
            lambda text: compile_cuda(text, arch, fast_math), cuda_texts(executable)
        )
        for code in compiled:
            used |= resources(code)
    return used


def machine_code_of(executable: Any, arch: str, fast_math: bool = False) -> Rewrite:
    """Function that replaces the CUDA texts of an executable by machine code for ``arch``.

    It is for :func:`tvm_fusion.codegen.library_bin.rewrite_modules`.
    """
    texts = cuda_texts(executable)

    def rewrite(kind: str, content: bytes) -> bytes:
        if kind != "cuda" or content.startswith(_MACHINE_CODE):
            return content
        for text in texts:
            code = packed(text.encode())
            if content.startswith(_TEXT) and content.endswith(code):
                between = content[len(_TEXT) : -len(code)]
                return _MACHINE_CODE + between + packed(compile_cuda(text, arch, fast_math).cubin)
        raise ArtifactError("the CUDA kernels that TVM embedded are of an unknown form")

    return rewrite


def _modules(root: Any) -> Iterator[Any]:
    """The modules of kernels that a module imports, directly or indirectly."""
    if root.kind == "cuda":
        yield root
    for module in root.imports:
        yield from _modules(module)
