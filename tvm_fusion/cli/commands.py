# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-fusion``: compile, run, bench, explain, tune and records.

Results go to standard output, progress and errors to standard error. Exit codes: 0, 1 for an
error that the message explains, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import ArtifactError, TVMFusionError
from ..version import __version__
from .options import (
    COMPILE_OPTIONS,
    EngineList,
    NamedFile,
    as_mapping,
    json_option,
    many_options,
    model_argument,
    records_option,
    refuse_given,
    threads_option,
)
from .output import progress_bar, show, show_table
from .tuning import records_group, tune_command

DEBUG = "TVM_FUSION_DEBUG"
"""Environment variable that makes errors show their traceback."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tvm-fusion")
def cli() -> None:
    """Compile ONNX models for CPUs and GPUs, with convolutions and reductions fused."""


@cli.command("compile")
@model_argument
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: MODEL.so."
)
@many_options(COMPILE_OPTIONS)
@records_option
@click.option(
    "--fast-math",
    is_flag=True,
    help="Let CUDA kernels approximate functions of float32: tanh to 2^-11, and others.",
)
@threads_option
@json_option
def compile_command(
    model: Path,
    output: Path | None,
    target: str,
    shape: tuple,
    fuse: str,
    winograd: str,
    records: str | None,
    fast_math: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compile MODEL, an ONNX file, into a shared library that `run` and tvm_fusion.load take."""
    from .. import compile as compile_model
    from .run import refuse_model_file

    output = output or Path(model.with_suffix(".so").name)
    if not os.access(output.parent, os.W_OK):
        raise ArtifactError(f"cannot write {str(output)!r}: no such folder, or not a writable one")
    refuse_model_file(output, model)
    begin = time.perf_counter()
    with progress_bar() as progress:
        shapes = as_mapping(shape, "--shape")
        compiled = compile_model(
            model,
            target,
            shapes,
            fuse=fuse,
            winograd=winograd,
            threads=threads,
            records=records,
            fast_math=fast_math,
            progress=progress,
        )
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


@cli.command("run")
@model_argument
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=NamedFile(),
    help="Array of an input, from a .npy file; other inputs get random values.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the outputs, by name, to this .npz file.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--repeat", type=click.IntRange(min=1), default=20, show_default=True)
