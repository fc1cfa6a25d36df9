# SPDX-License-Identifier: Apache-2.0
"""Interpreter of the host code of a GPU function: sizes, allocations, branches, launches.

TVM's own host code needs TVM's runtime for the device, which its wheel lacks for OpenCL, and which
allocates memory and chooses queues itself. Here the launches of a call are a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy the dtype "bfloat16"
import numpy as np
import tvm
from tvm import tirx
from tvm.sym import Analyzer
from tvm.tirx.buffer import BufferType

from ..errors import InvalidInputError, OpError

_AXES = {
    f"{kind}Idx.{axis}": (kind, i)
    for kind in ("block", "thread", "clusterCta")
    for i, axis in enumerate("xyz")
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: three sizes each of grid and cluster (blocks), and block (threads)."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True)
class Allocation:
    """A buffer that the function allocates for the time of one call."""

    buffer: tirx.Var
    nbytes: int


@dataclass(frozen=True)
class Step:
    """A launch with its arguments: a buffer's variable, or a number of the given dtype."""

    launch: Launch
    arguments: tuple[tuple[Any, np.dtype | None], ...]


@tvm.instrument.pass_instrument
class AfterSplit:
    """Keeps the module as TVM's lowering has it after the split into host and kernels."""

    module: tvm.IRModule

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        """Keep the module of that pass."""
        if info.name == "tirx.SplitHostDevice":
            self.module = module

    def functions(self) -> tuple[dict[str, tirx.PrimFunc], dict[str, tirx.PrimFunc]]:
        """The host functions and the kernels, by their names."""
        named = {var.name_hint: func for var, func in self.module.functions.items()}
        kernels = {n: f for n, f in named.items() if "tirx.kernel_launch_params" in f.attrs}
        return {n: f for n, f in named.items() if n not in kernels}, kernels


def opencl_texts(source: str) -> dict[str, str]:
    """The parts of TVM's OpenCL text, by their kernels: each is a program, with all declarations.

    Bytes stand for ``bool*``, which OpenCL forbids as the type of a parameter.
    """
    texts = re.split(r"^// Function: (\w+)\n", source, flags=re.MULTILINE)[1:]
    return {
        name: re.sub(r"\b(__global|__local) bool\b", r"\1 uchar", text)
        for name, text in zip(texts[::2], texts[1::2], strict=True)
    }


