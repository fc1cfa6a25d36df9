# SPDX-License-Identifier: Apache-2.0
"""Counts the loads and stores of GPU kernels in their IR, element by element, for given sizes.

The lowered kernels are interpreted for all threads at once: an index is an array with one number a
thread, a condition a mask. Values that come from memory are unknown. A condition on one (has this
block drawn the last ticket?) is taken to hold in the last block along ``blockIdx.x``, the axis that
splits outputs, and in no other. Threads of a warp that ask for the same element in one instruction
count once, as the hardware serves them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from numpy.typing import NDArray
from tvm import tirx
from tvm.target import Target

from schedules.errors import OpError
from tests.targets import PLAIN
from tvm_fusion.codegen.host_code import AfterSplit, HostCode, Step

WARP = 32
Value = Any  # an integer, an array with one for each thread, or None for what is unknown

_BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Div": np.floor_divide,  # Sizes are never negative.
    "Mod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}


class Traffic:
    """Reads and writes of a call of one function.

    Parameters
    ----------
    func : tirx.PrimFunc
        A scheduled function.
    target : Target
        What it was scheduled for.
    arguments : sequence of numpy.ndarray or number
        Arguments in the order of its parameters; arrays give their shapes only.

    Attributes
    ----------
    kernels : int
        How many were launched.
    reads, writes : list of numpy.ndarray
        Counts of the reads and writes of each element, one array for each parameter that is one.
    """

    def __init__(
        self, func: tirx.PrimFunc, target: Target, arguments: Sequence[np.ndarray | float]
    ) -> None:
        split = AfterSplit()
        named = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        with tvm.transform.PassContext(instruments=[split]):
            tirx.build(named, Target(target, PLAIN))  # the host's code never runs
        device = {
            var.name_hint: kernel
            for var, kernel in split.module.functions.items()
            if "tirx.kernel_launch_params" in kernel.attrs
        }
        [host] = (f for v, f in split.module.functions.items() if v.name_hint not in device)
        given = zip(host.params, arguments, strict=True)
        sizes = {param: a.size for param, a in given if isinstance(a, np.ndarray)}
        self._reads = {param: np.zeros(size, np.int64) for param, size in sizes.items()}
        self._writes = {param: np.zeros(size, np.int64) for param, size in sizes.items()}
        self.kernels = 0
        for step in HostCode(host, device, arguments).steps():
            if isinstance(step, Step):
                self.kernels += 1
                _Kernel(device[step.launch.kernel], step, self._reads, self._writes).run()
        self.reads, self.writes = list(self._reads.values()), list(self._writes.values())


class _Kernel:
    """One launch, all threads at once; those of a block are neighbours."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        step: Step,
        reads: dict[tirx.Var, NDArray[np.int64]],
        writes: dict[tirx.Var, NDArray[np.int64]],
    ) -> None:
        self._body = func.body
        grid, block = step.launch.grid, step.launch.block
        places = np.indices((*grid[::-1], *block[::-1])).reshape(6, -1)
        names = [f"{kind}Idx.{axis}" for kind in ("block", "thread") for axis in "zyx"]
        self._axes = dict(zip(names, places, strict=True))
        for axis, size in zip("xyz", step.launch.cluster, strict=True):
            self._axes[f"clusterCtaIdx.{axis}"] = self._axes[f"blockIdx.{axis}"] % size
        self._elected = self._axes["blockIdx.x"] == grid[0] - 1
        self._threads = int(np.prod(block))
        self._values: dict[tirx.Var, Value] = {}
        self._owner: dict[tirx.Var, tirx.Var] = {}
        for param, (argument, dtype) in zip(func.params, step.arguments, strict=True):
            if dtype is None:
                self._owner[param] = argument
            else:
                self._values[param] = argument
        self._reads, self._writes = reads, writes

    def run(self) -> None:
        self._visit(self._body, np.ones(len(self._elected), bool))

    def _visit(self, stmt: tirx.Stmt, mask: NDArray[np.bool_]) -> None:
        if not mask.any():
            return
        visit = getattr(self, f"_visit_{type(stmt).__name__}", None)
        if visit is None:
            raise OpError(f"traffic of {type(stmt).__name__} is not counted: {stmt}")
        visit(stmt, mask)

    def _visit_SeqStmt(self, stmt: tirx.SeqStmt, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        for part in _parts(stmt):
            self._visit(part, mask)

    def _visit_AttrStmt(self, stmt: tirx.AttrStmt, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        if stmt.attr_key == "thread_extent":
            self._values[stmt.node.var] = self._axes[str(stmt.node.thread_tag)]
        self._visit(stmt.body, mask)

    def _visit_AllocBuffer(self, stmt: tirx.Stmt, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        pass

    def _visit_DeclBuffer(self, stmt: Any, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        data = stmt.data.args[0] if isinstance(stmt.data, tvm.ir.Call) else stmt.data
        if data in self._owner:
            self._owner[stmt.buffer] = self._owner[data]

    def _visit_Bind(self, stmt: tirx.Bind, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        self._values[stmt.var] = self._evaluate(stmt.value, mask)

    def _visit_Evaluate(self, stmt: tirx.Evaluate, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        self._evaluate(stmt.value, mask)

    def _visit_BufferStore(self, stmt: Any, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        self._evaluate(stmt.value, mask)
        self._note(self._writes, stmt.buffer, stmt.indices, mask)

    def _visit_IfThenElse(self, stmt: Any, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        holds = self._holds(self._evaluate(stmt.condition, mask))
        self._visit(stmt.then_case, mask & holds)
        if stmt.else_case is not None:
            self._visit(stmt.else_case, mask & ~holds)

    def _visit_While(self, stmt: tirx.While, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        self._visit(stmt.body, mask)  # waits for other blocks, or tries again

    def _visit_For(self, stmt: tirx.For, mask: NDArray[np.bool_]) -> None:  # noqa: N802
        if not _touches_global(stmt, frozenset(self._owner)):
            return
        start, extent = self._evaluate(stmt.min, mask), self._evaluate(stmt.extent, mask)
        for count in range(int(np.max(np.where(mask, extent, 0)))):
            self._values[stmt.loop_var] = start + count
            self._visit(stmt.body, mask & (count < np.asarray(extent)))

    def _holds(self, value: Value) -> NDArray[np.bool_]:
        known = self._elected if value is None else np.asarray(value, bool)
        return np.broadcast_to(known, self._elected.shape)

    def _evaluate(self, expr: Any, mask: NDArray[np.bool_]) -> Value:
        kind = type(expr).__name__
        if kind == "IntImm":
            return int(expr.value)
        if kind == "Var":
            return self._values.get(expr)
        if kind in _BINARY:
            return _apply(_BINARY[kind], [self._evaluate(e, mask) for e in (expr.a, expr.b)])
        if kind == "Not":
            return _apply(np.logical_not, [self._evaluate(expr.a, mask)])
        if kind in ("Cast", "Broadcast"):
            return self._evaluate(expr.value, mask)
        if kind == "Ramp":
            base = np.broadcast_to(self._evaluate(expr.base, mask), self._elected.shape)
            return base[..., None] + int(expr.stride) * np.arange(int(expr.lanes))
        if kind == "Select":  # a lazy one in CUDA's text
            return self._choose(expr.condition, [expr.true_value, expr.false_value], mask)
        if kind == "TensorLoad":
            if expr.source.name == "place":  # the only launch has the first one of a workspace
                return 0
            for index in expr.indices:
                self._evaluate(index, mask)
            self._note(self._reads, expr.source, expr.indices, mask)
            return None
        if kind == "Call":
            return self._call(expr, mask)
        for part in getattr(expr, "vectors", ()):  # A Shuffle has vectors.
            self._evaluate(part, mask)
        return None

    def _call(self, call: tvm.ir.Call, mask: NDArray[np.bool_]) -> Value:
        name = getattr(call.op, "name", "").rpartition(".")[2]
        if name == "if_then_else":
            return self._choose(call.args[0], call.args[1:], mask)
        if name == "address_of":  # An atomic update or a fence takes it, which is neither.
            return None
        for argument in call.args:
            self._evaluate(argument, mask)
        return None

    def _choose(
        self, condition: tirx.Expr, branches: Sequence[tirx.Expr], mask: NDArray[np.bool_]
    ) -> Value:
        value = self._evaluate(condition, mask)
        holds = self._holds(value)
        chosen = [
            self._evaluate(branch, mask & part)
            for branch, part in zip(branches, (holds, ~holds), strict=True)
        ]
        return _apply(np.where, [value, *chosen])

    def _note(
        self,
        counts: dict[tirx.Var, NDArray[np.int64]],
        buffer: tirx.Var,
        indices: Sequence[tirx.Expr],
        mask: NDArray[np.bool_],
    ) -> None:
        if buffer not in self._owner:
            return
        [index] = (self._evaluate(index, mask) for index in indices)  # flattened by now
        if index is None:
            raise OpError(f"an index into {buffer.name} comes from memory: {indices}")
        lanes = np.atleast_1d(index).shape[-1] if np.ndim(index) > 1 else 1
        places = np.broadcast_to(np.reshape(index, (-1, lanes)), (len(mask), lanes))
        np.add.at(counts[self._owner[buffer]], _asked(places, mask, self._threads), 1)


def _asked(places: NDArray[np.int64], mask: NDArray[np.bool_], threads: int) -> NDArray[np.int64]:
    """The elements that each warp asks for, every one once."""
    warps = np.where(mask[:, None], places, -1).reshape(-1, threads, places.shape[1])
    padding = -threads % WARP
    warps = np.pad(warps, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    warps = np.sort(warps.reshape(-1, WARP * places.shape[1]), axis=1)
    new = np.diff(warps, axis=1, prepend=-1) != 0
    return warps[new & (warps >= 0)]


@functools.lru_cache(maxsize=4096)
def _parts(stmt: tirx.SeqStmt) -> list[tirx.Stmt]:
    return list(stmt.seq)


@functools.lru_cache(maxsize=4096)
def _touches_global(stmt: tirx.For, owners: frozenset[tirx.Var]) -> bool:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(
        stmt,
        [
            (tvm.ir.TensorLoad, lambda load: found.append(load.source)),
            (tirx.BufferStore, lambda store: found.append(store.buffer)),
        ],
    )
    return any(buffer in owners for buffer in found)


def _apply(function: Any, values: list[Value]) -> Value:
    """The function of known values; unknown where one is unknown."""
    if any(value is None for value in values):
        return None
    if any(np.ndim(value) > 1 for value in values):  # One number a thread goes beside vectors.
        values = [v[..., None] if np.ndim(v) == 1 else v for v in values]
    return function(*values)
