# SPDX-License-Identifier: Apache-2.0
"""Errors of a model that is compiled with less precision, of its outputs and of each layer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from rich.table import Table

from ..compiler.compile import compile as compile_model
from ..compiler.options import chosen_precision
from ..compiler.registry import ONNX, front_end_of
from ..compiler.targets import resolve
from ..errors import InvalidInputError
from ..onnx.model.graph_edits import is_default_domain
from ..onnx.model.loader import check_external_data, load_all_external_data, parse_model, read_model
from ..onnx.model.shapes import infer_shapes
from ..runtime.host_arrays import random_inputs, refuse_open_shapes, relative_error

if TYPE_CHECKING:
    from ..runtime.compiled_model import CompiledModel

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "GRU", "LSTM", "MatMul", "RNN"})
"""Operators whose results are those of layers."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@dataclass(frozen=True)
class TensorErrors:
    """Errors of a tensor over all runs.

    Parameters
    ----------
    name : str
        Its name in the model.
    operator : str
        What computes it; empty of an output.
    largest : float
        Largest error, in parts of the largest magnitude of the run; infinity where a NaN or an
        infinity is in another place.
    rms : float
        Root of the mean square of the errors, in parts of that of the numbers.
    top1 : float | None
        Share of the lines along the last axis whose largest number is in the same place; None where
        a line has one number, or of integers.
    """

    name: str
    operator: str
    largest: float
    rms: float
    top1: float | None


