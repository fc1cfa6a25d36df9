# SPDX-License-Identifier: Apache-2.0
"""The description of one input or output of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and element type of one input or output.

    Parameters
    ----------
    name : str
        The name which the model gives the tensor.
    shape : tuple of int or str
        One entry a dimension; a string names a dimension that is only known when the model runs.
    dtype : str
        The element type as TVM and numpy spell it, for example ``"float32"``.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
