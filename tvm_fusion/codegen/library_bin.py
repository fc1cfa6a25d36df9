# SPDX-License-Identifier: Apache-2.0
"""Modules that TVM embeds in a shared library, and their replacement.

They are stored one after the other under the symbol ``__tvm_ffi__library_bin``::

    bytes that follow : u64, tree of imports : two vectors of u64,
    then for each module its kind : string, and unless that is "_lib" its content : string

A vector or a string is its length (u64) and its items. TVM's ``library_module.cc`` defines it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from ..errors import ArtifactError
from .elf_object import ElfObject

SYMBOL = "__tvm_ffi__library_bin"

Rewrite = Callable[[str, bytes], bytes]
"""Function from the kind and the content of an embedded module to its new content."""

_LENGTH = struct.Struct("<Q")
_LIBRARY = "_lib"


def rewrite_modules(item: ElfObject, rewrite: Rewrite) -> ElfObject:
    """Rewrite the modules that are embedded in an object; its section changes in place.

    Raises
    ------
    ArtifactError
        If their layout is not that of this version of TVM.
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