@dataclass(frozen=True)
class Comparison:
    """Errors of a compiled model against the same one without options that cost precision.

    Parameters
    ----------
    outputs, layers : tuple of TensorErrors
        Errors in the order of the model; ``layers`` is empty unless it was asked for.
    runs : int
        Inputs on which both were called.
    options : dict
        The options that were compared.
    """

    outputs: tuple[TensorErrors, ...]
    layers: tuple[TensorErrors, ...]
    runs: int
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All of it in numbers, texts, lists and dictionaries."""
        return asdict(self)


def compare(
    model: Any,
    *,
    weights: str | None = None,
    precision: str = "fp32",
    fast_math: bool = False,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
    runs: int = 8,
    layers: bool = False,
    **options: Any,
) -> Comparison:
    """Compare a model that is compiled with less precision with itself.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.export.ExportedProgram
        The model.
    weights, precision, fast_math
        What is compared with their defaults: options of :func:`tvm_fusion.compile`.
    inputs : sequence of mappings, optional
        Inputs by name, one mapping for each run; those of users tell more than random ones, which
        take the place of those that are missing.
    runs : int
        Number of random inputs without ``inputs``: normal floats, integers 0 or 1.
    layers : bool
        Whether the results of each convolution and product are compared, too; of ONNX models.
    **options
        Other options of :func:`tvm_fusion.compile`, for both.

    Returns
    -------
    Comparison

    Raises
    ------
    InvalidInputError
        If nothing is compared, sizes of inputs are not known, the model has no input of a name, or
        layers are asked for of a program of PyTorch.
    """
    if precision == "auto":
        precision = chosen_precision(precision, resolve(options.get("target", "native")))
    settings = {"weights": weights, "precision": precision, "fast_math": fast_math}
    plain = {"weights": None, "precision": "fp32", "fast_math": False}
    settings = {name: value for name, value in settings.items() if value != plain[name]}
    if not settings:
        raise InvalidInputError(
            "compare() got nothing to compare: pass weights='int8', precision='bf16' or the like; "
            "precision='auto' is fp32 where bf16 is no faster"
        )
    outputs = _errors(model, {}, options, settings, inputs, runs)
    inner: tuple[TensorErrors, ...] = ()
    if layers:
        opened, names = _with_layers(model)
        found = _errors(opened, names, options, settings, inputs, runs)
        inner = tuple(each for each in found if each.operator)
    return Comparison(outputs, inner, len(inputs) if inputs else runs, settings)


def _errors(
    model: Any,
    operators: Mapping[str, str],
    common: Mapping[str, Any],
    options: Mapping[str, Any],
    inputs: Sequence[Mapping[str, np.ndarray]] | None,
    runs: int,
) -> tuple[TensorErrors, ...]:
    """Errors of all outputs of a model."""
    exact, rounded = (compile_model(model, **common, **more) for more in ({}, options))
    refuse_open_shapes(exact.inputs, InvalidInputError, "a comparison needs its size: bind it")
    supplied = inputs or [{}] * runs
    unknown = {name for feed in supplied for name in feed} - {spec.name for spec in exact.inputs}
    if unknown:
        raise InvalidInputError(
            f"the model has no input {', '.join(map(repr, sorted(unknown)))}; expected some of "
            f"{', '.join(repr(spec.name) for spec in exact.inputs)}"
        )
    feeds = [
        random_inputs(exact.inputs, seed, normal=True) | dict(feed)
        for seed, feed in enumerate(supplied)
    ]
    pairs = [(_call(exact, feed), _call(rounded, feed)) for feed in feeds]
    return tuple(
        _tensor_errors(spec.name, operators.get(spec.name, ""), [(a[i], b[i]) for a, b in pairs])
        for i, spec in enumerate(exact.outputs)
    )


def _call(compiled: CompiledModel, feed: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    outputs = compiled(*(feed[spec.name] for spec in compiled.inputs))
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _tensor_errors(
    name: str, operator: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TensorErrors:
    """Errors of the second of each pair."""
    largest = max(relative_error([found], [exact]) for exact, found in pairs)
    wide = [(exact.astype(np.float64), found.astype(np.float64)) for exact, found in pairs]
    with np.errstate(invalid="ignore", over="ignore"):
        size = sum(float(np.square(exact).sum()) for exact, _ in wide)
        error = sum(float(np.square(found - exact).sum()) for exact, found in wide)
    rms = (error / size) ** 0.5 if size else 0.0
    exact = pairs[0][0]
    top1 = None
    is_float = exact.dtype.kind == "f" or exact.dtype.name == "bfloat16"
    if is_float and exact.ndim and exact.shape[-1] > 1 and exact.size:
        same = [a.argmax(-1) == b.argmax(-1) for a, b in pairs]
        top1 = float(np.mean([np.mean(each) for each in same]))
    return TensorErrors(name, operator, largest, rms, top1)


def _with_layers(model: Any) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The model with the results of layers as outputs, and the operators that compute them."""
    if front_end_of(model) is not ONNX:
        raise InvalidInputError("layers=True compares nodes of ONNX models: leave it out")
    proto = parse_model(read_model(model))
    check_external_data(proto, Path(model) if isinstance(model, str | os.PathLike) else None)
    load_all_external_data(proto)
    known = {value.name: value for value in infer_shapes(proto).graph.value_info}
    outputs = {value.name for value in proto.graph.output}
    names: dict[str, str] = {}
    for node in proto.graph.node:
        value = known.get(node.output[0]) if node.output else None
        is_layer = is_default_domain(node) and node.op_type in LAYERS
        if not is_layer or value is None or value.name in outputs:
            continue
        if value.type.tensor_type.elem_type in _FLOATS:
            proto.graph.output.append(value)
            names[value.name] = node.op_type
    return proto, names


def comparison_table(comparison: Comparison, title: str) -> Table:
    """A table with a row for each output, and for each layer."""
    told = ", ".join(f"{name}={value}" for name, value in comparison.options.items())
    table = Table(title=f"{title}, {told}, {comparison.runs} runs")
    for heading, justify in (
        ("output or layer", "left"),
        ("operator", "left"),
        ("largest error", "right"),
        ("rms error", "right"),
        ("same top 1", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for group in (comparison.outputs, comparison.layers):
        for each in group:
            top1 = "" if each.top1 is None else f"{each.top1:.1%}"
            table.add_row(each.name, each.operator, f"{each.largest:.1e}", f"{each.rms:.1e}", top1)
        table.add_section()
    table.caption = "Errors in parts of the largest magnitude, and of the root mean square."
    return table
