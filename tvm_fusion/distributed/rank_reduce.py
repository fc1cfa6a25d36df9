# SPDX-License-Identifier: Apache-2.0
"""Reductions of an array one of whose axes lies over the ranks.

Each rank reduces its part by a compiled kernel to states, which are combined in the order of the
ranks: so floats have the same bits from run to run. Integers and logic are combined by MPI.

Many outputs are shared out: each rank combines its share of all states, and all gather the results
(Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005,
section 4.5: reduce-scatter and allgather).

The states of one part are what is left to combine with those of other ranks:

===================  ==================================================
operator             fields of a state, one element an output each
===================  ==================================================
``argmin, argmax``   extreme value, and its position in the part (int64)
``max_sum_exp``      largest value m, and the sum of exp(x - m)
``variance``         sum of squares of x - mean
``mean``             sum
others               as their name says; of logic a bool
===================  ==================================================
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Integral
from typing import Any

import numpy as np
from tvm import IRModule, relax

from relay_passes.op.coalesced_reduce import coalesced_reduce
from schedules.distribute.partition import integers
from schedules.workload.reduce import (
    FLOATS,
    MAX_SUM_EXP,
    OPERATORS,
    ReduceWorkload,
    accumulation_dtype,
    normal_axes,
)
from schedules.workload.reduce_operator import empty_result, identity

from ..codegen.linker import SharedLinker
from ..compiler.pipeline import build, optimize
from ..compiler.targets import is_gpu, resolve
from ..errors import OpError, TargetError
from ..runtime.arguments import InputBuffers, check, results
from ..runtime.host_arrays import ALIGNMENT, TensorSpec
from ..runtime.thread_pool import Crew
from ..runtime.tvm_runtime import start_machine
from .world.communicator import World
from .world.failure import DisagreementError
from .world.local_world import UFUNCS, LocalWorld
from .world.parcel import name_ranks

_OF_FLOATS = ("variance", "logsumexp", MAX_SUM_EXP)
_UFUNCS = UFUNCS | dict.fromkeys(("sum_squares", "mean", "variance"), np.add)
_BY_MPI = {"sum_squares": "sum"} | {n: n for n in ("sum", "prod", "min", "max", "and", "or")}
_AT_ONCE_BYTES = 16 * 1024  # Bytes of one rank's states; more are shared out.


class StateKernel:
    """Compiled kernel of the states of a part."""

    def __init__(
        self,
        # The reduction; ``variance`` takes the means, of the accumulators' type and with reduced
        # extents of 1, as a second input.
        operator: str,
        shape: tuple[int, ...],  # Shape of the part; no extent is 0.
        dtype: str,  # Element type of the part.
        axes: tuple[int, ...],  # Reduced axes, ascending.
        target: str,
        threads: int,  # Threads of the kernel.
    ) -> None:
        specs = [TensorSpec("part", shape, dtype)]
        if operator == "variance":
            means = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
            specs.append(TensorSpec("mean", means, accumulation_dtype("sum", dtype)))
        resolved = resolve(target, threads)
        if is_gpu(resolved):
            raise TargetError(f"target {target!r} is a GPU; parts are reduced by the ranks' CPUs")
        executable = build(optimize(_module(specs, operator, axes), resolved), resolved)
        library = executable.jit(fcompile=SharedLinker(str(resolved.attrs["mtriple"])))
        self._main = start_machine(library)["main"]
        self._specs, self._inputs = specs, InputBuffers(specs, ALIGNMENT)
        self._crew = Crew(threads, library)

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The fields of the states, flattened; calls of several threads wait for each other."""
        return self._crew.run(self._run, check(self._specs, arrays))

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors, held = self._inputs.tensors(arrays)
        outputs = list(self._main(*tensors))
        fields = results(outputs, [True] * len(outputs), held)
        return [field.reshape(-1) for field in fields]


_compiling = threading.Lock()


def state_kernel(
    operator: str,
    shape: tuple[int, ...],
    dtype: str,
    axes: tuple[int, ...],
    target: str,
    threads: int,
) -> StateKernel:
    """A :class:`StateKernel`, compiled at the first call for its arguments, by one thread at once.

    TVM's builders of functions share one stack in a process.
    """
    with _compiling:
        return _known_kernel(operator, shape, dtype, axes, target, threads)


