# SPDX-License-Identifier: Apache-2.0
"""Fast path from a call to the kernels, for arguments that need no conversion.

Kernels of 50 us evict the interpreter's data from the caches, so that each Python function in a
call costs a good part of a microsecond. Hence few functions, and no virtual machine for a single
kernel, which checks nothing. What is not as it should be takes the slow path, whose errors are
clearer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InvalidInputError
from .arguments import as_numpy, empty, export, numpy_dtype, overlaps
from .host_arrays import TensorSpec
from .thread_pool import Crew

Outputs = Sequence[np.ndarray]
FastCall = Callable[[Sequence[Any], Any], "Outputs | None"]


_OUTPUTS = 2  # the one that the caller still holds while the next is computed, and the next
_UNUSED = 2  # references to an array that only its tuple holds, as getrefcount sees it


@dataclass(frozen=True)
class SoleKernelCall:
    """Kernel call that ``main`` consists of."""

    name: str  # The kernel.
    arguments: tuple[int, ...]
    """The arguments of ``main`` that it takes, in its order, each input once; the output follows
    them."""


class OutputPool:
    """Arrays for one output of a model, reused as soon as they have no other references.

    A call gets a view, so that its user may change its shape or its flags; it and all its views
    hold a reference to the array here.

    ``spec``: type and shape of the output; its sizes are known.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self._outputs: deque[tuple[np.ndarray, np.dtype, Any]] = deque()

    def take(self) -> tuple[np.ndarray, Any]:
        """An unused array, and the tensor in its memory; not thread-safe."""
        outputs = self._outputs
        if len(outputs) < _OUTPUTS:
            outputs.appendleft(self._new())
        else:
            outputs.rotate()
            if getrefcount(outputs[0][0]) > _UNUSED:
                outputs[0] = self._new()
        array, dtype, tensor = outputs[0]
        return array.view(dtype), tensor

    def _new(self) -> tuple[np.ndarray, np.dtype, Any]:
        """The array that views are counted by, their type, and the tensor."""
        shape = [int(size) for size in self.spec.shape]
        tensor = empty(shape, self.spec.dtype, tvm_ffi.device("cpu", 0))
        array = as_numpy(tensor)
        base = array.base  # an array if numpy lacks the type
        return base if isinstance(base, np.ndarray) else array, array.dtype, tensor


@dataclass(frozen=True)
class PreparedCall:
    """Function that a call runs, with its arguments."""

    function: Callable[..., Any]  # The program on the virtual machine, or its only kernel.
    arguments: Sequence[Any]  # Its arguments: weights, and placeholders for inputs and outputs.
    inputs: Sequence[int]
    outputs: Sequence[int]
    """``inputs`` and ``outputs``: position of each input and output."""

    @classmethod
    def of_main(
        cls, main: Callable[..., Any], inputs: int, outputs: int, weights: Sequence[Any]
    ) -> PreparedCall:
        """The program on the virtual machine."""
        given = inputs + outputs
        return cls(main, [*[None] * given, *weights], range(inputs), range(inputs, given))

    @classmethod
    def of_kernel(
        cls, kernel: Callable[..., Any], call: SoleKernelCall, inputs: int, weights: Sequence[Any]
    ) -> PreparedCall:
        """A program that is one kernel."""
        given = [*[None] * inputs, *weights]
        arguments = [given[index] for index in call.arguments]
        places = [call.arguments.index(index) for index in range(inputs)]
        return cls(kernel, [*arguments, None], places, [len(arguments)])


def has_fast_call(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], lifted: Sequence[bool]
) -> bool:
    """Return whether a model writes all outputs where it is told, and all types are plain."""
    is_plain = is_known(inputs) and all(map(_is_numpys_own, [*inputs, *outputs]))
    return is_plain and len(lifted) > 0 and all(lifted)


def make_fast_call(
    program: PreparedCall, crew: Crew, inputs: Sequence[TensorSpec], pools: Sequence[OutputPool]
) -> FastCall:
    """Make a function from the arguments by position to the outputs.

    ``program``: that of a model with :func:`has_fast_call`. ``crew``: threads that run it.
    ``pools``: memory of its outputs. Returns its second argument is None, or the array of the only
    output, or a tuple of one for each. It returns None, without any effect, unless every array has
    the right type and shape, and kernels can use it in place; and if one for an output shares
    memory with another one.
    """
    places = list(zip(program.inputs, *_plain_types(inputs), strict=True))
    outputs = [pool.spec for pool in pools]
    targets = list(zip(program.outputs, pools, *_plain_types(outputs), strict=True))
    template, function, run_on_crew = list(program.arguments), program.function, crew.run
    count = len(places)

    def run(arguments: list[Any]) -> list[np.ndarray]:
        arrays = []
        for place, pool, _, _ in targets:
            array, arguments[place] = pool.take()
            arrays.append(array)
        function(*arguments)
        return arrays

    def run_into(arguments: list[Any], args: Sequence[Any], out: Any) -> Outputs | None:
        results = (out,) if type(out) is np.ndarray else out
        if type(results) is not tuple or len(results) != len(targets):
            return None
        taken = list(args)
        for value, (place, _, dtype, shape) in zip(results, targets):  # noqa: B905
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
            if not value.flags.writeable or overlaps(value, taken):
                return None
            arguments[place] = export(value, dtype.itemsize)
            taken.append(value)
        run_on_crew(function, *arguments)
        return results

    def call(args: Sequence[Any], out: Any = None) -> Outputs | None:
        if len(args) != count:
            return None
        try:
            arguments = template.copy()
            for value, (place, dtype, shape) in zip(args, places):  # noqa: B905  they are as many
                if type(value) is not np.ndarray or value.shape != shape:
                    return None
                # Unpickled types are equal, but not the same.
                if value.dtype is not dtype and value.dtype != dtype:
                    return None
                arguments[place] = export(value, dtype.itemsize)
            if out is None:
                return run_on_crew(run, arguments)
            return run_into(arguments, args, out)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return None

    return call


def _plain_types(specs: Sequence[TensorSpec]) -> tuple[list[np.dtype], list[tuple[int, ...]]]:
    """The types and the shapes of some tensors."""
    return [numpy_dtype(s.dtype) for s in specs], [tuple(map(int, s.shape)) for s in specs]


def no_fast_call(args: Sequence[Any], out: Any = None) -> None:
    """Fast call of a model that has none."""


def is_known(specs: Sequence[TensorSpec]) -> bool:
    """Return whether all sizes are numbers, and there are elements."""
    return all(isinstance(size, int) and size > 0 for spec in specs for size in spec.shape)


def _is_numpys_own(spec: TensorSpec) -> bool:
    try:
        return numpy_dtype(spec.dtype).isbuiltin == 1
    except InvalidInputError:
        return False
