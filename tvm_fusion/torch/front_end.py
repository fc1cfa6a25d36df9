# SPDX-License-Identifier: Apache-2.0
"""Front end of exported programs, as the compiler asks it (``compiler/registry.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from ..compiler.reference import OPEN_SHAPE, Reference
from ..errors import InvalidInputError
from ..onnx.frontend import ImportedModel
from ..runtime.compiled_model import CompiledModel
from ..runtime.host_arrays import TensorSpec, refuse_open_shapes
from .exported_program import as_onnx, digest, import_exported_program

__all__ = ["as_onnx", "digest", "import_model", "reference"]


def import_model(
    program: ExportedProgram, shapes: Mapping[str, Any] | None, outputs: Sequence[str] | None
) -> ImportedModel:
    """Import a program as :func:`import_exported_program` does.

    Raises
    ------
    InvalidInputError
        If outputs are chosen.
    """
    if outputs is not None:
        raise InvalidInputError(
            "outputs= is for ONNX models: export a module that returns what is wanted"
        )
    return import_exported_program(program, shapes)


def as_argument(tensor: torch.Tensor) -> Any:
    """A numpy array in the memory of ``tensor``, or a tensor of a type that numpy lacks.

    Conjugate and negative views are resolved and strided ones made contiguous, which copies them.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dtype is torch.bfloat16 else tensor.numpy()


def reference(program: ExportedProgram, compiled: CompiledModel, seed: int) -> Reference:
    """Outputs of a program in eager mode.

    It is called on its example inputs, if these fit, and on random floats: of the examples'
    shapes and beside their integers, or else beside zeros and ones.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        The program.
    compiled : CompiledModel
        Its compiled form.
    seed : int
        Seed of the generator.

    Raises
    ------
    InvalidInputError
        If it carries no example inputs and has open sizes, or fails on random inputs.
    """
    values = (node.meta.get("val") for node in program.graph.nodes)
    dtypes = {str(x.dtype).removeprefix("torch.") for x in values if isinstance(x, torch.Tensor)}
    return Reference("PyTorch's eager mode", dtypes, _trials(program, compiled.inputs, seed))


def _trials(
    program: ExportedProgram, inputs: Sequence[TensorSpec], seed: int
) -> Iterator[tuple[list[Any], list[np.ndarray]]]:
    examples = _examples(program, inputs)
    if examples is not None:
        yield _trial(program, inputs, examples)
    else:
        refuse_open_shapes(inputs, InvalidInputError, OPEN_SHAPE)
    generator = torch.Generator().manual_seed(seed)
    known = examples or {}
    drawn = {spec.name: _drawn(spec, known.get(spec.name), generator) for spec in inputs}
    try:
        trial = _trial(program, inputs, drawn)
    except Exception as error:  # Any op may raise.
        if examples is not None:
            return  # the examples were right
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInputError(
            f"check=True: PyTorch fails on random inputs: {reason}; export the program anew, so "
            "that it carries example inputs, for these shapes"
        ) from error
    yield trial


def _examples(
    program: ExportedProgram, inputs: Sequence[TensorSpec]
) -> dict[str, torch.Tensor] | None:
    """The program's example inputs by their names; None if it has none of these shapes."""
    if program.example_inputs is None:
        return None
    given = zip(_arguments(program), pytree.tree_leaves(program.example_inputs), strict=True)
    found = {argument.name: value for argument, value in given}
    for spec in inputs:
        sizes = zip(spec.shape, found[spec.name].shape, strict=True)
        if any(isinstance(size, int) and size != own for size, own in sizes):
            return None
    return found


def _arguments(program: ExportedProgram) -> list[Any]:
    """The user's inputs in the program's signature."""
    specs = program.graph_signature.input_specs
    return [spec.arg for spec in specs if spec.kind is InputKind.USER_INPUT]


def _drawn(spec: TensorSpec, example: torch.Tensor | None, generator: torch.Generator) -> Any:
    """Random floats, or an example's integers, or zeros and ones."""
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        is_given = example is not None
        return example if is_given else torch.randint(2, spec.shape, generator=generator).to(dtype)
    shape = spec.shape if example is None else example.shape
    return torch.randn(shape, generator=generator).to(dtype)


def _trial(
    program: ExportedProgram, inputs: Sequence[TensorSpec], values: dict[str, torch.Tensor]
) -> tuple[list[Any], list[np.ndarray]]:
    leaves = [
        argument.value if isinstance(argument, ConstantArgument) else values[argument.name]
        for argument in _arguments(program)
    ]
    spec = program.call_spec.in_spec
    assert spec is not None, "a program of torch.export has one"
    args, kwargs = pytree.tree_unflatten([_copied(leaf) for leaf in leaves], spec)
    with torch.no_grad():
        outputs = program.module(check_guards=False)(*args, **kwargs)
    wanted = [_as_array(value) for value in pytree.tree_leaves(outputs) if value is not None]
    return [as_argument(values[spec.name]) for spec in inputs], wanted


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _as_array(value: Any) -> np.ndarray:
    """An output as the exporter to ONNX has it."""
    tensor = torch.as_tensor(value).detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
