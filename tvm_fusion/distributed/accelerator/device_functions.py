# SPDX-License-Identifier: Apache-2.0
"""Kernels of a device: functions of rows, scheduled, compiled, and their launches as a list."""

from __future__ import annotations

import contextlib

import tvm
from tvm import s_tir, tirx

from schedules.cpu import RULES as CPU_RULES
from schedules.cpu.nests.work_groups import work_groups
from schedules.distribute.localize import LocalFunction
from schedules.gpu import RULES
from schedules.schedule_rule import schedule_function

from ...codegen.host_code import AfterSplit
from ...codegen.nvrtc import compile_cuda, tvm_compiler
from ...compiler.launches import launches
from ...compiler.phases import STOCK_RULES
from ...errors import OpError
from .device import ResolvedDevice
from .driver import DeviceCode


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
