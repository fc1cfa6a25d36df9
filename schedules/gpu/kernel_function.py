# SPDX-License-Identifier: Apache-2.0
"""Writing a function with kernels in the place of the one that they compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .device import GPUInfo


def write_function(func: tirx.PrimFunc, body: Callable[[], None]) -> tirx.PrimFunc:
    """A function with the parameters and attributes of ``func``, marked as scheduled.

    Parameters
    ----------
    func : tirx.PrimFunc
        What the kernels compute.
    body : Callable
        Emits the launches; it may use the parameters of ``func``.
    """
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            for buffer in func.params:
                T.arg(buffer.name, buffer)
            T.func_attr({**dict(func.attrs), "tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                body()
    written = builder.get()  # named by the builder; the module knows the function by its variable
    return written if "global_symbol" in func.attrs else written.without_attr("global_symbol")


def resident_blocks(gpu: GPUInfo, count: int) -> AbstractContextManager:
    """Ask for registers so that ``count`` blocks share a multiprocessor, inside the launch.

    Left to itself, the compiler of CUDA spills some for the sake of more blocks. OpenCL has no
    such request.
    """
    if gpu.kind != "cuda" or count < 1:
        return nullcontext()
    return T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", count)
