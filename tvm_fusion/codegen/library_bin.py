# SPDX-License-Identifier: Apache-2.0
"""Modules that TVM embeds in a shared library, and their replacement.

They are stored one after the other under the symbol ``__tvm_ffi__library_bin``::

    bytes that follow : u64, tree of imports : two vectors of u64,
    then for each module its kind : string, and unless that is "_lib" its content : string

A vector or a string is its length (u64) and its items. TVM's ``library_module.cc`` defines it.

TVM generates CUDA text, and where it finds no GPU it leaves the text in the library that it saves:
the machine that loads it would have to compile it. Here the text of a model becomes machine code
when the model is compiled, and that is what is saved. OpenCL text stays text, since there the
driver of each device has the compiler.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..errors import ArtifactError
from ..machine.host import physical_cores
from .elf_object import ElfObject
from .nvrtc import Resources, compile_cuda, resources

SYMBOL = "__tvm_ffi__library_bin"

Rewrite = Callable[[str, bytes], bytes]
"""Function from the kind and the content of an embedded module to its new content."""

_LENGTH = struct.Struct("<Q")
_LIBRARY = "_lib"


def rewrite_modules(item: ElfObject, rewrite: Rewrite) -> ElfObject:
    """Rewrite the modules that are embedded in an object; its section changes in place.

    Raises ArtifactError if their layout is not that of this version of TVM.
    """
    symbol = next((s for s in item.symbols if s.name == SYMBOL), None)
    if symbol is None or symbol.section is None:
        return item
    content = symbol.section.data
    if symbol.value + symbol.size != len(content):
        raise ArtifactError("the modules that TVM embedded are not at the end of their section")
    content[symbol.value :] = _rewritten(bytes(content[symbol.value :]), rewrite)
    grown = replace(symbol, size=len(content) - symbol.value)
    symbols = [grown if other is symbol else other for other in item.symbols]
    return ElfObject(item.machine, item.sections, symbols)


def packed(text: bytes) -> bytes:
    """A string as TVM writes it."""
    return _LENGTH.pack(len(text)) + text


def _rewritten(data: bytes, rewrite: Rewrite) -> bytes:
    reader = _BinaryReader(data)
    end = reader.number() + _LENGTH.size
    tree = reader.position
    modules = reader.vector()
    reader.vector()
    result = data[tree : reader.position]
    for _ in range(modules - 1):
        kind = reader.string()
        result += packed(kind)
        if kind.decode() != _LIBRARY:
            result += packed(rewrite(kind.decode(), reader.string()))
    if reader.position != end:
        raise ArtifactError("the modules that TVM embedded in the library are of an unknown form")
    return _LENGTH.pack(len(result)) + result


class _BinaryReader:
    """Reads numbers and strings in sequence."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def number(self) -> int:
        return _LENGTH.unpack(self._take(_LENGTH.size))[0]

    def string(self) -> bytes:
        return self._take(self.number())

    def vector(self) -> int:
        """Skip the items; return their number."""
        count = self.number()
        self._take(count * _LENGTH.size)
        return count

    def _take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._data):
            raise ArtifactError("the modules that TVM embedded in the library are cut off")
        return self._data[start : self.position]


_TEXT, _MACHINE_CODE = packed(b"cuda"), packed(b"cubin")
"""Prefix of the content of a CUDA module; its code is at the end."""


def cuda_texts(executable: Any) -> list[str]:
    """The CUDA text of every kernel module of an executable."""
    found = (module.inspect_source("cuda") for module in _modules(executable.mod))
    return [str(text) for text in found if text]


def compile_kernels(executable: Any, arch: str, fast_math: bool = False) -> dict[str, Resources]:
    """Compile every CUDA kernel of an executable for ``arch``; no GPU is needed.

    ``fast_math`` is that of :func:`tvm_fusion.codegen.nvrtc.compile_cuda`.

    Returns resources of each kernel, by its name. Raises TargetError if no compiler for CUDA text
    is installed. Raises CompilationError if it refuses a kernel.
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