class HostCode:
    """The host part of a function after TVM's split, run with one set of arguments.

    ``host``: the function that launches. ``kernels``: the kernels by name. ``arguments``: as the
    parameters of ``host``; arrays give their shapes only. ``stream``: number of the stream of its
    launches. Raises InvalidInputError where an argument does not fit its parameter.
    """

    def __init__(
        self,
        host: tirx.PrimFunc,
        kernels: Mapping[str, tirx.PrimFunc],
        arguments: Sequence[np.ndarray | float],
        stream: int = 0,
    ) -> None:
        self._host = host
        self._stream = stream
        self._kernels = kernels
        self._sizes = Analyzer()
        self._same: dict[tirx.Var, tirx.Var] = {}
        if len(arguments) != len(host.params):
            names = ", ".join(param.name for param in host.params)
            raise InvalidInputError(f"{len(arguments)} arguments for the parameters {names}")
        for param, argument in zip(host.params, arguments, strict=True):
            self._bind_parameter(param, argument)
        # Extents such as 8 * n may come before what binds n.
        for param, argument in zip(host.params, arguments, strict=True):
            self._check_extents(param, argument)

    def steps(self) -> Iterator[Step | Allocation]:
        """Run the host code: what it allocates and launches, in its order.

        Raises OpError where it does anything else, or a grid is empty.
        """
        return self._visit(self._host.body)

    def _bind_parameter(self, param: tirx.Var, argument: np.ndarray | float) -> None:
        if not isinstance(param.ty, BufferType):
            self._bind(param, argument)
            return
        dtype = np.dtype(str(param.ty.dtype))
        if not isinstance(argument, np.ndarray) or argument.dtype != dtype:
            found = getattr(argument, "dtype", type(argument).__name__)
            raise InvalidInputError(f"parameter {param.name} is an array of {dtype}, not {found}")
        if argument.ndim != len(param.ty.shape) or not argument.flags.c_contiguous:
            raise InvalidInputError(
                f"parameter {param.name} is a contiguous array of {len(param.ty.shape)} axes"
            )
        for extent, size in zip(param.ty.shape, argument.shape, strict=True):
            expected = self._sizes.simplify(extent)
            if isinstance(expected, tirx.Var):
                self._bind(expected, size)

    def _check_extents(self, param: tirx.Var, argument: np.ndarray | float) -> None:
        if not isinstance(argument, np.ndarray):
            return
        for extent, size in zip(param.ty.shape, argument.shape, strict=True):
            expected = self._sizes.simplify(extent)
            if not isinstance(expected, tirx.IntImm) or expected.value != size:
                raise InvalidInputError(
                    f"parameter {param.name} has an axis of {expected}, not {size}"
                )

    def _visit(self, stmt: tirx.Stmt) -> Iterator[Step | Allocation]:
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                yield from self._visit(part)
        elif isinstance(stmt, tirx.Bind):
            is_stream = _is_stream(stmt.value)
            self._bind(stmt.var, self._stream if is_stream else self._evaluate(stmt.value))
        elif isinstance(stmt, tirx.AllocBuffer):
            yield Allocation(stmt.buffer, self._bytes(stmt.buffer))
        elif isinstance(stmt, tirx.DeclBuffer):
            self._same[stmt.buffer] = self._owner(stmt.data)
        elif isinstance(stmt, tirx.AttrStmt):
            yield from self._visit(stmt.body)
        elif isinstance(stmt, tirx.IfThenElse):
            branch = stmt.then_case if self._evaluate(stmt.condition) else stmt.else_case
            if branch is not None:
                yield from self._visit(branch)
        elif isinstance(stmt, tirx.For):
            start = self._evaluate(stmt.min)
            for i in range(start, start + self._evaluate(stmt.extent)):
                self._bind(stmt.loop_var, i)
                yield from self._visit(stmt.body)
        elif _is_launch(stmt):
            yield self._launch(stmt.value)
        elif not isinstance(getattr(stmt, "value", None), tirx.IntImm):  # a no-op
            raise OpError(f"the host code does more than launching kernels: {stmt}")

    def _launch(self, call: tvm.ir.Call) -> Step:
        name = call.args[0].value
        types = [param.ty for param in self._kernels[name].params]
        arguments: list[tuple[Any, np.dtype | None]] = []
        for argument, kind in zip(call.args[1:], types, strict=False):
            if isinstance(kind, tvm.ir.PointerType):
                arguments.append((self._owner(argument), None))
            else:
                arguments.append((self._evaluate(argument), np.dtype(str(kind.dtype))))
        sizes = {kind: [1, 1, 1] for kind, _ in _AXES.values()}
        extents = call.args[1 + len(types) :]
        for axis, extent in zip(call.attrs.launch_params, extents, strict=True):
            if axis not in _AXES:
                raise OpError(f"{name} needs the launch parameter {axis}, which is unknown")
            of, i = _AXES[axis]
            sizes[of][i] = self._evaluate(extent)
        launch = Launch(name, *(_triple(sizes[kind]) for kind in ("block", "thread", "clusterCta")))
        if 0 in launch.grid + launch.block:
            raise OpError(f"{name} has an empty grid: {launch}")
        return Step(launch, tuple(arguments))

    def _owner(self, data: tvm.ir.Expr) -> tirx.Var:
        """Return the variable of the allocation or parameter that ``buffer.data`` means."""
        buffer = data.args[0]
        return self._same.get(buffer, buffer)

    def _bind(self, var: tirx.Var, value: Any) -> None:
        self._sizes.bind(var, tirx.const(value, str(var.ty.dtype)), allow_override=True)

    def _bytes(self, buffer: tirx.Var) -> int:
        element = tvm.DataType(str(buffer.ty.dtype))  # perhaps a vector
        elements = element.lanes
        for extent in buffer.ty.shape:
            elements *= self._evaluate(extent)
        return elements * -(-element.bits // 8)

    def _evaluate(self, expr: Any) -> Any:
        value = self._sizes.simplify(expr)
        assert isinstance(value, tirx.IntImm | tirx.FloatImm), f"a size is left unbound in {expr}"
        return value.value


def _triple(sizes: list[int]) -> tuple[int, int, int]:
    x, y, z = sizes
    return x, y, z


def _is_stream(value: Any) -> bool:
    is_call = getattr(getattr(value, "op", None), "name", None) == "tirx.tvm_call_packed"
    return is_call and value.args[0].value == "runtime.get_cuda_stream"


def _is_launch(stmt: tirx.Stmt) -> bool:
    call = stmt.value if isinstance(stmt, tirx.Evaluate) else None
    return isinstance(call, tvm.ir.Call) and (
        getattr(call.op, "name", None) == "tirx.call_ffi_kernel"
    )
