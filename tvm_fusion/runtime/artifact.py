# SPDX-License-Identifier: Apache-2.0
"""File format of a saved model.

It is a shared library with weights and a description appended. TVM itself can load it too; the
function ``main`` of the program then takes the inputs, tensors for the outputs, and the weights.
A file for several CPUs has the library of the one that needs least at its beginning.

======================  ========================================================================
bytes                   content
======================  ========================================================================
libraries               ELF shared libraries, one a target: kernels, code of their threads, program,
                        constants; each followed by zeros up to a multiple of 64 bytes
weights                 tensors, each followed by zeros up to a multiple of 64 bytes; equal ones of
                        several targets lie there once
description             JSON in UTF-8: a :class:`Description`
length before the JSON  unsigned 64-bit integer, little-endian as all of them
length of the JSON      unsigned 64-bit integer
checksum                SHA-256 of all that comes before the lengths
format                  unsigned 32-bit integer; the highest that is known here is ``FORMAT``
magic                   ``TVMFUSION-MODEL`` and a newline
======================  ========================================================================

Format 1 had no weights: there they are constants in the library. Formats 1 and 2 are for CPUs, and
formats up to 3 do not record whether the program is one kernel. Formats up to 4 do not say whether
functions are approximations, those up to 5 have no tuning records, and those up to 6 no ranks;
those up to 8 exchange no rows in place, those up to 9 none by kernels. Up to format 10, programs
allocate their outputs, and kernels for CPUs need inputs that begin at multiples of 64 bytes; up to
format 11 there is one library, and the weights lie one after the other before the description.

A model for an NVIDIA GPU holds machine code for its architecture, so nothing is compiled where it
runs; one for OpenCL holds text, which the device's driver compiles.

The description is read, and the file is checked, before anything of it is loaded: nothing in it is
executed, unpickled, or followed to another file. **Loading the library then runs its code with all
rights of the process.** The checksum detects damage, not malice: load only files that you trust.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import tvm_ffi

from ..errors import ArtifactError, TargetError
from ..machine.host import (
    TILE_FEATURES,
    arch_of_triple,
    check_host,
    cpu_title,
    flagged_features,
    host_arch,
    host_cpu,
    host_features,
    may_use_tiles,
)
from ..paths import as_path, written_aside
from ..version import __version__
from .fast_call import SoleKernelCall
from .host_arrays import ALIGNMENT, TensorSpec
from .tvm_runtime import DeviceNeeds, check_device
from .tvm_runtime import version as tvm_version
from .weights import fit_into, map_weights, places_from, stored_bytes, write_weights

if TYPE_CHECKING:  # loading a model for one process needs neither
    from schedules.distribute.rows.row_plan import RankPlan

    from ..codegen.linker import SharedLinker

FORMAT = 12
"""The format for writing; all up to it can be read."""

_MAGIC = b"TVMFUSION-MODEL\n"
_FOOTER = struct.Struct("<QQ32sI16s")
_SAVE_HELP = "save again with this version, or compile the model again"


@dataclass(frozen=True)
class Description:
    """Facts about a compiled model that need no execution."""

    target: str  # The TVM target as JSON.
    arch: str  # Architecture of the code.
    features: tuple[str, ...]  # CPU features that the code needs.
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """``inputs`` and ``outputs``: in the order of the call and of the results."""
    fresh: tuple[bool, ...]  # Whether each output is newly created by each call.
    fused: tuple[dict[str, Any], ...]  # One record a pair of convolutions.
    versions: dict[str, str]
    """Versions of ``tvm_fusion``, ``tvm`` and ``tvm_ffi`` that compiled the model."""
    weights: tuple[TensorSpec, ...] = ()
    """Arguments of ``main`` after the inputs and the outputs that are arguments."""
    device: DeviceNeeds | None = None
    """The GPU that the kernels run on; None if they run on the CPU."""
    kernel: SoleKernelCall | None = None  # Call of the program if it is one kernel.
    fast_math: bool = False  # Whether functions in CUDA kernels may be approximations.
    records: tuple[dict[str, Any], ...] = ()  # Tuning records that chose knobs, one a function.
    ranks: RankPlan | None = None
    """Functions, rows and exchanges of each rank, if the model is distributed: it then has no
    ``main``."""
    lifted: tuple[bool, ...] = ()
    """Whether each output is an argument of ``main``, after the inputs; empty if none is."""
    alignment: int = ALIGNMENT
    """Bytes at a multiple of which kernels for a CPU expect the data of inputs to begin."""
    library: tuple[int, int] = field(default=(0, 0), compare=False)
    """Begin and end of the library in the file; both are 0 if the model is not saved."""
    places: tuple[int, ...] = field(default=(), compare=False)
    """Begin of each weight in the file; empty if the model is not saved."""
    others: tuple[Description, ...] = ()
    """The same model for other CPUs, in the same file. What a later one needs includes, as a rule,
    what those before it need."""

    @property
    def all(self) -> tuple[Description, ...]:
        """The descriptions for all CPUs of the file, this one first."""
        return self, *self.others

    @property
    def cpu(self) -> str:
        """LLVM's name of the CPU that the code, or that of its host, is for."""
        return _host(json.loads(self.target))["mcpu"]

    @property
    def title(self) -> str:
        """:attr:`cpu`, and the features in which the code differs from it."""
        return cpu_title(_host(json.loads(self.target)))

    @property
    def triple(self) -> str:
        """LLVM's triple of the system that the code is for."""
        return _host(json.loads(self.target))["mtriple"]

    def check_machine(self) -> None:
        """Refuse to run on a machine whose CPU or GPU lacks what the code needs.

        Raises TargetError if something is missing; the message names it.
        """
        check_host(self.features, self.arch)
        if self.device is not None:
            check_device(self.device)

    def for_this_machine(self) -> Description:
        """The last description of :attr:`all` whose code this machine can run.

        What Linux lists of the CPU decides; LLVM, which is slow to load, is asked if that is too
        little for every description.

        Raises TargetError if there is none; the message names all targets and what they need.
        """
        if not self.others:
            self.check_machine()
            return self
        for features in (flagged_features, host_features):
            there = features()
            for about in reversed(self.all):
                if about.runs_with(there):
                    rest = (other for other in self.all if other is not about)
                    return replace(about, others=tuple(replace(one, others=()) for one in rest))
        lacks = "; ".join(f"{about.title} needs {about.missing()}" for about in self.all)
        raise TargetError(
            f"this CPU ({host_cpu()}) can run none of the targets that the model is compiled for: "
            f"{lacks}; compile it again with another target, such as 'native'"
        )

    def runs_with(self, features: frozenset[str]) -> bool:
        """Return whether the code needs no other features than those of this machine."""
        if self.arch != host_arch() or not features.issuperset(self.features):
            return False
        return not TILE_FEATURES.intersection(self.features) or may_use_tiles()

    def missing(self) -> str:
        """Names of what the code needs and this machine lacks, or does not allow."""
        if self.arch != host_arch():
            return self.arch
        lacks = set(self.features) - host_features()
        if not lacks and not self.runs_with(host_features()):
            return "tile registers (AMX), which Linux does not let this process use"
        return ", ".join(sorted(lacks))

    def linker(self, executable: Any) -> SharedLinker:
        """Linker of an executable into a library, with machine code for the GPU if that is CUDA."""
        from ..codegen.linker import SharedLinker

        if self.device is None or self.device.kind != "cuda":
            return SharedLinker(self.triple)
        from ..codegen.library_bin import machine_code_of

        rewrite = machine_code_of(executable, self.device.arch, self.fast_math)
        return SharedLinker(self.triple, rewrite)


