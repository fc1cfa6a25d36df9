# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion compile``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from ..errors import ArtifactError
from .checks import refuse_model_file
from .options import compile_options, json_option, model_argument, records_option, threads_option
from .output import compile_model, show


@click.command("compile")
@model_argument
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: MODEL.so."
)
@compile_options
@records_option
@click.option(
    "--fast-math",
    is_flag=True,
    help="Let CUDA kernels approximate functions of float32: tanh to 2^-11, and others.",
)
@threads_option
@json_option
def compile_command(model: Path, output: Path | None, as_json: bool, **options: Any) -> None:
    """Compile MODEL, an ONNX file, into a shared library that `run` and tvm_fusion.load take."""
    output = output or Path(model.with_suffix(".so").name)
    if not os.access(output.parent, os.W_OK):
        raise ArtifactError(f"cannot write {str(output)!r}: no such folder, or not a writable one")
    refuse_model_file(output, model)
    begin = time.perf_counter()
    compiled = compile_model(model, **options)
    compiled.save(output)
    seconds = time.perf_counter() - begin
    fused = sum(bool(pair["fused"]) for pair in compiled.fused)
    size = output.stat().st_size
    result = {
        "output": str(output),
        "bytes": size,
        "seconds": seconds,
        "target": str(compiled.target),
        "pairs": len(compiled.fused),
        "fused": fused,
        "inputs": compiled.inputs,
        "outputs": compiled.outputs,
        "records": compiled.records,
    }
    device = "" if compiled.needs is None else f" for {compiled.needs}"
    tuned = f"{len(compiled.records)} tuned kernels, " if compiled.records else ""
    text = (
        f"{output}: {size / 1e6:.1f} MB{device}, {fused} of {len(compiled.fused)} pairs fused, "
        f"{tuned}compiled in {seconds:.1f} s"
    )
    show(result, text, as_json)