_known_kernel = lru_cache(maxsize=64)(StateKernel)


def _module(specs: Sequence[TensorSpec], operator: str, axes: tuple[int, ...]) -> IRModule:
    params = [relax.Var(spec.name, relax.TensorType(spec.shape, spec.dtype)) for spec in specs]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            fields = _fields(builder, params, specs[0].dtype, operator, axes)
            output = builder.emit_output(relax.Tuple(fields))
        builder.emit_func_output(output)
    return builder.get()


def _fields(
    builder: relax.BlockBuilder,
    params: Sequence[relax.Var],
    dtype: str,
    operator: str,
    axes: tuple[int, ...],
) -> list[relax.Expr]:
    part, accumulator = params[0], accumulation_dtype(operator, dtype)

    def reduced(value: relax.Expr, by: str, keepdims: bool = False) -> relax.Var:
        return builder.emit(coalesced_reduce(value, by, axes, keepdims=keepdims))

    if operator in ("and", "or"):
        return [reduced(part, operator)]
    value = part if dtype == accumulator else builder.emit(relax.op.astype(part, accumulator))
    if operator in ("argmin", "argmax"):
        return [reduced(value, operator.removeprefix("arg")), reduced(part, operator)]
    if operator == "variance":
        centred = builder.emit(relax.op.subtract(value, params[1]))
        return [reduced(centred, "sum_squares")]
    if operator == MAX_SUM_EXP:
        largest = reduced(value, "max", keepdims=True)
        zero, lowest = (relax.const(number, accumulator) for number in (0.0, -np.inf))
        is_empty = builder.emit(relax.op.equal(largest, lowest))  # -inf - -inf would be NaN
        origin = builder.emit(relax.op.where(is_empty, zero, largest))
        terms = builder.emit(relax.op.exp(builder.emit(relax.op.subtract(value, origin))))
        return [largest, reduced(terms, "sum")]
    return [reduced(value, "sum" if operator == "mean" else operator)]


def reduce(
    world: World | LocalWorld,
    part: np.ndarray,
    operator: str = "sum",
    axes: int | Sequence[int] | None = None,
    *,
    axis: int = 0,
    keepdims: bool = False,
    target: str = "native",
) -> Any:
    """Reduce an array of which each rank has a part; called by all ranks together.

    Parameters
    ----------
    world : World or LocalWorld
        The ranks.
    part : np.ndarray
        This rank's part: float64, float32, float16, bfloat16, int64, int32, int8, uint8 or bool. It
        may be empty along ``axis``; the other extents are the same on all ranks.
    operator : str
        ``sum``, ``prod``, ``min``, ``max``, ``and``, ``or``, ``argmin``, ``argmax`` (position in
        the whole reduced axes, flattened, of the first extreme element), ``sum_squares``; of
        floats ``mean``, ``variance`` (of the population), ``logsumexp``, and ``max_sum_exp``, the
        pair of a softmax: the largest value m and the sum of exp(x - m).
    axes : int, Sequence[int] or None
        Reduced axes; None stands for all.
    axis : int
        The axis that lies over the ranks, in their order.
    keepdims : bool
        Whether reduced axes stay with extent 1.
    target : str
        The CPU that the kernel is compiled for, at the first call for a shape.

    Returns
    -------
    np.ndarray or tuple of np.ndarray
        The reduced array, on all ranks; or, if ``axis`` is not reduced, this rank's part of it. Of
        the type of ``part``, positions of int64, logic of bool; the sum of ``max_sum_exp`` is of
        the accumulators' type. NaN, and integers that wrap around, are as in numpy; 16-bit floats
        are accumulated in float32 and rounded once.

    Raises
    ------
    OpError
        If the operator, an axis or the type does not fit, or for an extreme of no elements.
    TargetError
        If the target is unknown, or a GPU.
    DistributedError
        If the ranks call it with different arguments.
    """
    if isinstance(part, np.ma.MaskedArray):
        raise OpError("the part is a masked array; expected an array without a mask: fill it first")
    part = np.asarray(part)
    names = None if axes is None else integers([axes] if np.ndim(axes) == 0 else axes, "axes")
    if not isinstance(axis, Integral):
        raise OpError(f"axis is {axis!r}; expected an integer")
    workload = _workload(operator, names, part)
    [axis] = normal_axes([axis], part.ndim)
    about = f"{operator} of {workload.dtype} over axes {list(workload.axes)}"
    extents = _extents(world, part, about, axis)
    run = _Reduction(world, part, workload, axis, extents, target)
    if run.elements == 0:
        fields = run.of_no_elements(operator)
    elif operator == "variance":
        means = run.states("mean")[0] / _accumulator(workload).type(run.elements)
        fields = run.states(operator, means.reshape(run.kept_shape))
    else:
        fields = run.states({"logsumexp": MAX_SUM_EXP}.get(operator, operator))
    outputs = _finish(operator, fields, run.elements, part.dtype)
    shape = run.kept_shape if keepdims else run.shape
    found = tuple(output.reshape(shape) for output in outputs)
    return found if operator == MAX_SUM_EXP else found[0]


