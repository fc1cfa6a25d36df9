# SPDX-License-Identifier: Apache-2.0
"""Linker of the few objects of a compiled model into a shared library, without a system linker.

A machine that compiles models need not have a C compiler, and rarely has one for another
architecture. The output of TVM's code generator is simple enough to be linked here: position
independent code, constants, a few pointers, no thread-local data, no constructors.

The library has four segments: its tables, the code, the data (among it the global offset table) and
the constants. These come last since the model's weights are among them: everything that the code
refers to by a 32-bit distance lies before them. Every symbol is bound when the library is loaded.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template

import tvm_ffi

from ..errors import ArtifactError
from .elf_object import (
    ARCHITECTURES,
    MACHINES,
    Architecture,
    ElfObject,
    Relocation,
    Section,
    Symbol,
    read_object,
)
from .library_bin import Rewrite, rewrite_modules

_NEEDED = ("libm.so.6", "libc.so.6")
_PAGE = 0x10000
"""The largest page size of the systems in question (AArch64 may have 64 KiB)."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ, _WRITE, _EXECUTE = 4, 2, 1
_SEGMENTS = 6


_ARCHITECTURES = {
    "x86_64": {"pause": "pause", "futex": 202, "sched_yield": 24},
    "aarch64": {"pause": "isb", "futex": 98, "sched_yield": 124},
}
"""The instruction that waits a moment, and numbers of Linux's system calls."""


def worker_pool(triple: str) -> ElfObject:
    """Object file with the threads' code, to be linked with kernels.

    Raises ArtifactError if there is none for the architecture.
    """
    return read_object(_compiled(triple))


@cache
def _compiled(triple: str) -> bytes:
    arch = triple.partition("-")[0]
    if arch not in _ARCHITECTURES:
        raise ArtifactError(f"cannot link for {arch!r}; expected one of {list(_ARCHITECTURES)}")
    target = json.dumps({"kind": "llvm", "mtriple": triple}).replace('"', r"\22")
    text = Template(Path(__file__).with_name("worker_pool.ll").read_text())
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "pool.ll"), Path(folder, "pool.o")
        source.write_text(text.substitute(_ARCHITECTURES[arch], triple=triple, target=target))
        load = tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")
        load(str(source), "ll").write_to_file(str(output), "o")
        return output.read_bytes()


class SharedLinker:
    """The linker in the form that TVM's ``export_library`` and ``jit`` take as ``fcompile``.

    ``triple``: LLVM's triple of the target; TVM needs it where a model has no kernels. ``rewrite``:
    rewrites the modules that TVM embeds in the library; by default they stay.
    """

    def __init__(self, triple: str, rewrite: Rewrite | None = None) -> None:
        self._triple = triple
        self._rewrite = rewrite

    def get_target_triple(self) -> str:
        """Return the triple of the target."""
        return self._triple

    def __call__(self, output: str, files: Sequence[str], **options: object) -> None:
        """Link object files into the shared library ``output``.

        Raises ArtifactError if an object holds something that TVM's code generator is not known to
        emit.
        """
        data = [Path(file).read_bytes() for file in files if not _is_empty_source(file)]
        objects = [read_object(item) for item in data]
        if self._rewrite is not None:
            objects = [rewrite_modules(item, self._rewrite) for item in objects]
        objects.append(worker_pool(self._triple))
        Path(output).write_bytes(link(objects))


def _is_empty_source(file: str) -> bool:
    """Return whether it is the empty C file that TVM writes for a model without kernels."""
    return file.endswith(".c") and Path(file).read_text().strip() in ("", ";")


def link(objects: Sequence[ElfObject]) -> bytearray:
    """Link objects into the bytes of a shared library."""
    if len({item.machine for item in objects}) != 1:
        raise ArtifactError("expected objects for one machine")
    return _Linker(objects).link()


