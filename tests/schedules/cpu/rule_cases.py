# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests of general rules: building, scheduling, inspecting and running."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import s_tir, te, tirx
from tvm.ir import IRModule
from tvm.s_tir.dlight import ScheduleRule
from tvm.target import Target

from schedules.cpu import RULES
from tests.targets import compile_unchecked
from tvm_fusion.compiler.targets import resolve

Array = NDArray[np.generic]

HOST = resolve("native", 2)
AVX2 = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 2})
AVX512 = Target(
    {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 8}
)
NEON = Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 4})
FOREIGN = Target("c")

# Extents at which tiles fit, just fit, and do not fit.
EXTENTS = [1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 23, 31, 32, 40, 65]


def function(inputs: Sequence[te.Tensor], *outputs: te.Tensor) -> tirx.PrimFunc:
    """The function as legalization makes it."""
    return te.create_prim_func([*inputs, *outputs]).with_attr("tirx.noalias", True)


def tensor(name: str, *shape: int, dtype: str = "float32") -> te.Tensor:
    return te.placeholder(shape, dtype, name=name)


def schedule(rule: ScheduleRule, func: tirx.PrimFunc, target: Target = HOST) -> tirx.PrimFunc:
    """Result of the rule on a function that it must take; well formed."""
    found = rule.apply(func, target, False)
    assert isinstance(found, s_tir.Schedule), f"{type(rule).__name__} refused {func}"
    scheduled = found.mod["main"]
    assert s_tir.analysis.verify_well_formed(scheduled)
    return scheduled


def schedule_first(func: tirx.PrimFunc, target: Target = HOST) -> tirx.PrimFunc:
    """Result of the first rule that takes the function."""
    return schedule(next(rule for rule in RULES if rule.apply(func, target, False)), func, target)


def compiled(func: tirx.PrimFunc, target: Target = HOST) -> tvm.runtime.Executable:
    named = func.with_attr("global_symbol", "main").without_attr("tirx.is_scheduled")
    return compile_unchecked(IRModule({"main": named}), target)


def assembly(func: tirx.PrimFunc, target: Target) -> str:
    return compiled(func, target).mod.inspect_source("asm")


def run(func: tirx.PrimFunc, *inputs: Array, target: Target = HOST) -> list[Array]:
    """Outputs of a function that must write every element of them."""
    outputs = [
        np.full([int(extent) for extent in buffer.shape], _poison(str(buffer.dtype)))
        for buffer in func.params[len(inputs) :]
    ]
    arguments = [tvm.runtime.tensor(array) for array in (*inputs, *outputs)]
    compiled(func, target)["main"](*arguments)
    return [argument.numpy() for argument in arguments[len(inputs) :]]


def _poison(dtype: str) -> np.generic:
    return np.dtype(dtype).type(
        np.nan if dtype.startswith("float") else 113 % 2 if dtype == "bool" else 113
    )


def lowered(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without blocks, conditions decided where the loops decide them."""
    passes = [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.StmtSimplify(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
    return tvm.transform.Sequential(passes)(IRModule({"main": func}))["main"]


def draw(shape: Sequence[int], seed: int = 0, dtype: str = "float32") -> Array:
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 5, shape).astype(dtype)


def close(found: Array, expected: Array, scale: float = 1.0) -> None:
    """Equal up to float32 rounding of sums of numbers as large as ``scale``."""
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5 * max(scale, 1.0))


def loops(func: tirx.PrimFunc, *kinds: tirx.ForKind) -> list[tirx.For]:
    """Loops of the given kinds, or all, in the order of the text."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append), order="pre")
    return [loop for loop in found if not kinds or loop.kind in kinds]


def extents(func: tirx.PrimFunc, kind: tirx.ForKind) -> list[int]:
    return [int(loop.extent) for loop in loops(func, kind)]


def parallel(func: tirx.PrimFunc) -> list[int]:
    """Extents of the parallel loops."""
    return extents(func, tirx.ForKind.PARALLEL)


def vectors(func: tirx.PrimFunc) -> set[int]:
    """Lengths of the vectors."""
    return set(extents(func, tirx.ForKind.VECTORIZED))


def guards(func: tirx.PrimFunc) -> int:
    """Number of blocks that still have a condition."""
    found: list[s_tir.SBlockRealize] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlockRealize, found.append))
    return sum(not isinstance(realize.predicate, tirx.IntImm) for realize in found)


def stores_outside_vectors(func: tirx.PrimFunc) -> int:
    """Number of stores outside of vector loops."""

    def count(node: object, kind: type, skip: Callable[[tirx.For], bool]) -> int:
        found: list[object] = []

        def enter(loop: tirx.For, visitor: tvm_ffi.StructuralVisitor) -> None:
            if not skip(loop):
                visitor.default_visit(loop)

        tvm_ffi.structural_visit(
            node, [(tirx.For, enter), (kind, lambda store, _: found.append(store))]
        )
        return len(found)

    return count(func.body, tirx.BufferStore, lambda loop: loop.kind == tirx.ForKind.VECTORIZED)
