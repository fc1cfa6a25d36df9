# SPDX-License-Identifier: Apache-2.0
"""Search for NVIDIA's libraries, headers and programs.

NVIDIA's wheels (``nvidia-cuda-nvrtc`` and others), PyTorch, which depends on them, CuPy and the
toolkit contain all that is needed, in different places.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

_WHEEL_FOLDERS = ("nvidia/cu*", "nvidia/cuda_*")


def find_libraries(pattern: str) -> list[Path]:
    """Libraries whose name fits, such as ``libnvrtc.so.*``; those of Python packages first."""
    places = [*wheel_folders("lib"), *toolkit_folders("lib64"), *toolkit_folders("lib")]
    return [path for place in places for path in sorted(place.glob(pattern))]


def find_program(name: str) -> Path | None:
    """A program such as ``nvcc``, of a Python package, a toolkit, or on the search path."""
    searched = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    places = [*wheel_folders("bin"), *toolkit_folders("bin"), *searched]
    return next((place / name for place in places if (place / name).is_file()), None)


def include_folders() -> list[Path]:
    """Every folder that may hold headers of kernels."""
    places = [*wheel_folders("include"), *toolkit_folders("include"), *_cupy_folders()]
    return [inner for place in places for inner in (place, place / "cccl")]


def wheel_folders(kind: str) -> list[Path]:
    """Folders of that name in CUDA packages of Python."""
    roots = (Path(entry) for entry in sys.path if entry)
    return _existing(
        folder / kind
        for root in roots
        for pattern in _WHEEL_FOLDERS
        for folder in sorted(root.glob(pattern))
    )


def toolkit_folders(kind: str) -> list[Path]:
    """Folders of that name in toolkits."""
    named = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    roots = [*map(Path, named), *sorted(Path("/usr/local").glob("cuda*"), reverse=True)]
    inner = f"targets/{platform.machine()}-linux"
    return _existing(folder for root in roots for folder in (root / kind, root / inner / kind))


def _cupy_folders() -> list[Path]:
    """Folders of CuPy, which ships the headers of its own kernels."""
    roots = (Path(entry, "cupy/_core/include/cupy") for entry in sys.path if entry)
    return _existing(
        folder
        for root in roots
        for pattern in ("_cuda/cuda-*", "_cccl/*", "_cccl/libcudacxx/include")
        for folder in sorted(root.glob(pattern))
    )


def _existing(folders: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))
