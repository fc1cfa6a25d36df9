# SPDX-License-Identifier: Apache-2.0
"""Reader of relocatable ELF objects as LLVM writes them for x86-64 and AArch64."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ..errors import ArtifactError

MACHINES = {62: "x86_64", 183: "aarch64"}

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")

_SHT_SYMTAB, _SHT_RELA, _SHT_NOBITS = 2, 4, 8
_SHF_WRITE, _SHF_ALLOC, _SHF_EXECINSTR, _SHF_TLS = 1, 2, 4, 0x400
_STB_LOCAL, _STB_WEAK = 0, 2


@dataclass(eq=False)
class Section:
    """A section of the program; ``address`` is set by the layout."""

    name: str
    flags: int
    align: int
    data: bytearray
    relocations: list[Relocation] = field(default_factory=list)
    address: int = 0

    @property
    def writable(self) -> bool:
        """Return whether the running program may write to it."""
        return bool(self.flags & _SHF_WRITE)

    @property
    def executable(self) -> bool:
        """Return whether it holds instructions."""
        return bool(self.flags & _SHF_EXECINSTR)


@dataclass(frozen=True)
class Symbol:
    """A name for a place in a section, or for an external definition (no section)."""

    name: str
    section: Section | None
    value: int
    size: int
    info: int

    @property
    def local(self) -> bool:
        """Return whether only its own object sees it."""
        return self.info >> 4 == _STB_LOCAL

    @property
    def weak(self) -> bool:
        """Return whether another definition may replace it."""
        return self.info >> 4 == _STB_WEAK


@dataclass(frozen=True)
class Relocation:
    """A place in a section that depends on the final address of a symbol."""

    offset: int
    kind: int
    symbol: Symbol
    addend: int


@dataclass(frozen=True)
class ElfObject:
    """Contents of one object for the linker."""

    machine: int
    sections: list[Section]
    symbols: list[Symbol]


def read_object(data: bytes) -> ElfObject:
    """Read one relocatable object.

    Unwinding tables and debug information are left out: kernels throw no exceptions.

    Raises
    ------
    ArtifactError
        If it is no ELF object for a known machine, or has thread-local data.
    """
    if data[:7] != b"\x7fELF\x02\x01\x01" or len(data) < _HEADER.size:
        raise ArtifactError(
            "LLVM wrote no 64-bit little-endian ELF object, and shared libraries are written for "
            "Linux only; choose a target with a Linux triple"
        )
    _, _, machine, _, _, _, table, _, _, _, _, _, count, names_at = _HEADER.unpack_from(data)
    if machine not in MACHINES:
        raise ArtifactError(f"cannot link for ELF machine {machine}; expected {MACHINES}")
    headers = [_SECTION.unpack_from(data, table + _SECTION.size * index) for index in range(count)]
    names = _content(data, headers[names_at])
    sections = [_section(data, header, names) for header in headers]
    symbols: list[Symbol] = []
    for header in headers:
        if header[1] == _SHT_SYMTAB:
            symbols = _symbols(data, header, _content(data, headers[header[6]]), sections)
    for header in headers:
        target = sections[header[7]] if header[1] == _SHT_RELA else None
        if target is not None:
            target.relocations = _relocations(data, header, symbols)
    return ElfObject(machine, [section for section in sections if section is not None], symbols)


def _section(data: bytes, header: tuple[int, ...], names: bytes) -> Section | None:
    """The section of a header, or None if it is not loaded into memory."""
    name = _text(names, header[0])
    _, kind, flags, _, _, size, _, _, align, _ = header
    if not flags & _SHF_ALLOC or name == ".eh_frame" or name.startswith(".note"):
        return None
    if flags & _SHF_TLS:
        raise ArtifactError(f"cannot link the thread-local section {name!r}")
    content = bytes(size) if kind == _SHT_NOBITS else _content(data, header)
    return Section(name, flags, max(1, align), bytearray(content))


def _symbols(
    data: bytes, header: tuple[int, ...], names: bytes, sections: list[Section | None]
) -> list[Symbol]:
    symbols = []
    for name, info, _, index, value, size in _SYMBOL.iter_unpack(_content(data, header)):
        section = sections[index] if index < len(sections) else None
        symbols.append(Symbol(_text(names, name), section, value, size, info))
    return symbols


def _relocations(data: bytes, header: tuple[int, ...], symbols: list[Symbol]) -> list[Relocation]:
    return [
        Relocation(offset, info & 0xFFFFFFFF, symbols[info >> 32], addend)
        for offset, info, addend in _RELA.iter_unpack(_content(data, header))
    ]


def _content(data: bytes, header: tuple[int, ...]) -> bytes:
    return data[header[4] : header[4] + header[5]]


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()
