# SPDX-License-Identifier: Apache-2.0
"""Reductions of the comparison of GPU engines, as data.

A case is one graph: inputs of one shape and type, element-wise steps, one or several reductions.
Steps are words: ``cast float32``, ``neg``, ``abs``, ``exp``, ``isfinite``, ``reshape 8192 768``,
and ``add 1`` or ``mul 1``, whose number names another input. Groups: the tables of Panamera
(*paper2*, its sub-graphs, and *paper4*), single reductions of today's networks (*network*), every
operator and type once (*operator*), sizes (*sweep*), shapes without divisors (*odd*), and rows
times columns as nvFuser's suite has them (*grid*).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

from examples.subgraph_table import ROWS, Row
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload

BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "bool": 1,
}
GRID_ROWS = (16, 512, 2048, 8192, 16384)
GRID_COLUMNS = (768, 4096, 4098, 4100, 4104, 4112, 18432, 73728)
QUICK = (
    "paper*",
    "network/softmax sum*",
    "network/layer_norm*",
    "operator/* float32",
    "sweep/float32 2^*[02468]",
    "odd/*",
)
QUICK_BYTES = 1 << 30


@dataclass(frozen=True)
class Reduction:
    """One reduction of a case.

    Parameters
    ----------
    operator : str
        One of ``schedules.workload.reduce.OPERATORS``.
    axes : tuple[int, ...]
        Reduced axes of the result of the steps.
    steps : tuple[str, ...]
        Element-wise steps before the reduction.
    source : int
        The input that the first step takes.
    """

    operator: str
    axes: tuple[int, ...]
    steps: tuple[str, ...] = ()
    source: int = 0


@dataclass(frozen=True)
class Case:
    """One case: the same computation and inputs for every engine.

    Parameters
    ----------
    name : str
        The group, a slash, and a name within the group.
    shape : tuple[int, ...]
        Shape of each input.
    dtype : str
        Type of each input.
    reductions : tuple[Reduction, ...]
        One output each.
    inputs : int
        Number of inputs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reductions: tuple[Reduction, ...]
    inputs: int = 1

    @property
    def group(self) -> str:
        """Group of the case, the part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def elements(self) -> int:
        """Elements of one input."""
        return math.prod(self.shape)

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return self.inputs * self.elements * BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """Compulsory bytes: every input read once, every output written once."""
        outputs = (
            self.loops(reduction).outputs * BYTES[self.workload(reduction).out_dtype]
            for reduction in self.reductions
        )
        return self.input_bytes + sum(outputs)

    @property
    def form(self) -> str:
        """``all``, ``x`` or ``y``, that of the first reduction."""
        return self.loops(self.reductions[0]).form

    def loops(self, reduction: Reduction) -> CanonicalLoops:
        """The two coalesced loops."""
        return CanonicalLoops(self.reduced_shape(reduction), reduction.axes)

    def reduced_shape(self, reduction: Reduction) -> tuple[int, ...]:
        """The shape of the reduced tensor: that of the last reshape, or of the inputs."""
        shape = self.shape
        for step in reduction.steps:
            word, *sizes = step.split()
            if word == "reshape":
                shape = tuple(int(size) for size in sizes)
        return shape

    def output_shape(self, reduction: Reduction) -> tuple[int, ...]:
        """The shape of one output."""
        shape = self.reduced_shape(reduction)
        return tuple(size for axis, size in enumerate(shape) if axis not in reduction.axes)

    def workload(self, reduction: Reduction, finish: str = "auto") -> ReduceWorkload:
        """The reduction after its steps."""
        dtype = step_dtypes(reduction, self.dtype)[-1]
        return ReduceWorkload.create(
            reduction.operator,
            reduction.axes,
            len(self.reduced_shape(reduction)),
            dtype,
            finish=finish,
        )


def step_dtypes(reduction: Reduction, dtype: str) -> list[str]:
    """The type of the data and of the result of each step."""
    dtypes = [dtype]
    for step in reduction.steps:
        word, _, argument = step.partition(" ")
        dtypes.append({"cast": argument, "isfinite": "bool"}.get(word, dtypes[-1]))
    return dtypes


def all_cases() -> list[Case]:
    """Every case once; names are unique."""
    return [*paper2(), *paper4(), *network(), *operators(), *sweep(), *odd(), *grid()]


def select(quick: bool = False, only: Sequence[str] = ()) -> list[Case]:
    """Cases of which one of the patterns ``only`` matches the name; ``quick`` keeps a few."""
    found = all_cases()
    if quick:
        found = [case for case in found if matches(case, QUICK) and case.bytes <= QUICK_BYTES]
    return [case for case in found if not only or matches(case, only)]


def matches(case: Case, patterns: Sequence[str]) -> bool:
    """Return whether a shell pattern matches the name, or its beginning up to the slash."""
    return any(
        fnmatch.fnmatchcase(case.name, pattern) or case.group == pattern for pattern in patterns
    )


def paper2() -> list[Case]:
    """Panamera's Table 2."""
    return [_sub_graph(row) for row in ROWS]


