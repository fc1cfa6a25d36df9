# SPDX-License-Identifier: Apache-2.0
"""The part of TVM that runs models, without the part that compiles them.

``import tvm`` loads the compiler with LLVM and takes 170 MiB and most of a second. A saved model
needs a hundredth of that: ``libtvm_runtime``, which the same package holds. It is loaded as TVM
itself would load it, so that a later ``import tvm`` finds it in place.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm_ffi.libinfo import load_lib_ctypes

_POOLED_ALLOCATOR = 2
_CPU = 1


def get_function(name: str) -> Callable[..., Any]:
    """Return a global function of TVM's runtime.

    Raises
    ------
    ValueError
        If there is none of that name.
    """
    _load()
    return tvm_ffi.get_global_func(name)


def version() -> str:
    """Version of the TVM that is installed."""
    if "tvm" not in sys.modules:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("apache-tvm")
    return str(importlib.import_module("tvm").__version__)


def start_machine(library: tvm_ffi.Module) -> tvm_ffi.Module:
    """Make the virtual machine that runs the program in a compiled library.

    Parameters
    ----------
    library : tvm_ffi.Module
        A library that holds a Relax program; its functions are those of the machine.

    Raises
    ------
    RuntimeError
        If the program calls a function that there is not.
    """
    try:
        return _start(library)
    except RuntimeError:
        if "tvm" in sys.modules:
            raise
    # A few operators (Unique, NonZero) are Python functions of TVM's compiler package.
    importlib.import_module("tvm")
    return _start(library)


def _start(library: tvm_ffi.Module) -> tvm_ffi.Module:
    machine = library["vm_load_executable"]()
    machine["vm_initialization"](_CPU, 0, _POOLED_ALLOCATOR)
    return machine


@cache
def _load() -> None:
    """Load the runtime from the package of TVM, unless that is imported anyway."""
    if "tvm" in sys.modules:
        return
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'tvm'; install apache-tvm", name="tvm")
    package = Path(spec.origin).parent
    # TVM's own order: its variable, a wheel, a build inside a checkout.
    named = os.environ.get("TVM_LIBRARY_PATH")
    folders = [Path(named)] if named else []
    folders += [package / "lib", package / "../../build/lib", package / "../../lib"]
    load_lib_ctypes("tvm", "tvm_runtime", "RTLD_GLOBAL", extra_lib_paths=folders)
    with contextlib.suppress(RuntimeError, OSError):  # sorting; not every build has it
        load_lib_ctypes("tvm", "tvm_runtime_extra", "RTLD_LOCAL", extra_lib_paths=folders)
