# SPDX-License-Identifier: Apache-2.0
"""Pack what a GPU machine without TVM and network measures; all compilation is done here.

    python examples/benchmarks/pack_gpu.py [FOLDER] [--only 'product/*' small] [--python 3.12]
    bash FOLDER/device_run.sh 500           # there

The folder (by default .gpu) holds TVM's runtime without its compiler, the modules that load and
measure, the compiled cases and models, and one script. Only what is missing, or whose source has
changed, is compiled again. Needs the extras cuda and check, and a network where the other machine
has another Python. Exit code: 0, or 1 if a case does not compile or the folder is too large.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
import tvm_fusion  # noqa: E402
from examples.benchmarks.gpu.offline.device_run import CANDIDATES  # noqa: E402
from examples.benchmarks.gpu.offline.kernel_cases import BLOCK, KernelCase, select  # noqa: E402
from examples.benchmarks.gpu.offline.model_cases import MODELS, PackedModel  # noqa: E402
from examples.benchmarks.gpu.protocol import reason  # noqa: E402
from examples.benchmarks.gpu.with_tvm.onnx_case import onnx_model  # noqa: E402
from examples.benchmarks.predict_gpu import OUTPUT  # noqa: E402
from examples.onnx_builder import random_inputs  # noqa: E402
from examples.zoo import ZOO  # noqa: E402
from tvm_fusion.cli.progress import progress_bar  # noqa: E402
from tvm_fusion.errors import TVMFusionError  # noqa: E402
from tvm_fusion.machine.cuda_toolkit import find_libraries  # noqa: E402
from tvm_fusion.paths import written_aside

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = ROOT / "examples" / "benchmarks" / "gpu" / "offline"
SOURCES = ("tvm_fusion", "relay_passes", "schedules")
MEASURING = ("tvm_fusion", "schedules", "examples")
"""Packages whose modules go along: what loads and measures, and what that imports."""
MOST_BYTES = 40_000_000
MACHINES = ("h100", "h200")
_QUICK = 1  # preset of xz: repeated weights shrink to nothing by any
_LIBRARIES = ("libtvm_runtime.so", "libtvm_runtime_extra.so", "libtvm_runtime_cuda.so")
_NOT_FFI = ("include", "3rdparty", "share", "src", "cython", "__pycache__", "testing", "stub")
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux2014")

AnyCase = KernelCase | PackedModel


def repeated(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose large weights are a short block, repeated, with the spread that they had.

    Scales and variances of norms that are folded into weights become constant, so that the weights
    stay as repetitive.
    """
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    folded = {node.input[place] for node in norms for place in (1, 4)}
    for item in model.graph.initializer:
        array = numpy_helper.to_array(item)
        if item.name in folded:
            array = np.full_like(array, array.mean())
        elif array.dtype.kind == "f" and array.size > 4 * BLOCK.size:
            block = np.resize(BLOCK, array.shape)
            array = (block * array.std() + array.mean()).astype(array.dtype)
        item.CopyFrom(numpy_helper.from_array(array, item.name))
    return model


def build(cases: Sequence[AnyCase], folder: Path, target: str) -> dict[str, Any]:
    """Compile the cases that are missing in a folder, or were compiled from other sources.

    Returns
    -------
    dict
        What is known of each case: seconds of its compilation, predicted seconds on some machines,
        or the problem.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, sources = folder / "cases.json", digest_of_sources()
    known = json.loads(path.read_text()) if path.exists() else {}
    index: dict[str, Any] = {}
    with progress_bar() as progress:
        for number, case in enumerate(cases):
            progress(case.name, number, len(cases))
            wanted = target_of(case, target)
            digest = hashlib.sha256(f"{sources} {wanted} {case.options}".encode()).hexdigest()
            index[case.name] = known.get(case.name, {})
            if index[case.name].get("digest") != digest or not (folder / case.file).exists():
                index[case.name] = {"digest": digest, **_compile(case, folder, wanted)}
                with written_aside(path) as aside:
                    aside.write_text(json.dumps({**known, **index}, indent=1) + "\n")
    return index


def target_of(case: AnyCase, target: str) -> str:
    """The target of a case: ``-arch=sm_90`` is ``sm_90a`` for what only that one has."""
    return re.sub(r"(-arch=sm_\d+)\b", r"\1a", target) if case.is_specific else target


def _compile(case: AnyCase, folder: Path, target: str) -> dict[str, Any]:
    start = time.monotonic()
    (folder / case.file).unlink(missing_ok=True)
    try:
        if isinstance(case, PackedModel):
            model = repeated(ZOO[case.builder](**case.sizes))
        else:
            model = onnx_model(case)
        tvm_fusion.compile(model, target, cache=False, **case.options).save(folder / case.file)
        if isinstance(case, PackedModel):
            save_outputs(model, folder / f"{case.file}.npz")
    except Exception as error:  # one case must not end the others
        return {"problem": reason(error)}
    return {"predicted": predicted(case, model), "seconds": round(time.monotonic() - start, 1)}


def save_outputs(model: onnx.ModelProto, path: Path) -> None:
    """Write inputs, and the outputs of ONNX Runtime for them."""
    import onnxruntime

    feed = random_inputs(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    arrays = {f"x{number}": array for number, array in enumerate(feed.values())}
    arrays |= {f"y{number}": array for number, array in enumerate(session.run(None, feed))}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def predicted(case: AnyCase, model: onnx.ModelProto) -> dict[str, float]:
    """Predicted seconds of our kernels on each machine; none where a figure is missing.

    Those of reductions are by their machine code, where predict_gpu.py has read it.
    """
    if case.options:  # predictions are for the types of the model
        return {}
    if isinstance(case, KernelCase) and case.reduction is not None:
        known = json.loads(OUTPUT.read_text()).get(case.reduction.name, {}).get("machines", {})
        if known:
            return {name: known[name]["predicted"]["seconds"] for name in MACHINES}
    try:
        return {name: tvm_fusion.predict(model, machine=name).kernel_seconds for name in MACHINES}
    except TVMFusionError:
        return {}


def digest_of_sources() -> str:
    """Digest of everything that decides what is compiled."""
    digest = hashlib.sha256()
    packages = [path for name in SOURCES for path in sorted((ROOT / name).rglob("*.py"))]
    for path in [*packages, OFFLINE / "kernel_cases.py", OFFLINE / "model_cases.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def pack_cases(
    built: Path,
    index: dict[str, Any],
    cases: Sequence[AnyCase],
    candidates: Path | None,
    target: Path,
) -> None:
    """Write the compiled cases, their index, and candidates of a tuning job into an archive."""
    with tempfile.TemporaryDirectory() as name, _archive(target, _QUICK) as archive:
        about = Path(name) / "cases.json"
        about.write_text(json.dumps(index))
        archive.add(about, "cases.json")
        for case in sorted(cases, key=lambda one: one.file):
            for path in (built / case.file, built / f"{case.file}.npz"):
                if path.exists():
                    archive.add(path, path.name)
        if candidates is not None:
            archive.add(candidates, CANDIDATES)


def pack_runtime(target: Path, python: str) -> None:
    """Write TVM's runtime, its Python package, and the modules that measure, into an archive."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as name, _archive(target) as archive:
        empty = Path(name) / "empty.py"
        empty.touch()
        archive.add(empty, "tvm/__init__.py")  # where the runtime is looked for
        for library in _LIBRARIES:
            archive.add(package / "lib" / library, f"tvm/lib/{library}")
        for folder in package.parent.glob("apache_tvm-*.dist-info"):
            archive.add(folder / "METADATA", f"{folder.name}/METADATA")
        for path, place in (*_ffi(Path(name), python), *_modules()):
            archive.add(path, place)
        for path in find_libraries("libcudart.so.*")[:1]:
            archive.add(path.resolve(), f"cuda/{path.name}")


