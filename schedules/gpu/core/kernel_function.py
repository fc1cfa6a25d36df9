# SPDX-License-Identifier: Apache-2.0
"""Frame of the functions that the rules write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.tir.extents import Extent, constant
from schedules.tir.index_math import i64

from .machine import GPUInfo

ROLLED = {"disable_unroll": True}
"""Annotation of loops that would load ahead, and spill, if the compiler unrolled them."""


def write_kernels(func: tirx.PrimFunc, body: Callable[[], None]) -> tirx.PrimFunc:
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
            for param in func.params:
                T.arg(param.name, param)
            T.func_attr({**dict(func.attrs), "tirx.is_scheduled": True})
            with T.sblock("root"):
                T.reads()
                T.writes()
                body()
    written = builder.get()  # named by the builder; the module knows the function by its variable
    return written if "global_symbol" in func.attrs else written.without_attr("global_symbol")


def unless_empty(blocks: Extent) -> AbstractContextManager:
    """Launch only if there are blocks, to be opened around the launch.

    CUDA rejects an empty grid, which a symbolic extent of zero would give. It is a host loop of one
    iteration or none, since TVM puts no barriers under a condition, even one of the host.
    """
    if constant(blocks) is not None:
        return nullcontext()
    return T.serial(i64(0), tirx.min(i64(blocks), i64(1)))


def resident_blocks(gpu: GPUInfo, count: int) -> AbstractContextManager:
    """Ask for registers so that ``count`` blocks share a multiprocessor, inside the launch.

    Otherwise the CUDA compiler spills some to fit more blocks. OpenCL has no such request.
    """
    if gpu.kind != "cuda" or count < 1:
        return nullcontext()
    return T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", count)
