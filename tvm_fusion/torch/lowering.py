# SPDX-License-Identifier: Apache-2.0
"""Compilation of an FX graph: whole, or in parts around the ops that only PyTorch can run."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from ..compiler.compile import compile
from ..compiler.model_cache import VARIABLE
from ..compiler.pipeline import Options, phases
from ..compiler.targets import resolve
from ..errors import EagerModeWarning, InvalidInputError
from ..runtime.compiled_model import CompiledModel
from ..runtime.thread_pool import choose_threads
from ..warning_filters import warnings_ignored
from .exported_program import UnsupportedTorchOpError, changed_in_place, functional
from .front_end import as_argument

Run = Callable[..., Sequence[Any]]
"""Function from the tensors of a call to all outputs of a graph."""

_PASSES = ("fuse", "precision", "weights", "winograd")
_KNOWN = ("check", "target", "threads", *_PASSES)
_COPY = "aten.copy_.default"
_CHEAP = frozenset(
    """_unsafe_view alias clone contiguous detach expand permute reshape select
    slice squeeze t transpose unsqueeze view""".split()
)
"""Ops that alone are not worth a compiled model."""


def run(model: CompiledModel, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of a model on tensors of the CPU; nothing is copied that need not be."""
    arguments = [as_argument(tensor) for tensor in tensors]
    if any(spec.dtype == "bfloat16" for spec in model.outputs):
        outputs = model.tensors(*arguments)
    else:
        outputs = model(*arguments)  # has a faster path, for numpy arrays
    if len(model.outputs) == 1:
        outputs = (outputs,)
    return [torch.from_dlpack(output) for output in outputs]


@dataclass(frozen=True)
class Choices:
    """Options of ``torch.compile(..., options=...)``."""

    arguments: Mapping[str, Any]
    """Keyword arguments of :func:`tvm_fusion.compile`; ``threads`` is PyTorch's own number by
    default."""

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Choices:
        """Check the options of a user.

        Raises
        ------
        InvalidInputError
            If one is unknown, or ``check`` or ``threads`` has a value that it cannot have.
        OpError
            If a pass does not know the value of its option.
        TargetError
            If the target is unknown.
        """
        for name in options or {}:
            if name not in _KNOWN:
                raise InvalidInputError(
                    f"torch.compile got the option {name!r}; expected one of {', '.join(_KNOWN)}"
                )
        settings = {"threads": torch.get_num_threads()} | dict(options or {})
        check, target = settings.get("check", False), settings.get("target", "native")
        if not isinstance(check, bool):
            raise InvalidInputError(f"the option 'check' is {check!r}; expected True or False")
        choose_threads(settings["threads"], elsewhere=target != "native")
        passes = {name: settings[name] for name in _PASSES if name in settings}
        phases(resolve(target, cores=settings["threads"]), Options(**passes))  # makes the passes
        return cls(settings)


