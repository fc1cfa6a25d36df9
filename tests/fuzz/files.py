# SPDX-License-Identifier: Apache-2.0
"""Cases of damaged files: everything that the package reads, given to what reads it.

A saved model is machine code, so a damaged one must be refused before it is loaded; one that is
loaded must compute what it did. Forged ones, with a right checksum, are only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .damage import changed_tree, damaged_bytes, damaged_json
from .outcomes import Found, WrongResultError, outcome_of

ROOT = Path(__file__).resolve().parents[2]

Reader = Callable[[Path], Any]
Damage = Callable[[bytes, random.Random], bytes]


class Artifact(NamedTuple):
    """Files that are read together.

    Parameters
    ----------
    files : mapping
        Their contents by name; the first one is what readers get.
    readers : tuple of callable
        What reads it.
    forge : callable, optional
        Damage of the first file that only its meaning shows.
    forged_readers : tuple of callable, optional
        Readers of forged files, where they are others.
    weight : int
        Share of the cases.
    """

    files: Mapping[str, bytes]
    readers: tuple[Reader, ...]
    forge: Damage | None = None
    forged_readers: tuple[Reader, ...] = ()
    weight: int = 2


def attempt(number: int) -> Found:
    """Read a damaged file."""
    rng = random.Random(f"file {number}")
    artifacts = every_artifact()
    [artifact] = rng.choices(artifacts, [one.weight for one in artifacts])
    files, readers = dict(artifact.files), artifact.readers
    name = rng.choice(list(files))
    if artifact.forge is not None and rng.random() < 0.5:
        name = next(iter(files))
        files[name] = artifact.forge(files[name], rng)
        readers = artifact.forged_readers or readers
    else:
        other = rng.choice(list(rng.choice(artifacts).files.values()))
        files[name] = damaged_bytes(files[name], rng, other)

    def read() -> str:
        with tempfile.TemporaryDirectory() as folder:
            for file, data in files.items():
                (Path(folder) / file).write_bytes(data)
            rng.choice(readers)(Path(folder) / next(iter(files)))
        return "read"

    return outcome_of(read)


@cache
def every_artifact() -> tuple[Artifact, ...]:
    """All kinds of files; built once a process."""
    return (*_saved_models(), _ranks_model(), *_records(), *_machines(), *_traces(), *_others())


def command(*arguments: str | Path) -> Reader:
    """A reader that runs a command on the file, whose path takes the place of ``"FILE"``."""

    def read(path: Path) -> None:
        run_command([str(path) if one == "FILE" else str(one) for one in arguments])

    return read


def run_command(arguments: list[str]) -> None:
    """Run the command line in this process; an exception that it does not expect leaves it."""
    import os
    from unittest import mock

    from tvm_fusion.cli.command_line import DEBUG, main

    with (
        mock.patch.dict(os.environ, {DEBUG: "1"}),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        main(arguments)


def saved_model(text: str, seed: int = 0) -> tuple[bytes, list[np.ndarray], list[np.ndarray]]:
    """A saved model of a graph in ONNX's notation, inputs, and their results."""
    import onnx

    import tvm_fusion
    from tvm_fusion.runtime.host_arrays import TensorSpec, random_inputs

    header = '<ir_version: 8, opset_import: ["": 17]> graph '
    open_sizes = {"n": "n"} if "[n," in text else {}
    model = tvm_fusion.compile(
        onnx.parser.parse_model(header + text), "native", open_sizes, threads=1
    )
    specs = [
        TensorSpec(spec.name, tuple(s if isinstance(s, int) else 3 for s in spec.shape), spec.dtype)
        for spec in model.inputs
    ]
    inputs = list(random_inputs(specs, seed).values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        model.save(path)
        return path.read_bytes(), inputs, _arrays(model(*inputs))


GRAPHS = (
    "(float[4,8] x) => (float[4,8] y) { z = Relu(x) y = Mul(z, x) }",
    "(float[n,3] x) => (float[n,3] y) { y = Softmax(x) }",
    "(float16[2,3] h, bool[2,3] m, uint8[4] u) => (float16[2,3] a, uint8[4] b)"
    " { s = Add(h, h) a = Where(m, h, s) b = Add(u, u) }",
)


def _saved_models() -> list[Artifact]:
    found = []
    for text in (*GRAPHS, _large_graph()):
        data, inputs, expected = saved_model(text)
        readers = (_runs(inputs, expected), command("run", "FILE", "--repeat", "1"), _unpickles)
        found.append(
            Artifact({"model.so": data}, readers, _forged_model, (command("inspect", "FILE"),), 6)
        )
    return found


def _large_graph() -> str:
    weights = np.random.default_rng(0).integers(-9, 9, (48, 48))
    numbers = ", ".join(map(str, weights.ravel()))
    return (
        f"(float[3,48] x) => (float[3,48] y) <float[48,48] w = {{{numbers}}}>"
        " { z = MatMul(x, w) y = Relu(z) }"
    )


def _runs(inputs: list[np.ndarray], expected: list[np.ndarray]) -> Reader:
    def read(path: Path) -> None:
        import tvm_fusion

        model = tvm_fusion.load(path, threads=1)
        for found, wanted in zip(_arrays(model(*inputs)), expected, strict=True):
            if not np.array_equal(found, wanted):
                raise WrongResultError(f"{found} instead of {wanted}")
        model.save(path.parent / "copy.so")

    return read


def _unpickles(path: Path) -> None:
    from tvm_fusion.runtime.compiled_model import _unpickled

    _unpickled(path.read_bytes(), 1)


def _arrays(results: Any) -> list[np.ndarray]:
    return list(results) if isinstance(results, tuple) else [results]


def _forged_model(data: bytes, rng: random.Random) -> bytes:
    """A saved model with another description or footer; mostly its checksum is right."""
    from tvm_fusion.runtime.artifact import _FOOTER

    place, length, digest, version, magic = _FOOTER.unpack(data[-_FOOTER.size :])
    library, text = data[:place], data[place : place + length]
    if rng.random() < 0.7:
        text = json.dumps(changed_tree(json.loads(text), rng)).encode()
    numbers = [place, len(text), rng.choice([version] * 9 + [0, 1, 3, 6, 8, 1 << 31])]
    if rng.random() < 0.3:
        index = rng.randrange(2)
        more = rng.choice([-64, -1, 1, 64, 1 << 40])
        numbers[index] = max(0, numbers[index] + more)
        if rng.random() < 0.5:
            numbers[1 - index] = max(0, numbers[1 - index] - more)
    if rng.random() < 0.8:
        digest = hashlib.sha256(library + text).digest()
    return library + text + _FOOTER.pack(numbers[0], numbers[1], digest, numbers[2], magic)


def _ranks_model() -> Artifact:
    import tvm_fusion
    from examples.models import GraphBuilder
    from tvm_fusion import distributed

    net = GraphBuilder("network", (1, 3, 9, 8), 2)
    model = net.model({"y": (net.conv(net.input, 16, 3), [1, 16, 9, 8])})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.so"
        tvm_fusion.compile(model, ranks=2, threads=1).save(path)
        data = path.read_bytes()

    def read(path: Path) -> None:
        if distributed.load(path).ranks != 2:
            raise WrongResultError("another number of ranks")

    local = (command("inspect", "FILE"), lambda path: tvm_fusion.load(path))
    return Artifact({"model.so": data}, (read, *local), _forged_model, local, 4)


def _records() -> list[Artifact]:
    import tvm_fusion
    from tvm_fusion.compiler.record_reader import SHIPPED, choose_records
    from tvm_fusion.compiler.targets import resolve
    from tvm_fusion.tuning.meta_schedule_records import read_measurements
    from tvm_fusion.tuning.record_files import import_measured

    lines = (SHIPPED / "znver4.jsonl").read_bytes().splitlines(keepends=True)
    data = b"".join(lines[:: max(1, len(lines) // 6)])

    def forge(data: bytes, rng: random.Random) -> bytes:
        lines = data.splitlines()
        index = rng.randrange(len(lines))
        lines[index] = damaged_json(lines[index], rng)
        if b'"knobs"' in lines[index] and rng.random() < 0.5:
            record = json.loads(lines[index])
            if isinstance(record, dict) and isinstance(record.get("knobs"), dict | list):
                record["knobs"] = changed_tree(record["knobs"], rng)
                lines[index] = json.dumps(record).encode()
        return b"\n".join(lines)

    def choose(path: Path) -> None:
        choose_records(path, resolve("znver4"))

    def compile_with(path: Path) -> None:
        from small_onnx import small_model

        tvm_fusion.compile(small_model(), "znver4", records=path, threads=1)

    def take_in(path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            import_measured(Path(folder), path)

    readers = (
        *(choose, compile_with, read_measurements, take_in),
        *(command("records", verb, "FILE") for verb in ("list", "verify", "prune")),
        command("records", "merge", "/dev/null/x", "FILE"),
    )
    return [Artifact({"records.jsonl": data}, readers, forge, weight=4)]


def _machines() -> list[Artifact]:
    from schedules.cost.machine import load_machine
    from tvm_fusion.distributed.network_figures import read_figures
    from tvm_fusion.prediction.collectives import (
        Collectives,
        Curve,
        collectives_of,
        load_collectives,
    )

    folder = ROOT / "schedules" / "cost" / "machines"
    curve = Curve("all_to_all", 2, (1e3, 1e4, 1e6), (1e-5, 2e-5, 1e-3), "here")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "c.json"
        Collectives({("all_to_all", 2): curve}).save(path)
        curves = path.read_bytes()
    machine = json.loads((folder / "v100.json").read_bytes())
    machine["curves"] = json.loads(curves)["curves"]
    network = {
        "name": "ranks-2",
        "kind": "network",
        "title": "two",
        "figures": {
            f"network.{name}": {"value": value, "origin": "here"}
            for name, value in (("latency", 1e-6), ("bandwidth", 1e9), ("progress", 0.5))
        },
    }

    def compile_for(path: Path) -> None:
        from small_onnx import small_model

        import tvm_fusion

        tvm_fusion.compile(small_model(), "znver4", machine=path, threads=1)

    def shard(path: Path) -> None:
        tables = path.with_name("tables.json")
        tables.write_bytes(TABLES)
        run_command(["shard", str(tables), "--machine", str(path), "--ranks", "2"])

    return [
        Artifact(
            {"m.json": json.dumps(machine).encode()},
            (load_machine, collectives_of, shard),
            damaged_json,
        ),
        Artifact(
            {"m.json": (folder / "znver4.json").read_bytes()},
            (load_machine, compile_for),
            damaged_json,
        ),
        Artifact({"c.json": curves}, (load_collectives,), damaged_json),
        Artifact(
            {"n.json": json.dumps(network).encode()},
            (load_machine, lambda path: read_figures(str(path))),
            damaged_json,
        ),
    ]


TABLES = json.dumps(
    {
        "batch": 64,
        "tables": [
            {"name": f"t{i}", "rows": 100 * (i + 1), "width": 16 << i, "lookups": 2.5 + i}
            for i in range(3)
        ],
    }
).encode()


def _traces() -> list[Artifact]:
    import small_traces

    from tvm_fusion.prediction.api import load_traces, predict_traces
    from tvm_fusion.prediction.traces.overheads import load_overheads

    def predict(path: Path) -> None:
        for run in load_traces(path.parent):
            predict_traces(run)

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(2):
            small_traces.training_step(rank).write(Path(folder) / f"rank{rank}.json")
        small_traces.training_step().write(Path(folder) / "one.json.gz")
        nodes = [
            small_traces.node(1, 0, "aten::linear", "1.0.1"),
            small_traces.node(2, 1, "aten::mm", "1.0.1", shapes=[[32, 64], [64, 16]]),
        ]
        small_traces.execution_trace(Path(folder) / "et.json", "1.0.1", nodes)
        (run,) = load_traces(Path(folder) / "one.json.gz")
        run.overheads.save(Path(folder) / "overheads.json")
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    packed = gzip.decompress(found["one.json.gz"])
    found["one.json.gz"] = gzip.compress(packed, mtime=0)  # the same bytes in every process
    ranks = {name: found[name] for name in ("rank0.json", "rank1.json")}
    linked = {"rank0.json": found["rank0.json"], "et.json": found["et.json"]}
    return [
        Artifact(ranks, (predict,), damaged_json),
        Artifact(linked, (predict,), damaged_json),
        Artifact(linked | {}, (command("predict", "--traces", "FILE"),), damaged_json),
        Artifact({"et.json": found["et.json"], "rank0.json": found["rank0.json"]}, (predict,)),
        Artifact({"one.json.gz": found["one.json.gz"]}, (predict,)),
        Artifact({"overheads.json": found["overheads.json"]}, (load_overheads,), damaged_json),
    ]


def _others() -> list[Artifact]:
    from schedules.cost.learned import load_model
    from tvm_fusion.cli.commands.run import load_array

    models = ROOT / "schedules" / "cost" / "models"
    learned = min(models.glob("*.npz"), key=lambda path: (path.stat().st_size, path.name))
    array = io.BytesIO()
    np.save(array, np.arange(6, dtype=np.float32).reshape(2, 3))
    tables = json.loads(TABLES)
    tables["tables"][0] = {"name": "data", "rows": 100, "width": 16, "data": "d.npz"}
    data = io.BytesIO()
    indices = np.arange(256) % 100
    np.savez(data, indices=indices, offsets=np.arange(0, 256, 2))
    with_data = {"t.json": json.dumps(tables).encode(), "d.npz": data.getvalue()}
    shard = command("shard", "FILE", "--machine", "v100", "--ranks", "2")
    uncached: Reader = load_model.__wrapped__
    link = {"bandwidth": 5e10, "latency": 5e-6, "origin": "here"}
    nodes = {"name": "two", "machine": "h100", "nodes": 2, "gpus_per_node": 8, "link": link}
    return [
        Artifact({"nodes.json": json.dumps(nodes).encode()}, (_exchange,), damaged_json),
        Artifact({"t.json": TABLES}, (shard,), damaged_json),
        Artifact(with_data, (shard,), damaged_json),
        Artifact({"x.npy": array.getvalue()}, (load_array, _as_input)),
        Artifact({"l.npz": learned.read_bytes()}, (uncached,)),
        _external_data(),
    ]


def _exchange(path: Path) -> None:
    from tvm_fusion.prediction.cluster import load_cluster

    load_cluster(path).predict("all_reduce", (0, 1), 1e6)


def _as_input(path: Path) -> None:
    model = path.with_name("model.so")
    shutil.copy(_input_model(), model)
    run_command(["run", str(model), "--repeat", "1", "--input", f"x={path}"])


@lru_cache(maxsize=1)
def _input_model() -> Path:
    folder = Path(tempfile.mkdtemp())
    data, *_ = saved_model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    (folder / "model.so").write_bytes(data)
    return folder / "model.so"


def _external_data() -> Artifact:
    """A model whose weights lie in another file."""
    import onnx

    import tvm_fusion

    text = '<ir_version: 8, opset_import: ["": 17]> graph (float[2,3] x) => (float[2,3] y)'
    model = onnx.parser.parse_model(text + " { y = Mul(x, w) }")
    weights = np.arange(3, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, "w.bin", offset=4, length=12)
    tensor.ClearField("raw_data")

    def forge(data: bytes, rng: random.Random) -> bytes:
        changed = onnx.ModelProto.FromString(data)
        [tensor] = changed.graph.initializer
        entry = rng.choice(tensor.external_data)
        entry.value = rng.choice(
            ["", "0", "-1", "1", str(1 << 62), "x", "/etc/passwd", "../w.bin", "w.bin/", "\0", "."]
        )
        if rng.random() < 0.3:
            tensor.dims[0] = rng.choice([0, 1, 4, 1 << 40, -1])
        return changed.SerializeToString()

    def read(path: Path) -> None:
        compiled = tvm_fusion.compile(path, threads=1)
        if all(dataclasses.astuple(spec)[1:] == ((2, 3), "float32") for spec in compiled.inputs):
            compiled(np.ones((2, 3), np.float32))

    files = {"m.onnx": model.SerializeToString(), "w.bin": bytes(4) + weights.tobytes()}
    return Artifact(files, (read,), forge)