@many_options(COMPILE_OPTIONS)
@records_option
@threads_option
@json_option
def run_command(
    model: Path,
    inputs: tuple,
    output: Path | None,
    seed: int,
    repeat: int,
    target: str,
    shape: tuple,
    fuse: str,
    winograd: str,
    records: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run MODEL, a compiled model or an ONNX file, and show its outputs and its latency.

    --target, --fuse and --winograd apply to ONNX files only; --seed is that of the random inputs,
    --repeat the number of timed runs.
    """
    from .. import load
    from .run import is_compiled, refuse_absent_gpu, refuse_model_file, run_model, save_outputs

    if output is not None:
        refuse_model_file(output, model)
    shapes = as_mapping(shape, "--shape")
    if is_compiled(model):
        refuse_given(["target", "fuse", "winograd", "records"], f"{model.name} is compiled already")
        compiled = load(model, threads=threads)
    else:
        from .. import compile as compile_model

        refuse_absent_gpu(target)
        with progress_bar() as progress:
            compiled = compile_model(
                model,
                target,
                shapes,
                fuse=fuse,
                winograd=winograd,
                threads=threads,
                records=records,
                progress=progress,
            )
    result, outputs = run_model(compiled, as_mapping(inputs, "--input"), shapes, seed, repeat)
    if output is not None:
        save_outputs(output, outputs)
    show({"model": str(model), **result}, _run_text(result), as_json)


@cli.command("bench")
@model_argument
@click.option(
    "--against",
    type=EngineList(),
    help="Peers, separated by commas: onnxruntime, openvino, tvm. Default: those installed.",
)
@click.option(
    "--compiled",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Race this compiled model instead of compiling MODEL again.",
)
@click.option(
    "--profile",
    "as_profile",
    is_flag=True,
    help="Do not race; show the time of each kernel beside the machine's limit.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True)
@many_options(COMPILE_OPTIONS)
@records_option
@threads_option
@json_option
def bench_command(
    model: Path,
    against: list[str] | None,
    compiled: Path | None,
    as_profile: bool,
    rounds: int,
    runs: int,
    target: str,
    shape: tuple,
    fuse: str,
    winograd: str,
    records: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Race tvm-fusion against other engines on MODEL, an ONNX file.

    Each engine runs in its own process; in each of --rounds rounds they take turns of --runs timed
    runs, on the same random inputs. With --profile, tvm-fusion runs alone, --runs times, and a
    table shows its kernels, sorted by the time lost against the machine's limit.
    """
    from .run import names_gpu, refuse_absent_gpu

    if as_profile:
        refuse_given(["against", "compiled", "rounds"], "--profile does not race")
        if names_gpu(target):
            raise click.UsageError("--profile is for CPUs; use explain --resources for GPU kernels")
        shapes = as_mapping(shape, "--shape")
        _show_profile(model, target, shapes, fuse, winograd, records, threads, runs, as_json)
        return
    refuse_absent_gpu(target)
    from ..bench.race import EngineSpec, Plan, available_peers, gpu_peers, race
    from ..bench.race_result import race_table
    from ..runtime.artifact import read_artifact

    options: dict[str, Any] = {"target": target, "fuse": fuse, "winograd": winograd}
    options |= {} if records is None else {"records": records}
    is_gpu = names_gpu(target)
    if compiled is not None:
        given = ["target", "fuse", "winograd", "records"]
        refuse_given(given, f"{compiled.name} is compiled already")
        options = {"artifact": str(compiled.resolve())}
        about = read_artifact(compiled)
        target, is_gpu = about.target, about.device is not None
    engines = [EngineSpec("tvm-fusion", options=options)]
    if is_gpu:
        engines += gpu_peers(against or [], target)
    else:
        engines += [EngineSpec(name) for name in against or available_peers()]
    with progress_bar() as progress:
        result = race(
            model,
            engines,
            threads=threads,
            shapes=as_mapping(shape, "--shape"),
            plan=Plan(rounds=rounds, runs=runs),
            progress=progress,
        )
    show_table(result.to_json(), race_table(result), as_json)


def _show_profile(
    model: Path,
    target: str,
    shapes: dict[str, Any],
    fuse: str,
    winograd: str,
    records: str | None,
    threads: int | None,
    runs: int,
    as_json: bool,
) -> None:
    from ..bench.profiler import profile, profile_table

    with progress_bar() as progress:
        result = profile(
            model,
            target,
            shapes,
            fuse=fuse,
            winograd=winograd,
            threads=threads,
            records=records,
            runs=runs,
            progress=progress,
        )
    show_table(result.to_json(), profile_table(result, model.name), as_json)


@cli.command("explain")
@model_argument
@click.option(
    "--resources",
    is_flag=True,
    help="Compile the CUDA kernels, and show their registers, spills and shared memory.",
)
@many_options(COMPILE_OPTIONS)
@records_option
@json_option
def explain_command(
    model: Path,
    resources: bool,
    target: str,
    shape: tuple,
    fuse: str,
    winograd: str,
    records: str | None,
    as_json: bool,
) -> None:
    """Show what MODEL is compiled to, and why; nothing is run.

    For a CPU, every pair of convolutions that could be fused: its FLOPs, the bytes moved by
    separate kernels and by a fused one, the FLOPs a byte (arithmetic intensity) of both, the
    decision, and the reason. For a GPU, every function, the rule that scheduled it, and the kernels
    that it launches. For both, the kernels that are left to a general rule or on which a rule
    failed, and why; --json names the rules of all kernels.
    """
    from .run import names_gpu

    if names_gpu(target):
        from ..compiler.explain_gpu import explain_kernels, explain_kernels_table

        refuse_given(["winograd", "records"], "it applies to CPUs only")
        shapes = as_mapping(shape, "--shape")
        report = explain_kernels(model, target, shapes, fuse, resources)
        show_table(report, explain_kernels_table(report, model.name), as_json)
        return
    refuse_given(["resources"], "it is for --target cuda")
    from ..compiler.explain import explain, explain_table

    report = explain(model, target, as_mapping(shape, "--shape"), fuse, winograd, records)
    show_table(report, explain_table(report, model.name), as_json)


cli.add_command(tune_command)
cli.add_command(records_group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing but ``SystemExit`` leaves it."""
    try:
        result = cli.main(arguments, prog_name="tvm-fusion", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return 130
    except BrokenPipeError:
        # The reader of our output, such as `head`, is done; click and rich exit likewise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        click.echo(f"Error: {_error_text(error)}", err=True)
        return 1


def _error_text(error: Exception) -> str:
    """One line for the user: our own errors as they are, others with their class."""
    if isinstance(error, TVMFusionError):
        return " ".join(str(error).split())
    first = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {first} (set {DEBUG}=1 to see where)"


def _run_text(result: dict[str, Any]) -> str:
    lines = []
    for output in result["outputs"]:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        lines.append(f"{output['name']}: {output['dtype']} {shape}")
        lines += [f"  {entry['index']:>8}  {entry['value']:.6g}" for entry in output["top"]]
    latency = result["latency"]
    lines.append(
        f"latency: median {latency['median_ms']:.3f} ms, min {latency['min_ms']:.3f} ms, "
        f"p90 {latency['p90_ms']:.3f} ms, {latency['repeat']} runs, {latency['threads']} threads"
    )
    return "\n".join(lines)