_GIVEN: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Warnings that were given, by the calls of ``torch.compile``."""


def warn_once(text: str) -> None:
    """Give a warning about the line that calls the model, once for each ``torch.compile``."""
    frame: FrameType | None = sys._getframe(1)
    caller = None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "self" in frame.f_locals:
            caller, texts = frame, _GIVEN.setdefault(frame.f_locals["self"], set())
        frame = frame.f_back
    if caller is None:  # a graph that is compiled outside of a call
        warnings.warn(text, EagerModeWarning, stacklevel=3)
        return
    if text in texts:
        return
    texts.add(text)
    while caller.f_back and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    # A registry would give the same text about the same line only once.
    warnings.warn_explicit(text, EagerModeWarning, caller.f_code.co_filename, caller.f_lineno)


def export(
    module: torch.nn.Module, arguments: Sequence[torch.Tensor], open_dimensions: Any = None
) -> ExportedProgram:
    """Export a module, as a functional program, on tensors like ``arguments``.

    Parameters
    ----------
    module : torch.nn.Module
        A graph module.
    arguments : sequence of torch.Tensor
        Only shapes and types count.
    open_dimensions : tuple of dict, optional
        The ``dynamic_shapes`` of ``torch.export.export``.

    Raises
    ------
    UnsupportedTorchOpError
        If PyTorch cannot export it.
    """
    try:
        with torch.inference_mode(False), torch.no_grad(), warnings_ignored():
            # Zeros, since a check would call the program on them: they are valid indices.
            examples = tuple(torch.zeros(value.shape, dtype=value.dtype) for value in arguments)
            program = torch.export.export(
                module, examples, dynamic_shapes=open_dimensions, strict=False
            )
            return functional(program)
    except Exception as error:  # there is no common class of its errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnsupportedTorchOpError(
            f"PyTorch cannot export the graph: {reason}", frozenset()
        ) from error


def lower(program: ExportedProgram, choices: Choices) -> Run:
    """Compile a program whole, or else what lies between the ops that cannot be compiled.

    Those run in eager mode; a warning names them.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        Program of a module whose inputs and outputs are tensors; it may change its inputs.
    choices : Choices
        The user's options.

    Raises
    ------
    TVMFusionError
        If nothing can be compiled.
    """
    if changed_in_place(program):
        return _lower_in_parts(program, choices, frozenset([_COPY]))
    try:
        return lower_whole(program, choices)
    except UnsupportedTorchOpError as error:
        if not error.ops:
            raise
        return _lower_in_parts(program, choices, error.ops)


def lower_whole(program: ExportedProgram, choices: Choices) -> Run:
    """Compile a program whose inputs and outputs are tensors as one model.

    Raises
    ------
    TVMFusionError
        If that is not possible.
    """
    with torch.inference_mode(False), torch.no_grad():
        is_unset = VARIABLE not in os.environ
        model = compile(program, cache=True if is_unset else None, **choices.arguments)
    names = list(program.graph_signature.user_inputs)
    places = [names.index(spec.name) for spec in model.inputs]

    def run_whole(*arguments: torch.Tensor) -> list[torch.Tensor]:
        return run(model, [arguments[place] for place in places])

    return run_whole


def _lower_in_parts(program: ExportedProgram, choices: Choices, refused: frozenset[str]) -> Run:
    """Compile what lies between the refused ops, and between those found on the way."""
    if not refused <= _ops(program) | {_COPY}:
        program = program.run_decompositions()
    while True:
        module = program.module(check_guards=False)
        assert isinstance(module, fx.GraphModule)
        partitioner = CapabilityBasedPartitioner(
            module, _Compilable(refused), allows_single_node_partition=True
        )
        parts = [part for part in partitioner.propose_partitions() if _is_worthwhile(part.nodes)]
        try:
            _compile_parts(partitioner.fuse_partitions(parts), choices)
        except UnsupportedTorchOpError as error:
            if not error.ops or not error.ops <= _ops(program) - refused:
                raise
            refused |= error.ops
            continue
        for op in sorted(refused - {_COPY}):
            warn_once(f"{op} cannot be compiled and runs in eager mode; other ops are compiled")
        return module


def _ops(program: ExportedProgram) -> frozenset[str]:
    nodes = program.graph.nodes
    return frozenset(str(node.target) for node in nodes if node.op == "call_function")


class _Compilable(OperatorSupportBase):
    """All ops on tensors but the refused ones."""

    def __init__(self, refused: frozenset[str]) -> None:
        self._refused = refused

    def is_node_supported(self, submodules: Mapping[str, Any], node: fx.Node) -> bool:
        """Return whether the node can be part of a compiled model."""
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        return node.op == "call_function" and is_tensor and str(node.target) not in self._refused


def _is_worthwhile(nodes: Mapping[fx.Node, Any]) -> bool:
    """Return whether one of the nodes computes something."""
    names = (str(node.target).split(".") for node in nodes)
    return any(len(name) < 2 or name[1] not in _CHEAP for name in names)


def _compile_parts(module: fx.GraphModule, choices: Choices) -> None:
    """Replace the submodules of a partitioned graph by compiled models."""
    for node in list(module.graph.nodes):
        if node.op != "call_module":
            continue
        part = module.get_submodule(node.target)
        assert isinstance(part, fx.GraphModule)
        _move_weights(module, node, part)
        values = [argument.meta["val"] for argument in node.args]
        is_single = isinstance(part.graph.output_node().args[0], fx.Node)
        run = lower_whole(export(part, values), choices)
        module.delete_submodule(node.target)
        module.add_submodule(node.target, _Part(run, is_single))
    module.graph.eliminate_dead_code()
    module.recompile()


def _move_weights(module: fx.GraphModule, node: fx.Node, part: fx.GraphModule) -> None:
    """Let a submodule have the weights that it takes as arguments."""
    operands = []
    inputs = [inner for inner in part.graph.nodes if inner.op == "placeholder"]
    for argument, inner in zip(node.args, inputs, strict=True):
        if argument.op != "get_attr":
            operands.append(argument)
            continue
        weight = functools.reduce(getattr, str(argument.target).split("."), module)
        bind_input(part, inner, f"weight_{inner.name}", weight)
    node.args = tuple(operands)
    part.recompile()


def bind_input(module: fx.GraphModule, node: fx.Node, name: str, value: torch.Tensor) -> None:
    """Replace an input of a graph by a buffer in the memory of ``value``."""
    with torch.inference_mode(False):
        buffer = value.detach()
        if buffer.is_inference():  # could not be changed in place while the graph is exported
            buffer = torch.from_dlpack(buffer.resolve_conj().resolve_neg())
    module.register_buffer(name, buffer, persistent=False)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.erase_node(node)


class _Part(torch.nn.Module):
    """Compiled part of a graph."""

    def __init__(self, run: Run, is_single: bool) -> None:
        super().__init__()
        self._run = run
        self._is_single = is_single

    def forward(self, *arguments: torch.Tensor) -> Any:
        """Compute the outputs of the part."""
        outputs = self._run(*arguments)
        return outputs[0] if self._is_single else tuple(outputs)
