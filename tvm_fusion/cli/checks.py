# SPDX-License-Identifier: Apache-2.0
"""Checks that the commands make before anything is compiled or written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ..errors import ArtifactError

_LIBRARY_SUFFIXES = (".so", ".dylib", ".dll")
_LIBRARY_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ")


def refuse_given(names: Sequence[str], why: str) -> None:
    """Reject options that the user gave and that have no effect here."""
    context = click.get_current_context()
    default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    options = {param.name: param.opts[0] for param in context.command.params}
    for name in names:
        if context.get_parameter_source(name) not in default:
            raise click.UsageError(f"{options[name]} has no effect: {why}")


def is_compiled(path: Path) -> bool:
    """Return whether the file should be a shared library, by its suffix or its first bytes."""
    if path.suffix.lower() in _LIBRARY_SUFFIXES:
        return True
    with path.open("rb") as file:
        return file.read(4).startswith(_LIBRARY_MAGIC)


def names_gpu(target: str) -> bool:
    """Return whether a target is a GPU; needs no GPU, and imports nothing for a CPU."""
    if target == "native":
        return False
    from ..compiler.targets.target import names_gpu

    return names_gpu(target)


def refuse_absent_gpu(target: str) -> None:
    """Refuse a target whose code this machine's GPU cannot run, before anything is compiled.

    Raises
    ------
    TargetError
        If something is missing; the message names it.
    """
    if names_gpu(target):
        from ..compiler.targets.target import device_needs, resolve
        from ..runtime.gpu_device import check_device

        needs = device_needs(resolve(target))
        if needs is not None:
            check_device(needs)


def refuse_absent_folder(output: Path) -> None:
    """Refuse to write a file into a folder that is not there.

    Raises
    ------
    ArtifactError
        If the folder does not exist, or may not be written to.
    """
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ArtifactError(f"cannot write {str(output)!r}: no such folder, or not a writable one")


def refuse_model_file(output: Path, model: Path) -> None:
    """Refuse to overwrite the files that the model is read from.

    Raises
    ------
    ArtifactError
        If the output is the model, or one of the files of an ONNX model's weights.
    """
    if not output.exists():
        return
    files: Sequence[Path] = [model]
    if not is_compiled(model):
        from ..onnx.model.loader import model_files

        files = model_files(model)
    for file in files:
        if file.exists() and output.samefile(file):
            whose = "the model itself" if file == model else "a file of the model's weights"
            raise ArtifactError(f"{str(output)!r} is {whose}; give --output another name")
