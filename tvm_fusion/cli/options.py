# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands have, and checks of them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    from ..compiler.targets import names_gpu

    return names_gpu(target)


def refuse_absent_gpu(target: str) -> None:
    """Refuse a target whose code this machine's GPU cannot run, before anything is compiled.

    Raises TargetError if something is missing; the message names it.
    """
    if names_gpu(target):
        from ..compiler.targets import device_needs, resolve
        from ..runtime.tvm_runtime import check_device

        needs = device_needs(resolve(target))
        if needs is not None:
            check_device(needs)


def refuse_absent_folder(output: Path) -> None:
    """Refuse to write a file into a folder that is not there.

    Raises ArtifactError if the folder does not exist, or may not be written to.
    """
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ArtifactError(f"cannot write {str(output)!r}: no such folder, or not a writable one")


def refuse_model_file(output: Path, model: Path) -> None:
    """Refuse to overwrite the files that the model is read from.

    Raises ArtifactError if the output is the model, or one of the files of an ONNX model's weights.
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


PEERS = ("onnxruntime", "openvino", "tvm")


class Shape(click.ParamType):
    """``name=1,3,224,224``, the shape of an input, or ``name=1``, the size of a dimension."""

    name = "NAME=SIZES"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int | tuple[int, ...]]:
        """Read the name and the sizes."""
        if not isinstance(value, str):
            return value
        name, _, sizes = value.rpartition("=")
        items = sizes.removesuffix(",").split(",")
        if not name or not all(item.strip().isdecimal() and int(item) for item in items):
            self.fail(f"{value!r} is not like input=1,3,224,224 or batch=1", param, ctx)
        numbers = tuple(int(item) for item in items)
        return name, numbers if "," in sizes else numbers[0]


class Targets(click.ParamType):
    """A target, or several, separated by commas."""

    name = "TARGET[,...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> str | list[str]:
        """Split targets, of which the first is a name; commas of ``-mattr`` separate features."""
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in re.split(r",(?![+-])", value)]
        if len(names) == 1 or re.search(r"[\s{]", names[0]):
            return value
        if not all(names):
            self.fail(f"{value!r} is not like x86-64-v3,x86-64-v4", param, ctx)
        return names


class Names(click.ParamType):
    """Names of tensors, separated by commas."""

    name = "NAME[,...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[str]:
        """Split the names."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class ModelFile(click.Path):
    """A file with a model; ``-`` is standard input, which is kept in a file during the command."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read standard input, or check that the file is there."""
        if value != "-":
            return super().convert(value, param, ctx)
        folder = tempfile.TemporaryDirectory(prefix="standard-input-")  # errors name it
        ctx.call_on_close(folder.cleanup)
        path = Path(folder.name) / "model"
        path.write_bytes(sys.stdin.buffer.read())
        return path


class OutputFile(click.Path):
    """A file to write, which is refused before anything is computed if its folder is not there."""

    def __init__(self, dir_okay: bool = False) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Check that the file can be written."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        refuse_absent_folder(path)
        return path


existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)


class NamedFile(click.ParamType):
    """``name=file``, the file an existing one."""

    name = "NAME=FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path]:
        """Read the name and the path."""
        if not isinstance(value, str):
            return value
        # A name and a path may both contain "=": take the first split that gives a file.
        parts = value.split("=")
        for index in range(1, len(parts)):
            path = Path("=".join(parts[index:]))
            if path.is_file():
                return "=".join(parts[:index]), path
        return self.fail(f"{value!r} is not like input=file.npy with an existing file", param, ctx)


class EngineList(click.ParamType):
    """Names of peers, separated by commas."""

    name = "ENGINES"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[str]:
        """Read the names; a repeated one counts once."""
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",") if name.strip()]
        unknown = sorted(set(names) - set(PEERS))
        if unknown or not names:
            found = ", ".join(unknown) or repr(value)
            self.fail(f"{found}: expected some of {', '.join(PEERS)}", param, ctx)
        return list(dict.fromkeys(names))


