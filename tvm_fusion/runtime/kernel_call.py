# SPDX-License-Identifier: Apache-2.0
"""How a program that is one kernel is called without TVM's virtual machine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from .arguments import empty
from .tensor_spec import TensorSpec

_OUTPUTS = 2  # the one that the caller has still got while the next is computed, and that
_UNUSED = 2  # references to an array that only its tuple holds, as getrefcount sees it


@dataclass(frozen=True)
class KernelCall:
    """What ``main`` comes down to.

    Parameters
    ----------
    name : str
        The kernel.
    arguments : tuple of int
        Which arguments of ``main`` it takes, in its order, each input once; behind them it takes
        the output.
    """

    name: str
    arguments: tuple[int, ...]


class OutputPool:
    """Arrays for the outputs of calls, taken again as soon as nobody has them any more.

    What is handed out is a view, so that its user may change its shape or its flags; it and all
    views of it hold the array here.

    Parameters
    ----------
    spec : TensorSpec
        Type and shape of the output: sizes that are known, and a type of numpy's own.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._shape, self._dtype = [int(size) for size in spec.shape], spec.dtype
        self._outputs = deque(self._new() for _ in range(_OUTPUTS))

    def take(self) -> tuple[np.ndarray, Any]:
        """An array that nobody uses, and the tensor in its memory; not from two threads at once."""
        outputs = self._outputs
        outputs.rotate()
        if getrefcount(outputs[0][0]) > _UNUSED:
            outputs[0] = self._new()
        return outputs[0]

    def _new(self) -> tuple[np.ndarray, Any]:
        tensor = empty(self._shape, self._dtype, tvm_ffi.device("cpu", 0))
        return np.from_dlpack(tensor), tensor