def current_versions() -> dict[str, str]:
    """Versions of the packages that compile and run models here."""
    return {"tvm_fusion": __version__, "tvm": tvm_version(), "tvm_ffi": str(tvm_ffi.__version__)}


@dataclass(frozen=True)
class Program:
    """A compiled program for one target."""

    executable: Any  # The program.
    about: Description  # Its description.
    weights: Sequence[Any]  # The tensors that the description lists.


def write_artifact(path: str | os.PathLike[str], programs: Sequence[Program]) -> None:
    """Write a compiled model atomically, even if the power fails.

    ``path``: destination; an existing file is replaced. ``programs``: the model for each target,
    the one that needs least first. Raises ArtifactError if the file cannot be written, or the model
    cannot be linked.
    """
    with written_aside(path) as aside:
        try:
            _write(aside, programs)
        except RuntimeError as error:  # TVM's own failures to write
            raise OSError(None, str(error)) from error


def _write(aside: Path, programs: Sequence[Program]) -> None:
    known: dict[bytes, int] = {}
    with aside.open("wb") as file:
        libraries = [_write_library(file, program) for program in programs]
        places = [write_weights(file, program.weights, known) for program in programs]
        first, *others = (
            replace(program.about, library=library, places=where, others=())
            for program, library, where in zip(programs, libraries, places, strict=True)
        )
        place = file.tell()
        text = json.dumps(asdict(replace(first, others=tuple(others)))).encode()
        file.write(text)
    digest = file_digest(aside, place + len(text))
    with aside.open("ab") as file:
        file.write(_FOOTER.pack(place, len(text), digest, FORMAT, _MAGIC))


