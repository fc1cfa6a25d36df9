# SPDX-License-Identifier: Apache-2.0
"""Machine code of CUDA kernels as nvdisasm lists it: instructions and loops."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tvm_fusion.codegen.nvrtc import compile_cuda
from tvm_fusion.errors import EngineError
from tvm_fusion.machine.cuda_toolkit import find_program

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\b(U?R\d+|U?P\d+)(\.64)?")
_NO_RESULT = ("ST", "RED", "BAR", "BRA", "EXIT", "MEMBAR", "ERRBAR", "CCTL", "NANOSLEEP",
              "WARPSYNC")  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Parameters
    ----------
    guard : str
        Its predicate, such as ``@!P0``; empty if it always runs.
    opcode : str
        Name with modifiers.
    operands : str
        The rest.
    target : int | None
        Place in the code that a branch jumps to.
    """

    guard: str
    opcode: str
    operands: str
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def loaded_bytes(self) -> int:
        """Bytes that it loads from memory, other than words that other blocks may be changing."""
        if self.name != "LDG" or "STRONG" in self.opcode:
            return 0
        sizes = {"128": 16, "64": 8, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
        found = (size for part, size in sizes.items() if part in self.opcode.split("."))
        return next(found, 4)

    @property
    def results(self) -> set[str]:
        """Registers and predicates that it writes."""
        return self._split()[0]

    @property
    def sources(self) -> set[str]:
        """Registers and predicates that it reads, and perhaps some that it only writes."""
        return self._split()[1] | _registers(self.guard)

    def _split(self) -> tuple[set[str], set[str]]:
        """Results, which come first among the operands, and the rest."""
        registers: set[str] = set()
        parts = [] if self.name.startswith(_NO_RESULT) else self.operands.split(",")
        count = 0
        for count, operand in enumerate(parts):
            register = re.fullmatch(r"\s*(U?R\d+)(\.\w+)*", operand)
            if register and "SETP" not in self.opcode:
                registers |= _wide(register[1], self._width)
                count += 1
                break
            if re.fullmatch(r"\s*U?P[\dT]", operand) is None:
                break
            registers |= _registers(operand)
        return registers, _registers(",".join(self.operands.split(",")[count:]))

    @property
    def _width(self) -> int:
        words = self.opcode.split(".")
        return 4 if "128" in words else 2 if "64" in words or "WIDE" in words else 1


def _registers(text: str) -> set[str]:
    found: set[str] = set()
    for name, wide in _REGISTER.findall(text):
        found |= _wide(name, 2 if wide else 1)
    return found


def _wide(name: str, width: int) -> set[str]:
    letters = name.rstrip("0123456789")
    first = int(name[len(letters) :])
    return {f"{letters}{first + k}" for k in range(width)}


def sass(source: str, arch: str = "sm_90", fast_math: bool = False) -> dict[str, str]:
    """Compile CUDA text; return the machine code of each kernel, as ``nvdisasm`` lists it.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
    EngineError
        If there is no ``nvdisasm``.
    """
    disassembler = find_program("nvdisasm")
    if disassembler is None:
        raise EngineError("nvdisasm is not installed: pip install 'tvm-fusion[test]'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compile_cuda(source, arch, fast_math).cubin)
        file.flush()
        listing = subprocess.run(
            [disassembler, "--print-code", file.name], capture_output=True, text=True, check=True
        ).stdout
    parts = re.split(r"^//-+ \.text\.(\w+)", listing, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def instructions(code: str) -> list[Instruction]:
    """The instructions of one kernel in their order."""
    listed: list[Instruction] = []
    labels: dict[str, int] = {}
    jumps: dict[int, str] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(listed)
        for guard, opcode, operands in _INSTRUCTION.findall(line):
            if opcode.startswith("BRA") and (jump := re.search(r"`\((\.L_\w+)\)", operands)):
                jumps[len(listed)] = jump[1]
            listed.append(Instruction(guard, opcode, operands))
    return [
        Instruction(i.guard, i.opcode, i.operands, labels.get(jumps.get(place, "")))
        for place, i in enumerate(listed)
    ]


def opcodes(code: str) -> list[str]:
    """The instructions' names of one kernel in their order, without operands."""
    return [each.opcode for each in instructions(code)]


def loop_ranges(code: Sequence[Instruction]) -> Iterator[range]:
    """Places of the instructions of each loop: from a backward branch's target to it."""
    ends = 0  # Code behind it is where a warp with diverged lanes is sent to, and comes back from.
    for place, each in enumerate(code):
        if each.name == "EXIT" and not each.guard:
            ends = place
        # The last branch of every kernel jumps to itself.
        if each.target is not None and ends <= each.target < place:
            yield range(each.target, place + 1)


def loops(code: str) -> list[list[str]]:
    """The opcodes of each loop of one kernel."""
    found = instructions(code)
    return [[found[place].opcode for place in loop] for loop in loop_ranges(found)]


def main_range(code: Sequence[Instruction]) -> range | None:
    """Places of the loop that loads most bytes; None if none loads any.

    Words that other blocks may be changing, which a kernel waits for, do not count.
    """
    found = list(loop_ranges(code))
    best = max(found, key=lambda loop: _loaded(code, loop), default=None)
    return best if best is not None and _loaded(code, best) else None


def input_range(code: Sequence[Instruction]) -> range:
    """Places from the first load of an input to the last one; all if there is none.

    Partial results, which the kernel itself has written, are not loaded through the constant cache.
    """
    every = [place for place, each in enumerate(code) if each.loaded_bytes]
    places = [place for place in every if "CONSTANT" in code[place].opcode] or every
    return range(places[0], places[-1] + 1) if places else range(len(code))


def _loaded(code: Sequence[Instruction], places: Iterable[int]) -> int:
    return sum(code[place].loaded_bytes for place in places)


def main_loop(*codes: str) -> list[str]:
    """The opcodes of the loop of these kernels that loads most bytes, or of :func:`input_range`.

    Without the loads of words that other blocks may be changing.
    """
    bodies, every = [], []
    for code in map(instructions, codes):
        loop = main_range(code)
        bodies += [[code[place] for place in loop]] if loop else []
        every.append([code[place] for place in input_range(code)])
    most = max(bodies or every, key=lambda body: sum(each.loaded_bytes for each in body))
    return [each.opcode for each in most if each.name != "LDG" or "STRONG" not in each.opcode]


def count(names: list[str], opcode: str) -> int:
    """Count an opcode with any further modifiers: ``LDG.E.128`` also in its cached form."""
    return sum(name == opcode or name.startswith(opcode + ".") for name in names)


def bytes_before_use(body: Sequence[Instruction]) -> int:
    """Bytes of the loads of a body that are issued before the first of their results is read."""
    loaded: set[str] = set()
    total = 0
    for each in body:
        if each.loaded_bytes:
            total += each.loaded_bytes
            loaded |= each.results
        elif loaded & each.sources:
            return total
    return total
