# SPDX-License-Identifier: Apache-2.0
"""One model for open shapes: compiled for the sizes of each call, and kept for the next one."""

from __future__ import annotations

import os
import threading
from collections import ChainMap, OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper

from ..errors import ArtifactError, InvalidInputError, InvalidModelError
from ..onnx.model.loader import external_tensors, parse_model, read_model
from ..onnx.rewrite import drop_initializers_from_inputs
from ..runtime.arguments import bind
from ..runtime.compiled_model import CompiledModel
from ..runtime.host_arrays import TensorSpec
from .compile import compile
from .registry import front_end_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class _Variant:
    """A compiled model and its weights by their digests."""

    model: CompiledModel
    weights: dict[bytes, Any]


class SpecializedModel:
    """A model with open dimensions, made by :func:`tvm_fusion.specialize`.

    It is called as a :class:`.CompiledModel` is. The first call with certain sizes compiles a
    variant for them, which takes as long as any compilation; calls with the same sizes use it
    again. The variants that were called last are kept, and share the weights that are equal in all
    of them. Several threads may call it.

    Parameters
    ----------
    model : path, bytes or onnx.ModelProto
        The model.
    inputs : tuple of TensorSpec
        Its inputs; names in their shapes are the open dimensions.
    ranges : Mapping[str, range]
        Allowed sizes of open dimensions.
    kept : int
        Greatest number of variants.
    options : Mapping[str, Any]
        Other arguments of :func:`tvm_fusion.compile`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto,
        inputs: tuple[TensorSpec, ...],
        ranges: Mapping[str, range],
        kept: int,
        options: Mapping[str, Any],
    ) -> None:
        self.inputs = inputs
        self._model = model
        self._ranges = ranges
        self._kept = kept
        self._options = dict(options)
        self._lock = threading.Lock()
        self._variants: OrderedDict[tuple[int, ...], Future[_Variant]] = OrderedDict()
        dims = (dim for spec in inputs for dim in spec.shape if isinstance(dim, str))
        self.dimensions: tuple[str, ...] = tuple(dict.fromkeys(dims))
        """The open dimensions."""

    @property
    def variants(self) -> list[dict[str, int]]:
        """Sizes of the compiled variants; the one that was called last comes last."""
        with self._lock:
            done = [sizes for sizes, variant in self._variants.items() if variant.done()]
        return [dict(zip(self.dimensions, sizes, strict=True)) for sizes in done]

    def __repr__(self) -> str:
        """Inputs and number of variants."""
        inputs = ", ".join(map(str, self.inputs))
        return f"SpecializedModel({inputs}; {len(self.variants)} of {self._kept} variants)"

    def __call__(
        self, /, *args: Any, out: Any = None, **kwargs: Any
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """Compute the outputs as :meth:`.CompiledModel.__call__` does.

        Raises
        ------
        InvalidInputError
            If an input is missing or unknown, or a size is out of range or differs from that of
            another input.
        CompilationError, UnsupportedOperatorError
            If the model cannot be compiled for these sizes.
        """
        if out is not None and any(spec.name == "out" for spec in self.inputs):
            kwargs["out"], out = out, None
        values = bind(self.inputs, args, kwargs)
        return self._variant(self._sizes_of(values))(*values, out=out)

    def variant(self, sizes: Sizes) -> CompiledModel:
        """The model for some sizes, compiled now if it is not there; it can be saved.

        Parameters
        ----------
        sizes : Mapping[str, int]
            A size for each open dimension.

        Raises
        ------
        InvalidInputError
            If a dimension is missing or unknown, or a size is out of range.
        """
        if set(sizes) != set(self.dimensions):
            raise InvalidInputError(
                f"got sizes of {', '.join(sizes) or 'nothing'}; expected those of "
                f"{', '.join(self.dimensions)}"
            )
        for name, size in sizes.items():
            self._check_size(name, size)
        return self._variant(sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Refuse: a saved model cannot compile."""
        raise ArtifactError(
            f"cannot write {os.fspath(path)!r}: a model for any sizes needs the compiler; save its "
            "variants instead, as by model.variant({...}).save(...)"
        )

    def _check_size(self, name: str, size: int) -> None:
        allowed = self._ranges.get(name)
        if size < 1 or (allowed is not None and size not in allowed):
            expected = "1 or more" if allowed is None else _range_text(allowed)
            raise InvalidInputError(f"dimension {name!r} is {size}; expected {expected}")

    def _sizes_of(self, values: list[Any]) -> dict[str, int]:
        """The sizes of the open dimensions in the inputs of a call."""
        sizes: dict[str, int] = {}
        for spec, value in zip(self.inputs, values, strict=True):
            shape = getattr(value, "shape", None)
            if shape is None or len(shape) != len(spec.shape):
                found = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
                wanted = ", ".join(map(str, spec.shape))
                raise InvalidInputError(
                    f"input {spec.name!r} is of {found}; expected an array of shape ({wanted})"
                )
            for dim, extent in zip(spec.shape, shape, strict=True):
                if isinstance(dim, str):
                    size = int(extent)
                    self._check_size(dim, size)
                    if sizes.setdefault(dim, size) != size:
                        raise InvalidInputError(
                            f"dimension {dim!r} is {size} in input {spec.name!r} and {sizes[dim]} "
                            "in another one"
                        )
        return sizes

    def _variant(self, sizes: Sizes) -> CompiledModel:
        key = tuple(sizes[name] for name in self.dimensions)
        with self._lock:
            variant = self._variants.get(key)
            mine: Future[_Variant] | None = None
            if variant is None:
                variant = mine = self._variants[key] = Future()
            self._variants.move_to_end(key)
            while len(self._variants) > self._kept:
                self._variants.popitem(last=False)
        if mine is not None:
            try:
                mine.set_result(self._compile(sizes))
            except BaseException as error:
                with self._lock:
                    if self._variants.get(key) is mine:
                        del self._variants[key]
                mine.set_exception(error)
        return variant.result().model

    def _compile(self, sizes: Sizes) -> _Variant:
        shapes = {
            spec.name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
            for spec in self.inputs
        }
        model = compile(self._model, shapes=shapes, **self._options)
        with self._lock:  # a variant that failed is not among them
            done = [v.result().weights for v in self._variants.values() if v.done()]
        return _Variant(model, model.share_weights(ChainMap(*done)))


