# SPDX-License-Identifier: Apache-2.0
"""Reader of relocatable ELF objects as LLVM writes them for x86-64 and AArch64.

Of the relocations of x86-64 and AArch64, as in their ABIs, only those that LLVM emits for position
independent kernels are here; any other one is an error.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
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

    Raises ArtifactError if it is no ELF object for a known machine, or has thread-local data.
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


class Architecture(ABC):
    """Relocations of one architecture; numbers and formulas are those of its ELF ABI."""

    calls: frozenset[int]
    """Kinds that may go to a stub when the function is defined elsewhere."""

    slot_users: frozenset[int]
    """Kinds that mean the symbol's slot in the global offset table."""

    absolute: int
    """The kind of a 64-bit address."""

    dynamic_slot: int
    """Relocation of a slot by the loader: store the symbol's address."""

    dynamic_relative: int
    """Relocation of a pointer by the loader: add the load address of the library."""

    stub_size = 16

    @abstractmethod
    def stub(self, place: int, slot: int) -> bytes:
        """Code that jumps to the address in ``slot``."""

    @abstractmethod
    def apply(self, data: bytearray, offset: int, kind: int, value: int, place: int) -> None:
        """Write the value of the field at ``offset`` into ``data``.

        ``data``: the section's bytes. ``offset``: offset of the field in them. ``kind``: the kind
        of relocation. ``value``: address of the symbol, its stub or its slot, plus the addend.
        ``place``: address of the field.
        """


class X86(Architecture):
    """x86-64."""

    calls = frozenset({4})
    slot_users = frozenset({9, 41, 42})
    absolute = 1
    dynamic_slot = 6
    dynamic_relative = 8
    _distances = frozenset({2, 4, 9, 41, 42})

    def stub(self, place: int, slot: int) -> bytes:
        """``jmp *slot(%rip)``."""
        return b"\xff\x25" + struct.pack("<i", slot - place - 6)

    def apply(self, data: bytearray, offset: int, kind: int, value: int, place: int) -> None:
        """All kinds are a signed 32-bit distance."""
        if kind not in self._distances:
            raise _unknown(kind, "x86-64")
        distance = _signed(value - place, 32)
        struct.pack_into("<I", data, offset, distance)


class AArch64(Architecture):
    """AArch64: fields inside instructions."""

    calls = frozenset({282, 283})
    slot_users = frozenset({311, 312})
    absolute = 257
    dynamic_slot = 1025
    dynamic_relative = 1027
    _low_bits = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4, 312: 3}
    """Kinds that hold the low 12 bits of an address, in units of 1, 2, 4, 8 or 16 bytes."""

    def stub(self, place: int, slot: int) -> bytes:
        """``adrp x16; ldr x17, [x16]; br x17; nop``."""
        code = bytearray(struct.pack("<4I", 0x90000010, 0xF9400211, 0xD61F0220, 0xD503201F))
        self.apply(code, 0, 311, slot, place)
        self.apply(code, 4, 312, slot, place + 4)
        return bytes(code)

    def apply(self, data: bytearray, offset: int, kind: int, value: int, place: int) -> None:
        """Insert the bits into the fields of the instruction."""
        (word,) = struct.unpack_from("<I", data, offset)
        if kind == 261:
            word = _signed(value - place, 32)
        elif kind in (275, 311):
            pages = _signed((value >> 12) - (place >> 12), 21)
            word = word & 0x9F00001F | (pages & 3) << 29 | (pages >> 2) << 5
        elif kind in (282, 283):
            word = word & 0xFC000000 | _scaled(_signed(value - place, 28), 2)
        elif kind in self._low_bits:
            word = word & 0xFFC003FF | _scaled(value & 0xFFF, self._low_bits[kind]) << 10
        else:
            raise _unknown(kind, "AArch64")
        struct.pack_into("<I", data, offset, word)


ARCHITECTURES: dict[str, Architecture] = {"x86_64": X86(), "aarch64": AArch64()}


def _signed(value: int, bits: int) -> int:
    """``value`` in two's complement of ``bits`` bits."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ArtifactError(f"the model's code is too large to link: a distance of {value} bytes")
    return value & (1 << bits) - 1


def _scaled(value: int, shift: int) -> int:
    """``value`` in units of ``1 << shift`` bytes."""
    if value & (1 << shift) - 1:
        raise ArtifactError(f"cannot link the address {value:#x}: not a multiple of {1 << shift}")
    return value >> shift


def _unknown(kind: int, arch: str) -> ArtifactError:
    return ArtifactError(f"cannot link a relocation of kind {kind} for {arch}")
