# SPDX-License-Identifier: Apache-2.0
"""Call of a program that is one kernel, without TVM's virtual machine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from .arguments import empty
from .tensor_spec import TensorSpec

_OUTPUTS = 2  # the one that the caller still holds while the next is computed, and the next
_UNUSED = 2  # references to an array that only its tuple holds, as getrefcount sees it


@dataclass(frozen=True)
class SoleKernelCall:
    """Kernel call that ``main`` consists of.

    Parameters
    ----------
    name : str
        The kernel.
    arguments : tuple of int
        The arguments of ``main`` that it takes, in its order, each input once; the output follows
        them.
    """

    name: str
    arguments: tuple[int, ...]


class OutputPool:
    """Arrays for the outputs of calls, reused as soon as they have no other references.

    A call gets a view, so that its user may change its shape or its flags; it and all its views
    hold a reference to the array here.

    Parameters
    ----------
    spec : TensorSpec
        Type and shape of the output: sizes that are known, and a type of numpy's own.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self._shape, self._dtype = [int(size) for size in spec.shape], spec.dtype
        self._outputs = deque(self._new() for _ in range(_OUTPUTS))

    def take(self) -> tuple[np.ndarray, Any]:
        """An unused array, and the tensor in its memory; not thread-safe."""
        outputs = self._outputs
        outputs.rotate()
        if getrefcount(outputs[0][0]) > _UNUSED:
            outputs[0] = self._new()
        return outputs[0]

    def _new(self) -> tuple[np.ndarray, Any]:
        tensor = empty(self._shape, self._dtype, tvm_ffi.device("cpu", 0))
        return np.from_dlpack(tensor), tensor
