# SPDX-License-Identifier: Apache-2.0
"""CPUs that are not at hand, the loops of what is compiled for them, and what these promise."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import tvm
from cpu.conv_cases import Case
from tvm import tirx
from tvm.target import Target

from examples.benchmarks.assembly import Loop, loops
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.tiles import row_runs, split_evenly, tile_counts
from schedules.workload.conv2d import Conv2DKernel
from tests.targets import compile_unchecked
from tvm_fusion.codegen.elf_object import read_object
from tvm_fusion.compiler.build_kernels import CPU_LOWERING

AARCH64 = ("cortex-a76", "neoverse-v2")
CPUS = ("x86-64-v3", "znver4", "znver5", "skylake-avx512", "sapphirerapids", *AARCH64)

RARE = 32
RARE_AT_BORDERS = 10
WHOLE_ROW = 200

Tile = tuple[int, int]
Check = Callable[[Sequence[Loop]], list[str]]


@dataclass(frozen=True)
class Form:
    """A scheduled function, and what tells the defects of its loops."""

    func: tirx.PrimFunc
    checks: tuple[Check, ...]


def machine_of(cpu: str) -> str:
    return "aarch64" if cpu in AARCH64 else "x86_64"


def target_of(cpu: str) -> Target:
    triple = f"{machine_of(cpu)}-linux-gnu"
    return Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 2})


def info_of(cpu: str) -> CPUInfo:
    return CPUInfo.from_target(target_of(cpu))


def lanes_of(cpu: str) -> int:
    return info_of(cpu).lanes("float32")


def loops_of(functions: Mapping[str, tirx.PrimFunc], cpu: str) -> dict[str, list[Loop]]:
    """Compile scheduled functions together; return the loops of each."""
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    library = compile_unchecked(tvm.IRModule(named), target=target_of(cpu))
    found: dict[str, list[Loop]] = {name: [] for name in functions}
    for loop in loops(str(library.mod.inspect_source("asm"))):
        if loop.function in found:
            found[loop.function].append(loop)
    return found


def code_bytes(func: tirx.PrimFunc, cpu: str) -> int:
    """Bytes of the machine code of a function, compiled as the pipeline does."""
    target = target_of(cpu)
    with target, tempfile.TemporaryDirectory() as folder:
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        path = Path(folder, "code.o")
        tvm.tirx.build(mod, target=target, pipeline=CPU_LOWERING).write_to_file(str(path))
        sections = read_object(path.read_bytes()).sections
    return sum(len(section.data) for section in sections if section.executable)


def defects(forms: Mapping[str, Form], cpu: str) -> list[str]:
    """Defects in the machine code of some forms, compiled together."""
    found = loops_of({name: form.func for name, form in forms.items()}, cpu)
    return [
        f"{name}: {text}"
        for name, form in forms.items()
        for check in form.checks
        for text in check(found[name])
    ]


def check_mmla(text: str, name: str, least: int) -> None:
    """Check the code of products of two rows by two columns: it has an instruction, and no dots.

    So many in a step of the largest tile; innermost loops neither store sums nor use the stack.
    """
    named = [(loop, [i.name for i in loop.instructions]) for loop in loops(text)]
    assert max(names.count(name) for _, names in named) >= least
    for loop, names in named:
        assert not any(each.endswith("dot") for each in names), loop
        if name in names and loop.innermost:
            assert not loop.stores and not loop.stack_loads, loop


def kernel_case(kernel: Conv2DKernel) -> Case:
    """A workload as the case from which ``build`` makes its function."""
    return Case(
        kernel.layers,
        kernel.batch or 1,
        int(kernel.height or 1),
        int(kernel.width or 1),
        kernel.lanes,
        kernel.residual,
        kernel.data_layout == "NCHW",
    )


def dense_tiles_of(
    kernel: Conv2DKernel, pixels: int, blocks: int
) -> tuple[dict[Tile, set[int]], set[Tile]]:
    """Register tiles of a dense or grouped layer.

    Returns the pixels and vectors of all tiles, each with how many multiply-adds may be the step of
    a loop: those of one tap, or of a row of the kernel, which LLVM may unroll. And with the tiles
    those parts of them at the border that see a tap.
    """
    layer = kernel.layers[0]
    height, width = layer.output_size(int(kernel.height or 1), int(kernel.width or 1))
    per_group = -(-layer.out_channels // layer.groups // kernel.lanes)
    steps: dict[int, set[int]] = {}
    seen: set[int] = set()
    if layer.is_pointwise and kernel.data_layout != "NCHW":
        steps = {size: {size} for size, _ in tile_counts(height * width, pixels)}
    else:
        for run in row_runs(layer, int(kernel.width or 1), width, pixels):
            spans = [high - low for low, high in run.taps if high > low]
            steps.setdefault(run.size, {run.size}).add(sum(spans))
            seen |= set(spans)
    vectors = set(split_evenly(per_group, blocks))
    whole = {(p, v): {step * v for step in found} for p, found in steps.items() for v in vectors}
    return whole, {(p, v) for p in seen | set(steps) for v in vectors}


def check_dense(whole: Mapping[Tile, set[int]], seen: Iterable[Tile], depth: int) -> Check:
    """Every loop keeps its sums in registers; each whole tile is there, with its multiply-adds.

    A loop may store sums only if it holds all ``depth`` terms of each, or another loop with most
    of them. One spill in ``RARE_AT_BORDERS`` multiply-adds is forgiven where a part of a tile at
    the border is computed, and where a kernel of seven columns is unrolled.
    """
    largest = max(pixels * vectors for pixels, vectors in whole)

    def spills(loop: Loop) -> bool:
        is_inner = loop.fmas in (4 * largest, 8 * largest) and depth % 49
        return loop.stack_stores * RARE_AT_BORDERS > (0 if is_inner else loop.fmas)

    def stores_late(loop: Loop) -> bool:
        done = (loop.stores - loop.stack_stores) * depth <= loop.fmas
        return done or (not loop.innermost and loop.stores <= largest)

    def check(found: Sequence[Loop]) -> list[str]:
        hot = [loop for loop in found if loop.fmas]
        wrong = [
            str(loop)
            for loop in hot
            if spills(loop)
            or not stores_late(loop)
            or (loop.stack_loads and not loop.stores)
            or not any(_is_promised(loop, tile) for tile in seen)
        ]
        return wrong + _missing(hot, whole)

    return check


def check_bytes(whole: Mapping[Tile, set[int]], seen: Iterable[Tile], depth: int) -> Check:
    """Check products of bytes as :func:`check_dense`; floats are multiplied at the end only."""
    check = check_dense(whole, seen, depth)

    def of_bytes(loop: Loop) -> Loop:
        floats = ("vfmadd", "fmla")
        kept = [each for each in loop.instructions if not each.name.startswith(floats)]
        return replace(loop, instructions=kept)

    return lambda found: check([of_bytes(loop) for loop in found])


def _is_promised(loop: Loop, tile: Tile) -> bool:
    """Return whether the loads are a tile's: a broadcast a pixel, a load a vector, each step."""
    pixels, vectors = tile
    steps = Fraction(loop.fmas, pixels * vectors)
    loads = loop.loads - loop.stack_loads
    return loop.fmas % vectors == 0 and loads <= steps * (pixels + vectors)


