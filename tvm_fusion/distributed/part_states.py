# SPDX-License-Identifier: Apache-2.0
"""States of a reduction of one rank's part: what is left to combine with those of other ranks.

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

import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from tvm import IRModule, relax

from relay_passes.op.coalesced_reduce import coalesced_reduce
from schedules.workload.reduce import MAX_SUM_EXP, accumulation_dtype

from ..codegen.linker import SharedLinker
from ..compiler.pipeline import build, optimize
from ..compiler.targets.target import is_gpu, resolve
from ..errors import TargetError
from ..runtime.arguments import results
from ..runtime.memory import HostMemory
from ..runtime.tensor_spec import TensorSpec
from ..runtime.thread_pool import Crew
from ..runtime.tvm_runtime import start_machine


class StateKernel:
    """Compiled kernel of the states of a part.

    Parameters
    ----------
    operator : str
        The reduction; ``variance`` takes the means, of the accumulators' type and with reduced
        extents of 1, as a second input.
    shape : tuple[int, ...]
        Of the part; no extent is 0.
    dtype : str
        Of the part.
    axes : tuple[int, ...]
        Reduced axes, ascending.
    target : str
        A CPU.
    threads : int
        Of the kernel.
    """

    def __init__(
        self,
        operator: str,
        shape: tuple[int, ...],
        dtype: str,
        axes: tuple[int, ...],
        target: str,
        threads: int,
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
        self._memory = HostMemory(specs)
        self._crew = Crew(threads, library)

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The fields of the states, flattened; calls of several threads wait for each other."""
        return self._crew.run(self._run, self._memory.check(arrays))

    def _run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors, held = self._memory.place(arrays)
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
