# SPDX-License-Identifier: Apache-2.0
"""The shortest way of a call to the kernels, for arguments that need nothing done to them.

Kernels of 50 us wash the interpreter's own data out of the caches, so that each Python function
which a call passes through costs a good part of a microsecond. Hence one function, and TVM's own
checks of shapes: what they refuse takes the long way, whose errors tell more. Types are checked
here, because TVM ends the process where it has no name for one, as for complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi

from .arguments import ALIGNMENT, numpy_dtype
from .errors import InvalidInputError
from .tensor_spec import TensorSpec
from .thread_pool import Crew

FastCall = Callable[[tuple[Any, ...]], "np.ndarray | None"]


def has_fast_call(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], fresh: Sequence[bool]
) -> bool:
    """Whether a model on the CPU has one new output, and all types and shapes are plain."""
    plain = all(isinstance(size, int) and size > 0 for spec in inputs for size in spec.shape)
    return plain and all(map(_is_numpys_own, [*inputs, *outputs])) and list(fresh) == [True]


def make_fast_call(
    main: Callable[..., Any],
    weights: Sequence[Any],
    crew: Crew,
    inputs: Sequence[TensorSpec],
) -> FastCall:
    """Make a function from the arguments by position to the output.

    Parameters
    ----------
    main : callable
        The program of a model with :func:`has_fast_call`.
    weights : sequence of tvm_ffi.Tensor
        Its arguments behind the inputs.
    crew : Crew
        What runs it.
    inputs : sequence of TensorSpec
        Its inputs.

    Returns
    -------
    callable
        It returns None if any argument is anything but an array of the right type and shape that
        kernels can read where it lies: contiguous, writable, and aligned. Nothing has happened
        then.
    """
    from_dlpack, run = tvm_ffi.from_dlpack, crew.run
    dtypes = [numpy_dtype(spec.dtype) for spec in inputs]
    count = len(dtypes)

    def call(args: tuple[Any, ...]) -> np.ndarray | None:
        if len(args) != count:
            return None
        try:
            tensors: list[Any] = []
            for value in args:
                if type(value) is not np.ndarray or value.dtype is not dtypes[len(tensors)]:
                    return None
                tensors.append(
                    from_dlpack(value, require_alignment=ALIGNMENT, require_contiguous=True)
                )
            return np.from_dlpack(run(main, *tensors, *weights))
        except (BufferError, RuntimeError, TypeError, ValueError):
            return None

    return call


def no_fast_call(args: tuple[Any, ...]) -> None:
    """The function of a model that has none."""


def _is_numpys_own(spec: TensorSpec) -> bool:
    try:
        return numpy_dtype(spec.dtype).isbuiltin == 1
    except InvalidInputError:
        return False
