# SPDX-License-Identifier: Apache-2.0
"""Machine code of the threads that share the parallel loops of kernels (``worker_pool.ll``)."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from string import Template

import tvm_ffi

from ..errors import ArtifactError
from .elf_object import ElfObject, read_object

_ARCHITECTURES = {
    "x86_64": {"pause": "pause", "futex": 202, "sched_yield": 24},
    "aarch64": {"pause": "isb", "futex": 98, "sched_yield": 124},
}
"""The instruction that waits a moment, and numbers of Linux's system calls."""


def worker_pool(triple: str) -> ElfObject:
    """Object file with the threads' code, to be linked with kernels.

    Raises
    ------
    ArtifactError
        If there is none for the architecture.
    """
    return read_object(_compiled(triple))


@cache
def _compiled(triple: str) -> bytes:
    arch = triple.partition("-")[0]
    if arch not in _ARCHITECTURES:
        raise ArtifactError(f"cannot link for {arch!r}; expected one of {list(_ARCHITECTURES)}")
    target = json.dumps({"kind": "llvm", "mtriple": triple}).replace('"', r"\22")
    text = Template(Path(__file__).with_suffix(".ll").read_text())
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "pool.ll"), Path(folder, "pool.o")
        source.write_text(text.substitute(_ARCHITECTURES[arch], triple=triple, target=target))
        load = tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")
        load(str(source), "ll").write_to_file(str(output), "o")
        return output.read_bytes()