def _missing(hot: Sequence[Loop], tiles: Mapping[Tile, set[int]]) -> list[str]:
    return [
        f"no loop holds the multiply-adds of whole steps of {pixels} pixels x {vectors} vectors"
        for (pixels, vectors), steps in tiles.items()
        if not any(loop.fmas % step == 0 for loop in hot for step in steps)
    ]


def check_rows(terms: int = 4, constants: int = 0) -> Check:
    """Sums of at least ``terms`` terms are stored once; a multiply-add takes a load, and few more.

    So many constants as have no register may be read from the stack. Where LLVM unrolls the whole
    kernel, one spill in ``RARE`` multiply-adds is forgiven; and around the innermost loops, where
    rare cases of the borders stand, and in rows that one tile holds (``WHOLE_ROW`` multiply-adds
    and more), one in eight.
    """

    def check(found: Sequence[Loop]) -> list[str]:
        hot = [loop for loop in found if loop.fmas]
        wrong = [str(loop) for loop in hot if is_wrong(loop)]
        return wrong or ([] if hot else ["no loop holds multiply-adds"])

    def is_wrong(loop: Loop) -> bool:
        if loop.loads > constants + loop.fmas + loop.fmas // 8:
            return True
        if not loop.innermost or loop.fmas >= WHOLE_ROW:
            return loop.stack_stores > constants + loop.fmas // 8
        return (
            loop.stack_stores > loop.fmas // RARE
            or loop.stack_loads > constants + loop.fmas // 8
            or loop.stores * terms > loop.fmas
        )

    return check


