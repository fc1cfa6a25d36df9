# SPDX-License-Identifier: Apache-2.0
"""Fast path from a call to the kernels, for arguments that need no conversion.

Kernels of 50 us evict the interpreter's data from the caches, so that each Python function in a
call costs a good part of a microsecond. Hence few functions, and no virtual machine for a single
kernel, which checks nothing. What is not as it should be takes the slow path, whose errors are
clearer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import InvalidInputError
from .arguments import numpy_dtype
from .host_arrays import ALIGNMENT
from .kernel_call import OutputPool, SoleKernelCall
from .tensor_spec import TensorSpec
from .thread_pool import Crew

FastCall = Callable[[tuple[Any, ...]], "np.ndarray | None"]


@dataclass(frozen=True)
class PreparedCall:
    """Function that a call runs, with its arguments.

    Parameters
    ----------
    function : callable
        The program on the virtual machine, or its only kernel.
    arguments : sequence
        Its arguments: weights, and placeholders for the inputs.
    inputs : sequence of int
        Position of each input.
    outputs : OutputPool | None
        Source of its last argument, the output; None if it returns the output.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    inputs: Sequence[int]
    outputs: OutputPool | None

    @classmethod
    def of_main(cls, main: Callable[..., Any], inputs: int, weights: Sequence[Any]) -> PreparedCall:
        """The program on the virtual machine."""
        return cls(main, [*[None] * inputs, *weights], range(inputs), None)

    @classmethod
    def of_kernel(
        cls,
        kernel: Callable[..., Any],
        call: SoleKernelCall,
        inputs: int,
        weights: Sequence[Any],
        output: TensorSpec,
    ) -> PreparedCall:
        """A program that is one kernel."""
        given = [*[None] * inputs, *weights]
        arguments = [given[index] for index in call.arguments]
        places = [call.arguments.index(index) for index in range(inputs)]
        return cls(kernel, [*arguments, None], places, OutputPool(output))

    def run(self, arguments: list[Any]) -> np.ndarray:
        """Compute the output; the arguments include the inputs."""
        if self.outputs is None:
            return np.from_dlpack(self.function(*arguments))
        array, arguments[-1] = self.outputs.take()
        self.function(*arguments)
        return array.view()


def has_fast_call(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], fresh: Sequence[bool]
) -> bool:
    """Return whether a model on the CPU has one new output, and only plain types and shapes."""
    is_plain = is_known(inputs) and all(map(_is_numpys_own, [*inputs, *outputs]))
    return is_plain and list(fresh) == [True]


def make_fast_call(program: PreparedCall, crew: Crew, inputs: Sequence[TensorSpec]) -> FastCall:
    """Make a function from the arguments by position to the output.

    Parameters
    ----------
    program : PreparedCall
        That of a model with :func:`has_fast_call`.
    crew : Crew
        Threads that run it.
    inputs : sequence of TensorSpec
        Its inputs.

    Returns
    -------
    callable
        It returns None, without any effect, unless every argument is an array of the right type and
        shape that kernels can read in place: contiguous, writable, and aligned.
    """
    from_dlpack, run_on_crew, run = tvm_ffi.from_dlpack, crew.run, program.run
    dtypes = [numpy_dtype(spec.dtype) for spec in inputs]
    shapes = [tuple(map(int, spec.shape)) for spec in inputs]
    count = len(dtypes)
    places = list(zip(program.inputs, dtypes, shapes, strict=True))
    template = list(program.arguments)

    def call(args: tuple[Any, ...]) -> np.ndarray | None:
        if len(args) != count:
            return None
        try:
            arguments = template.copy()
            for value, (place, dtype, shape) in zip(args, places):  # noqa: B905  they are as many
                if type(value) is not np.ndarray or value.dtype is not dtype:
                    return None
                if value.shape != shape:
                    return None
                arguments[place] = from_dlpack(
                    value, require_alignment=ALIGNMENT, require_contiguous=True
                )
            return run_on_crew(run, arguments)
        except (BufferError, RuntimeError, TypeError, ValueError):
            return None

    return call


def no_fast_call(args: tuple[Any, ...]) -> None:
    """Fast call of a model that has none."""


def is_known(specs: Sequence[TensorSpec]) -> bool:
    """Return whether all sizes are numbers, and there are elements."""
    return all(isinstance(size, int) and size > 0 for spec in specs for size in spec.shape)


def _is_numpys_own(spec: TensorSpec) -> bool:
    try:
        return numpy_dtype(spec.dtype).isbuiltin == 1
    except InvalidInputError:
        return False
