# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled models on the disk: what was compiled before is loaded, without the compiler.

A model is found again by its bytes, those of its external data and records, all options, the CPU
where the code is for this one, and the versions and files of the packages that compile it. Files
are saved models, named by a digest of all that. Loading them runs their code, so that only files of
this user are taken, which nobody else may write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, InvalidInputError, TargetError
from ..paths import user_cache, written_aside
from ..runtime.artifact import FORMAT
from ..runtime.compiled_model import CompiledModel, load
from .registry import digest_of_file, front_end_of

VARIABLE = "TVM_FUSION_CACHE"
"""Environment variable: a folder, ``1`` for the default one, ``0`` for none."""

MOST_BYTES = 4 << 30
"""Size of all models of a folder; those that were used longest ago are removed."""

_PACKAGES = "tvm_fusion", "relay_passes", "schedules"
_COMPILERS = "apache-tvm", "apache-tvm-ffi", "onnx", "onnxscript", "torch"


def cache_folder(wish: bool | str | os.PathLike[str] | None) -> Path | None:
    """The folder that a ``cache=`` argument means; None if nothing is to be cached.

    ``wish``: None means what the environment variable ``TVM_FUSION_CACHE`` says, True the default
    folder. Raises InvalidInputError if it is none of these.
    """
    if wish is None:
        text = os.environ.get(VARIABLE, "0")
        wish = text == "1" if text in ("", "0", "1") else text
    if isinstance(wish, bool):
        return user_cache() / "models" if wish else None
    if not isinstance(wish, str | os.PathLike) or wish == "":  # which would be this folder
        raise InvalidInputError(f"cache is {wish!r:.60}; expected True, False, a folder or None")
    return Path(wish)


@dataclass(frozen=True)
class Entry:
    """Place of one model with one set of options."""

    folder: Path  # The cache.
    key: str  # Digest of everything but external data.
    path: Path | None  # File of the model, whose folder its external data lie in.

    @classmethod
    def of(cls, folder: Path, model: Any, options: Mapping[str, Any]) -> Entry | None:
        """The entry of a model and the arguments of its compilation; None if they have no digest.

        Arguments that are functions, and models that cannot be read, have none.
        """
        try:
            content = front_end_of(model).digest(model)
            parts = [_packages(), content, _processor(), *_described(options)]
        except (OSError, RuntimeError, TypeError, ValueError):
            return None
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return cls(folder, key, Path(model) if isinstance(model, str | os.PathLike) else None)

    def load(self, threads: int) -> CompiledModel | None:
        """The model, if it is there, whole, this user's, and for this machine."""
        with contextlib.suppress(OSError, ValueError, ArtifactError, TargetError):
            is_own = _is_own(self.folder) and _is_own(self._list)
            names = json.loads(self._list.read_text()) if is_own else None
            if isinstance(names, list):
                external = self.external(names)
                file = None if external is None else self._file(external)
                if file is not None and _is_own(file):
                    compiled = load(file, threads)
                    os.utime(file)
                    os.utime(self._list)
                    return compiled
        return None

    def external(self, names: Iterable[str]) -> dict[str, str] | None:
        """Digests of the files of external data, by their names; None if one cannot be read."""
        if self.path is None:
            return {}
        try:
            return {name: digest_of_file(self.path.parent / name) for name in names}
        except OSError:
            return None

    def store(self, compiled: CompiledModel, external: Mapping[str, str]) -> None:
        """Save a model; a folder that cannot be written to only costs the time of compiling."""
        with contextlib.suppress(OSError, ArtifactError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_own(self.folder):
                return
            compiled.save(self._file(external))
            with written_aside(self._list) as aside:
                aside.write_text(json.dumps(list(external)))
            _shrink(self.folder)

    @property
    def _list(self) -> Path:
        return self.folder / f"{self.key}.json"

    def _file(self, external: Mapping[str, str]) -> Path:
        digest = hashlib.sha256(json.dumps([self.key, sorted(external.items())]).encode())
        return self.folder / f"{digest.hexdigest()}.so"


def _is_own(path: Path) -> bool:
    """Return whether a file or folder is this user's, and nobody else may write to it."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _shrink(folder: Path) -> None:
    """Remove the models that were used longest ago, until the rest is small enough."""
    found = [(path.stat(), path) for path in folder.iterdir() if path.suffix in (".so", ".json")]
    total = sum(status.st_size for status, _ in found)
    for status, path in sorted(found, key=lambda item: item[0].st_mtime_ns):
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= status.st_size


def _described(options: Mapping[str, Any]) -> Iterable[str]:
    """Texts that tell sets of options apart; of files, their contents."""
    for name, value in sorted(options.items()):
        if callable(value):
            raise TypeError(f"{name} is a function")
        text = value if isinstance(value, str) else json.dumps(value, default=_named)
        if name in ("records", "machine") and value is not None and os.path.exists(value):  # noqa: PTH110
            files = sorted(Path(value).glob("*")) if Path(value).is_dir() else [Path(value)]
            text = " ".join(digest_of_file(file) for file in files if file.is_file())
        yield f"{name}={text}"


def _named(value: Any) -> str:
    """A path or a target of TVM as text."""
    if isinstance(value, os.PathLike) or type(value).__module__.startswith("tvm."):
        return str(value)
    raise TypeError(f"no text tells {type(value).__name__} apart")


@cache
def _packages() -> str:
    """Versions of the compilers, and sizes and times of the files of this project's packages."""
    versions = [f"format {FORMAT}", sys.version]
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    root = Path(__file__).resolve().parents[2]
    for name in _PACKAGES:
        versions += sorted(_stamps(f"{root}/{name}"))
    return hashlib.sha256("\n".join(versions).encode()).hexdigest()


def _stamps(folder: str) -> Iterator[str]:
    """Path, size and time of each file of a package."""
    with os.scandir(folder) as entries:  # three times as fast as pathlib, and part of every start
        for entry in entries:
            if entry.is_dir():
                yield from _stamps(entry.path)
            elif entry.name.endswith((".py", ".ll", ".json", ".jsonl", ".npz")):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"


@cache
def _processor() -> str:
    """Text of the system about this CPU, without what changes from moment to moment."""
    kept = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "cache size",
        "CPU ",
        "Features",
    )
    lines = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        lines += [line for line in first.splitlines() if line.startswith(kept)]
    return "\n".join(lines)