def paper4() -> list[Case]:
    """Panamera's Table 4: float32 sums."""
    shapes: list[tuple[int, ...]] = [
        (16226304,),
        (1024, 131072),
        (131072, 1024),
        (1048576, 512),
    ]
    return [_case(f"paper4/{_by(shape)}", shape, "float32", (len(shape) - 1,)) for shape in shapes]


def network() -> list[Case]:
    """Reductions that dominate today's networks, the forms of section 5's list."""
    bf16, f16, f32 = "bfloat16", "float16", "float32"
    both = ("sum", "sum_squares")
    return [
        _several("layer_norm", (8192, 4096), bf16, (1,), both),
        _case("network/short rows", (262144, 128), bf16, (1,), operator="sum_squares"),
        _norm_gradient((8192, 4096)),
        _norm_gradient((32768, 768)),
        Case(
            "network/rms_norm gradient",
            (32768, 512),
            bf16,
            (Reduction("sum", (0,), ("mul 1",)), Reduction("sum", (1,), ("mul 1",))),
            2,
        ),
        _case("network/bias gradient ffn", (8192, 16384), bf16, (0,), "cast float32"),
        _case("network/bias gradient dlrm", (8192, 1024), f32, (0,)),
        _case("network/bias gradient one", (8192, 1), f32, (0,)),
        _case("network/bias gradient wide", (16000, 1024), f32, (0,)),
        _case("network/bias gradient deep", (16000, 256), f32, (0,)),
        *_softmax("attention", (262144, 1024), bf16),
        *_softmax("vocabulary", (4096, 128256), bf16),
        *_softmax("transformer", (4096, 36560), f32),
        *_softmax("decode 8", (8, 151936), f32),
        *_softmax("decode 64", (64, 128256), f32),
        _case("network/loss", (65536,), f32, (0,), operator="mean"),
        _case("network/gradient norm", (134217728,), bf16, (0,), operator="sum_squares"),
        _case("network/finite", (134217728,), f32, (0,), "isfinite", operator="and"),
        _case("network/absmax", (8192, 4096), bf16, (0, 1), "abs", operator="max"),
        _case("network/absmax rows", (8192, 4096), bf16, (1,), "abs", operator="max"),
        _several("batch_norm inception", (128, 64, 147, 147), f32, (0, 2, 3), both),
        _several("batch_norm mobilenet", (300, 96, 112, 112), f32, (0, 2, 3), both),
        _several("batch_norm nhwc", (200704, 256), f16, (0,), both),
        _several("group_norm unet", (32, 40960), f16, (1,), both),
        _several("group_norm vae", (32, 4194304), f16, (1,), both),
        _case("network/grouped query", (4, 7, 4096, 128), bf16, (1,)),
        _case("network/experts", (8192, 8, 7168), bf16, (1,)),
        _case("network/embedding 40", (50000, 40, 64), f32, (1,)),
        _case("network/embedding 39", (8000, 39, 80), f32, (1,)),
        _case("network/global pool", (128, 144, 56, 56), f32, (2, 3)),
        _case("network/mask rows", (4096, 4096), "bool", (1,), operator="or"),
        _case("network/mask", (16777216,), "bool", (0,), operator="and"),
    ]