def _archive(path: Path, preset: int = lzma.PRESET_DEFAULT) -> tarfile.TarFile:
    return tarfile.TarFile.xzopen(str(path), "w", preset=preset)


def _ffi(scratch: Path, python: str) -> Iterator[tuple[Path, str]]:
    """Files of TVM's bindings for a version of Python, and their places."""
    spec = importlib.util.find_spec("tvm_ffi")
    assert spec is not None and spec.origin is not None
    site = Path(spec.origin).parents[1]
    yield site / "typing_extensions.py", "typing_extensions.py"
    if python != _version():
        download(scratch, python)
        site = scratch
    for folder in (site / "tvm_ffi", *site.glob("apache_tvm_ffi-*.dist-info")):
        for path in sorted(folder.rglob("*")):
            place = path.relative_to(site)
            is_left_out = set(place.parts) & set(_NOT_FFI)
            if path.is_file() and not is_left_out:
                yield path, str(place)


def download(folder: Path, python: str) -> None:
    """Unpack the wheel of TVM's bindings for another version of Python."""
    wanted = f"apache-tvm-ffi=={importlib.metadata.version('apache-tvm-ffi')}"
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python]
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    subprocess.run([*pip, *options, *platforms, "--dest", str(folder), wanted], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def _modules() -> Iterator[tuple[Path, str]]:
    for name in MEASURING:
        for path in sorted((ROOT / name).rglob("*.py")):
            yield path, str(path.relative_to(ROOT))


def _version() -> str:
    return "{}.{}".format(*sys.version_info[:2])


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path, nargs="?", default=ROOT / ".gpu", metavar="FOLDER")
    options.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="of case names")
    options.add_argument("--arch", default="sm_90", help="of the GPU (default: %(default)s)")
    options.add_argument("--python", default="3.12", help="version there (default: %(default)s)")
    options.add_argument(
        "--candidates", type=Path, metavar="FOLDER", help="of tvm-fusion tune --export, to race"
    )
    options.add_argument(
        "--built", type=Path, default=ROOT / "build" / "gpu", help="compiled cases, kept"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what is missing, and pack it."""
    options = parser().parse_args(arguments)
    cases: list[AnyCase] = [*select(options.only), *select(options.only, MODELS)]
    if not cases:
        print(f"pack_gpu: no case matches {' '.join(options.only)}", file=sys.stderr)
        return 1
    built = options.built / options.arch
    index = build(cases, built, f"cuda -arch={options.arch} -host=x86-64-v3")
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    pack_cases(built, index, cases, options.candidates, folder / "cases.tar.xz")
    pack_runtime(folder / "runtime.tar.xz", options.python)
    (folder / "python-version").write_text(f"{options.python}\n")
    shutil.copy(OFFLINE / "device_run.sh", folder / "device_run.sh")
    os.chmod(folder / "device_run.sh", 0o755)
    failed = {name: about["problem"] for name, about in index.items() if "problem" in about}
    for name, problem in failed.items():
        print(f"{name}: {problem}", file=sys.stderr)
    size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    print(f"{folder}: {len(cases) - len(failed)} cases, {size / 1e6:.1f} MB")
    print(f"on the machine with the GPU: bash {folder.name}/device_run.sh 500")
    if size > MOST_BYTES:
        print(f"pack_gpu: that is more than {MOST_BYTES / 1e6:.0f} MB", file=sys.stderr)
    return 1 if failed or size > MOST_BYTES else 0


if __name__ == "__main__":
    raise SystemExit(main())
