# SPDX-License-Identifier: Apache-2.0
"""Check of a compiled model's numbers against PyTorch or ONNX Runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CompilationError
from ..runtime.host_arrays import relative_error
from ..runtime.tensor_spec import TensorSpec
from .registry import front_end_of

if TYPE_CHECKING:
    from ..runtime.compiled_model import CompiledModel

TOLERANCES = {
    "float64": 1e-4,
    "float32": 1e-3,
    "float16": 2e-2,
    "bfloat16": 5e-2,
    "int8": 5e-2,
    "uint8": 5e-2,
    "int4": 0.25,
}
"""Largest error in parts of an output's largest magnitude, by the coarsest type in the model.

Constants of float64 are rounded to float32 by PyTorch's exporter. A value that is halfway between
two levels of a quantised type may be rounded to either.
"""

_MOST_DIFFERENT = 0.01
"""Largest share of the elements of an integer output that differ, as where two scores are equal."""

_SEED = 0


def check_numbers(model: Any, compiled: CompiledModel, coarsest: str | None) -> None:
    """Call a compiled model on random inputs, and compare with the model that it was made of.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.export.ExportedProgram
        The model.
    compiled : CompiledModel
        Its compiled form.
    coarsest : str | None
        A type that the user chose for numbers of the model.

    Raises
    ------
    CompilationError
        If an output differs.
    EngineError
        If there is nothing to compare with.
    InvalidInputError
        If sizes of the inputs are not known, or an output is none that the model declares.
    TargetError
        If this machine cannot run the compiled model.
    """
    reference = front_end_of(model).reference(model, compiled, _SEED)
    dtypes = reference.dtypes | ({coarsest} if coarsest else set())
    tolerance = max(TOLERANCES[dtype] for dtype in {"float64"} | dtypes & TOLERANCES.keys())
    for inputs, wanted in reference.trials:
        found = compiled(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for spec, one, other in zip(compiled.outputs, found, wanted, strict=True):
            _compare(spec, one, other, tolerance, reference.name)


def _compare(
    spec: TensorSpec, found: np.ndarray, wanted: np.ndarray, tolerance: float, name: str
) -> None:
    """Refuse an output that differs from the right one."""
    if found.shape != wanted.shape:
        what = f"the shape is {found.shape} instead of {wanted.shape}"
    elif wanted.dtype.kind in "iub":
        share = float(np.mean(found != wanted)) if wanted.size else 0.0
        if share <= _MOST_DIFFERENT:
            return
        what = f"{share:.1%} of the elements differ; the tolerance is {_MOST_DIFFERENT:.0%}"
    else:
        error = relative_error([found], [wanted])
        if error <= tolerance:
            return
        what = f"the largest error is {error:.2g} of its largest magnitude; the tolerance is "
        what += f"{tolerance:g}"
        if error == np.inf:
            what = "a NaN or an infinity is in another place, or a number where all are 0"
    raise CompilationError(
        f"check=True: output {str(spec)!r} differs from that of {name} on the same inputs: {what}. "
        "This is a defect of tvm-fusion or of an exporter: do not use the compiled model"
    )
