# SPDX-License-Identifier: Apache-2.0
"""Compilation of TVM's CUDA text without a GPU: registers, spills and machine code.

The text is compiled as that of a model is, by ``tvm_fusion.codegen.nvrtc``; ``nvdisasm`` lists the
machine code.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile

import tvm
from tvm import tirx

from tvm_fusion.codegen.nvrtc import Resources, compile_cuda, resources
from tvm_fusion.errors import EngineError
from tvm_fusion.machine.cuda_toolkit import find_program


@functools.lru_cache(maxsize=8)
def cuda_source(mod: tvm.IRModule | tirx.PrimFunc, arch: str = "sm_90") -> str:
    """Return the CUDA text that TVM's own lowering makes of GPU functions.

    Parameters
    ----------
    mod : tvm.IRModule or tirx.PrimFunc
        The functions, bound to ``blockIdx`` and ``threadIdx``.
    arch : str
        The architecture, for example ``"sm_90"``.

    Returns
    -------
    source : str
        The text of all kernels. TVM compiles it when a kernel is first run, not here.
    """
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")
    return tirx.build(mod, target=target).imports[0].inspect_source()


def ptxas(source: str, arch: str = "sm_90") -> dict[str, Resources]:
    """Compile CUDA text; return what each kernel uses.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
    """
    return resources(compile_cuda(source, arch))


def sass(source: str, arch: str = "sm_90", fast_math: bool = False) -> dict[str, str]:
    """Compile CUDA text; return the machine code of each kernel, as ``nvdisasm`` lists it.

    Raises
    ------
    CompilationError
        Where the text does not compile; with the compiler's log.
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


def opcodes(code: str) -> list[str]:
    """Return the instructions' names of one kernel in their order, without operands."""
    return re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code)


def loops(code: str) -> list[list[str]]:
    """Return the opcodes of each loop of one kernel: from a backward branch's target to it."""
    names: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        names += opcodes(line)
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        # The last branch of every kernel jumps to itself.
        if jump and labels.get(jump[1], len(names)) < len(names) - 1:
            found.append(names[labels[jump[1]] :])
    return found


def main_loop(*codes: str) -> list[str]:
    """Return the opcodes of the loop of these kernels that loads most bytes; all if none loads any.

    Words that other blocks may be changing, which a kernel waits for, do not count.
    """
    found = [loop for code in codes for loop in loops(code) if count(_plain(loop), "LDG")]
    bodies = found or [opcodes(code) for code in codes]
    return max(map(_plain, bodies), key=_loaded_bytes)


def _loaded_bytes(names: list[str]) -> int:
    wide = {size: count(names, f"LDG.E.{8 * size}") for size in (8, 16)}
    return 4 * (count(names, "LDG") - sum(wide.values())) + sum(s * n for s, n in wide.items())


def _plain(names: list[str]) -> list[str]:
    """Leave out the loads of words that other blocks may be changing."""
    return [name for name in names if not (name.startswith("LDG") and "STRONG" in name)]


def count(names: list[str], opcode: str) -> int:
    """Count an opcode with any further modifiers: ``LDG.E.128`` also in its cached form."""
    return sum(name == opcode or name.startswith(opcode + ".") for name in names)
