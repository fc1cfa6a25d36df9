# SPDX-License-Identifier: Apache-2.0
"""Outputs that a compiled model should have, of ONNX Runtime or another framework."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..errors import EngineError, InvalidInputError
from ..onnx.model.loader import parse_model, read_model
from ..runtime.compiled_model import CompiledModel
from ..runtime.host_arrays import random_inputs
from ..runtime.tensor_spec import refuse_open_shapes

OPEN_SHAPE = "check=True needs its size: give it in shapes"


@dataclass(frozen=True)
class Reference:
    """What a compiled model should compute."""

    name: str  # Where the outputs are from.
    dtypes: set[str]  # Element types in the model.
    trials: Iterator[tuple[list[Any], list[np.ndarray]]]
    """Inputs, in the order of the compiled model's, and the outputs of them."""


def onnx_reference(model: Any, compiled: CompiledModel, seed: int) -> Reference:
    """Outputs of ONNX Runtime on random inputs.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    compiled : CompiledModel
        Its compiled form.
    seed : int
        Seed of the inputs.

    Raises
    ------
    EngineError
        If ONNX Runtime is not installed.
    InvalidInputError
        If sizes of the inputs are not known, or an output is none that the model declares.
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
            wanted = session.run(outputs, feed)
        except Exception as error:  # ONNX Runtime has no common class
            reason = str(error).strip().splitlines()[0]
            raise EngineError(
                f"check=True: ONNX Runtime does not run the model, so that there is nothing to "
                f"compare with: {reason}"
            ) from error
        yield list(feed.values()), wanted

    return Reference("ONNX Runtime", dtypes, trials())


_DTYPES = {"FLOAT": "float32", "DOUBLE": "float64"}