def _write_library(file: BinaryIO, program: Program) -> tuple[int, int]:
    """Write a program's library, and return where it begins and ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "library.so"
        program.executable.export_library(
            str(path), fcompile=program.about.linker(program.executable)
        )
        data = path.read_bytes()
    begin = file.tell()
    file.write(data)
    file.write(bytes(-len(data) % ALIGNMENT))
    return begin, begin + len(data)


def copy_artifact(source: Path, path: str | os.PathLike[str]) -> None:
    """Copy a saved model atomically.

    Raises ArtifactError if the copy cannot be written, or the file is gone or damaged.
    """
    read_artifact(source)
    with written_aside(path) as aside:
        shutil.copyfile(source, aside)


def read_artifact(path: str | os.PathLike[str]) -> Description:
    """Read and check the description of a file without loading its code.

    Of a file for several CPUs it is that of the best one that this machine can run.

    Raises ArtifactError if the file cannot be read, was not written by tvm_fusion, is damaged, or
    comes from a version that this one cannot read. Raises TargetError if this machine cannot run
    its code.
    """
    about = describe_artifact(path).for_this_machine()
    here = current_versions()
    for package in ("tvm", "tvm_ffi"):
        saved = about.versions[package]
        if saved.split(".")[:2] != here[package].split(".")[:2]:
            raise ArtifactError(
                f"{os.fspath(path)!r} was compiled with {package} {saved}, and {here[package]} is "
                "installed; compile the model again, or install that version"
            )
    return about


def describe_artifact(path: str | os.PathLike[str]) -> Description:
    """Read and check the description of a file, whatever machine and versions it is for.

    Raises ArtifactError if the file cannot be read, was not written by tvm_fusion, is damaged, or
    is of a newer format.
    """
    file = as_path(path, ArtifactError)
    try:
        return _read(file)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"cannot read {str(file)!r}: {reason}") from error


def read_artifact_weights(path: Path, about: Description) -> list[tvm_ffi.Tensor]:
    """Map the weights of a file whose description was read; all that load the file share them.

    Raises ArtifactError if the file cannot be read, or has changed since.
    """
    if not about.weights:
        return []
    try:
        with path.open("rb") as file:
            return map_weights(file, about.weights, about.places)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        reason = getattr(error, "strerror", None) or error
        raise ArtifactError(f"cannot read {str(path)!r}: {reason}") from error


def _read(path: Path) -> Description:
    size = path.stat().st_size
    if not path.is_file():
        raise OSError(None, "it is not a file")
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, size - _FOOTER.size))
        end = file.read(_FOOTER.size)
        if len(end) < _FOOTER.size or not end.endswith(_MAGIC):
            raise ArtifactError(_foreign(path, start))
        place, length, digest, version, _ = _FOOTER.unpack(end)
        if version > FORMAT:
            raise ArtifactError(
                f"{str(path)!r} has format {version}, and this version of tvm_fusion reads up to "
                f"{FORMAT}; install a newer tvm_fusion"
            )
        whole = version >= 1 and place + length + _FOOTER.size == size
        if not whole or digest != file_digest(path, place + length):
            raise ArtifactError(
                f"{str(path)!r} is damaged: its checksum does not fit; {_SAVE_HELP}"
            )
        file.seek(place)
        text = file.read(length)
    try:
        data = json.loads(text)
        absent: dict[str, tuple[int, Any]]
        absent = {
            "weights": (2, []),
            "device": (3, None),
            "kernel": (4, None),
            "fast_math": (5, False),
            "records": (6, []),
            "ranks": (7, None),
            "lifted": (11, []),
            "alignment": (11, ALIGNMENT),
            "library": (12, [0, place]),
            "places": (12, None),
            "others": (12, []),
        }
        added = {name: value for name, (since, value) in absent.items() if version < since}
        return _parse(data | added, place)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtifactError(
            f"the description in {str(path)!r} is not valid ({error!r}); {_SAVE_HELP}"
        ) from error


def _foreign(path: Path, start: bytes) -> str:
    if start == b"\x7fELF":
        return (
            f"{str(path)!r} is a shared library which tvm_fusion did not save, or one that is cut "
            "off; expected a file that was written by CompiledModel.save"
        )
    return (
        f"{str(path)!r} is not a compiled model; expected a file written by CompiledModel.save, or "
        "by tvm-fusion compile"
    )


def file_digest(path: Path, count: int) -> bytes:
    """SHA-256 of the first ``count`` bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while count > 0 and (block := file.read(min(count, 1 << 20))):
            digest.update(block)
            count -= len(block)
    return digest.digest()


