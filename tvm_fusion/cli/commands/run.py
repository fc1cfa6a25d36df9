# SPDX-License-Identifier: Apache-2.0
"""Command ``tvm-fusion run``: a model, on this machine or on each rank of a job."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from schedules.cost.trees import DAMAGED_ARRAY

from ...bench.throughput import throughput
from ...errors import InvalidInputError, TVMFusionError
from ...paths import written_aside
from ...runtime.artifact import describe_artifact
from ...runtime.host_arrays import TensorSpec, random_inputs, refuse_open_shapes
from ...runtime.thread_pool import choose_threads
from ..options import (
    OutputFile,
    compile_options,
    inputs_option,
    is_compiled,
    json_option,
    model_argument,
    records_option,
    refuse_absent_gpu,
    refuse_given,
    refuse_model_file,
    threads_option,
)
from ..output import compile_model, show

if TYPE_CHECKING:
    from ...distributed.world.numa_placement import Numa


TOP = 5
"""Number of an output's largest values that are shown."""

WARM_UP = 3
"""Untimed runs before the timed ones."""


def run_model(
    model: Any,
    files: Mapping[str, Path],
    shapes: Mapping[str, Sequence[int]],
    seed: int,
    repeat: int,
    streams: int | None = None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Run a compiled model ``repeat`` times, and return what to show and the outputs by name.

    With ``streams``, then also so many copies of it at the same time.
    """
    arrays = input_arrays(model.inputs, files, shapes, seed)
    outputs = named_outputs(model, model(arrays))
    latency = model.benchmark(repeat, warmup=WARM_UP, inputs=arrays)
    result = {
        "inputs": [
            {"name": name, "shape": array.shape, "dtype": array.dtype.name}
            | {"from": str(files[name]) if name in files else f"random, seed {seed}"}
            for name, array in arrays.items()
        ],
        "outputs": [
            {"name": name, "shape": array.shape, "dtype": array.dtype.name, "top": top(array)}
            for name, array in outputs.items()
        ],
        "latency": asdict(latency),
    }
    if streams is not None:
        result["throughput"] = asdict(throughput(model, streams, arrays))
    return result, outputs


def input_arrays(
    specs: Sequence[TensorSpec],
    files: Mapping[str, Path],
    shapes: Mapping[str, Sequence[int]],
    seed: int,
) -> dict[str, np.ndarray]:
    """Return an array for each input, in order: from its file, or a random one."""
    unknown = sorted(set(files) - {spec.name for spec in specs})
    if unknown:
        names = ", ".join(repr(spec.name) for spec in specs)
        raise InvalidInputError(f"no input is called {unknown[0]!r}; the inputs are {names}")
    loaded = {name: load_array(path) for name, path in files.items()}
    drawn = [_with_sizes(spec, shapes) for spec in specs if spec.name not in files]
    arrays = loaded | random_inputs(drawn, seed, normal=True)
    return {spec.name: arrays[spec.name] for spec in specs}


def load_array(path: Path) -> np.ndarray:
    """Read a .npy file; one that would execute code when read is refused."""
    try:
        array = np.load(path, allow_pickle=False)
    except DAMAGED_ARRAY as error:
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise InvalidInputError(f"cannot read {str(path)!r} as a .npy file: {reason}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidInputError(f"{str(path)!r} holds several arrays; expected a .npy file of one")
    return array


def named_outputs(model: Any, results: Any) -> dict[str, np.ndarray]:
    """Return the outputs of a call as numpy arrays by their names; none of one without results."""
    if results is None:
        return {}
    results = results if isinstance(results, list | tuple) else [results]
    names = [spec.name for spec in model.outputs]
    return {name: np.asarray(value) for name, value in zip(names, results, strict=True)}


def top(array: np.ndarray) -> list[dict[str, Any]]:
    """Return the largest values, and where they are, in the first item of a batch."""
    if array.ndim < 2 or array.size == 0:
        return []
    scores = array[0].ravel()
    best = np.argsort(-scores.astype(np.float64), kind="stable")[:TOP]
    return [{"index": int(index), "value": scores[index].item()} for index in best]


def save_outputs(path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    """Write arrays as an .npz file under exactly this path; ``numpy.savez`` forbids some names."""
    with written_aside(path) as aside, zipfile.ZipFile(aside, "w") as archive:
        for name, array in outputs.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _with_sizes(spec: TensorSpec, shapes: Mapping[str, Any]) -> TensorSpec:
    """``spec`` with sizes for its symbolic dimensions from ``shapes``, by input or by dimension."""
    shape = shapes.get(spec.name, spec.shape)
    sizes = tuple(shapes.get(size, size) if isinstance(size, str) else size for size in shape)
    filled = TensorSpec(spec.name, sizes, spec.dtype)
    remedy = "give it an array with --input or sizes with --shape"
    refuse_open_shapes([filled], InvalidInputError, remedy)
    return filled


def run_text(result: Mapping[str, Any]) -> str:
    """Format the findings of :func:`run_model` as text."""
    lines = []
    for output in result["outputs"]:
        shape = "x".join(map(str, output["shape"])) or "scalar"
        lines.append(f"{output['name']}: {output['dtype']} {shape}")
        lines += [f"  {entry['index']:>8}  {entry['value']:.6g}" for entry in output["top"]]
    latency = result["latency"]
    lines.append(
        f"latency: median {latency['median_ms']:.3f} ms, min {latency['min_ms']:.3f} ms, "
        f"p90 {latency['p90_ms']:.3f} ms, p99 {latency['p99_ms']:.3f} ms, "
        f"{latency['repeat']} runs, {latency['threads']} threads"
    )
    if "throughput" in result:
        found = result["throughput"]
        lines.append(
            f"throughput: {found['calls_per_second']:.1f} calls/s, {found['streams']} streams of "
            f"{found['threads']} threads"
        )
    return "\n".join(lines)


def run_distributed(
    path: Path,
    files: Mapping[str, Path],
    output: Path | None,
    seed: int,
    repeat: int,
    settings: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Run a model on all ranks of this job; the first one writes and shows the outputs.

    ``settings`` are those of the session.
    """
    from ...distributed import load, session

    with session(_ranks_of(path), **settings) as world:
        model = load(path).on(world)
        if output is not None and world.rank == 0:
            refuse_model_file(output, path)
        result, outputs = run_model(model, files, {}, seed, repeat)
        if world.rank == 0:
            if output is not None:
                save_outputs(output, outputs)
            result = {"model": str(path), "ranks": world.size, **result}
            show(result, run_text(result), as_json)


def _ranks_of(path: Path) -> int | None:
    """Ranks that a file is for; None if it is no such file, which is told within the session."""
    try:
        plan = describe_artifact(path).ranks
    except TVMFusionError:
        return None
    return None if plan is None else plan.ranks


@click.command("run")
@model_argument
@inputs_option
@click.option("--output", type=OutputFile(), help="Write the outputs, by name, to this .npz file.")
@click.option("--seed", type=click.IntRange(min=0), default=0)
@click.option("--iterations", "--repeat", "repeat", type=click.IntRange(min=1), default=20)
@click.option(
    "--streams",
    type=click.IntRange(min=1),
    help="Also count the calls a second of so many copies of the model that run at the same time; "
    "each has --threads threads, by default an equal share of the physical cores.",
)
@click.option(
    "--distributed",
    is_flag=True,
    help="Be one rank of a job that runs a model compiled with --ranks; start it by "
    "`mpiexec -n RANKS tvm-fusion run MODEL --distributed`. The first rank shows the outputs.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="With --distributed: seconds for which a rank waits for another.",
)
@click.option(
    "--numa",
    type=click.Choice(["same", "other", "unbound"]),
    help="With --distributed: spread the ranks of a machine over its NUMA nodes, their memory on "
    "the same node, the next (other) one, or unbound; refused by a machine with one node.",
)
@click.option(
    "--bind/--no-bind",
    default=True,
    help="With --distributed: give each rank of a machine processors of its own, if there are "
    "enough of them.",
)
@click.option(
    "--network",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --distributed: file of `calibrate --network`, read by the first rank, whose fastest "
    "routes the exchanges take that are not kernels of the model. Default: routes by constants.",
)
@compile_options
@records_option
@threads_option
@json_option
def run_command(
    model: Path,
    inputs: dict[str, Path],
    output: Path | None,
    seed: int,
    repeat: int,
    streams: int | None,
    distributed: bool,
    timeout: float,
    numa: Numa | None,
    bind: bool,
    network: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run MODEL, a compiled model or an ONNX file, and show its outputs and its latency.

    --target, --fuse and --winograd apply to ONNX files only; --seed is that of the random inputs,
    --iterations the number of timed runs.
    """
    if distributed:
        refuse_given(
            ["target", "shapes", "fuse", "winograd", "records", "streams"],
            "--distributed runs a model that is compiled already, once at a time",
        )
        threads = options["threads"]
        settings = {"timeout": timeout, "threads": threads, "numa": numa, "bind": bind}
        settings["network"] = network
        run_distributed(model, inputs, output, seed, repeat, settings, as_json)
        return
    refuse_given(["timeout", "numa", "bind", "network"], "it is for --distributed")
    from ... import load

    if streams is not None and options["threads"] is None:
        options["threads"] = max(1, choose_threads(None) // streams)
    if output is not None:
        refuse_model_file(output, model)
    if is_compiled(model):
        refuse_given(["target", "fuse", "winograd", "records"], f"{model.name} is compiled already")
        compiled = load(model, threads=options["threads"])
    else:
        refuse_absent_gpu(options["target"])
        compiled = compile_model(model, **options)
    result, outputs = run_model(compiled, inputs, options["shapes"], seed, repeat, streams)
    if output is not None:
        save_outputs(output, outputs)
    show({"model": str(model), **result}, run_text(result), as_json)
