# SPDX-License-Identifier: Apache-2.0
"""Cases of arguments of functions and of the command line: good ones, and one or two bad ones."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .files import TABLES, run_command, saved_model
from .outcomes import Found, outcome_of

KINDS = (None, True, 3, -1, 2.5, float("nan"), "", "x", b"x", (), [], {}, {3: 4}, object(), "\0")
"""Values that no option should choke on."""

PATHS = ("", "/", "/nonexistent/x", ".", "\0", "a" * 5000, b"/nonexistent", Path("none"), "~", "-")

TARGETS = (
    *("native", "x86-64-v3", "znver4", "aarch64", "cortex-a72", "llvm", "llvm -mcpu=znver3"),
    *(
        "llvm -mcpu=",
        "llvm -mcpu=foo",
        "llvm -mattr=+foo",
        "llvm -mattr=-avx2",
        "llvm -x",
        "-",
        "ä",
    ),
    *("llvm -num-cores=0", "llvm -num-cores=99999999", "llvm -num-cores=x", "llvm -mtriple=foo"),
    *("cuda -arch=sm_80", "cuda -arch=sm_0", "cuda -arch=", "cuda -arch=sm_90 -max_num_threads=0"),
    *("opencl", "opencl -max_num_threads=0", "opencl -thread_warp_size=-1", "vulkan", "metal", "c"),
    *("{", "{}", "[]", '{"kind": 3}', '{"kind": "llvm", "mcpu": 3}', '{"kind": "llvm", "x": 1}'),
    *("nvidia/nvidia-a100", "native\0", "native native", "raspberry-pi/4b-aarch64", "cuda -host=x"),
    *({"kind": "llvm", "num-cores": -1}, {"kind": "llvm", "num-cores": "x"}, {"tag": "x"}, {1: 2}),
    *({"kind": "llvm", "mcpu": "znver4", "mattr": ["+avx2"]}, {"kind": "llvm", "mattr": "+avx2"}),
    *(
        {"kind": "cuda", "arch": "sm_80", "host": 3},
        {"kind": ["llvm"]},
        {"kind": "llvm", "mcpu": []},
    ),
)

SHAPES = (
    *({}, {"n": 1}, {"n": 0}, {"n": -1}, {"n": 1 << 40}, {"n": 1 << 70}, {"n": 1.5}, {"n": "n"}),
    *({"n": "m"}, {"n": True}, {"n": None}, {"x": (2, 3, 12, 12)}, {"x": [2, 3]}, {"x": ()}),
    *({"image": (2, 3, 12, 12)}, {"image": [2, 3, 12, 12]}, {"image": (2, 3)}, {"image": "n"}),
    *({"image": ("n", 3, 12, 12)}, {"image": ("n", "k", 12, 12)}, {"image": 3}, {"n": np.int64(2)}),
    *({"image": np.array([1, 3, 12, 12])}, {"n": 1, "image": (2, 3, 12, 12)}, [("n", 1)], "n=1"),
    *({"n": "1"}, {"n": ""}, {"image": (1, 3, 12, 1 << 40)}, {"image": (-1, 3, 12, 12)}, {"n": []}),
)

COMPILE: Mapping[str, tuple[Any, ...]] = {
    "target": TARGETS,
    "shapes": SHAPES,
    "fuse": ("auto", "all", "none", "ALL", *KINDS),
    "winograd": ("auto", "always", "never", *KINDS),
    "threads": (1, 2, 0, 10**6, 1.0, "1", np.int64(1), np.float32(1), *KINDS),
    "records": ("none", *PATHS, *KINDS),
    "fast_math": (False, True, *KINDS),
    "precision": ("fp32", "fp16", "tf32", "FP16", *KINDS),
    "weights": (None, "bf16", "int8", "int4", "int2", *KINDS),
    "cuda_graph": (False, True, *KINDS),
    "reproducible": (False, True, *KINDS),
    "machine": ("znver4", "a100", "native", "../znver4", *PATHS, *KINDS),
    "progress": (None, lambda *_: None, *KINDS),
    "ranks": (1, 2, 0, 1000, np.int64(2), *KINDS),
}


def attempt(number: int) -> Found:
    """Call a function of the package, or a command, with some bad arguments."""
    rng = random.Random(f"options {number}")
    call = rng.choice([_compile] * 4 + [_command] * 5 + [_load, _load, _resolve, _others])

    def run() -> str:
        with tempfile.TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                call(rng)
            finally:
                os.chdir(before)
        return "result"

    return outcome_of(run)


@cache
def _model() -> Any:
    from small_onnx import small_model

    return small_model("n")


def _chosen(rng: random.Random) -> dict[str, Any]:
    """Options of ``compile``, of which one to three are given."""
    names = rng.sample(list(COMPILE), rng.randint(1, 3))
    return {"shapes": {"n": 1}} | {name: rng.choice(COMPILE[name]) for name in names}


def _compile(rng: random.Random) -> None:
    import tvm_fusion

    model = _model() if rng.random() < 0.9 else rng.choice([*PATHS, *KINDS])
    compiled = tvm_fusion.compile(model, **_chosen(rng))
    if rng.random() < 0.3:
        compiled.save(rng.choice(["m.so", *PATHS[:6]]))


def _load(rng: random.Random) -> None:
    import tvm_fusion
    from tvm_fusion import distributed

    path = rng.choice(["good.so", "good.so", *PATHS, *KINDS])
    Path("good.so").write_bytes(_saved())
    if rng.random() < 0.2:
        distributed.load(path)
    else:
        model = tvm_fusion.load(path, rng.choice(COMPILE["threads"]))
        model.save(rng.choice([*PATHS[:6], *KINDS]))


@cache
def _saved() -> bytes:
    return saved_model("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")[0]


def _resolve(rng: random.Random) -> None:
    import tvm_fusion

    tvm_fusion.resolve_target(rng.choice([*TARGETS, *KINDS]))


def _others(rng: random.Random) -> None:
    """Functions that take a model and options, as ``compile`` does."""
    import tvm_fusion

    model = _model() if rng.random() < 0.8 else rng.choice([*PATHS, *KINDS])
    chosen = _chosen(rng)
    which = rng.randrange(3)
    if which == 0:
        given = {name: chosen[name] for name in ("target", "fuse", "winograd") if name in chosen}
        tvm_fusion.explain(model, shapes=chosen["shapes"], **given)
    elif which == 1:
        ranges = rng.choice([{"n": range(1, 4)}, {"n": (1, 3)}, {"k": range(3)}, *KINDS])
        target = rng.choice([*["native"] * 20, *TARGETS])
        found = tvm_fusion.specialize(model, target, ranges, variants=rng.choice([1, 2, *KINDS]))
        found(np.zeros((rng.choice([0, 1, 5]), 3, 12, 12), np.float32))
    else:
        tvm_fusion.predict(model, rng.choice(COMPILE["machine"]), shapes=chosen["shapes"])


NUMBERS = ("0", "1", "2", "-1", "x", "", "1.5", "nan", "99999999999999999999", "1e3")
FILES = (
    *("m.onnx", "m.onnx", "m.onnx", "good.so", "good.so", "x.npy", "t.json", "m.json", "none", "."),
    *("empty", "", "-", "/dev/null"),
)
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "--target": tuple(target for target in TARGETS if isinstance(target, str)),
    "--shape": ("n=1", "n=2", "image=1,3,12,12", "n", "n=", "=1", "n=0", "n=-1", "n=x", "x=1,2"),
    "--fuse": ("auto", "all", "none", "x"),
    "--winograd": ("always", "never", "x"),
    "--threads": NUMBERS,
    "--records": ("none", *FILES),
    "--machine": ("znver4", "v100", "native", *FILES),
    "--precision": ("fp32", "fp16", "tf32", "x"),
    "--input": ("image=x.npy", "x=x.npy", "x=none", "x", "=", "image=m.onnx", "a=b=x.npy"),
    "--output": ("y.npz", "y.so", ".", "", "none/y", "m.onnx", "good.so"),
    "--seed": NUMBERS,
    "--repeat": NUMBERS[:5],
    "--ranks": ("1", "2", "1,2", "2,1", "1,...,4", "1,...", "0", "x", ""),
    "--exchange": ("auto", "always", "once", "x"),
    "--network": ("alpha=1us,beta=1GB/s", "alpha=1", "x", "", "m.json", "alpha=0us", "beta=nanB/s"),
    "--streams": ("1", "0", "x"),
    "--timeout": ("1", "0", "nan", "x"),
    "--batch": NUMBERS,
    "--engine": ("tvm_fusion", "pytorch", "x"),
    "--traces": ("t.json", "m.json", ".", "none"),
    "--what-if": ("x", "", "mm=2", "kernel:mm=0.5", "="),
    "--one-rank": NUMBERS,
    "--draw": ("d.svg", "d.x", "", "none/d.svg"),
    "--collectives": FILES,
    "--format": ("jsonl", "meta-schedule", "x"),
    "--cpu": ("znver4", "x", ""),
}
FLAGS = ("--json", "--fast-math", "--cuda-graph", "--resources", "--weak", "--help", "--nonsense")
COMMANDS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("compile",): ("--target --shape --fuse --winograd --threads --records --machine --output"
                   " --precision --ranks --exchange --network").split(),
    ("run",): ("--input --output --seed --repeat --streams --shape --threads --target --fuse"
               " --timeout").split(),
    ("inspect",): (),
    ("explain",): ("--target --shape --ranks --exchange --network --precision --records"
                   " --machine").split(),
    ("predict",): "--machine --engine --batch --shape --threads --traces --what-if".split(),
    ("simulate",): "--ranks --exchange --network --one-rank --draw --shape --target".split(),
    ("shard",): "--machine --ranks --batch --collectives --seed".split(),
    ("records", "list"): (),
    ("records", "verify"): (),
    ("records", "prune"): (),
    ("records", "merge"): (),
    ("records", "export"): "--format --cpu --shape".split(),
    ("records", "import"): ("--format",),
    ("records",): (),
    ("nonsense",): (),
    (): (),
}  # fmt: skip


def _command(rng: random.Random) -> None:
    """Run a command on files of all kinds."""
    _write_files()
    name = rng.choice(list(COMMANDS))
    arguments = [*name, *(rng.choice(FILES) for _ in range(rng.choice([1, 1, 1, 1, 2, 0])))]
    if rng.random() < 0.7:
        arguments += ["--shape", "n=1"] if "--shape" in COMMANDS[name] else []
        arguments += ["--machine", "v100", "--ranks", "2"] if name == ("shard",) else []
    if name == ("run",):
        arguments += ["--repeat", "1"]
    own = COMMANDS[name] if rng.random() < 0.9 else list(OPTIONS)
    for option in rng.sample(list(own), min(len(own), rng.choice([0, 1, 1, 2, 3]))):
        arguments += [option, rng.choice(OPTIONS[option])][: rng.choice([2] * 30 + [1])]
    if rng.random() < 0.3:
        arguments.append(rng.choice(FLAGS))
    run_command(arguments)


def _write_files() -> None:
    Path("m.onnx").write_bytes(_model().SerializeToString())
    Path("good.so").write_bytes(_saved())
    np.save("x.npy", np.zeros((2, 3), np.float32))
    Path("t.json").write_bytes(TABLES)
    Path("m.json").write_text('{"name": "x", "kind": "cpu", "title": "x", "figures": {}}')
    Path("empty").touch()
