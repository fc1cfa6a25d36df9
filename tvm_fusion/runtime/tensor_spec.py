# SPDX-License-Identifier: Apache-2.0
"""Description of one input or output of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import TVMFusionError


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and element type of one input or output."""

    name: str  # The name which the model gives the tensor.
    shape: tuple[int | str, ...]
    """One entry a dimension; a string names a dimension that is only known when the model runs."""
    dtype: str  # The element type as TVM and numpy spell it, for example ``"float32"``.

    def __str__(self) -> str:
        """Name, type and shape: ``x: float32[1, 3, batch]``."""
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


def refuse_open_shapes(
    inputs: Iterable[TensorSpec], error: type[TVMFusionError], remedy: str
) -> None:
    """Refuse inputs with dimensions that are only known at run time.

    Parameters
    ----------
    inputs : iterable of TensorSpec
        The inputs.
    error : type
        Class of the exception.
    remedy : str
        Remedy for the caller, as the end of the message.
    """
    for spec in inputs:
        if not all(isinstance(size, int) for size in spec.shape):
            shape = ", ".join(map(str, spec.shape))
            raise error(f"input {spec.name!r} has the open shape ({shape}); {remedy}")
