# SPDX-License-Identifier: Apache-2.0
"""Call of a program that is one kernel, without TVM's virtual machine, and memory of outputs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import numpy as np
import tvm_ffi

from .arguments import as_numpy, empty
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
    """Arrays for one output of a model, reused as soon as they have no other references.

    A call gets a view, so that its user may change its shape or its flags; it and all its views
    hold a reference to the array here.

    Parameters
    ----------
    spec : TensorSpec
        Type and shape of the output; its sizes are known.
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
