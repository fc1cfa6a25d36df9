# SPDX-License-Identifier: Apache-2.0
"""The modules embedded in a library: what is rewritten, and what is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_fusion.codegen.elf_object import ElfObject, Section, Symbol
from tvm_fusion.codegen.library_bin import SYMBOL, machine_code_of, packed, rewrite_modules
from tvm_fusion.errors import ArtifactError

Modules = list[tuple[str, bytes]]


def vector(*numbers: int) -> bytes:
    return struct.pack(f"<Q{len(numbers)}Q", len(numbers), *numbers)


def embedded(modules: Modules) -> bytes:
    """A chain of imports, as TVM lays it out."""
    count = len(modules)
    starts = [min(number, count - 1) for number in range(count + 1)]
    body = vector(*starts) + vector(*range(1, count))
    for kind, content in modules:
        body += packed(kind.encode()) + (b"" if kind == "_lib" else packed(content))
    return struct.pack("<Q", len(body)) + body


def an_object(data: bytes, before: bytes = b"", behind: bytes = b"") -> ElfObject:
    section = Section(".rodata", 2, 1, bytearray(before + data + behind))
    symbol = Symbol(SYMBOL, section, len(before), len(data), 0x11)
    return ElfObject(62, [section], [Symbol("", None, 0, 0, 0), symbol])


@given(
    st.lists(st.tuples(st.sampled_from(["_lib", "cuda", "other"]), st.binary()), min_size=1),
    st.binary(),
    st.binary(),
)
def test_contents_are_replaced_and_all_else_stays(
    modules: Modules, before: bytes, new: bytes
) -> None:
    item = an_object(embedded(modules), before)
    rewritten = rewrite_modules(item, lambda kind, old: new if kind == "cuda" else old)
    wanted = embedded([(kind, new if kind == "cuda" else old) for kind, old in modules])
    symbol = next(symbol for symbol in rewritten.symbols if symbol.name == SYMBOL)
    assert symbol.section is rewritten.sections[0]
    assert bytes(symbol.section.data) == before + wanted
    assert (symbol.value, symbol.size) == (len(before), len(wanted))


def test_an_object_without_modules_stays() -> None:
    item = ElfObject(62, [], [Symbol("main", None, 0, 0, 0)])
    assert rewrite_modules(item, lambda kind, old: b"") is item


@pytest.mark.parametrize(
    ("data", "behind", "message"),
    [
        (embedded([("cuda", b"text")])[:-3], b"", "are cut off"),
        (b"\1", b"", "are cut off"),
        (embedded([("cuda", b"text")]), b"more", "not at the end of their section"),
        (struct.pack("<Q", 32) + vector(0) + vector() + bytes(8), b"", "of an unknown form"),
    ],
)
def test_another_layout_is_refused(data: bytes, behind: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        rewrite_modules(an_object(data, behind=behind), lambda kind, old: old)


class _Executable:
    """Result of ``tvm.compile``, with one module of kernels."""

    kind = "relax.VMExecutable"
    imports: list = []

    def __init__(self) -> None:
        self.mod = self


def test_cuda_text_that_nobody_generated_is_refused() -> None:
    rewrite = machine_code_of(_Executable(), "sm_90")
    with pytest.raises(ArtifactError, match="CUDA kernels that TVM embedded are of an unknown"):
        rewrite("cuda", packed(b"cuda") + packed(b"another text"))


@pytest.mark.parametrize(
    ("kind", "content"), [("cuda", packed(b"cubin") + b"rest"), ("opencl", b"text")]
)
def test_machine_code_and_other_kinds_stay(kind: str, content: bytes) -> None:
    assert machine_code_of(_Executable(), "sm_90")(kind, content) == content
