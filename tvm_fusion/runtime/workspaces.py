# SPDX-License-Identifier: Apache-2.0
"""Workspaces in which blocks of one GPU kernel meet, and what follows when one waited in vain."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from schedules.workload.workspace_layout import FAILED, WATCHED, is_workspace

from ..errors import TargetError
from .memory import download, upload

# A thread gives up after several seconds: quicker calls need no look at the device's memory.
_SECONDS = 0.5


class Workspaces:
    """The workspaces of a model's kernels on a device.

    Parameters
    ----------
    tensors : sequence of tvm_ffi.Tensor
        Their memory (:mod:`schedules.gpu.core.workspace_slot`).
    """

    def __init__(self, tensors: Sequence[Any] = ()) -> None:
        self._tensors = list(tensors)
        self._launched: float | None = None

    @classmethod
    def among(cls, weights: Sequence[Any], places: Sequence[Any]) -> Workspaces:
        """Those of the places whose weights are workspaces, which are told of the checks."""
        pairs = zip(weights, places, strict=True)
        found = cls([place for weight, place in pairs if is_workspace(np.from_dlpack(weight))])
        found.reset()
        return found

    def launched(self) -> None:
        """Note that kernels were launched."""
        if self._tensors and self._launched is None:
            self._launched = time.monotonic()

    @property
    def are_suspect(self) -> bool:
        """Whether a launch since the last check may have taken so long that it has failed."""
        return self._launched is not None and time.monotonic() - self._launched > _SECONDS

    def check(self) -> None:
        """Look whether a launch has failed; all must be done, and none may begin meanwhile.

        Raises
        ------
        TargetError
            If one has. The workspaces are reset by then.
        """
        suspect, self._launched = self.are_suspect, None
        if suspect and any(download(tensor)[FAILED] for tensor in self._tensors):
            self.reset()
            raise TargetError(
                "a reduction found no free slot of its workspace, or no results of its other "
                "blocks: too many streams ran it at once, or something wrote to its memory. The "
                "results since the last call that ended well are wrong; CompiledModel.reset() was "
                "called, so the next call begins anew"
            )

    def reset(self) -> None:
        """Set all but the word that tells of the checks to zero; no launch may be under way."""
        for tensor in self._tensors:
            content = np.zeros(tuple(tensor.shape), "int32")
            content[WATCHED] = 1
            upload(content, tensor)
