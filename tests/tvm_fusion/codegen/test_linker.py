# SPDX-License-Identifier: Apache-2.0
"""The linker: hand-made objects whose functions are called, and objects of LLVM."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
from relax_models import dense

from tvm_fusion.codegen import linker
from tvm_fusion.codegen.elf_object import (
    ARCHITECTURES,
    MACHINES,
    ElfObject,
    Relocation,
    Section,
    Symbol,
    read_object,
)
from tvm_fusion.codegen.linker import SharedLinker, link
from tvm_fusion.errors import ArtifactError
from tvm_fusion.machine.host import host_arch

X86, ARM = ARCHITECTURES["x86_64"], ARCHITECTURES["aarch64"]
NUMBERS = {name: number for number, name in MACHINES.items()}
ALLOC, WRITE, CODE, TLS = 2, 1, 4, 0x400
GLOBAL, WEAK, LOCAL = 0x12, 0x22, 0x02

# Code of this machine with what has to be relocated in it: offset, kind, addend.
HERE = {
    "x86_64": {
        "return": lambda number: b"\xb8" + struct.pack("<I", number) + b"\xc3",
        "jump": (b"\xe9\0\0\0\0", [(1, 4, -4)]),
        "variable": (b"\x48\x8b\x05\0\0\0\0\x48\x8b\0\xc3", [(3, 42, -4)]),
        "constant": (b"\x48\x8b\x05\0\0\0\0\xc3", [(3, 2, -4)]),
    },
    "aarch64": {
        "return": lambda number: struct.pack("<2I", 0x52800000 | number << 5, 0xD65F03C0),
        "jump": (struct.pack("<I", 0x14000000), [(0, 282, 0)]),
        "variable": (
            struct.pack("<4I", 0x90000000, 0xF9400000, 0xF9400000, 0xD65F03C0),
            [(0, 311, 0), (4, 312, 0)],
        ),
        "constant": (
            struct.pack("<3I", 0x90000000, 0xF9400000, 0xD65F03C0),
            [(0, 275, 0), (4, 286, 0)],
        ),
    },
}[host_arch()]


def section(data: bytes, flags: int = ALLOC | CODE, align: int = 16) -> Section:
    return Section(".test", flags, align, bytearray(data))


def define(name: str, where: Section, info: int = GLOBAL, value: int = 0) -> Symbol:
    return Symbol(name, where, value, len(where.data), info)


def elsewhere(name: str) -> Symbol:
    return Symbol(name, None, 0, 0, 0x10)


def returns(number: int) -> Section:
    """Code of a function that returns the number."""
    return section(HERE["return"](number))


def uses(way: str, target: Symbol) -> Section:
    """Code that jumps to a function, or returns a variable or a constant."""
    code, places = HERE[way]
    made = section(code)
    for offset, kind, addend in places:
        made.relocations.append(Relocation(offset, kind, target, addend))
    return made


def machine_object(sections: list[Section], symbols: list[Symbol]) -> ElfObject:
    return ElfObject(NUMBERS[host_arch()], sections, symbols)


def load(tmp_path: Path, *objects: ElfObject) -> ctypes.CDLL:
    path = tmp_path / "linked.so"
    path.write_bytes(link(objects))
    return ctypes.CDLL(str(path))


def test_functions_of_several_objects_call_each_other(tmp_path: Path) -> None:
    answer, caller = returns(42), uses("jump", elsewhere("answer"))
    library = load(
        tmp_path,
        machine_object([caller], [define("caller", caller), elsewhere("answer")]),
        machine_object([answer], [define("answer", answer)]),
    )
    assert library.answer() == library.caller() == 42


def test_a_strong_definition_replaces_a_weak_one_and_the_first_weak_one_stays(
    tmp_path: Path,
) -> None:
    weak, strong, late = returns(1), returns(2), returns(3)
    caller, other = uses("jump", elsewhere("f")), uses("jump", elsewhere("g"))
    library = load(
        tmp_path,
        machine_object([weak, caller], [define("f", weak, WEAK), define("caller", caller)]),
        machine_object([strong], [define("f", strong), define("g", strong, WEAK)]),
        machine_object([late, other], [define("f", late, WEAK), define("g", late, WEAK),
                                       define("other", other)]),
    )  # fmt: skip
    assert library.f() == library.caller() == 2
    assert library.g() == library.other() == 2


def test_local_names_of_two_objects_stay_apart(tmp_path: Path) -> None:
    objects = []
    for index in (1, 2):
        hidden = returns(index)
        caller = uses("jump", local := define("hidden", hidden, LOCAL))
        objects.append(machine_object([hidden, caller], [local, define(f"f{index}", caller)]))
    library = load(tmp_path, *objects)
    assert (library.f1(), library.f2()) == (1, 2)
    assert not hasattr(library, "hidden")


def test_functions_of_the_c_library_are_found(tmp_path: Path) -> None:
    caller = uses("jump", elsewhere("abs"))
    library = load(tmp_path, machine_object([caller], [define("mine", caller)]))
    assert library.mine(-7) == 7


def test_data_can_be_written_and_point_to_data_and_to_functions(tmp_path: Path) -> None:
    number = section(struct.pack("<q", 5), ALLOC | WRITE, 8)
    pointers = section(bytes(24), ALLOC | WRITE, 8)
    absolute = ARCHITECTURES[host_arch()].absolute
    for offset, target in enumerate([define("number", number), elsewhere("abs")]):
        pointers.relocations.append(Relocation(8 * offset, absolute, target, 0))
    pointers.relocations.append(Relocation(16, absolute, define("number", number), 4))
    symbols = [define("number", number), define("pointers", pointers)]
    library = load(tmp_path, machine_object([number, pointers], symbols))
    first, function, shifted = (ctypes.c_void_p * 3).in_dll(library, "pointers")
    place = ctypes.addressof(ctypes.c_int64.in_dll(library, "number"))
    assert (first, shifted) == (place, place + 4)
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(function)(-3) == 3
    ctypes.c_int64.from_address(first).value = 6
    assert ctypes.c_int64.in_dll(library, "number").value == 6


def test_code_reads_constants_and_variables(tmp_path: Path) -> None:
    number = section(struct.pack("<q", 7), ALLOC | WRITE, 8)
    constant = section(struct.pack("<q", 9), ALLOC, 8)
    get, fix = (
        uses("variable", elsewhere("number")),
        uses("constant", define("constant", constant, LOCAL)),
    )
    symbols = [define("number", number), define("get", get), define("fix", fix)]
    library = load(tmp_path, machine_object([number, constant, get, fix], symbols))
    assert (library.get(), library.fix()) == (7, 9)


def test_many_symbols_are_found_by_their_hashes(tmp_path: Path) -> None:
    sections = [returns(index) for index in range(300)]
    symbols = [define(f"function_{index}", made) for index, made in enumerate(sections)]
    library = load(tmp_path, machine_object(sections, symbols))
    assert [library[f"function_{index}"]() for index in range(300)] == list(range(300))


def test_the_hash_is_that_of_the_system_v_abi() -> None:
    assert linker._hash("printf") == 0x077905A6
    assert linker._hash("a" * 40) < 1 << 28


@pytest.mark.parametrize(
    ("kind", "before", "value", "place", "after"),
    [
        (2, 0, 0x2000, 0x1000, 0x1000),
        (4, 0, 0x1000, 0x2000, 0xFFFFF000),
    ],
)
def test_x86_distances(kind: int, before: int, value: int, place: int, after: int) -> None:
    data = bytearray(struct.pack("<2I", 0xAAAAAAAA, before))
    X86.apply(data, 4, kind, value, place)
    assert struct.unpack("<2I", data) == (0xAAAAAAAA, after)


@pytest.mark.parametrize(
    ("kind", "before", "value", "place", "after"),
    [
        (261, 0, 0x1000, 0x1004, 0xFFFFFFFC),  # .word
        (275, 0x90000000, 0x30123, 0x10FFC, 0x90000100),  # adrp x0, +0x20 pages
        (275, 0x90000000, 0x00123, 0x01000, 0xF0FFFFE0),  # adrp x0, -1 page
        (311, 0x90000010, 0x21008, 0x10000, 0xB0000090),  # adrp x16, +0x11 pages
        (277, 0x91000000, 0x40123, 0, 0x91048C00),  # add x0, x0, #0x123
        (278, 0x39400000, 0x40123, 0, 0x39448C00),  # ldrb w0, [x0, #0x123]
        (284, 0x79400000, 0x40124, 0, 0x79424800),  # ldrh w0, [x0, #0x124]
        (285, 0xB9400000, 0x40124, 0, 0xB9412400),  # ldr w0, [x0, #0x124]
        (286, 0xF9400000, 0x40128, 0, 0xF9409400),  # ldr x0, [x0, #0x128]
        (312, 0xF9400000, 0x40128, 0, 0xF9409400),  # ldr x0, [x0, #0x128]
        (299, 0x3DC00000, 0x40120, 0, 0x3DC04800),  # ldr q0, [x0, #0x120]
        (283, 0x94000000, 0x1100, 0x1000, 0x94000040),  # bl +0x100
        (282, 0x14000000, 0x0FFC, 0x1000, 0x17FFFFFF),  # b -4
    ],
)
def test_aarch64_instructions(kind: int, before: int, value: int, place: int, after: int) -> None:
    data = bytearray(struct.pack("<2I", 0xAAAAAAAA, before))
    ARM.apply(data, 4, kind, value, place)
    assert struct.unpack("<2I", data) == (0xAAAAAAAA, after)


def test_the_aarch64_stub_loads_its_slot_and_jumps() -> None:
    words = struct.unpack("<4I", ARM.stub(0x10000, 0x21008))
    assert words == (0xB0000090, 0xF9400611, 0xD61F0220, 0xD503201F)


@pytest.mark.parametrize(
    ("arch", "kind", "value", "message"),
    [
        (X86, 2, 1 << 31, "the model's code is too large to link: a distance of 2147483648"),
        (X86, 2, -(1 << 31) - 1, "too large to link"),
        (X86, 10, 0, "cannot link a relocation of kind 10 for x86-64"),
        (ARM, 283, 1 << 27, "too large to link"),
        (ARM, 275, 1 << 32, "too large to link"),
        (ARM, 299, 0x128, "cannot link the address 0x128: not a multiple of 16"),
        (ARM, 283, 2, "not a multiple of 4"),
        (ARM, 273, 0, "cannot link a relocation of kind 273 for AArch64"),
    ],
)
def test_what_does_not_fit_a_field_is_refused(arch, kind: int, value: int, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        arch.apply(bytearray(4), 0, kind, value, 0)


def test_two_strong_definitions_are_refused() -> None:
    objects = [machine_object([made := returns(n)], [define("f", made)]) for n in (1, 2)]
    with pytest.raises(ArtifactError, match="two objects define 'f'"):
        link(objects)


def test_objects_for_two_machines_are_refused() -> None:
    objects = [ElfObject(number, [], []) for number in MACHINES]
    with pytest.raises(ArtifactError, match="expected objects for one machine"):
        link(objects)


def test_an_address_among_the_constants_is_refused() -> None:
    constants = section(bytes(8), ALLOC, 8)
    absolute = ARCHITECTURES[host_arch()].absolute
    constants.relocations.append(Relocation(0, absolute, elsewhere("abs"), 0))
    with pytest.raises(ArtifactError, match=r"cannot link an address in read-only '\.test'"):
        link([machine_object([constants], [])])


def test_a_distance_to_what_is_defined_elsewhere_is_refused() -> None:
    code = section(bytes(8))
    kind = {"x86_64": 2, "aarch64": 275}[host_arch()]
    code.relocations.append(Relocation(0, kind, elsewhere("environ"), 0))
    with pytest.raises(ArtifactError, match="cannot link the use of 'environ', defined elsewhere"):
        link([machine_object([code], [])])


@pytest.fixture(scope="module")
def objects_of(tmp_path_factory: pytest.TempPathFactory):
    """The objects that TVM hands to its linker, by target."""

    def compile_for(target: str) -> list[bytes]:
        found: list[bytes] = []

        def keep(output: str, files: list[str], **options: object) -> None:
            found.extend(Path(file).read_bytes() for file in files)

        path = tmp_path_factory.mktemp("objects") / "model.so"
        dense(target)._executable.export_library(str(path), fcompile=keep)
        return found

    return compile_for


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("target", "arch"), [("x86-64-v3", "x86_64"), ("aarch64", "aarch64")])
def test_objects_of_llvm_are_read_and_linked(objects_of, target: str, arch: str) -> None:
    objects = [read_object(data) for data in objects_of(target)]
    assert {MACHINES[item.machine] for item in objects} == {arch}
    names = {made.name for item in objects for made in item.sections}
    assert {".text", ".rodata"} <= names
    assert not names & {".eh_frame", ".debug_info", ".note.GNU-stack"}
    defined = {symbol.name for item in objects for symbol in item.symbols if symbol.section}
    assert {"__tvm_ffi__library_bin", "__tvm_ffi_matmul"} <= defined
    image = link(objects)
    assert image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", image, 18)[0] == NUMBERS[arch]
    for name in ("__tvm_ffi__library_bin", "__tvm_ffi_matmul", "libm.so.6"):
        assert name.encode() + b"\0" in image


def test_weights_come_last_so_that_code_stays_near_its_constants(objects_of) -> None:
    objects = [read_object(data) for data in reversed(objects_of("native"))]
    link(objects)
    sections = [made for item in objects for made in item.sections if made.data]
    blob = next(s.section for item in objects for s in item.symbols if "library_bin" in s.name)
    assert max(sections, key=lambda made: made.address) is blob


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"MZ", "no 64-bit little-endian ELF object.*choose a target with a Linux triple"),
        (4, b"\x01", "no 64-bit little-endian ELF object"),
        (18, struct.pack("<H", 243), "cannot link for ELF machine 243"),
    ],
)
def test_other_objects_are_refused(objects_of, offset: int, value: bytes, message: str) -> None:
    data = bytearray(objects_of("native")[0])
    data[offset : offset + len(value)] = value
    with pytest.raises(ArtifactError, match=message):
        read_object(bytes(data))


def test_thread_local_data_is_refused(objects_of) -> None:
    data = bytearray(objects_of("native")[0])
    (table,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    for index in range(count):
        place = table + 64 * index + 8
        (flags,) = struct.unpack_from("<Q", data, place)
        if flags & CODE:
            struct.pack_into("<Q", data, place, flags | TLS)
    with pytest.raises(ArtifactError, match="cannot link the thread-local section"):
        read_object(bytes(data))


def test_only_an_empty_c_file_is_ignored(tmp_path: Path, objects_of) -> None:
    source, kernels = tmp_path / "lib0.c", tmp_path / "lib1.o"
    kernels.write_bytes(objects_of("native")[0])
    source.write_text(";\n")
    SharedLinker("x86_64-linux-gnu")(str(tmp_path / "out.so"), [str(source), str(kernels)])
    source.write_text("int f(void) { return 1; }")
    with pytest.raises(ArtifactError, match="no 64-bit little-endian ELF object"):
        SharedLinker("x86_64-linux-gnu")(str(tmp_path / "out.so"), [str(source), str(kernels)])
