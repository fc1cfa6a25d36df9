# SPDX-License-Identifier: Apache-2.0
"""Runs of a model by the command line: its inputs, its outputs, and what is shown of them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from schedules.cost.trees import DAMAGED_ARRAY

from ...bench.throughput import throughput
from ...errors import InvalidInputError
from ...runtime.host_arrays import random_inputs
from ...runtime.tensor_spec import TensorSpec, refuse_open_shapes
from ...written_aside import written_aside

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