@dataclass
class _Linker:
    """State of one link: definitions, imports, and the layout."""

    objects: Sequence[ElfObject]
    defined: dict[str, Symbol] = field(default_factory=dict)
    imports: dict[str, int] = field(default_factory=dict)
    slots: dict[Symbol, int] = field(default_factory=dict)
    stubs: dict[str, int] = field(default_factory=dict)
    dynamic: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = self.objects[0].machine
        self.arch: Architecture = ARCHITECTURES[MACHINES[self.machine]]
        self.sections = [section for item in self.objects for section in item.sections]

    def link(self) -> bytearray:
        """Resolve the symbols, lay out the segments, relocate, and write the image."""
        self._define()
        self._reserve()
        exports = list(self.defined.values())
        names, strings = _strings([*_NEEDED, *self.imports, *self.defined])
        hashes = _hash_table([*self.imports, *self.defined])
        tables = [
            Section(".hash", 0, 8, bytearray(hashes)),
            Section(".dynsym", 0, 8, bytearray(_SYMBOL.size * (1 + len(names) - len(_NEEDED)))),
            Section(".dynstr", 0, 1, bytearray(strings)),
            Section(".rela", 0, 8, bytearray(_RELA.size * self._count_dynamic())),
        ]
        self.plt = Section(".plt", 0, 16, bytearray(self.arch.stub_size * len(self.stubs)))
        self.got = Section(".got", 0, 8, bytearray(8 * len(self.slots)))
        info = Section(".dynamic", 0, 8, bytearray(16 * (len(_NEEDED) + 10)))
        segments = self._lay_out(tables, info)
        self._fill_got()
        for section in self.sections:
            for relocation in section.relocations:
                self._relocate(section, relocation)
        _fill(tables[1], self._symbol_table(exports, names))
        _fill(tables[3], (_RELA.pack(*entry) for entry in self.dynamic))
        _fill(info, _dynamic_section(tables, names))
        return self._image(segments, info)

    def _define(self) -> None:
        """Choose the definition of each global name: a strong one, else the first."""
        for symbol in (symbol for item in self.objects for symbol in item.symbols):
            if symbol.section is None or symbol.local:
                continue
            other = self.defined.setdefault(symbol.name, symbol)
            if other is not symbol and other.weak and not symbol.weak:
                self.defined[symbol.name] = symbol
            elif other is not symbol and not other.weak and not symbol.weak:
                raise ArtifactError(f"two objects define {symbol.name!r}")

    def _reserve(self) -> None:
        """Count the stubs and the offset-table slots that the relocations need."""
        for section in self.sections:
            for relocation in section.relocations:
                symbol = self._resolve(relocation.symbol)
                if symbol.section is None:
                    self.imports.setdefault(symbol.name, len(self.imports) + 1)
                if relocation.kind in self.arch.calls and symbol.section is None:
                    self.stubs.setdefault(symbol.name, len(self.stubs))
                    self.slots.setdefault(symbol, len(self.slots))
                elif relocation.kind in self.arch.slot_users:
                    self.slots.setdefault(symbol, len(self.slots))

    def _resolve(self, symbol: Symbol) -> Symbol:
        if symbol.local:
            return symbol
        return self.defined.get(symbol.name, Symbol(symbol.name, None, 0, 0, 0x10))

    def _count_dynamic(self) -> int:
        absolute = sum(
            relocation.kind == self.arch.absolute
            for section in self.sections
            for relocation in section.relocations
        )
        return absolute + len(self.slots)

    def _lay_out(self, tables: list[Section], info: Section) -> list[tuple[int, list[Section]]]:
        """Give every section its address, which is also its place in the file."""
        code = [section for section in self.sections if section.executable]
        data = [section for section in self.sections if section.writable]
        rest = [s for s in self.sections if not s.executable and not s.writable]
        rest.sort(key=lambda section: len(section.data))
        segments = [
            (_READ, tables),
            (_READ | _EXECUTE, [*code, self.plt]),
            (_READ | _WRITE, [info, self.got, *data]),
            (_READ, rest),
        ]
        address = _HEADER.size + _SEGMENT.size * _SEGMENTS
        for _, sections in segments:
            for section in sections:
                address = _align(address, section.align)
                section.address = address
                address += len(section.data)
            address = _align(address, _PAGE)
        return segments

    def _address(self, symbol: Symbol) -> int:
        if symbol.section is None:
            raise ArtifactError(f"cannot link the use of {symbol.name!r}, defined elsewhere")
        return symbol.section.address + symbol.value

    def _fill_got(self) -> None:
        for symbol, index in self.slots.items():
            place = self.got.address + 8 * index
            if symbol.section is None:
                info = self.imports[symbol.name] << 32 | self.arch.dynamic_slot
                self.dynamic.append((place, info, 0))
            else:
                self.dynamic.append((place, self.arch.dynamic_relative, self._address(symbol)))
        for name, index in self.stubs.items():
            place = self.plt.address + self.arch.stub_size * index
            slot = self.slots[Symbol(name, None, 0, 0, 0x10)]
            stub = self.arch.stub(place, self.got.address + 8 * slot)
            start = self.arch.stub_size * index
            self.plt.data[start : start + len(stub)] = stub

    def _relocate(self, section: Section, relocation: Relocation) -> None:
        symbol = self._resolve(relocation.symbol)
        kind = relocation.kind
        place = section.address + relocation.offset
        if kind == self.arch.absolute:
            if not section.writable:
                raise ArtifactError(f"cannot link an address in read-only {section.name!r}")
            if symbol.section is None:
                info = self.imports[symbol.name] << 32 | kind
                self.dynamic.append((place, info, relocation.addend))
            else:
                value = self._address(symbol) + relocation.addend
                self.dynamic.append((place, self.arch.dynamic_relative, value))
            return
        if kind in self.arch.slot_users:
            value = self.got.address + 8 * self.slots[symbol]
        elif symbol.section is None and kind in self.arch.calls:
            value = self.plt.address + self.arch.stub_size * self.stubs[symbol.name]
        else:
            value = self._address(symbol)
        self.arch.apply(section.data, relocation.offset, kind, value + relocation.addend, place)

    def _symbol_table(self, exports: Iterable[Symbol], names: dict[str, int]) -> Iterable[bytes]:
        yield bytes(_SYMBOL.size)
        for name in self.imports:
            yield _SYMBOL.pack(names[name], 0x10, 0, 0, 0, 0)
        for symbol in exports:
            # Any section number means "defined here": there is no section table.
            address = self._address(symbol)
            yield _SYMBOL.pack(names[symbol.name], symbol.info, 0, 1, address, symbol.size)

    def _image(self, segments: list[tuple[int, list[Section]]], info: Section) -> bytearray:
        """Write headers and sections."""
        headers: list[tuple[int, ...]] = []
        image = bytearray(_HEADER.size + _SEGMENT.size * _SEGMENTS)
        for flags, sections in segments:
            start = _align(len(image), _PAGE) if headers else 0
            for section in sections:
                image.extend(bytes(section.address - len(image)))
                image.extend(section.data)
            size = len(image) - start
            if size <= 0:  # empty, or past the end of the file
                continue
            headers.append((_PT_LOAD, flags, start, start, start, size, size, _PAGE))
        size = len(info.data)
        place = info.address
        headers.append((_PT_DYNAMIC, _READ | _WRITE, place, place, place, size, size, 8))
        headers.append((_PT_GNU_STACK, _READ | _WRITE, 0, 0, 0, 0, 0, 16))
        identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        counts = (_HEADER.size, _SEGMENT.size, len(headers), 0, 0, 0)
        _HEADER.pack_into(image, 0, identity, 3, self.machine, 1, 0, _HEADER.size, 0, 0, *counts)
        for index, header in enumerate(headers):
            _SEGMENT.pack_into(image, _HEADER.size + _SEGMENT.size * index, *header)
        return image


