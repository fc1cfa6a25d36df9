# SPDX-License-Identifier: Apache-2.0
"""Parser of LLVM's assembly text: functions, loops, and the effect of a loop's instructions.

Takes x86-64 in AT&T's syntax and AArch64, as ``inspect_source("asm")`` of a compiled module gives
them. Only instructions on vectors are classified: multiply-adds, sums, loads, stores, and those
that access the stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_LABEL = re.compile(r"^([\w.$]+):")
_FUNCTION = re.compile(r"^\t\.type\t([\w.$]+),[@%]function", re.MULTILINE)
_LAMBDA = re.compile(r"(\.L__tvm_parallel_lambda[\w.]*)")
_JUMP = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)\s(?:.*\s)?(\.L\w+)$")
_LEAVES = re.compile(r"(?:jmp|b|br|ret\w?|ud2|brk)\b(?!\.)")
_FRAME = re.compile(r"\tmovq\t%rsp, %(rbp)|\t(?:mov|add)\t(x29), sp")
_X86_VECTOR = re.compile(r"%([xyz])mm\d+")
_ARM_VECTOR = re.compile(r"\b([vqds])\d+\b")
_X86_MEMORY = re.compile(r"\((?:%(\w+))?[^)]*\)")
_ARM_MEMORY = re.compile(r"\[(\w+)[^\]]*\]")
_X86_FMA = re.compile(r"vfn?m(?:add|sub)\d{3}p|vpdpbusd|vpmaddwd")  # the latter of integers
_X86_SUM = re.compile(r"v(?:add|sub|mul|max|min)p")
_X86_SHUFFLE = re.compile(r"v(?:unpck|shuf|perm|insert|extract|blend|align)")
_ARM_SHUFFLE = re.compile(r"(?:zip|uzp|trn)\d|ext|tbl|ins\b")
_ARM_FMA = re.compile(r"fml[as]\b|(?:s|us|bf)dot\b|(?:us|bf)mmla\b")
_ARM_SUM = re.compile(r"f(?:add|sub|mul|max(?:nm)?|min(?:nm)?|cm\w\w)\b")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Parameters
    ----------
    text : str
        Mnemonic and operands.
    frame : str
        The register besides the stack pointer that points into the stack; empty if there is none.
    """

    text: str
    frame: str = ""

    @cached_property
    def name(self) -> str:
        """The mnemonic."""
        return self.text.split(None, 1)[0]

    @cached_property
    def operands(self) -> str:
        """The text after the mnemonic."""
        return self.text[len(self.name) :].strip()

    @cached_property
    def vectors(self) -> list[str]:
        """Kinds of its vector registers: ``x``, ``y``, ``z``, or ``v``, ``q``, ``d``, ``s``."""
        return (_X86_VECTOR if "%" in self.text else _ARM_VECTOR).findall(self.operands)

    @cached_property
    def base(self) -> str:
        """Base register of its memory operand, or ``?``; empty if it touches no memory."""
        if self.name.startswith(("lea", "prefetch", "prfm", "prfum")):
            return ""
        found = (_X86_MEMORY if "%" in self.text else _ARM_MEMORY).search(self.operands)
        # A lane of a register, such as v0.s[1], also stands in brackets.
        return "" if found is None or (found[1] or "").isdigit() else found[1] or "?"

    @property
    def is_fma(self) -> bool:
        """Return whether it multiplies and adds vectors."""
        if self.name == "vpmaddwd" and set(self.vectors) == {"x"}:
            return False  # LLVM multiplies pairs of indices by it
        return bool(_X86_FMA.match(self.name)) or self._computes(_ARM_FMA)

    @property
    def is_sum(self) -> bool:
        """Return whether it adds, multiplies or compares vectors, without being a multiply-add."""
        return bool(_X86_SUM.match(self.name)) or self._computes(_ARM_SUM)

    @property
    def is_shuffle(self) -> bool:
        """Return whether it moves elements among vector registers, none of them from memory."""
        names = _X86_SHUFFLE if "%" in self.text else _ARM_SHUFFLE
        return bool(names.match(self.name)) and bool(self.vectors) and not self.base

    def _computes(self, names: re.Pattern[str]) -> bool:
        return bool(names.match(self.name)) and self.vectors[:1] == ["v"]

    @property
    def loads(self) -> int:
        """Number of vectors, or parts of them, that it reads from memory."""
        return 0 if self._writes else self._moves

    @property
    def stores(self) -> int:
        """Number of vectors, or parts of them, that it writes to memory."""
        return self._moves if self._writes else 0

    @property
    def _moves(self) -> int:
        if not self.base:
            return 0
        return min(1, len(self.vectors)) if "%" in self.text else len(self.vectors)

    @property
    def _writes(self) -> bool:
        if "%" in self.text:
            return bool(re.search(r"\)(?:\s*\{%k\d\})?$", self.operands))
        return self.name.startswith("st")

    @property
    def on_stack(self) -> bool:
        """Return whether it moves vectors from or to the stack."""
        return bool(self.vectors) and self.base in {"rsp", "sp", self.frame} - {""}

    @property
    def target(self) -> str:
        """Label that it may jump to; empty if none."""
        found = _JUMP.match(self.text)
        return found[1] if found else ""

    @property
    def leaves(self) -> bool:
        """Return whether the next instruction of the text is not executed after it."""
        return bool(_LEAVES.match(self.text))


