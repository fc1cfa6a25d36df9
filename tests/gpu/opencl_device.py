# SPDX-License-Identifier: Apache-2.0
"""The OpenCL device of the tests: a CPU that has computed a small kernel correctly."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import metadata

import numpy as np

# pyopencl keeps binaries by the device's name, which virtual machines on other CPUs share.
os.environ.setdefault("PYOPENCL_NO_CACHE", "1")

# Intel's compiler joins work-items to vectors, which takes half of its time; threads of a GPU are
# not joined either.
os.environ.setdefault("CL_CONFIG_CPU_VECTORIZER_MODE", "1")

import pyopencl as cl

from schedules.errors import EngineError

# What the kernels of the tests need, each once.
_KERNEL = """
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION cl_khr_int64_base_atomics : enable
__kernel void odd_numbers(__global long* total, __global const half* halves) {
  __local double shared[32];
  size_t i = get_local_id(0);
  shared[i] = convert_float(halves[i]) * 2;
  barrier(CLK_LOCAL_MEM_FENCE);
  atom_add(total, (long)shared[31 - i]);
}
"""
_HALVES = np.arange(0.5, 32, dtype="float16")
_TOTAL = 32 * 32
_ADVICE = "pip install intel-opencl-rt intel-cmplr-lib-rt; not on x86-64: a PoCL with cl_khr_fp16"


def find_platforms() -> list[cl.Platform]:
    """List the OpenCL platforms: Intel's alone where pip installed it, else the system's.

    ``OCL_ICD_VENDORS``, where it is set, decides instead. Only the first call in a process counts,
    since the loader looks for libraries once.
    """
    _choose_library()
    try:
        return cl.get_platforms()
    except cl.Error:  # so the loader says that there is none
        return []


def _choose_library() -> None:
    library = _intel_library()
    if library is not None:
        # The wheel's own entry for the loader has the path of a folder in which it is not.
        os.environ.setdefault("OCL_ICD_VENDORS", library)


def _intel_library() -> str | None:
    try:
        files = metadata.files("intel-opencl-rt") or []
    except metadata.PackageNotFoundError:
        return None
    found = (os.path.realpath(file.locate()) for file in files if file.name == "libintelocl.so")
    return next(found, None)


def choose_device(platforms: Iterable[cl.Platform]) -> cl.Device:
    """Choose the first CPU that computes a small kernel with float64, float16 and atomics.

    Intel's runtime does on CPUs of Intel and AMD alike. It is tried rather than looked up, since a
    device may be listed that cannot build anything: PoCL's is on CPUs newer than its LLVM.

    Parameters
    ----------
    platforms : iterable of pyopencl.Platform
        Platforms to look at, in order.

    Returns
    -------
    device : pyopencl.Device
        The device.

    Raises
    ------
    EngineError
        Where there is none; in one line, with the devices that failed.
    """
    failed = []
    for platform in platforms:
        for device in platform.get_devices(cl.device_type.CPU):
            reason = _failure(device)
            if reason is None:
                return device
            failed.append(f"; {device.name} of {platform.name}: {reason}")
    raise EngineError(f"no OpenCL for this CPU: {_ADVICE}{''.join(failed)}")


def _failure(device: cl.Device) -> str | None:
    try:
        found = _run(device)
    except cl.Error as error:
        return f"{error.routine}: {cl.status_code.to_string(error.code)}"
    return None if found == _TOTAL else f"computed {found} instead of {_TOTAL}"


def _run(device: cl.Device) -> int:
    context = cl.Context([device])
    queue = cl.CommandQueue(context)
    copied = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    total = cl.Buffer(context, copied, hostbuf=np.zeros(1, "int64"))
    halves = cl.Buffer(context, copied, hostbuf=_HALVES)
    kernel = cl.Kernel(cl.Program(context, _KERNEL).build("-w"), "odd_numbers")
    kernel.set_args(total, halves)
    cl.enqueue_nd_range_kernel(queue, kernel, (32,), (32,))
    result = np.empty(1, "int64")
    cl.enqueue_copy(queue, result, total)
    return int(result[0])


_choose_library()  # compilation for an OpenCL device asks the loader, perhaps as the first