def check_tiles(tiles: Mapping[Tile, set[int]]) -> Check:
    """Check that there are loops of some register tiles, and that they are without defects."""

    def check(found: Sequence[Loop]) -> list[str]:
        pure = [loop for loop in found if loop.fmas and not loop.stores and not loop.stack_loads]
        kept = [loop for loop in pure if any(_is_promised(loop, tile) for tile in tiles)]
        return _missing(kept, tiles)

    return check


def check_transforms() -> Check:
    """Short sums are loaded no more often than they add.

    Stores are counted loosely: those of tiles at the border, of which one is executed, all count.
    """

    def check(found: Sequence[Loop]) -> list[str]:
        short = [loop for loop in found if loop.sums]
        work = [loop.sums + loop.fmas for loop in short]
        wrong = [
            str(loop)
            for loop, adds in zip(short, work, strict=True)
            if loop.loads > adds or loop.stores * 2 > adds * 3
        ]
        return wrong or ([] if short else ["no loop adds vectors"])

    return check


def check_transposes(lanes: int) -> Check:
    """Loops that move whole blocks of ``lanes`` pixels shuffle registers no more than needed.

    That is log2(lanes) times for each vector, by instructions of two operands.
    """
    rounds = lanes.bit_length() - 1

    def check(found: Sequence[Loop]) -> list[str]:
        moving = [loop for loop in found if loop.innermost and loop.stores >= lanes]
        wrong = [
            f"{loop.shuffles} shuffles in {loop}"
            for loop in moving
            if loop.shuffles > rounds * loop.stores or loop.stack_stores
        ]
        return wrong or ([] if moving else ["no loop stores whole blocks"])

    return check


def check_matrix(streams: bool) -> Check:
    """The loop of most multiply-adds keeps its sums in registers; of a stream, for eight steps."""

    def check(found: Sequence[Loop]) -> list[str]:
        hot = [loop for loop in found if loop.fmas and loop.innermost]
        wrong = [
            str(loop)
            for loop in hot
            if loop.stack_stores
            or loop.stack_loads
            or loop.stores * 8 > (loop.fmas if streams else 0)
            or loop.loads * 8 > loop.fmas * 9
        ]
        return wrong or ([] if hot else ["no loop holds multiply-adds"])

    return check


def check_reduction() -> Check:
    """The loop of most sums stores at most every eighth of them, and no loop spills."""

    def check(found: Sequence[Loop]) -> list[str]:
        inner = [loop for loop in found if loop.innermost and loop.fmas + loop.sums]
        if not inner:
            return ["no loop adds vectors"]
        most = max(inner, key=lambda loop: loop.fmas + loop.sums)
        wrong = [str(loop) for loop in inner if loop.stack_stores or loop.stack_loads]
        sums = most.fmas + most.sums
        return wrong + [str(most)] * (most.stores * 8 > sums or most.loads > 2 * sums)

    return check