def specialize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ExportedProgram,
    target: Any = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    variants: int = 8,
    **options: Any,
) -> SpecializedModel:
    """Prepare a model of ONNX or PyTorch for calls with any sizes of its open dimensions.

    Kernels for known sizes are faster than those for any, and exist for all operators; so each
    combination of sizes gets kernels of its own when it is first called. Nothing is compiled yet.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.export.ExportedProgram
        The model. If its weights are in other files, they are read for each variant. Those of a
        program are copied.
    target : str, mapping or tvm.target.Target
        Target as in :func:`tvm_fusion.compile`.
    shapes : mapping, optional
        As for :func:`tvm_fusion.compile`; all that it does not bind stays open. A ``range`` limits
        the sizes of a dimension: ``{"sequence": range(1, 513)}``. A dimension without a name is
        called after its input and its place, ``x_0``.
    variants : int
        Greatest number of variants that are kept.
    **options
        Other arguments of :func:`tvm_fusion.compile`.

    Returns
    -------
    SpecializedModel

    Raises
    ------
    InvalidModelError
        If the model cannot be read, or ``shapes`` names what it does not have.
    InvalidInputError
        If ``variants`` is not positive.

    Examples
    --------
    >>> model = tvm_fusion.specialize("bert.onnx")                  # doctest: +SKIP
    >>> y = model(input_ids=ids, attention_mask=mask)               # doctest: +SKIP
    """
    if isinstance(variants, bool) or not isinstance(variants, Integral) or variants < 1:
        raise InvalidInputError(f"variants is {variants!r:.60}; expected an integer of 1 or more")
    if not isinstance(shapes or {}, Mapping):
        raise InvalidModelError(f"shapes is {shapes!r:.80}; expected a mapping")
    model = front_end_of(model).as_onnx(model)
    data = read_model(model)
    proto = parse_model(data)
    source = model if any(True for _ in external_tensors(proto)) else data
    drop_initializers_from_inputs(proto)
    given = dict(shapes or {})
    ranges = {name: size for name, size in given.items() if isinstance(size, range)}
    inputs = _open_inputs(proto, {k: v for k, v in given.items() if k not in ranges})
    open_dimensions = {dim for spec in inputs for dim in spec.shape if isinstance(dim, str)}
    unknown = sorted(ranges.keys() - open_dimensions)
    if unknown:
        names = ", ".join(sorted(open_dimensions)) or "none"
        raise InvalidModelError(f"shapes limits {unknown[0]!r}; the open dimensions are {names}")
    return SpecializedModel(source, inputs, ranges, variants, {"target": target, **options})


def _open_inputs(proto: onnx.ModelProto, shapes: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """The inputs, with a name for each dimension that has no size."""
    specs, used = [], set()
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        whole = shapes.get(value.name)
        if not tensor.HasField("shape") and whole is None:
            raise InvalidModelError(
                f"input {value.name!r} has no shape; pass shapes={{{value.name!r}: (...)}} with a "
                "size or a name for each dimension"
            )
        dims: list[int | str] = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{place}"
            for place, dim in enumerate(tensor.shape.dim)
        ]
        if whole is not None:
            used.add(value.name)
            dims = list(whole)
        used |= set(dims) & shapes.keys()
        dims = [shapes.get(dim, dim) if isinstance(dim, str) else dim for dim in dims]
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        specs.append(TensorSpec(value.name, tuple(dims), dtype))
    unknown = sorted(shapes.keys() - used)
    if unknown:
        raise InvalidModelError(
            f"shapes names {unknown[0]!r}, which is neither an input nor an open dimension of the "
            "model"
        )
    return tuple(specs)


def _range_text(allowed: range) -> str:
    step = "" if allowed.step == 1 else f" in steps of {allowed.step}"
    return f"{allowed[0]} to {allowed[-1]}{step}" if allowed else "nothing, by an empty range"