@dataclass(frozen=True)
class Loop:
    """A loop.

    Parameters
    ----------
    function : str
        Name of the function that holds it.
    instructions : Sequence[Instruction]
        Instructions of one iteration in the order of the text, without those of the loops in it.
    innermost : bool
        Whether it holds no other loop.
    """

    function: str
    instructions: Sequence[Instruction]
    innermost: bool

    @cached_property
    def fmas(self) -> int:
        """Multiply-adds of vectors."""
        return sum(instruction.is_fma for instruction in self.instructions)

    @cached_property
    def sums(self) -> int:
        """Additions, multiplications and comparisons of vectors."""
        return sum(instruction.is_sum for instruction in self.instructions)

    @cached_property
    def shuffles(self) -> int:
        """Instructions that move elements among vector registers."""
        return sum(instruction.is_shuffle for instruction in self.instructions)

    @cached_property
    def loads(self) -> int:
        """Vectors and broadcast elements that are read from memory, also as operands."""
        return sum(instruction.loads for instruction in self.instructions)

    @cached_property
    def stores(self) -> int:
        """Vectors that are written to memory."""
        return sum(instruction.stores for instruction in self.instructions)

    @cached_property
    def stack_loads(self) -> int:
        """Those of ``loads`` that read the stack."""
        return sum(i.loads for i in self.instructions if i.on_stack)

    @cached_property
    def stack_stores(self) -> int:
        """Those of ``stores`` that write to the stack."""
        return sum(i.stores for i in self.instructions if i.on_stack)

    def __str__(self) -> str:
        return (
            f"a loop of {self.function}: {self.fmas} multiply-adds, {self.sums} sums, "
            f"{self.loads} loads, {self.stores} stores of vectors; of these "
            f"{self.stack_loads} loads and {self.stack_stores} stores touch the stack"
        )


@dataclass
class _Block:
    """Instructions without a jump but the last one, and the numbers of the blocks that follow."""

    label: str = ""
    instructions: list[Instruction] = field(default_factory=list)
    after: list[int] = field(default_factory=list)


def functions(text: str) -> dict[str, list[str]]:
    """The lines of each function, by name; directives and comments are left out."""
    by_name: dict[str, list[str]] = {name: [] for name in _FUNCTION.findall(text)}
    lines: list[str] = []
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label and label[1] in by_name:
            lines = by_name[label[1]]
        elif label:
            lines.append(f"{label[1]}:")
        elif line.startswith("\t") and not line.startswith("\t."):
            lines.append(_without_comment(line))
    return by_name


def _without_comment(line: str) -> str:
    # "#" also marks the numbers of AArch64.
    return re.split(r"//|\s#\s", line)[0].rstrip()


def loops(text: str) -> list[Loop]:
    """All loops of all functions of an assembly text.

    Those of a parallel loop's body count as those of the function that starts the loop, and those
    of TVM's entry of a function as those of the function, which LLVM may inline there.
    """
    by_name = functions(text)
    starts = {
        called: _source_name(name)
        for name, lines in by_name.items()
        for called in _LAMBDA.findall("\n".join(lines))
        if called != name
    }
    return [
        Loop(starts.get(name, _source_name(name)), instructions, innermost)
        for name, lines in by_name.items()
        for instructions, innermost in _loops(_blocks(lines))
    ]


def _source_name(name: str) -> str:
    return name.removeprefix("__tvm_ffi_").removesuffix("_compute_")


def _blocks(lines: list[str]) -> list[_Block]:
    frame = next((found for line in lines if (found := _FRAME.match(line))), None)
    register = next(filter(None, frame.groups())) if frame else ""
    blocks = [_Block()]
    for line in lines:
        if line.endswith(":"):
            blocks.append(_Block(line[:-1]))
        elif line.strip():
            instruction = Instruction(line.strip().removeprefix("{vex}").strip(), register)
            blocks[-1].instructions.append(instruction)
            if instruction.target or instruction.leaves:
                blocks.append(_Block())
    places = {block.label: number for number, block in enumerate(blocks) if block.label}
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.target in places:
            block.after.append(places[last.target])
        if number + 1 < len(blocks) and not (last is not None and last.leaves):
            block.after.append(number + 1)
    return blocks


def _loops(blocks: list[_Block]) -> list[tuple[list[Instruction], bool]]:
    """Natural loops without the loops in them, and whether there are none."""
    before: list[list[int]] = [[] for _ in blocks]
    for number in _closure(0, lambda number: blocks[number].after):
        for following in blocks[number].after:
            before[following].append(number)
    above = _dominators(before)
    bodies: dict[int, set[int]] = {}
    for header, earlier in enumerate(before):
        for number in earlier:
            if above[number] >> header & 1:
                cut = [*before[:header], [], *before[header + 1 :]]
                bodies.setdefault(header, {header}).update(_closure(number, cut.__getitem__))
    ranges = []
    for header, body in bodies.items():
        held = [bodies[other] for other in bodies if other != header and other in body]
        own = sorted(body.difference(*held))
        instructions = [i for number in own for i in blocks[number].instructions]
        ranges.append((instructions, not held))
    return ranges


def _dominators(before: list[list[int]]) -> list[int]:
    """Dominators of each block, as bits: the blocks that every path to it goes through."""
    everything = (1 << len(before)) - 1
    above = [1] + [everything] * (len(before) - 1)
    changed = True
    while changed:
        changed = False
        for number in range(1, len(before)):
            common = everything if before[number] else 0
            for previous in before[number]:
                common &= above[previous]
            common |= 1 << number
            changed |= common != above[number]
            above[number] = common
    return above


def _closure(start: int, following: Callable[[int], Iterable[int]]) -> set[int]:
    """All blocks that are reachable from ``start``."""
    reached: set[int] = set()
    todo = [start]
    while todo:
        here = todo.pop()
        if here not in reached:
            reached.add(here)
            todo += following(here)
    return reached
