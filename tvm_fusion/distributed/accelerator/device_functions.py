# SPDX-License-Identifier: Apache-2.0
"""Kernels of a device: functions of rows, scheduled, compiled, and their launches as a list."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tvm
from tvm import s_tir, tirx

from schedules.cpu import RULES as CPU_RULES
from schedules.cpu.nests.work_groups import work_groups
from schedules.distribute.localize import LocalFunction
from schedules.gpu import RULES
from schedules.schedule_rule import schedule_function

from ...codegen.host_code import AfterSplit, Allocation, HostCode, Launch, opencl_texts
from ...codegen.nvrtc import compile_cuda, tvm_compiler
from ...compiler.launches import launches
from ...compiler.phases import STOCK_RULES
from ...errors import OpError
from ...runtime.arguments import numpy_dtype
from .device import ResolvedDevice


@dataclass(frozen=True)
class Scratch:
    """Memory that a function needs for an intermediate result."""

    number: int  # Which of the function's.
    nbytes: int  # Its size.


Argument: TypeAlias = "int | Scratch | np.generic"
"""An argument of a kernel: a window by its place among the parameters, scratch, or a number."""


@dataclass(frozen=True)
class DeviceCall:
    """One launch."""

    launch: Launch  # Kernel, grid and block.
    arguments: tuple[Argument, ...]  # In the order of the kernel's parameters.


@dataclass(frozen=True)
class DeviceCode:
    """Compiled functions of a device."""

    kind: str  # ``cuda`` or ``opencl``.
    text: str  # All kernels as text.
    cubin: bytes  # Their machine code for CUDA, else empty.
    before: str  # OpenCL that stands before each kernel: functions that they call.
    hosts: Mapping[str, tirx.PrimFunc]
    kernels: Mapping[str, tirx.PrimFunc]
    """``hosts`` and ``kernels``: host functions and kernels."""

    @property
    def programs(self) -> dict[str, str]:
        """OpenCL text of each kernel."""
        return {name: self.before + text for name, text in opencl_texts(self.text).items()}

    def calls(
        self,
        function: str,
        scalars: Sequence[int],  # Its arguments after the windows.
    ) -> tuple[DeviceCall, ...]:
        """The launches of a call of a function."""
        host = self.hosts[function]
        windows = host.params[: len(host.params) - len(scalars)]
        # Shapes are constant: the arrays stand for them, and their memory is never touched.
        arrays = [
            np.empty([int(n) for n in window.ty.shape], numpy_dtype(str(window.ty.dtype)))
            for window in windows
        ]
        buffers: dict[tirx.Var, int | Scratch] = {w: place for place, w in enumerate(windows)}
        found = []
        for step in HostCode(host, self.kernels, [*arrays, *scalars]).steps():
            if isinstance(step, Allocation):
                number = sum(isinstance(buffer, Scratch) for buffer in buffers.values())
                buffers[step.buffer] = Scratch(number, step.nbytes)
                continue
            arguments = tuple(
                buffers[value] if dtype is None else dtype.type(value)
                for value, dtype in step.arguments
            )
            found.append(DeviceCall(step.launch, arguments))
        return tuple(found)


class DeviceFunctions:
    """Functions of rows for a device; equal ones are compiled once."""

    def __init__(
        self,
        # The device. Without a schedule of its user our rules for GPUs do, then those of TVM; of a
        # device that is a CPU those for CPUs, where OpenCL has names for what they use.
        device: ResolvedDevice,
    ) -> None:
        self.target = device.target
        self._schedule, self._cpu = device.schedule, device.cpu
        self._before: dict[str, None] = {}
        self._names: dict[object, str] = {}
        self._functions: dict[str, tirx.PrimFunc] = {}

    def add(self, local: LocalFunction) -> str:
        """Schedule a function, and return its name."""
        if local.shape not in self._names:
            name = self._names[local.shape] = f"rows_{len(self._names)}"
            scheduled = self._scheduled(name, local.func)
            if not launches(scheduled.body):
                raise OpError(
                    f"the schedule for {self.target.kind.name} binds no loop to a block or thread; "
                    "bind loops by schedule.bind(loop, 'blockIdx.x')"
                )
            self._functions[name] = scheduled.with_attr("global_symbol", name)
        return self._names[local.shape]

    def compile(self) -> DeviceCode:
        """Compile all functions; no device is needed.

        Raises
        ------
        TargetError
            If no compiler for CUDA text is installed.
        CompilationError
            If it refuses a kernel.
        """
        split, kind = AfterSplit(), str(self.target.kind.name)
        arch = str(self.target.attrs["arch"]) if kind == "cuda" else ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tvm.transform.PassContext(instruments=[split]))
            if arch:  # where there is a GPU, TVM compiles at once
                stack.enter_context(tvm_compiler(arch))
            built = tirx.build(tvm.IRModule(self._functions), target=self.target)
        text = str(built.imports[0].inspect_source(kind if arch else ""))
        cubin = compile_cuda(text, arch).cubin if arch else b""
        return DeviceCode(kind, text, cubin, "".join(self._before), *split.functions())

    def _scheduled(self, name: str, func: tirx.PrimFunc) -> tirx.PrimFunc:
        if self._schedule is None and self._cpu is not None:
            with self._cpu:
                grouped = work_groups(schedule_function(name, func, self._cpu, CPU_RULES))
            if grouped is not None:
                self._before |= dict.fromkeys(grouped.before)
                return grouped.func
        if self._schedule is None:
            with self.target:
                return schedule_function(name, func, self.target, (*RULES, *STOCK_RULES))
        own = s_tir.Schedule(func)
        self._schedule(own)
        return own.mod["main"].with_attr("tirx.is_scheduled", True)