def as_mapping(
    context: click.Context, option: click.Parameter, pairs: Sequence[tuple[str, Any]]
) -> dict[str, Any]:
    """Return the values of a repeated ``NAME=VALUE`` option by name; no name may come twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise click.UsageError(f"{option.opts[0]} names {', '.join(twice)} more than once")
    return mapping


inputs_option = click.option(
    "--input",
    "inputs",
    multiple=True,
    type=NamedFile(),
    callback=as_mapping,
    help="Array of an input, from a .npy file; other inputs get random values.",
)

model_argument = click.argument("model", type=ModelFile(), metavar="MODEL")

_COMPILE_OPTIONS = (
    click.option(
        "--target",
        default="native",
        help="CPU or GPU to compile for: native, x86-64-v3, cuda (the GPU of this machine), "
        "'cuda -arch=sm_90', opencl, or a target of TVM.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        callback=as_mapping,
        type=Shape(),
        help="Shape of an input, x=1,3,224,224, or size of a dimension that the model leaves "
        "open, batch=1. May be repeated.",
    ),
    click.option(
        "--fuse",
        type=click.Choice(["auto", "all", "none"]),
        default="auto",
        help="Pairs of convolutions to fuse: those that gain, all that can be, or none.",
    ),
    click.option(
        "--winograd",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        help="3x3 convolutions to compute on a CPU by Winograd's algorithm, with fewer "
        "multiplications: those that gain, all that can be, or none.",
    ),
)


def compile_options(command: Any) -> Any:
    """Give a command the options ``target``, ``shapes``, ``fuse`` and ``winograd``.

    They are named as the parameters of :func:`tvm_fusion.compile`.
    """
    return _COMPILE_OPTIONS[0](model_options(command))


def model_options(command: Any) -> Any:
    """Give a command the options of :func:`compile_options` but for ``target``."""
    for option in reversed(_COMPILE_OPTIONS[1:]):
        command = option(command)
    return command


records_option = click.option(
    "--records",
    metavar="PATH",
    help="Tuning records for CPU kernels: a file, the folder of `tune --database`, or none to use "
    "not even those of the package.",
)

machine_option = click.option(
    "--machine",
    metavar="NAME|FILE",
    help="Choose by the figures of a file of `calibrate`, or of a known machine; cuda without an "
    "architecture is then that GPU. Default: the figures of the CPU's family, thresholds for GPUs.",
)

precision_option = click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "tf32", "fp16", "auto"]),
    default="fp32",
    help="For CPUs: bf16 rounds what products and convolutions of float32 multiply to bfloat16; "
    "auto does so where the CPU multiplies that faster. For GPUs: fp16 computes products and "
    "convolutions of float32 in float16, on tensor cores where there are some; tf32 rounds the "
    "factors of products and of dense convolutions to TF32, from sm_80 on.",
)

reproducible_option = click.option(
    "--reproducible",
    is_flag=True,
    help="For GPUs: add in an order that does not depend on the GPU, so that reductions have the "
    "same bits on all of them.",
)

weights_option = click.option(
    "--weights",
    type=click.Choice(["bf16", "int8", "int4"]),
    help="On CPUs: round the matrices of products to 16, 8 or 4 bits, the latter two with a scale "
    "for each block, as embeddings, and weights of convolutions to 8.",
)

targets_option = click.option(
    "--target",
    type=Targets(),
    default="native",
    help="CPU or GPU to compile for: native, x86-64-v3, cuda (the GPU of this machine), "
    "'cuda -arch=sm_90', opencl, or a target of TVM. Several are separated by commas: a file for "
    "x86-64-v3,x86-64-v4 holds code for each of these CPUs, and runs that for the best one.",
)

network_option = click.option(
    "--network",
    metavar="FIGURES|FILE",
    help="What connects the ranks: alpha=1.5us,beta=12GB/s (latency and bandwidth between nodes), "
    "or a file of `calibrate --network`. Default: an estimate of one node.",
)

exchange_option = click.option(
    "--exchange",
    type=click.Choice(["auto", "always", "once"]),
    default="auto",
    help="With --ranks: exchange rows where that is predicted to be fastest, wherever those of "
    "neighbours are read, or only at the end.",
)

threads_option = click.option(
    "--threads", type=click.IntRange(min=1), help="Default: one a physical core."
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write JSON, and nothing else, to standard output."
)