@dataclass(frozen=True)
class _Reduction:
    """One reduction of all ranks, and this rank's part; ``extents`` of all parts along ``axis``."""

    world: World | LocalWorld
    part: np.ndarray
    workload: ReduceWorkload
    axis: int
    extents: np.ndarray
    target: str

    @property
    def is_over_ranks(self) -> bool:
        """True if states of several ranks have to be combined."""
        return self.axis in self.workload.axes

    @property
    def elements(self) -> int:
        """Number of elements of each output."""
        reduced = [self.part.shape[axis] for axis in self.workload.axes if axis != self.axis]
        return math.prod(reduced) * (int(self.extents.sum()) if self.is_over_ranks else 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs, without the reduced axes."""
        kept = [axis for axis in range(self.part.ndim) if axis not in self.workload.axes]
        return tuple(self.part.shape[axis] for axis in kept)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the outputs, with 1 for the reduced axes."""
        extents = enumerate(self.part.shape)
        return tuple(1 if axis in self.workload.axes else size for axis, size in extents)

    def states(self, operator: str, *means: np.ndarray) -> list[np.ndarray]:
        """Fields of the states of all ranks, flattened."""
        local = self._local_states(operator, means)
        if not self.is_over_ranks or not local[0].size:
            return local
        if local[0].dtype.kind in "iub" and len(local) == 1:
            [field] = local
            combined = self.world.all_reduce(
                field.view("uint8") if field.dtype == bool else field, _BY_MPI[operator]
            )
            return [combined.view(field.dtype)]
        return self._in_order(operator, local)

    def of_no_elements(self, operator: str) -> list[np.ndarray]:
        """Fields of the result of no elements, as in numpy."""
        value = empty_result(self.workload)
        if operator == "logsumexp":
            fields: list[Any] = [-np.inf, 0.0]
        elif operator in ("variance", "mean"):
            fields = [np.nan]
        elif value is None:
            raise OpError(
                f"{operator} over axes {list(self.workload.axes)} has no elements and no identity; "
                "expected at least one element"
            )
        else:
            fields = [value]
        dtype = _accumulator(self.workload)
        return [np.full(math.prod(self.shape), field, dtype) for field in fields]

    def _local_states(self, operator: str, means: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Fields of the states of this rank's part."""
        workload, part = self.workload, self.part
        if part.size:
            about = operator, part.shape, workload.dtype, workload.axes
            kernel = state_kernel(*about, self.target, self.world.threads)
            fields = kernel(part, *means)
            if workload.is_arg and self.is_over_ranks:
                fields[1] = self._whole_position(fields[1])
            return fields
        accumulator = _accumulator(workload)
        dtypes = {MAX_SUM_EXP: [accumulator] * 2}.get(operator, [accumulator])
        if workload.is_arg:
            dtypes = [accumulator, np.dtype("int64")]
        elif operator in ("and", "or"):
            dtypes = [np.dtype("bool")]
        count = math.prod(self.shape)
        if len(dtypes) == 1 and dtypes[0].kind in "ib":  # MPI takes it for a state like others
            return [np.full(count, int(identity(workload)[0]), dtypes[0])]
        return [np.zeros(count, dtype) for dtype in dtypes]

    def _whole_position(self, position: np.ndarray) -> np.ndarray:
        """Positions in the reduced axes of all parts, from those in this part."""
        behind = [axis for axis in self.workload.axes if axis > self.axis]
        inner = math.prod(self.part.shape[axis] for axis in behind)
        before = int(self.extents[: self.world.rank].sum())
        outer, rest = np.divmod(position, self.part.shape[self.axis] * inner)
        return (outer * int(self.extents.sum()) + before) * inner + rest

    def _in_order(self, operator: str, states: list[np.ndarray]) -> list[np.ndarray]:
        """Combine the states of all ranks in their order; ranks without elements have none."""
        world, live = self.world, np.flatnonzero(self.extents)
        if sum(field.nbytes for field in states) <= _AT_ONCE_BYTES:
            return _combine(operator, [world.all_gather(field)[live] for field in states])
        count = states[0].size
        share = -(-count // world.size)
        padded = [np.pad(field, (0, share * world.size - count)) for field in states]
        slices = [world.all_to_all(field.reshape(world.size, share))[live] for field in padded]
        mine = _combine(operator, slices)
        return [world.all_gather(field).reshape(-1)[:count] for field in mine]


def _accumulator(workload: ReduceWorkload) -> np.dtype:
    """The numpy type of the accumulators."""
    return np.dtype(workload.acc_dtype)


def _workload(operator: str, axes: Sequence[int] | None, part: np.ndarray) -> ReduceWorkload:
    """Check the operator, the axes and the type."""
    dtype = part.dtype.name
    known = (*OPERATORS, *_OF_FLOATS)
    if operator not in known:
        raise OpError(f"reduction {operator!r} is unknown; expected one of {', '.join(known)}")
    if operator not in _OF_FLOATS:
        return ReduceWorkload.create(operator, axes, part.ndim, dtype)
    if dtype not in FLOATS:
        raise OpError(f"{operator} of {dtype}; expected a floating-point type: cast it first")
    workload = ReduceWorkload.create("sum", axes, part.ndim, dtype)
    return replace(workload, operator="mean" if operator == "variance" else MAX_SUM_EXP)


def _extents(world: World | LocalWorld, part: np.ndarray, about: str, axis: int) -> np.ndarray:
    """Extents of all parts along an axis, if the ranks agree on all else."""
    others = [extent for number, extent in enumerate(part.shape) if number != axis]
    digest = hashlib.sha256(f"{about} {axis} {others}".encode()).digest()[:8]
    mine = np.array([part.shape[axis], int.from_bytes(digest, "little", signed=True)])
    rows = world.all_gather(mine)
    strange = np.flatnonzero(rows[:, 1] != rows[0, 1])
    if strange.size:
        raise DisagreementError(
            f"{name_ranks(strange.tolist())} and rank 0 reduce differently; on this rank it is "
            f"{about} of a part of shape {list(part.shape)}, axis {axis} over ranks: call it with "
            "the same arguments, and parts that differ along that axis alone"
        )
    return rows[:, 0]


def _combine(operator: str, fields: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Combine states that are stacked along the first axis, in order."""
    with np.errstate(all="ignore"):
        values = fields[0]
        if operator in ("argmin", "argmax"):
            best = _UFUNCS[operator.removeprefix("arg")].reduce(values, axis=0)
            wins = (values == best) | (values != values)
            last = np.iinfo(np.int64).max
            return [best, np.where(wins, fields[1], last).min(axis=0)]
        if operator == MAX_SUM_EXP:
            largest = np.maximum.reduce(values, axis=0)
            factor = np.where(values == largest, 1, np.exp(values - largest)).astype(values.dtype)
            return [largest, np.add.reduce(fields[1] * factor, axis=0)]
        return [_UFUNCS[operator].reduce(values, axis=0)]


def _finish(
    operator: str, fields: Sequence[np.ndarray], elements: int, dtype: np.dtype
) -> list[np.ndarray]:
    """Results of states of all elements."""
    with np.errstate(all="ignore"):
        value = fields[0]
        if operator in ("argmin", "argmax"):
            return [fields[1]]
        if operator in ("and", "or"):
            return [value.astype(bool)]
        if operator == MAX_SUM_EXP:
            return [value.astype(dtype), fields[1]]
        if operator == "logsumexp":
            value = np.where(np.isinf(value), value, value + np.log(fields[1]))
        elif operator in ("mean", "variance"):
            value = value / value.dtype.type(elements)
        return [value.astype(dtype)]
