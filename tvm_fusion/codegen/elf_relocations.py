# SPDX-License-Identifier: Apache-2.0
"""Relocations of x86-64 and AArch64, as in their ABIs.

Only those that LLVM emits for position independent kernels are here; any other one is an error.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

from ..errors import ArtifactError


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

        Parameters
        ----------
        data : bytearray
            The section's bytes.
        offset : int
            Offset of the field in them.
        kind : int
            The kind of relocation.
        value : int
            Address of the symbol, its stub or its slot, plus the addend.
        place : int
            Address of the field.
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