def _parse(data: Any, room: int) -> Description:
    """Build a description from JSON; invalid content raises an exception.

    ``room`` is the number of bytes of the libraries and the weights.
    """
    fresh = tuple(_typed(item, bool) for item in _typed(data["fresh"], list))
    outputs = _specs(data["outputs"])
    lifted = tuple(_typed(item, bool) for item in _typed(data["lifted"], list))
    if len(fresh) != len(outputs) or (lifted and len(lifted) != len(outputs)):
        raise ValueError("'fresh', 'lifted' and 'outputs' differ in length")
    for spec in itertools.compress(outputs, lifted):
        if not all(isinstance(size, int) for size in spec.shape):
            raise ValueError(f"the output {spec.name!r} is lifted, and its sizes are unknown")
    weights, places = _specs(data["weights"]), data["places"]
    if places is None:
        places = places_from(room - stored_bytes(weights), weights)
    places = tuple(_typed(item, int) for item in places)
    if not fit_into(room, weights, places):
        raise ValueError("the weights are larger than the file")
    begin, end = (_typed(item, int) for item in data["library"])
    if not 0 <= begin <= end <= room:
        raise ValueError("the library is larger than the file")
    versions = _typed(data["versions"], dict)
    target = _typed(data["target"], str)
    options = _typed(json.loads(target), dict)
    device = _device(data["device"], options)
    host = _typed(_host(options), dict)
    if host.get("kind") != "llvm":
        raise ValueError(f"the target is of the kind {options.get('kind')!r}")
    for item in (host["mcpu"], *_typed(host.get("mattr", []), list)):
        _typed(item, str)
    arch = arch_of_triple(_typed(host["mtriple"], str))
    if data["arch"] != arch:
        raise ValueError(f"the target is for {arch}, and 'arch' is {data['arch']!r}")
    return Description(
        target=target,
        arch=arch,
        features=tuple(_typed(item, str) for item in _typed(data["features"], list)),
        inputs=_specs(data["inputs"]),
        outputs=outputs,
        fresh=fresh,
        fused=tuple(_typed(item, dict) for item in _typed(data["fused"], list)),
        versions={name: _typed(versions[name], str) for name in current_versions()},
        weights=weights,
        device=device,
        kernel=_kernel(data["kernel"], len(data["inputs"]) + len(weights)),
        fast_math=_typed(data["fast_math"], bool),
        records=tuple(_typed(item, dict) for item in _typed(data["records"], list)),
        ranks=_ranks(data["ranks"]),
        lifted=lifted,
        alignment=_typed(data["alignment"], int),
        library=(begin, end),
        places=places,
        others=tuple(_parse(item, room) for item in _typed(data["others"], list)),
    )


def _ranks(data: Any) -> RankPlan | None:
    if data is None:
        return None
    from schedules.distribute.rows.row_plan import plan_from_json

    return plan_from_json(data)


def _host(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a target's CPU: its own, or those of a GPU's host."""
    return options if options.get("kind") == "llvm" else options["host"]


def _device(data: Any, target: dict[str, Any]) -> DeviceNeeds | None:
    if data is None and target.get("kind") == "llvm":
        return None
    names = {each.name: int if each.type == "int" else str for each in fields(DeviceNeeds)}
    needs = DeviceNeeds(**{name: _typed(data[name], kind) for name, kind in names.items()})
    if needs.kind not in ("cuda", "opencl") or needs.kind != target.get("kind"):
        raise ValueError(f"the target is of the kind {target.get('kind')!r}, 'device' {needs.kind}")
    return needs


def _kernel(data: Any, arguments: int) -> SoleKernelCall | None:
    """Read the kernel's call; ``arguments`` is the number that ``main`` takes."""
    if data is None:
        return None
    taken = tuple(_typed(index, int) for index in _typed(data["arguments"], list))
    if sorted(taken) != list(range(arguments)):
        raise ValueError(f"'kernel' takes the arguments {taken}; expected {arguments} in any order")
    return SoleKernelCall(_typed(data["name"], str), taken)


def _specs(data: Any) -> tuple[TensorSpec, ...]:
    specs = []
    for item in _typed(data, list):
        shape = tuple(_typed(size, int, str) for size in _typed(item["shape"], list))
        specs.append(TensorSpec(_typed(item["name"], str), shape, _typed(item["dtype"], str)))
    return tuple(specs)


def _typed(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise TypeError(f"{value!r:.50} is no {' or '.join(kind.__name__ for kind in types)}")
    return value