def operators() -> list[Case]:
    """Every operator with every type that has it, 2^22 elements, all forms for sum and max."""
    cases = []
    for dtype in BYTES:
        numbers = () if dtype == "bool" else ("sum", "prod")
        logical = ("and", "or") if dtype in ("bool", "int32") else ()
        for operator in (*numbers, "min", "max", *logical):
            axes: tuple[tuple[int, ...], ...] = ((0, 1), (1,), (0,))
            for reduced in axes if operator in ("sum", "max") else axes[1:2]:
                form = CanonicalLoops((1024, 4096), reduced).form
                name = f"operator/{operator} {form} {dtype}"
                cases.append(_case(name, (1024, 4096), dtype, reduced, operator=operator))
    return cases


def sweep() -> list[Case]:
    """One output of 2^12 to 2^30 elements; every power for float32, every other one else."""
    return [
        _case(
            f"sweep/{dtype} 2^{power}",
            (1 << power,),
            dtype,
            (0,),
            operator="or" if dtype == "bool" else "sum",
        )
        for dtype in BYTES
        for power in range(12, 31, 1 if dtype == "float32" else 2)
    ]


def odd() -> list[Case]:
    """Extents that no vector width divides."""
    return [
        _case("odd/x", (8191, 4099), "float32", (1,)),
        _case("odd/y", (8191, 4099), "float32", (0,)),
        _case("odd/all", (1000003,), "bfloat16", (0,)),
    ]


def grid() -> list[Case]:
    """Rows times columns, both forms; columns around 4096 change the widest vector."""
    return [
        _case(f"grid/{form} {dtype} {rows}x{columns}", (rows, columns), dtype, (axis,))
        for form, axis in (("x", 1), ("y", 0))
        for dtype in ("float32", "bfloat16")
        for rows in GRID_ROWS
        for columns in GRID_COLUMNS
    ]


def _case(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    axes: tuple[int, ...],
    *steps: str,
    operator: str = "sum",
) -> Case:
    others = [int(step.split()[1]) for step in steps if step.split()[0] in ("add", "mul")]
    reduction = Reduction(operator, axes, steps)
    return Case(name, shape, dtype, (reduction,), 1 + max(others, default=0))


def _sub_graph(graph: Row) -> Case:
    """A row of the table with its inputs numbered."""
    reductions, used = [], 0
    for branch in graph.branches:
        source, steps = used, []
        for step in branch.steps:
            is_binary = step in ("add", "mul")
            used += is_binary
            steps.append(f"{step} {used}" if is_binary else step)
        reductions.append(Reduction("sum", branch.axes, tuple(steps), source))
        used += 1
    name = f"paper2/{graph.number}"
    return Case(name, graph.shape, graph.dtype, tuple(reductions), graph.inputs)


def _several(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    axes: tuple[int, ...],
    operators: Sequence[str],
) -> Case:
    reductions = tuple(Reduction(operator, axes) for operator in operators)
    return Case(f"network/{name}", shape, dtype, reductions)


def _norm_gradient(shape: tuple[int, int]) -> Case:
    reductions = (Reduction("sum", (0,)), Reduction("sum", (0,), ("mul 1",)))
    return Case(f"network/layer_norm gradient {_by(shape)}", shape, "bfloat16", reductions, 2)


def _softmax(name: str, shape: tuple[int, int], dtype: str) -> list[Case]:
    return [
        _case(f"network/softmax max {name}", shape, dtype, (1,), operator="max"),
        _case(f"network/softmax sum {name}", shape, dtype, (1,), "cast float32", "exp"),
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
