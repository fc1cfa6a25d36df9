# SPDX-License-Identifier: Apache-2.0
"""Numbers that a compiled model should have, of PyTorch or ONNX Runtime, and their check."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..errors import CompilationError, EngineError, InvalidInputError
from ..onnx.model.loader import parse_model, read_model
from ..runtime.compiled_model import CompiledModel
from ..runtime.host_arrays import TensorSpec, random_inputs, refuse_open_shapes, relative_error

OPEN_SHAPE = "check=True needs its size: give it in shapes"


@dataclass(frozen=True)
class Reference:
    """Inputs of a compiled model, and the outputs that are expected."""

    name: str  # Where the outputs are from.
    dtypes: set[str]  # Element types in the model.
    trials: Iterator[tuple[list[Any], list[np.ndarray]]]
    """Inputs, in the order of the compiled model's, and the outputs of them."""


def onnx_reference(model: Any, compiled: CompiledModel, seed: int) -> Reference:
    """Outputs of ONNX Runtime on random inputs.

    ``compiled``: its compiled form. Raises EngineError if ONNX Runtime is not installed. Raises
    InvalidInputError if sizes of the inputs are not known, or an output is none that the model
    declares.
    """
    inputs, outputs = compiled.inputs, [spec.name for spec in compiled.outputs]
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise EngineError(
            "check=True compares an ONNX model with ONNX Runtime, which is not installed; install "
            "it with: pip install onnxruntime"
        ) from error
    refuse_open_shapes(inputs, InvalidInputError, OPEN_SHAPE)
    data = read_model(model)
    graph = parse_model(data).graph
    for name in sorted({*outputs} - {value.name for value in graph.output}):
        raise InvalidInputError(
            f"check=True compares outputs that the model declares, and {name!r} is none: leave out "
            "one of check= and outputs="
        )
    names = (onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in graph.initializer)
    dtypes = {_DTYPES.get(name, name.lower()) for name in names} | {spec.dtype for spec in inputs}

    def trials() -> Iterator[tuple[list[Any], list[np.ndarray]]]:
        settings = runtime.SessionOptions()
        settings.log_severity_level = 4
        source = os.fspath(model) if isinstance(model, str | os.PathLike) else data
        try:
            feed = random_inputs(inputs, seed, normal=True)
            session = runtime.InferenceSession(source, settings, ["CPUExecutionProvider"])
            expected = session.run(outputs, feed)
        except Exception as error:  # ONNX Runtime has no common class
            reason = str(error).strip().splitlines()[0]
            raise EngineError(
                f"check=True: ONNX Runtime does not run the model, so that there is nothing to "
                f"compare with: {reason}"
            ) from error
        yield list(feed.values()), expected

    return Reference("ONNX Runtime", dtypes, trials())


_DTYPES = {"FLOAT": "float32", "DOUBLE": "float64"}


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

SEED = 0
"""Seed of the inputs on which a compiled model is checked."""


def check_numbers(reference: Reference, compiled: CompiledModel, coarsest: str | None) -> None:
    """Call a compiled model on random inputs, and compare with the model that it was made of.

    ``reference``: what that model computes of them. ``coarsest``: a type that the user chose for
    numbers of the model. Raises CompilationError if an output differs. Raises EngineError if there
    is nothing to compare with. Raises TargetError if this machine cannot run the compiled model.
    """
    dtypes = reference.dtypes | ({coarsest} if coarsest else set())
    tolerance = max(TOLERANCES[dtype] for dtype in {"float64"} | dtypes & TOLERANCES.keys())
    for inputs, wanted in reference.trials:
        found = compiled(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for spec, one, other in zip(compiled.outputs, found, wanted, strict=True):
            _compare(spec, one, other, tolerance, reference.name)


def _compare(
    spec: TensorSpec, output: np.ndarray, expected: np.ndarray, tolerance: float, name: str
) -> None:
    """Refuse an output that differs from the right one."""
    if output.shape != expected.shape:
        what = f"the shape is {output.shape} instead of {expected.shape}"
    elif expected.dtype.kind in "iub":
        share = float(np.mean(output != expected)) if expected.size else 0.0
        if share <= _MOST_DIFFERENT:
            return
        what = f"{share:.1%} of the elements differ; the tolerance is {_MOST_DIFFERENT:.0%}"
    else:
        error = relative_error([output], [expected])
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