def _dynamic_section(tables: list[Section], names: dict[str, int]) -> Iterable[bytes]:
    hashes, symbols, strings, relocations = tables
    for library in _NEEDED:
        yield struct.pack("<QQ", 1, names[library])
    entries = [
        (4, hashes.address),
        (5, strings.address),
        (6, symbols.address),
        (10, len(strings.data)),
        (11, _SYMBOL.size),
        (7, relocations.address),
        (8, len(relocations.data)),
        (9, _RELA.size),
        (30, 8),  # bind everything when the library is loaded
        (0, 0),
    ]
    for tag, value in entries:
        yield struct.pack("<QQ", tag, value)


def _strings(texts: Iterable[str]) -> tuple[dict[str, int], bytes]:
    """Offsets of the texts in a string table, and the table."""
    places: dict[str, int] = {}
    table = bytearray(b"\0")
    for text in texts:
        places[text] = len(table)
        table += text.encode() + b"\0"
    return places, bytes(table)


def _hash_table(names: Sequence[str]) -> bytes:
    """Symbol hash table of the loader; symbol 0 is none, names begin at 1."""
    count = len(names) + 1
    buckets = [0] * count
    chains = [0] * count
    for index, name in enumerate(names, start=1):
        bucket = _hash(name) % count
        chains[index] = buckets[bucket]
        buckets[bucket] = index
    return struct.pack(f"<II{2 * count}I", count, count, *buckets, *chains)


def _hash(name: str) -> int:
    """The hash of the System V ABI."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high & 0xFFFFFFFF
    return value


def _fill(section: Section, pieces: Iterable[bytes]) -> None:
    """Fill a section whose size was counted before its content was known."""
    content = b"".join(pieces)
    assert len(content) <= len(section.data), f"{section.name} was counted too small"
    section.data[: len(content)] = content


def _align(value: int, align: int) -> int:
    return -(-value // align) * align
